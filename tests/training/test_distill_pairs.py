"""Turns that teach the context that they were not sampled in (UCOB): recorded values of released code, which
turns teach, and the gradient against one of a plain model.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.distill import DistillSettings
from outrider.algorithms.distill_help import (
    HELPED,
    PAIR_WEIGHT,
    help_metrics,
    pair_weight,
    weigh_turns,
    with_helped_mode,
)
from outrider.algorithms.distill_losses import distill_losses, divergence_per_token, gates
from outrider.algorithms.luffy import LuffySettings
from outrider.algorithms.rollout_replay import RolloutReplaySettings
from outrider.config import validate
from outrider.trace import BODY, Insertion, Leaf, Node, Trace, with_help
from outrider.training.distill_term import pair_paths
from outrider.training.settings import UpdateSettings
from outrider.training.step_records import values_by_node
from outrider.training.update import rollout_paths, update
from outrider.types import Message, Origin, Outcome, Task
from tests.tiny import tiny_model
from tests.training.test_pack_update import (  # noqa: F401
    Recorder,
    assert_equal_gradients,
    double_precision,
    eager,
    padded_logprobs,
)
from tests.vectors import load_vectors

CASES = load_vectors("distill")["ucob.pairs"]["cases"]
HELP = (40, 41)


def settings(**options: Any) -> DistillSettings:
    return validate(DistillSettings, {"preset": "ucob", "path": "x", "max_help_tokens": 9, **options})


def likelihood(**options: Any) -> DistillSettings:
    """The sampled form, without the keys of the divergence."""
    return settings(
        preset="none", help="file", plays="both", pairs="anchor", form="likelihood", gate="gap", **options
    )


def test_weights_of_pairs() -> None:
    cases = [case for case in CASES if case["name"] == "weight of a pair"]
    assert len(cases) == 7
    for case in cases:
        chosen = settings(pair_margin=case["margin"], pair_scale=case["tau"], pair_cap=case["cap"])
        assert pair_weight(case["return_gap"], chosen) == pytest.approx(case["weight"] or 0.0, rel=1e-12)
        assert bool(pair_weight(case["return_gap"], chosen)) == case["taught"]


def test_the_sampled_form() -> None:
    """The released loss also has the constant log-probs of the reference, so slopes are compared."""
    case = next(case for case in CASES if case["name"].startswith("sampled form"))
    target = torch.tensor(case["target_logprobs"], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(case["reference_logprobs"], dtype=torch.float64)
    weights = torch.tensor(case["weights"], dtype=torch.float64)
    losses = distill_losses(likelihood(), logprobs_T=target, teacher_T=reference, start_T=target.detach())
    (slopes,) = torch.autograd.grad((losses * weights).mean(), target)
    expected = torch.tensor(case["d_loss_d_logprob"], dtype=torch.float64)
    assert torch.allclose(slopes, expected, rtol=1e-9, atol=0)
    gate = gates(reference - target.detach(), likelihood())
    value = float((gate * weights * (reference - target)).mean().detach())
    assert value == pytest.approx(case["loss"], rel=1e-9)


@pytest.mark.parametrize("case", [case for case in CASES if case["name"].startswith("full")], ids=str)
def test_the_released_setting(case: dict[str, Any]) -> None:
    target = torch.tensor(case["target_logits"], dtype=torch.float64).log_softmax(-1)
    reference = torch.tensor(case["reference_logits"], dtype=torch.float64).log_softmax(-1)
    support = reference.topk(2).indices
    chosen = settings()
    gap_T = (reference - target)[case["token"]][None]
    divergence_T = divergence_per_token(
        target[support][None], reference[support][None], alpha=chosen.alpha, tail=chosen.tail
    )
    own_T = target[case["token"]][None]
    loss_T = distill_losses(
        chosen, logprobs_T=own_T, teacher_T=own_T + gap_T, start_T=own_T, divergence_T=divergence_T
    )
    assert float(gates(gap_T, chosen)) == pytest.approx(case["gate"], rel=1e-9)
    assert float(case["weight"] * loss_T) == pytest.approx(case["loss"], rel=1e-9)


# Which turns teach


def group(
    *, observations: tuple[str, ...] = ("o",), returns: tuple[float, ...] = (1.0, 0.5, 0.0, 0.2)
) -> Trace:
    """Four rollouts with a turn at the prompt and one at each observation, the last two sampled with help."""
    modes = ("on_policy", "on_policy", HELPED, HELPED)
    trace = Trace(task=Task(key="t", question="?"), modes=modes)

    def add(
        parent: Node | None, origin: Origin, ids: tuple[int, ...], text: str = "", **options: Any
    ) -> Node:
        parent_id = None if parent is None else parent.node_id
        return trace.append(
            parent=parent_id,
            origin=origin,
            token_ids=ids,
            message=Message(role="user", content=text),
            **options,
        )

    for rollout, (mode, value) in enumerate(zip(modes, returns, strict=True)):
        node = add(None, Origin.PROMPT, (10, 11), "p")
        prompt = node
        if mode == HELPED:
            node = add(node, Origin.MEMORY, HELP, "help")
        node = add(node, Origin.PROMPT, (12,))
        for turn, text in enumerate((None, *observations)):
            if text is not None:
                node = add(node, Origin.ENVIRONMENT, (13,), text)
            ids = (20 + rollout, 30 + turn, 14)
            node = add(node, Origin.POLICY, ids, logprobs=(-1.0,) * 3, entropies=(1.0,) * 3)
            node.credit = (0.0,) * 3
        trace.finish(
            Leaf(node_id=node.node_id, rollout=rollout, outcome=Outcome.FINISHED, episode_return=value)
        )
        if mode != HELPED:
            insertion = Insertion(node_id=prompt.node_id, offset=2, token_ids=HELP, text="", source="file")
            trace.help[rollout] = (insertion,)
    return trace


def teaching(trace: Trace) -> dict[tuple[int, int], float]:
    """Weights by rollout and turn."""
    return {
        (leaf.rollout, number): node.metadata[PAIR_WEIGHT]
        for leaf, path in trace.rollouts()
        for number, node in enumerate(node for node in path if node.trainable)
        if PAIR_WEIGHT in node.metadata
    }


def test_the_best_turn_of_each_observation_teaches_with_its_largest_gaps() -> None:
    trace = group(returns=(1.0, 0.9, 0.7, 0.99))
    weigh_turns(trace, settings(pair_gamma=1.0))
    assert teaching(trace) == {
        (0, 0): pytest.approx(0.3 / 0.2 + 0.1 / 0.2), (0, 1): pytest.approx(0.3 / 0.2 + 0.1 / 0.2),
    }  # fmt: skip
    assert help_metrics([trace])["distill/num_teaching_turns"] == 2.0
    trace = group(returns=(1.0, 0.5, 0.0, 2.0))
    weigh_turns(trace, settings(pair_gamma=0.5, max_pairs=1, pair_cap=9.0))
    assert teaching(trace) == {(3, 0): pytest.approx(5.0), (3, 1): pytest.approx(9.0)}
    trace = group(returns=(1.0, 0.96, 0.97, 1.0))
    weigh_turns(trace, settings(pair_gamma=1.0))
    assert teaching(trace) == {}


def test_invalid_and_lost_turns_do_not_teach() -> None:
    trace = group()
    for node in trace.path(trace.leaves[0].node_id or 0):
        if node.trainable:
            node.metadata["invalid"] = True
    trace.leaves[1].episode_return = None
    weigh_turns(trace, settings(pair_gamma=1.0))
    assert set(teaching(trace)) == {(3, 0), (3, 1)}


def test_a_share_of_every_group_is_sampled_with_help() -> None:
    for share, num in ((0.5, 2), (0.25, 1), (0.1, 1)):
        modes = with_helped_mode(("a",) * 4, settings(helped_share=share), group=7, seed=0, has_tips=False)
        assert modes == ("a",) * (4 - num) + (f"a+{HELPED}",) * num


# The update


@pytest.mark.parametrize("max_tokens", [1, 10_000])
@pytest.mark.parametrize("returns", [(1.0, 0.5, 0.0, 0.2), (0.0, 0.5, 0.0, 1.0)])
def test_the_gradient_is_that_of_the_other_context(max_tokens: int, returns: tuple[float, ...]) -> None:
    """A success without help teaches the helped context, and one with help the context without."""
    trace = group(returns=returns)
    chosen = likelihood(pair_gamma=1.0, weight=0.7)
    weigh_turns(trace, chosen)
    paths = rollout_paths([trace])
    [pair] = pair_paths(paths)
    winner = paths[returns.index(1.0)]
    own = [node.token_ids for node in winner.nodes]
    assert [node.token_ids for node in pair.nodes_with_help or ()] == own
    ids = [token for node in pair.nodes for token in node.token_ids]
    if winner.rollout == 0:
        helped = [token for node in with_help(winner.nodes, trace.help[0]) for token in node.token_ids]
        assert ids == helped
    else:
        assert ids == [token for tokens in own if tokens != HELP for token in tokens]
    model = tiny_model(dtype=torch.float64)
    policy = Recorder(model)
    objective = ObjectiveSettings(distill=chosen, sampler_correction=None)
    report = update(
        policy, [trace], objective=objective, reference=None,
        settings=UpdateSettings(max_tokens=max_tokens, max_logprob_gap=99.0),
    )  # fmt: skip
    plain = eager(model)
    teacher = padded_logprobs(plain, [replace(pair, nodes=pair.nodes_with_help or ())])[0].detach()
    student = padded_logprobs(plain, [pair])[0]
    weights = torch.tensor([w for (_, _), w in sorted(teaching(trace).items()) for _ in range(3)])
    gate = torch.sigmoid(chosen.gate_beta * (teacher - student.detach()))
    loss = -(weights * gate * student).mean()
    (0.7 * loss).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert_equal_gradients(policy.gradients[0], expected)
    assert report.metrics["distill/loss"] == pytest.approx(float(loss.detach()), rel=1e-9)
    assert report.metrics["loss/policy"] == 0.0 and report.metrics["distill/num_tokens"] == 6.0
    values = values_by_node([paths], report.tokens)  # of the rollouts alone
    assert all(rollout < 4 for _, rollout in values)


def test_pairs_change_no_other_term() -> None:
    """The policy term, its denominators and the comparison with the engine."""
    metrics = []
    for weight in (None, 1e-9):
        trace = group()
        for node in trace.nodes:
            if node.trainable:
                node.credit = (1.0, -0.5, 0.25)
            if node.origin is Origin.ENVIRONMENT:
                node.metadata[BODY] = [[0, len(node.token_ids)]]
        chosen = None if weight is None else likelihood(pair_gamma=1.0, weight=weight)
        if chosen is not None:
            weigh_turns(trace, chosen)
        policy = Recorder(tiny_model(dtype=torch.float64))
        report = update(
            policy, [trace], objective=ObjectiveSettings(distill=chosen, positive_nll=0.3, entropy_bonus=0.1,
                                                         observation_nll=0.2),
            settings=UpdateSettings(max_logprob_gap=99.0), reference=None,
        )  # fmt: skip
        metrics.append((report.metrics, policy.gradients[0]))
    (plain, gradient), (paired, other) = metrics
    names = [name for name in plain if not name.startswith(("time", "distill"))]
    assert {name: paired[name] for name in names} == pytest.approx(
        {name: plain[name] for name in names}, rel=1e-9
    )
    assert_equal_gradients(other, gradient, 1e-7)


@pytest.mark.parametrize(
    ("kind", "metric"), [(LuffySettings, "luffy/num_tokens"), (RolloutReplaySettings, "replay/num_tokens")]
)
def test_pairs_are_no_demonstrations_and_not_replayed(kind: Any, metric: str) -> None:
    trace, chosen = group(), likelihood(pair_gamma=1.0)
    weigh_turns(trace, chosen)
    report = update(
        Recorder(tiny_model(dtype=torch.float64)), [trace], objective=kind(distill=chosen),
        settings=UpdateSettings(max_logprob_gap=99.0), reference=None,
    )  # fmt: skip
    assert report.metrics["distill/num_tokens"] == 6.0 and metric not in report.metrics
