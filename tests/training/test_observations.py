"""The likelihood of observations (ECHO) against plain rows in float64, and what it changes in an update."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.distill_help import PAIR_WEIGHT
from outrider.algorithms.grpo import GrpoSettings
from outrider.config import validate
from outrider.errors import ConfigError
from outrider.trace import BODY, Insertion, Leaf, Trace
from outrider.training.packing import RolloutPath, pack
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings, RunSettings, UpdateSettings
from outrider.training.update import rollout_paths, update
from outrider.types import Origin, Outcome, Task
from tests.distributed.groups import groups
from tests.tiny import tiny_model
from tests.training.test_objective_rules import run, traces_of
from tests.training.test_pack_update import (  # noqa: F401
    TEXT,
    Recorder,
    assert_equal_gradients,
    double_precision,
    eager,
    gradients_of,
    random_trace,
)


def written_nll(model: LlamaForCausalLM, paths: Sequence[RolloutPath]) -> Tensor:
    """The mean over the observation tokens of every rollout, each rollout alone in its row."""
    values = []
    for path in paths:
        row: list[int] = []
        positions: list[int] = []
        for node in path.nodes:
            for start, end in node.metadata.get("body", []) if node.origin == "environment" else []:
                positions += [len(row) + at for at in range(start, end) if len(row) + at > 0]
            row += node.token_ids
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits, dim=-1)
        values += [-logprobs[at - 1, row[at]] for at in positions]
    return torch.stack(values).mean()


def without_signal(traces: list[Trace]) -> list[Trace]:
    for trace in traces:
        for node in trace.nodes:
            node.credit = None if node.credit is None else (0.0,) * len(node.credit)
    return traces


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("max_tokens", [10_000, 40, 1])
def test_the_term_is_the_mean_over_all_rollouts_also_where_the_group_has_no_spread(
    max_tokens: int, alike: bool
) -> None:
    traces = without_signal([random_trace(31 + i, key=str(i), alike=alike) for i in range(4)])
    chosen = UpdateSettings(max_tokens=max_tokens)
    policy, metrics = run(traces, {"observation_nll": 0.1}, chosen=chosen)
    plain = eager(tiny_model(dtype=torch.float64))
    nll = written_nll(plain, rollout_paths(traces))
    assert metrics["loss/observation_nll"] == pytest.approx(nll.item(), rel=1e-9)
    assert_equal_gradients(policy.gradients[0], gradients_of(plain, 0.1 * nll))
    assert not run(traces, {}, chosen=chosen)[0].gradients


@pytest.mark.parametrize("options", [{}, {"kl_weight": 0.2}, {"positive_nll": 0.1, "entropy_bonus": 0.01}])
def test_it_is_added_to_the_other_terms(options: dict[str, Any]) -> None:
    traces = traces_of(3)
    common = options | {"sampler_correction": "none"}
    expected, values = run(traces, common)
    found, metrics = run(traces, common | {"observation_nll": 0.1})
    plain = eager(tiny_model(dtype=torch.float64))
    added = gradients_of(plain, 0.1 * written_nll(plain, rollout_paths(traces)))
    total = {name: added[name] + value for name, value in expected.gradients[0].items()}
    assert_equal_gradients(found.gradients[0], total)
    assert metrics["loss/policy"] == pytest.approx(values["loss/policy"], rel=1e-9)
    assert "loss/observation_nll" not in values


def test_a_weight_of_zero_changes_no_bit_and_marks_alone_do_nothing() -> None:
    chosen = UpdateSettings(max_tokens=40, num_epochs=2)
    unmarked = traces_of(7)
    for trace in unmarked:
        for node in trace.nodes:
            node.metadata.pop(BODY, None)
    expected, values = run(unmarked, {}, chosen=chosen)
    for traces, weight in ((traces_of(7), 0.0), (unmarked, 0.1)):
        found, metrics = run(traces, {"observation_nll": weight}, chosen=chosen)
        assert metrics == values
        for mine, theirs in zip(found.gradients, expected.gradients, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def group(*observations: tuple[int, ...], returns: Sequence[float]) -> Trace:
    """Rollouts of one turn that act alike, each with an observation of its own."""
    trace = Trace(task=Task(key="t", question=""))
    root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=(5, 6, 7), message=TEXT)
    for rollout, (seen, value) in enumerate(zip(observations, returns, strict=True)):
        values = {"logprobs": (-1.0, -1.0), "entropies": (1.0, 1.0)}
        turn = trace.append(
            parent=root.node_id, origin=Origin.POLICY, token_ids=(8, 9), message=TEXT, **values
        )
        turn.credit = (value, value)
        last = trace.append(
            parent=turn.node_id, origin=Origin.ENVIRONMENT, token_ids=(4, *seen, 3), message=TEXT,
            metadata={BODY: [[1, 1 + len(seen)]]},
        )  # fmt: skip
        trace.finish(
            Leaf(node_id=last.node_id, rollout=rollout, outcome=Outcome.FINISHED, episode_return=value)
        )
    return trace


def test_a_shared_observation_is_computed_once_and_counts_once_per_rollout() -> None:
    paths = rollout_paths([group((20, 21), (20, 21), (30,), returns=(0.0, 0.0, 0.0))])
    (plain,) = pack(paths, max_tokens=1000)
    assert len(plain.targets_U) == 2 and len(plain.observed_M) == 0
    marked = [RolloutPath(nodes=p.nodes, rollout_index=p.rollout_index, rollout=p.rollout,
                          scores_observations=True) for p in paths]  # fmt: skip
    (batch,) = pack(marked, max_tokens=1000)
    assert batch.targets_U[batch.observed_M].tolist() == [20, 20, 21, 21, 30]
    assert batch.num_tokens == plain.num_tokens and sorted(batch.targets_U.tolist()) == [8, 9, 20, 21, 30]
    assert batch.token_T.tolist() == plain.token_T.tolist() == [0, 0, 0, 1, 1, 1]


def test_tokens_of_other_origins_and_replayed_rollouts_have_no_part() -> None:
    trace = group((20, 21), (22, 23), returns=(0.0, 0.0))
    for node in trace.nodes:
        node.origin = Origin.BUFFER if node.origin is Origin.ENVIRONMENT else node.origin
    assert not run([trace], {"observation_nll": 0.1})[0].gradients


def test_facts_in_observations_become_likely_without_any_reward() -> None:
    """Both observations, after the same two actions; the policy term of this group is 0."""
    model = tiny_model()
    policy = Policy(model, OptimizerSettings(learning_rate=1e-2))
    objective = validate(ObjectiveSettings, {"observation_nll": 0.1, "sampler_correction": "none"})
    trace = group((20, 21, 22), (20, 21, 22), returns=(0.0, 0.0))
    chosen = UpdateSettings(max_logprob_gap=1e9)
    values = [
        update(policy, [trace], objective=objective, settings=chosen, reference=None).metrics[
            "loss/observation_nll"
        ]
        for _ in range(30)
    ]
    assert values[0] > 3.0 and values[-1] < 0.2


@pytest.mark.parametrize(
    ("others", "problem"),
    [
        ({"environment": {"type": "textworld"}, "model": {"history_thinking": "strip"}},
         "observation_nll needs model.history_thinking = keep"),
        ({"environment": {"type": "agent", "command": ["true"], "max_programs": 1}},
         "leaves the conversation to a program"),
    ],
)  # fmt: skip
def test_runs_without_known_observations_are_refused(others: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        validate(RunSettings, {"algorithm": {"type": "grpo", "observation_nll": 0.1}, **others})
    assert validate(GrpoSettings, {}).observation_nll == 0.0


@pytest.mark.parametrize("max_tokens", [10_000, 60])
def test_it_is_added_to_sampled_forms_of_self_distillation(max_tokens: int) -> None:
    """The teacher's pass scores no observations, though its rollouts have some."""
    gradients = []
    for weight in (0.0, 0.1):
        traces = groups(3, rollouts=3, longest=16)
        for trace in traces[:2]:
            for leaf, path in list(trace.rollouts())[1:]:
                trace.help[leaf.rollout] = (
                    Insertion(node_id=path[0].node_id, offset=3, token_ids=(20, 9), text="", source="file"),
                )
        objective = validate(
            ObjectiveSettings,
            {"observation_nll": weight, "sampler_correction": "none",
             "distill": {"help": "sibling", "form": "reverse_kl"}},
        )  # fmt: skip
        policy = Recorder(tiny_model(dtype=torch.float64))
        chosen = UpdateSettings(max_tokens=max_tokens)
        report = update(policy, traces, objective=objective, settings=chosen, reference=None)
        assert report.metrics["distill/num_tokens"] > 0
        gradients.append(policy.gradients[0])
    plain = eager(tiny_model(dtype=torch.float64))
    added = gradients_of(plain, 0.1 * written_nll(plain, rollout_paths(traces)))
    total = {name: added[name] + value for name, value in gradients[0].items()}
    assert_equal_gradients(gradients[1], total)


def test_a_pair_of_self_distillation_repeats_no_observation() -> None:
    """Its rollout's observations are scored in the context in which they were made."""
    distill = {
        "help": "file", "path": "x", "plays": "both", "pairs": "anchor", "form": "likelihood", "gate": "gap",
    }  # fmt: skip
    objective = validate(
        ObjectiveSettings, {"observation_nll": 0.1, "sampler_correction": "none", "distill": distill}
    )
    trace = group((20, 21), (22, 23, 24), returns=(0.0, 0.0))
    (_, path), _ = trace.rollouts()
    trace.help[0] = (Insertion(node_id=path[0].node_id, offset=3, token_ids=(20, 9), text="", source="file"),)
    path[1].metadata[PAIR_WEIGHT] = 1.0
    policy = Recorder(tiny_model(dtype=torch.float64))
    report = update(policy, [trace], objective=objective, settings=UpdateSettings(), reference=None)
    assert report.metrics["distill/num_tokens"] == 2.0
    nll = written_nll(eager(tiny_model(dtype=torch.float64)), rollout_paths([trace]))
    assert report.metrics["loss/observation_nll"] == pytest.approx(nll.item(), rel=1e-9)


def test_a_divergence_beside_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="not defined beside distill"):
        validate(ObjectiveSettings, {"observation_nll": 0.1, "distill": {"help": "sibling"}})
