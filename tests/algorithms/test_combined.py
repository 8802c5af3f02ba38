"""Several methods in one run: what each of them leaves to the others, over whole runs and bit by bit; modes,
refusals and shares.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.algorithms.entropy_branching import BranchHook
from outrider.algorithms.exploration import Combined, CombinedSettings, Empo2Settings, RapoSettings
from outrider.algorithms.retrieval import RetrievalHook, retrieved_share
from outrider.algorithms.tips import PLAIN, TipHook, tip_mode
from outrider.config import validate
from outrider.errors import ConfigError
from outrider.memory.embedders import HashEmbedder, load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.rollout.hooks import HYBRID, has_part
from outrider.trace import Trace, without_memory
from outrider.training.settings import RunSettings
from outrider.types import Message, Origin, Task
from tests.golden.cases import BUFFER, FORKS, MEMORY, recipe
from tests.golden.record import play_tree, write_inputs

ROOT = Path(__file__).parents[2]
SHARED: dict[str, Any] = {
    "group_size": 6,
    "loss": {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": None},
    "aggregation": "token_mean",
}
FORK = {key: FORKS[key] for key in ("first_wave", "base_probability", "window")}
REWARD = {"num_hybrid": 3, "advantage_weight": 0.5, "ratio_weight": 0.3}
TIPS = {"memory_probability": 0.8, "memory": {**MEMORY, "scope": "all"}, "intrinsic_coefficient": 0.05}
SECTIONS: dict[str, dict[str, Any]] = {
    "retrieval": {**REWARD, "probability": 0.8},
    "branch": {**FORK, "entropy_advantage": 0.2},
    "tips": TIPS,
}
OFF: dict[str, dict[str, Any]] = {
    "retrieval": {**SECTIONS["retrieval"], "num_hybrid": 0},
    "branch": {**FORK, "first_wave": SHARED["group_size"]},
    "tips": {**TIPS, "memory_probability": 0.0, "intrinsic_coefficient": 0.0},
}
ALONE: dict[tuple[str, ...], dict[str, Any]] = {
    (): {"type": "grpo"},
    ("retrieval",): {"type": "rapo", **REWARD, "retrieval": {"probability": 0.8}},
    ("branch",): {"type": "arpo", **SECTIONS["branch"]},
    ("tips",): {"type": "empo2", **TIPS},
    ("retrieval", "branch"): {"type": "rapo", **REWARD, "retrieval": {"probability": 0.8}, "branch": FORK},
}
SUBSETS = [
    tuple(name for number, name in enumerate(SECTIONS) if mask >> number & 1)
    for mask in range(2 ** len(SECTIONS))
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("combined") / "inputs"
    write_inputs(root)
    return root


def combined(*names: str, plain_branch: bool = False) -> dict[str, Any]:
    own = {name: SECTIONS[name] for name in names}
    if plain_branch and "branch" in own:
        own["branch"] = FORK
    return {"type": "combined", **own}


def played(root: Path, folder: Path, algorithm: Mapping[str, Any], **train: Any) -> list[dict[str, Any]]:
    """Two steps of a scripted run: traces, credit, gradients, rows, weights, moments, state and metrics."""
    tree = recipe("grpo", "scripted", root=root, run=folder / "run")
    tree["algorithm"] = {**SHARED, **algorithm}
    tree["buffer"] = {key: value.replace("{root}", str(root)) for key, value in BUFFER.items()}
    tree["train"] |= {"num_steps": 2, **train}
    return play_tree(tree, "scripted", folder=folder)


@pytest.mark.parametrize("names", ALONE, ids="+".join)
def test_with_one_section_it_is_that_method_bit_for_bit(
    inputs: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    own = played(inputs, tmp_path / "a", combined(*names, plain_branch=len(names) > 1))
    assert own == played(inputs, tmp_path / "b", ALONE[names])
    assert any(step["gradients"] for step in own)


@pytest.mark.parametrize(
    "names",
    [one if len(one) < 2 else pytest.param(one, marks=pytest.mark.slow) for one in SUBSETS[:-1]],
    ids="+".join,
)
def test_a_method_that_is_off_leaves_the_others_their_bits(
    inputs: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Off by its own settings, or left out: the same credit, gradients, weights and moments."""
    off = {name: OFF[name] for name in SECTIONS if name not in names}
    one = played(inputs, tmp_path / "a", combined(*names) | off)
    other = played(inputs, tmp_path / "b", combined(*names))
    parts = ("credit", "gradients", "masters", "optimizer")
    assert [[step[part] for part in parts] for step in one] == [
        [step[part] for part in parts] for step in other
    ]


def test_how_many_rollouts_play_at_a_time_changes_no_bit(inputs: Path, tmp_path: Path) -> None:
    one = played(inputs, tmp_path / "a", combined(*SECTIONS), max_concurrent=1)
    other = played(inputs, tmp_path / "b", combined(*SECTIONS), max_concurrent=8)
    for step in (*one, *other):
        step.pop("rows")  # of a branching run, where the metadata's keys stand in the order of arrival
    assert one == other
    # nor does it pass because nothing happened
    assert {"retrieval", "branch", "tips"} <= one[-1]["metrics"].keys()


@pytest.mark.parametrize("name", ["combined-factbook", "combined-house"])
def test_the_recipes_run_in_tiny_form(inputs: Path, tmp_path: Path, name: str) -> None:
    """With their own algorithm; model, tasks and limits are the tests'."""
    own = tomllib.loads((ROOT / "recipes" / f"{name}.toml").read_text())["algorithm"]
    own["tips"]["memory"]["embedder"] = "hash"
    tree = recipe("combined, house" if "house" in name else "combined", "scripted",
                  root=inputs, run=tmp_path / "run")  # fmt: skip
    tree["algorithm"] = own
    tree["train"]["num_steps"] = 2
    found = play_tree(tree, "scripted", folder=tmp_path)
    assert {"retrieval", "branch", "tips"} <= found[-1]["metrics"].keys()
    assert any(step["gradients"] for step in found)


def test_the_sections_have_the_methods_own_settings_and_defaults() -> None:
    run = validate(CombinedSettings, {"type": "combined", "retrieval": {}, "branch": {}, "tips": {}})
    rapo, empo2 = validate(RapoSettings, {}), validate(Empo2Settings, {})
    assert run.retrieval is not None and run.tips is not None
    for name, value in run.retrieval.model_dump().items():
        assert value == getattr(rapo if hasattr(rapo, name) else rapo.retrieval, name), name
    assert run.tips.model_dump() == {name: empo2.model_dump()[name] for name in run.tips.model_dump()}


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"branch": {"attribution": "hard"}, "retrieval": {}}, "hard needs ratio_weight = 0"),
        ({"retrieval": {}, "loss": {"type": "gppo"}}, "does not know RAPO's ratio"),
        ({"retrieval": {"num_hybrid": 9}}, "num_hybrid 9 exceeds group_size 8"),
        ({"branch": {"first_wave": 9}}, "first_wave 9 exceeds group_size 8"),
        ({"branch": {}, "loss": {"type": "gspo"}}, "use ratios of tokens"),
        ({"tips": {}, "loss": {"type": "reinforce"}}, "has no ratio"),
        ({"tips": {}, "loss": {"type": "gspo"}}, "student_mask cannot leave tokens out of"),
        ({"retrieval": {"quality": False, "timing": "none"}}, "leaves no retrieval reward"),
        ({"retrieval": {"mode": "execute"}}, "needs a stateful environment"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_line(table: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as found:
        validate(
            RunSettings, {"environment": {"type": "factbook"}, "algorithm": {"type": "combined", **table}}
        )
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("kind", ["gspo", "reinforce"])
def test_without_tips_the_losses_without_a_ratio_of_tokens_are_allowed(kind: str) -> None:
    for tips in ("none", {"memory_probability": 0.0}):
        found = validate(CombinedSettings, {"type": "combined", "loss": {"type": kind}, "tips": tips})
        assert found.loss.type == kind


@settings(max_examples=12)
@given(
    size=st.integers(2, 9), hybrid=st.integers(0, 9), p=st.floats(0, 1), step=st.integers(0, 40),
    group=st.integers(0, 3),
)  # fmt: skip
def test_the_modes_are_those_of_both_methods(size: int, hybrid: int, p: float, step: int, group: int) -> None:
    num_hybrid = min(size, hybrid)
    table = {
        "group_size": size, "retrieval": {"num_hybrid": num_hybrid},
        "tips": {"memory_probability": p, "memory": {"embedder": "hash"}},
    }  # fmt: skip
    both = Combined(validate(CombinedSettings, {"type": "combined", **table}), embedder=HashEmbedder())
    table.pop("retrieval")
    tips = Combined(validate(CombinedSettings, {"type": "combined", **table}), embedder=HashEmbedder())
    modes = both.modes_of(step, group)
    assert [has_part(mode, HYBRID) for mode in modes] == [i >= size - num_hybrid for i in range(size)]
    assert [tip_mode(mode) for mode in modes] == list(tips.modes_of(step, group))
    assert tip_mode("hybrid") == tip_mode("on_policy") == PLAIN


def test_tips_act_first_then_retrieval_then_branches(tmp_path: Path) -> None:
    chosen = validate(CombinedSettings, {"type": "combined", **SHARED, **SECTIONS})
    with StepTraceBuffer(tmp_path / "b.sqlite", load_embedder("hash"), mode="write") as buffer:
        method = Combined(chosen, buffer=buffer, embedder=HashEmbedder(), vocabulary_size=9)
        assert [type(hook) for hook in method.hooks] == [TipHook, RetrievalHook, BranchHook]
        assert method.remembers and len(method.counts()) == 1 and method.label == "combined"
    bare = Combined(validate(CombinedSettings, {"type": "combined"}))
    assert not bare.remembers and bare.hooks == () and bare.label == "grpo"


def test_tips_are_in_no_retrieved_share() -> None:
    """Else the weight of a ratio would depend on a rendering that the update does not see."""
    trace, parent = Trace(task=Task(key="t", question="")), None
    for origin, num in ((Origin.PROMPT, 4), (Origin.MEMORY, 50), (Origin.PROMPT, 2), (Origin.POLICY, 6),
                        (Origin.ENVIRONMENT, 3), (Origin.MEMORY, 20), (Origin.ENVIRONMENT, 1),
                        (Origin.BUFFER, 5), (Origin.POLICY, 5)):  # fmt: skip
        scores = (-1.0,) * num if origin is Origin.POLICY else ()
        node = trace.append(
            parent=parent, origin=origin, token_ids=(1,) * num, message=Message(role="user", content=""),
            logprobs=scores, entropies=scores,
        )  # fmt: skip
        parent = node.node_id
    assert parent is not None
    path = trace.path(parent)
    assert retrieved_share(path) == retrieved_share(without_memory(path)) == 5 / 20
