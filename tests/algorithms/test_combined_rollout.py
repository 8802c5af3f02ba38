"""Tips, retrieved steps and forks in one group through the real loop, in both protocols: who comes first,
what a fork inherits, and the rendering that the update sees.
"""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.algorithms.exploration import Combined, CombinedSettings
from outrider.config import validate
from outrider.engines.base import Request
from outrider.environments.base import StepResult
from outrider.memory.embedders import HashEmbedder, load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.rollout.settings import Limits
from outrider.trace import Node, Trace, policy_turns, without_memory
from outrider.training.packing import pack
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings
from outrider.training.update import rollout_paths
from outrider.types import Origin, Role, Step, Trajectory
from tests.rollout.fakes import TOKENIZER, Factory, Fake, RawEngine, say, scheduler, tasks
from tests.tiny import tiny_model
from tests.training.test_tips_update import scored

GROUP, TURNS = 6, 4


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StepTraceBuffer]:
    [task] = tasks(1)
    steps = [Step(text=f"did {i}", observation=f"found {i}", is_terminal=i == 7) for i in range(8)]
    told = Trajectory(trajectory_id="t", task_key=task.key, agent="expert", prompt=(), steps=tuple(steps),
                      reward=1.0)  # fmt: skip
    path: Path = tmp_path_factory.mktemp("buffer") / "steps.sqlite"
    with StepTraceBuffer(path, load_embedder("hash"), mode="write") as made:
        made.add_trajectories([told], questions={task.key: task.question})
        yield made


def play(
    buffer: StepTraceBuffer, role: Role, mode: str, *, max_concurrent: int = 16, coefficient: float = 0.0
) -> tuple[Trace, Combined]:
    table = {
        "type": "combined", "group_size": GROUP,
        "retrieval": {"num_hybrid": GROUP, "probability": 0.7, "ratio_weight": 0.5},
        "branch": {"first_wave": 2, "base_probability": 1.0, "entropy_weight": 0.0},
        "tips": {"intrinsic_coefficient": coefficient,
                 "memory": {"embedder": "hash", "min_similarity": -1.0}},
    }  # fmt: skip
    method = Combined(validate(CombinedSettings, table), buffer=buffer, embedder=HashEmbedder(),
                      vocabulary_size=99, every_action=True)  # fmt: skip
    [task] = tasks(1)
    assert method.tips is not None
    key = HashEmbedder().embed(["seen"])[0]
    method.tips.memory.add(task.key, key, "look up", 1.0, policy_version=0, rollout_id="earlier")

    def ids(request: Request) -> list[int]:
        draw = random.Random(request.seed)
        return [draw.randrange(3, 99) for _ in range(4)]

    def answer(number: int, text: str) -> StepResult:
        return say(f" seen {number}", role) if number < TURNS - 1 else StepResult(message=None, done=True)

    factory = Factory(lambda task, number: Fake(on_step=answer, episode_return=float(number % 3)))
    loop = scheduler(RawEngine(TOKENIZER, ids), factory, hooks=method.hooks, max_concurrent=max_concurrent,
                     limits=Limits(max_turns=TURNS, max_turn_tokens=40, step_timeout_s=60))  # fmt: skip
    [trace] = loop.run([task], modes=(f"{mode}+hybrid",) * GROUP, training_step=0).traces
    return trace, method


def between_turns(path: list[Node]) -> list[list[Origin]]:
    """The origins in front of every policy turn."""
    found = [[node.origin for node in group] for trains, group in groupby(path, lambda n: n.trainable)
             if not trains]  # fmt: skip
    return found[: sum(node.trainable for node in path)]


@pytest.mark.parametrize("role", ["user", "inline"])
def test_a_tip_comes_before_a_retrieved_step_and_a_fork_inherits_both_once(
    buffer: StepTraceBuffer, role: Role
) -> None:
    trace, _ = play(buffer, role, "tips_off")
    paths = [path for _, path in trace.rollouts()]
    users = Counter(node.node_id for path in paths for node in path)
    shared = {node.origin for path in paths for node in path if users[node.node_id] > 1}
    assert {Origin.MEMORY, Origin.BUFFER, Origin.POLICY} <= shared
    for path in paths:
        for origins in between_turns(path):
            # each hook acted once in front of a turn, also where another rollout left
            assert origins.count(Origin.MEMORY) == 1 and origins.count(Origin.BUFFER) <= 1
            if Origin.BUFFER in origins:
                assert origins.index(Origin.MEMORY) < origins.index(Origin.BUFFER) == len(origins) - 1
        # a shown step is no state, and neither is a tip
        assert [turn.observation.strip() for turn in policy_turns(path)] == [
            path[0].message.content.strip(),
            *(f"seen {number}" for number in range(TURNS - 1)),
        ]


@pytest.mark.parametrize("role", ["user", "inline"])
def test_the_tips_off_update_sees_retrieved_steps_and_no_tips(buffer: StepTraceBuffer, role: Role) -> None:
    trace, method = play(buffer, role, "tips_off")
    method.assign_advantages(trace)
    rollouts = rollout_paths([trace])
    lm = tiny_model(dtype=torch.float64, context=4096)
    policy = Policy(lm, OptimizerSettings(learning_rate=1e-3))
    for rollout in rollouts:
        origins = {node.origin for node in rollout.nodes}
        assert Origin.MEMORY not in origins and rollout.nodes_with_tips is not None
        assert list(rollout.nodes) == without_memory(list(rollout.nodes_with_tips))
        [alone] = pack([rollout], max_tokens=10**6)
        assert alone.ids_N.tolist() == [token for node in rollout.nodes for token in node.token_ids]
        assert alone.positions_N.tolist() == list(range(alone.num_tokens))
    assert any(node.origin is Origin.BUFFER for rollout in rollouts for node in rollout.nodes)
    [batch] = pack(rollouts, max_tokens=10**6)
    assert batch.num_tokens < sum(len(node.token_ids) for rollout in rollouts for node in rollout.nodes)
    with torch.no_grad():
        found = policy.score(batch).logprobs_T
        for index, rollout in enumerate(rollouts):
            mine = (batch.rollout_index_T == index).nonzero().flatten().tolist()
            order = sorted(mine, key=lambda entry: int(batch.ordinal_T[entry]))
            np.testing.assert_allclose(found[order], scored(lm.model, list(rollout.nodes)), atol=1e-9)


@pytest.mark.parametrize("role", ["user", "inline"])
def test_every_leaf_scales_its_own_ratio_and_has_its_own_credit_on_shared_tokens(
    buffer: StepTraceBuffer, role: Role
) -> None:
    trace, method = play(buffer, role, "tips_on")
    method.assign_advantages(trace)
    assert not trace.without_memory and all(path.nodes_with_tips is None for path in rollout_paths([trace]))
    shares = [node.shares for node in trace.nodes if node.shares]
    assert any(len({share.ratio_scale for share in one.values()}) > 1 for one in shares)
    for leaf, path in trace.rollouts():
        own = [node for node in path if node.origin is Origin.BUFFER]
        counted = [node for node in without_memory(path) if node.origin is not Origin.PROMPT]
        f_ret = sum(len(n.token_ids) for n in own) / sum(len(n.token_ids) for n in counted)
        for node in path:
            if node.trainable:
                share = node.shares[leaf.rollout] if node.shares else None
                assert (share.ratio_scale if share else node.ratio_scale) == 1 + 0.5 * f_ret
                assert set(share.credit if share else node.credit or ()) == {leaf.advantage}


@pytest.mark.parametrize("role", ["user", "inline"])
def test_one_rollout_at_a_time_plays_the_same_tree(buffer: StepTraceBuffer, role: Role) -> None:
    one, other = (play(buffer, role, "tips_off", max_concurrent=n)[0] for n in (1, 16))
    assert [(n.parent, n.origin, n.token_ids) for n in one.nodes] == [
        (n.parent, n.origin, n.token_ids) for n in other.nodes
    ]


@pytest.mark.parametrize("role", ["user", "inline"])
def test_novelty_counts_every_leaf_and_every_leaf_writes_a_tip(buffer: StepTraceBuffer, role: Role) -> None:
    trace, method = play(buffer, role, "tips_on", coefficient=0.3)
    assert method.tips is not None
    counts = method.tips.counts
    assert counts["written"] + counts["empty"] == GROUP
    assert len({leaf.reflection for leaf, _ in trace.rollouts()}) == GROUP  # from each rollout's own stream
    method.assign_advantages(trace)
    # all leaves see the same states, a shared one too: six visits of each are seen together
    for leaf, path in trace.rollouts():
        assert len(policy_turns(path)) == TURNS
        assert leaf.intrinsic == pytest.approx(0.3 * TURNS / GROUP)
