"""Demonstrations in the group: played in the group's own initial state, rewarded by the environment, marked
and unmeasured.
"""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.algorithms.luffy import Luffy, LuffySettings
from outrider.config import validate
from outrider.errors import EnvironmentFault
from outrider.rollout.experts import join_demonstration, play_experts
from outrider.rollout.hooks import RolloutStatus
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.trace import Leaf, Trace
from outrider.training.components import Components
from outrider.training.data import add_off_policy_groups
from outrider.training.step_records import trace_rows
from outrider.types import Origin, Outcome, Task
from tests.rollout.fakes import TOKENIZER, scheduler, scripted
from tests.toy import ToyTaskSet

SEED, STEP = 11, 3


class Expert(ToyTaskSet):
    """The expert of task 0 knows the number that its seed makes, that of task 1 is wrong, task 2 has none."""

    num_asked = 0
    num_refusals = 0
    num_closes = 0

    def expert(self, task: Task, seed: int) -> Any:
        self.num_asked += 1
        if self.num_asked <= self.num_refusals:
            raise EnvironmentFault("the expert's simulator died")
        return super().expert(task, seed)

    def close(self) -> None:
        self.num_closes += 1


def parts_of(family: ToyTaskSet, algorithm: Any) -> Components:
    """What mixing reads of the components."""
    train = SimpleNamespace(max_retries=1, expert_timeout_s=5.0)
    settings = SimpleNamespace(limits=Limits(step_timeout_s=60), seed=SEED, num_concurrent=4, train=train)
    parts = SimpleNamespace(
        task_set=family, factory=family.make(), settings=settings, algorithm=algorithm,
        renderer=ChatRenderer(TOKENIZER), engine=SimpleNamespace(context_length=4096),
        rollout_status=RolloutStatus(),
    )  # fmt: skip
    return cast(Components, parts)


def luffy(**options: Any) -> Luffy:
    return Luffy(validate(LuffySettings, {"group_size": 3, **options}), paths={})


def groups(family: ToyTaskSet) -> list[Trace]:
    """Two rollouts a task of a policy that answers at once."""
    engine = scripted(lambda request, context: "<answer>1</answer>")
    runs = scheduler(engine, family.make(), stop=family.stop, seed=SEED)  # type: ignore[arg-type]
    return runs.run(family.tasks("train"), modes=("on_policy",) * 2, training_step=STEP).traces


def test_a_demonstration_joins_its_group_with_the_return_of_the_environment() -> None:
    family, algorithm = Expert(3), luffy()
    traces = groups(family)
    replayed, metrics = add_off_policy_groups(parts_of(family, algorithm), traces, step=STEP, note=print)
    assert replayed == [] and metrics == {"luffy/num_groups_without": 1.0, "luffy/num_faults": 0.0}
    right, wrong, none = traces
    assert [leaf.episode_return for leaf, _ in right.rollouts()] == [0.25, 0.25, 2.0]
    assert [leaf.episode_return for leaf, _ in wrong.rollouts()] == [0.25, 0.25, 0.25] and not wrong.leaves[
        2
    ].success
    assert sorted(none.leaves) == [0, 1] and none.modes == ("on_policy",) * 2
    leaf, path = list(right.rollouts())[2]
    assert leaf.is_demonstration and right.modes[2] == "demonstration" and leaf.outcome is Outcome.FINISHED
    assert [node.origin for node in path] == [
        Origin.PROMPT,
        Origin.DEMONSTRATION,
        Origin.ENVIRONMENT,
        Origin.DEMONSTRATION,
    ]
    assert path[0] is right.nodes[0]  # the group's own prompt: the same initial state
    assert "claimed" not in path[2].message.content and "it is" in path[2].message.content
    shown = [node for node in path if node.origin is Origin.DEMONSTRATION]
    assert all(
        node.logprobs == node.entropies == () and node.receives_advantages and not node.trainable
        for node in shown
    )
    assert [leaf.rollout for leaf, _ in right.own_rollouts()] == [0, 1]
    credit = algorithm.assign_advantages(right)
    assert credit.measurements["luffy/return_demonstration"] == [2.0] and credit.measurements[
        "luffy/fraction_solved"
    ] == [1.0]
    assert (
        all(node.credit == (leaf.advantage,) * len(node.token_ids) for node in shown)
        and (leaf.advantage or 0) > 1
    )
    assert not algorithm.assign_advantages(wrong).advantages.has_signal


def test_experts_are_called_in_every_step_and_their_faults_are_retried_and_counted() -> None:
    family, algorithm = Expert(3), luffy()
    parts = parts_of(family, algorithm)
    family.num_refusals = 2  # both tries of the first task
    told: list[str] = []
    metrics = add_off_policy_groups(parts, groups(family), step=STEP, note=told.append)[1]
    assert metrics == {"luffy/num_groups_without": 2.0, "luffy/num_faults": 1.0}
    assert len(told) == 1 and "1 demonstration was lost to faults: the expert of toy/0: " in told[0]
    assert family.num_asked == 4 and family.num_closes == 2 + 1  # after every fault, and in the end
    assert (
        add_off_policy_groups(parts, groups(family), step=STEP, note=print)[1]["luffy/num_groups_without"]
        == 1.0
    )
    assert family.num_asked == 4 + 3 and family.num_closes == 4


def test_a_demonstration_starts_in_the_initial_state_of_its_step() -> None:
    """Each step resets it with another seed, so that what its expert did in an earlier one is of another
    episode.
    """
    family, algorithm = Expert(1), luffy()
    for step in (STEP, STEP + 1, STEP + 2):
        [trace] = groups(family)
        add_off_policy_groups(parts_of(family, algorithm), [trace], step=step, note=print)
        assert trace.leaves[2].is_demonstration and trace.leaves[2].success


def test_a_demonstration_with_a_fault_is_masked() -> None:
    family, algorithm = Expert(1), luffy()
    traces = groups(family)
    family.broken = {"toy/0"}
    told: list[str] = []
    _, metrics = add_off_policy_groups(parts_of(family, algorithm), traces, step=STEP, note=told.append)
    assert metrics["luffy/num_faults"] == 1.0 and "lost to faults: toy/0: " in told[0]
    leaf = traces[0].leaves[2]
    assert leaf.is_demonstration and leaf.outcome is Outcome.ENVIRONMENT_FAULT and leaf.episode_return is None
    assert algorithm.assign_advantages(traces[0]).advantages.assigned.tolist() == [True, True, False]
    rows = trace_rows(traces, step=STEP, tokenizer=TOKENIZER).rollouts
    assert [row.kind for row in rows] == ["on-policy", "on-policy", "demonstration"]


def test_no_demonstrations_and_too_many_rollouts_in_one() -> None:
    family = Expert(1)
    traces = groups(family)
    assert add_off_policy_groups(
        parts_of(family, luffy(num_demonstrations=0)), traces, step=STEP, note=print
    ) == ([], {})
    assert family.num_asked == 0
    [played] = play_experts(
        tasks=family.tasks("train"), expert=lambda task: family.expert(task, 0), factory=family.make(),
        tokenizer=TOKENIZER, limits=Limits(step_timeout_s=60), stop=family.stop, run_seed=SEED,
        context_length=4096, training_step=STEP,
    )  # fmt: skip
    played.finish(Leaf(node_id=0, rollout=1, outcome=Outcome.FINISHED, episode_return=0.0))
    with pytest.raises(ValueError, match="unpack"):
        join_demonstration(traces[0], played)
