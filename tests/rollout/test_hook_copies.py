"""Hooks that have copies in other processes: every one of Outrider's own, and what the check of the contract
finds.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.algorithms.base import Algorithm, AlgorithmContext
from outrider.algorithms.retrieval import RetrievalHook
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.plugins.registry import build, read_settings
from outrider.rollout import hooks
from outrider.rollout.hooks import Hook, StatelessHook, as_hooks
from outrider.testing import build_group, check_copies
from outrider.trace import Trace
from outrider.types import Message, Step, Trajectory

TIPS = {"memory_probability": 1.0, "memory": {"embedder": "hash", "scope": "all"}}
BUILT_IN: dict[str, dict[str, Any]] = {
    "rapo": {"num_hybrid": 2},
    "arpo": {"first_wave": 2},
    "tree_grpo": {"group_size": 6},
    "lamer": {},
    "empo2": TIPS,
    "empo2 by the environment": {**TIPS, "memory": {**TIPS["memory"], "writer": "environment"}},
    "combined": {
        "retrieval": {"num_hybrid": 2}, "branch": {"first_wave": 2}, "tips": TIPS,
    },
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with StepTraceBuffer(tmp_path / "b.sqlite", load_embedder("hash"), mode="write") as buffer:
        buffer.add_trajectories([_trajectory("first")])
    return tmp_path / "b.sqlite"


def _trajectory(name: str) -> Trajectory:
    steps = tuple(Step(text=f"{name} {i}", observation="seen", is_terminal=i == 2) for i in range(3))
    asked = (Message(role="user", content=f"question {name}"),)
    return Trajectory(
        trajectory_id=name, task_key=name, agent="a", reward=1.0, prompt=asked, steps=steps
    )  # fmt: skip


def maker(name: str, path: Path) -> Callable[[], Algorithm]:
    settings = read_settings("algorithms", {"type": name.split()[0], **BUILT_IN[name]})

    def make() -> Algorithm:
        context = AlgorithmContext(
            seed=1, num_training_steps=4, groups_per_step=5, max_response_tokens=64, vocabulary_size=9,
            is_stateful=False, count_tokens=len, train_tasks=(),
            buffer=StepTraceBuffer(path, load_embedder("hash"), mode="read"),
            load_embedder=load_embedder, read_demonstrations=lambda path, tasks: {},
        )  # fmt: skip
        return build("algorithms", copy.deepcopy(settings), context)  # type: ignore[return-value]

    return make


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_hook_has_copies(name: str, path: Path) -> None:
    make = maker(name, path)
    one = make()
    assert one.hooks and all(hook.is_portable for hook in one.hooks)
    groups = [build_group([0.0, 1.0], key=f"task-{i}", modes=("tips_on", "tips_on")) for i in range(3)]
    check_copies(one.hooks, make().hooks, groups)
    if "empo2" in name or name == "combined":
        stored = one.hooks[0].snapshot()[0]  # type: ignore[attr-defined]
        assert sum(len(held["tips"]) for held in stored["buffers"].values()) > 2


def test_gathered_data_of_copies_reaches_the_original(path: Path) -> None:
    make = maker("combined", path)
    [tips, retrieval, _], [one, other, _] = make().hooks, make().hooks
    for hook in (one, other):
        hook.counts.update({"retrievals": 2, "dropped": 1})
    one._endings["task", 0] = "the door is locked"
    one._training_step = 7
    tips.counts["dropped"] = 5
    tips.absorb(one.gathered())
    retrieval.absorb(other.gathered())
    retrieval.absorb(other.gathered())
    assert tips.counts["dropped"] == 6 and retrieval.counts["retrievals"] == 4
    assert tips._endings == {("task", 0): "the door is locked"} and tips._training_step == 7
    one.restore(tips.snapshot())
    assert one.gathered() == {"counts": {}, "endings": {}, "step": 7}


def test_a_copy_reads_the_same_revision_of_the_buffer(path: Path) -> None:
    [copied] = maker("rapo", path)().hooks
    assert isinstance(copied, RetrievalHook)
    with StepTraceBuffer(path, load_embedder("hash"), mode="write") as buffer:
        before, num_before = buffer.revision, len(buffer)
        buffer.add_trajectories([_trajectory("second")])
        copied.restore(buffer.revision)
        assert len(copied.buffer) == len(buffer) > num_before
        copied.restore(before)
        assert len(copied.buffer) == num_before


class Counts(Hook):
    """Counts groups; what is wrong with it is in a subclass."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def after_group(self, trace: Any) -> None:
        self.counts["groups"] += 1

    def snapshot(self) -> Any:
        return dict(self.counts)

    def restore(self, snapshot: Any) -> None:
        self.counts = Counter(snapshot)


class Forgets(Counts):
    def restore(self, snapshot: Any) -> None: ...


class Holds(Counts):
    def snapshot(self) -> Any:
        return lambda: self.counts


class Learns(Counts):
    def absorb(self, gathered: Any) -> None:
        self.counts["groups"] += 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Forgets, "has another snapshot"),
        (Holds, "cannot be pickled for another process"),
        (Learns, "change it in after_group"),
    ],
)
def test_the_check_of_copies_finds_errors(kind: type[Counts], message: str) -> None:
    group = [build_group([1.0], key="task", modes=("plain",))]
    check_copies([Counts()], [Counts()], group)
    with pytest.raises(AssertionError, match=message):
        check_copies([kind()], [kind()], group)


def test_an_object_with_the_methods_of_a_hook_works_with_a_warning() -> None:
    class Old:
        first_wave = 2

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def before_turn(self, state: Any) -> Any:
            return [state]

        def after_group(self, trace: Trace) -> None:
            self.seen.append(trace)

    old, new = Old(), Counts()
    with pytest.warns(FutureWarning, match=r"Old must be a subclass of outrider\.Hook or"):
        [adapter, same] = as_hooks([old, new])
    assert isinstance(adapter, Hook) and same is new and type(adapter).__name__ == "Old"
    assert adapter.before_turn("state") == ["state"] and adapter.first_wave == 2  # type: ignore[arg-type,comparison-overlap]
    adapter.after_group(build_group([1.0], key="task", modes=("plain",)))
    assert len(old.seen) == 1 and not adapter.is_portable
    assert adapter.max_reflection_tokens == 0 and new.is_portable and StatelessHook().is_portable


@pytest.mark.parametrize("name", ["Forgetful", "Portable", "Reflector"])
def test_old_names_of_hooks_warn(name: str) -> None:
    with pytest.warns(FutureWarning, match=name):
        assert issubclass(getattr(hooks, name), Hook)


def test_a_misspelt_hook_method_warns() -> None:
    with pytest.warns(UserWarning, match="Early.before_turns is no method of Hook; did you mean before_turn"):
        type("Early", (Hook,), {"before_turns": lambda self, state: ()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        type("Own", (Hook,), {"before_turn": lambda self, state: (), "task_key": lambda self: ""})
