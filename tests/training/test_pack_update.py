"""Packing and the update against the plain computation: padded rows, eager attention, one rollout after the
other.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.algorithms.advantages import RolloutAdvantages
from outrider.algorithms.base import ObjectiveSettings, write_advantages
from outrider.algorithms.loss_settings import RejectionMask
from outrider.engines.local.model import LanguageModel
from outrider.errors import CheckpointError, EngineFault
from outrider.trace import BODY, Leaf, Node, Trace
from outrider.training.checkpoint import load_reference, save_reference
from outrider.training.packing import RolloutPath, pack
from outrider.training.policy import Policy
from outrider.training.settings import LoraSettings, OptimizerSettings, UpdateSettings
from outrider.training.update import rollout_paths, update
from outrider.types import Message, Origin, Outcome, Task
from tests.objectives import nested
from tests.tiny import tiny_model

TEXT = Message(role="user", content="")
NO_CHECK = UpdateSettings(max_tokens=10_000, max_logprob_gap=1e9)


def written_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention written out; rows are padded on the right, so that no token sees padding."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ value).transpose(1, 2), None


@pytest.fixture(autouse=True, scope="module")
def double_precision() -> Iterator[None]:
    """transformers normalises in float32 whatever the model's precision; float64 models need it in float64
    here.
    """

    def forward(self: Any, states: Tensor) -> Tensor:
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(states.dtype)  # type: ignore[no-any-return]

    AttentionInterface.register("written", written_attention)
    AttentionMaskInterface.register("written", lambda *_, **__: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaRMSNorm, "forward", forward)
        yield


def eager(model: LanguageModel) -> LlamaForCausalLM:
    config = model.model.config.__class__.from_dict(model.model.config.to_dict())
    config._attn_implementation = "written"
    plain = LlamaForCausalLM(config).to(model.dtype)
    plain.load_state_dict(model.model.state_dict())
    return plain.eval()


def random_trace(
    seed: int,
    *,
    num_rollouts: int = 4,
    key: str = "t",
    faults: bool = True,
    flat: bool = False,
    alike: bool = False,
) -> Trace:
    """A group with a shared prompt (sometimes two), rollouts of other lengths, retrieved and observed nodes,
    and credit.

    ``alike``: of a few short texts, so that many rollouts begin with the same tokens, in nodes of their own.
    """
    dice: random.Random = Alike(seed) if alike else random.Random(seed)
    trace = Trace(task=Task(key=key, question=""))
    roots = [node(trace, None, Origin.PROMPT, ids(dice, 1, 9)) for _ in range(dice.choice([1, 1, 2]))]
    for rollout in range(num_rollouts):
        credit = 0.0 if flat else dice.choice([-2.0, -0.75, 0.0, 0.5, 1.5])
        scale = dice.choice([1.0, 1.0, 1.25])
        tip = dice.choice(roots)
        for turn in range(dice.randint(1, 3)):
            if turn:
                tip = node(trace, tip, dice.choice([Origin.ENVIRONMENT, Origin.BUFFER]), ids(dice, 1, 5))
            tip = node(trace, tip, Origin.POLICY, ids(dice, 1, 6), dice=dice)
            tip.credit, tip.ratio_scale = (credit,) * len(tip.token_ids), scale
        if dice.random() < 0.5:
            tip = node(trace, tip, Origin.ENVIRONMENT, ids(dice, 1, 4))  # cut after an observation
        fault = faults and num_rollouts > 1 and dice.random() < 0.2
        outcome, value = (Outcome.TOOL_FAULT, None) if fault else (Outcome.FINISHED, credit)
        trace.finish(
            Leaf(
                node_id=None if fault else tip.node_id, rollout=rollout, outcome=outcome, episode_return=value
            )
        )
    return trace


class Alike(random.Random):
    """Draws two tokens and short lengths only."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return super().randrange(3, 5) if stop == 90 else super().randrange(start, stop, step)

    def randint(self, a: int, b: int) -> int:
        return super().randint(a, min(b, a + 1))


def unique_tokens(paths: Sequence[RolloutPath]) -> int:
    """Tokens of the trees in which nodes of the same tokens behind the same nodes are one."""
    places = {
        tuple(one.token_ids for one in path.nodes[: depth + 1])
        for path in paths
        for depth in range(len(path.nodes))
    }
    return sum(len(place[-1]) for place in places)


def ids(dice: random.Random, low: int, high: int) -> tuple[int, ...]:
    return tuple(dice.randrange(3, 90) for _ in range(dice.randint(low, high)))


def node(
    trace: Trace,
    parent: Node | None,
    origin: Origin,
    token_ids: tuple[int, ...],
    dice: random.Random | None = None,
) -> Node:
    values = tuple(-2.0 - dice.random() for _ in token_ids) if dice else ()
    return trace.append(
        parent=None if parent is None else parent.node_id, origin=origin, token_ids=token_ids, message=TEXT,
        logprobs=values, entropies=values,
        # The first half is the template's.
        metadata={BODY: [[len(token_ids) // 2, len(token_ids)]]} if origin is Origin.ENVIRONMENT else {},
    )  # fmt: skip


def padded_distributions(
    model: LlamaForCausalLM, paths: Sequence[RolloutPath]
) -> list[tuple[Tensor, Tensor]]:
    """For every rollout, from one padded batch: the log-probs of the whole vocabulary where a policy token
    was sampled [T, V], and these tokens [T].
    """
    rows = [[token for one in path.nodes for token in one.token_ids] for path in paths]
    width = max(map(len, rows))
    logits = model(
        input_ids=torch.tensor([row + [2] * (width - len(row)) for row in rows]), use_cache=False
    ).logits
    found = []
    for row, path, scores in zip(rows, paths, torch.log_softmax(logits, dim=-1), strict=True):
        owners = [one for one in path.nodes for _ in one.token_ids]
        places = torch.tensor([i for i in range(1, len(row)) if owners[i].trainable], dtype=torch.long)
        found.append((scores[places - 1], torch.tensor(row)[places]))
    return found


def padded_logprobs(model: LlamaForCausalLM, paths: Sequence[RolloutPath]) -> list[Tensor]:
    """Log-probs of every policy token of every rollout, from one padded batch."""
    return [scores.gather(1, tokens[:, None])[:, 0] for scores, tokens in padded_distributions(model, paths)]


def slope(ratio: float, advantage: float, scale: float, o: ObjectiveSettings) -> float:
    """k in d loss / d log pi = -A k, from the gradient table of docs/algorithms/objectives.md."""
    if o.loss.type == "reinforce":
        return 1.0
    if o.loss.type == "cispo":
        return min(max(ratio, o.loss.ratio_floor), o.loss.ratio_cap)
    shaped = scale * ratio if o.loss.type == "clip" else ratio
    keeps = o.loss.type == "gppo"
    if advantage > 0 and shaped > 1 + o.loss.clip_high:
        return 1 + o.loss.clip_high if keeps else 0.0
    if advantage < 0 and shaped < 1 - o.loss.clip_low:
        return 1 - o.loss.clip_low if keeps else 0.0
    dual_clip = None if o.loss.type == "gspo" else o.loss.dual_clip
    return 0.0 if dual_clip and advantage < 0 and shaped > dual_clip else shaped


def engine_corrections(difference: Tensor, o: ObjectiveSettings) -> Tensor:
    """One weight a token from log pi_old - log pi_engine, zero for rejected tokens."""
    chosen, mask = o.sampler_correction, o.sampler_rejection
    weights = torch.ones_like(difference)
    if chosen is not None and chosen.level == "geometric":
        mean, least = float(difference.mean().exp()), chosen.lower or 0.0
        weights = torch.full_like(difference, mean if least <= mean <= chosen.upper else 0.0)
    elif chosen is not None:
        weights = difference.exp().clamp(max=chosen.upper)
    if mask is not None and mask.statistic == "k1":
        inverse = (-difference).exp()
        weights = weights * (inverse >= mask.lower) * (inverse <= mask.upper)
    elif mask is not None:
        weights = weights * float((difference.exp() - 1 - difference).mean() <= mask.upper)
    return weights


def written_loss(
    logprobs: Sequence[Tensor],
    olds: Sequence[Tensor],
    paths: Sequence[RolloutPath],
    o: ObjectiveSettings,
    refs: Sequence[Tensor] | None,
) -> Tensor:
    """A loss with the gradient of the objective, written down once more, token by token."""
    num_tokens = sum(map(len, logprobs))
    num_imitated = sum(len(own) for own, path in zip(logprobs, paths, strict=True) if path.succeeded)
    total = torch.zeros((), dtype=torch.float64)
    for i, (own, path) in enumerate(zip(logprobs, paths, strict=True)):
        nodes = [one for one in path.nodes if one.trainable for _ in one.token_ids]
        engine = torch.tensor([value for one in path.nodes for value in one.logprobs], dtype=torch.float64)
        old = olds[i].detach()
        corrections, log_ratio = engine_corrections(old - engine, o), (own - old).detach()
        weight = {
            "token_mean": 1 / num_tokens, "sequence_mean_token_mean": 1 / (len(paths) * len(own)),
            "sequence_mean_token_sum": 1 / len(paths),
            "constant_length": 1 / (len(paths) * (o.max_length or 1)),
        }[o.aggregation]  # fmt: skip
        form = getattr(o.loss, "sequence_ratio", "token")
        shared = log_ratio.sum() if form == "product" else log_ratio.mean()
        for t, one in enumerate(nodes):
            assert one.credit is not None
            ratio = float((shared if o.loss.type == "gspo" else log_ratio[t]).exp())
            k = slope(ratio, one.credit[0], one.ratio_scale, o)
            k *= len(own) if form == "product" else 1  # each token moves the whole product
            total = total - weight * float(corrections[t]) * one.credit[0] * k * own[t]
            if path.succeeded:
                total = total - o.positive_nll / num_imitated * own[t]
            if refs is not None:
                difference = own[t] - refs[i][t].detach()
                k3 = torch.exp(-difference) - 1 + difference
                kl = {"k2": difference**2 / 2, "k3": k3, "k3_ratio": k3 * torch.exp(own[t] - old[t])}
                total = total + o.kl_weight * weight * kl[o.kl_estimator]
    return total


class Recorder(Policy):
    """Stores the gradient of each optimizer step and moves the weights by a given amount instead of AdamW's.

    Only if ``is_first``, the update compares the engine's log-probs with the trainer's.
    """

    def __init__(
        self,
        model: LanguageModel,
        move: Callable[[str, Tensor], Tensor] | None = None,
        *,
        is_first: bool = False,
    ) -> None:
        super().__init__(model, OptimizerSettings(max_grad_norm=1e9))
        self.num_steps = 0 if is_first else 1
        self.gradients: list[dict[str, Tensor]] = []
        self._move = move

    def step(self, *, learning_rate: float | None = None) -> float:
        self.gradients.append(
            {name: m.grad.clone() for name, m in self.masters.items() if m.grad is not None}
        )
        with torch.no_grad():
            for name, master in self.masters.items():
                master.grad = None
                if self._move is not None:
                    master.add_(self._move(name, master))
        self.round_masters()
        return 1.0


def shift(name: str, master: Tensor) -> Tensor:
    """A step large enough for every kind of clip to act."""
    generator = torch.Generator().manual_seed(len(name))
    return 0.08 * master.abs().mean() * torch.randn(master.shape, generator=generator, dtype=master.dtype)


def gradients_of(model: LlamaForCausalLM, loss: Tensor) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    values = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: value for name, value in zip(parameters, values, strict=True) if value is not None}


def assert_equal_gradients(
    found: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 1e-10
) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) < limit * max(1.0, float(value.abs().max())), name


OBJECTIVES: list[dict[str, Any]] = [
    {"aggregation": "token_mean", "dual_clip": 1.02},
    {
        "aggregation": "sequence_mean_token_mean",
        "clip_high": 0.01,
        "clip_low": 0.02,
        "sampler_correction": 1.1,
    },
    {"aggregation": "sequence_mean_token_sum", "dual_clip": 1.05, "clip_low": 0.05, "clip_high": 0.03},
    {"aggregation": "constant_length", "max_length": 37, "sampler_correction": None},
    {"kl_weight": 0.3, "kl_estimator": "k2"},
    {"kl_weight": 0.3, "kl_estimator": "k3", "dual_clip": 1.02},
    {"kl_weight": 0.3, "kl_estimator": "k3_ratio", "aggregation": "sequence_mean_token_mean"},
]


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    num_groups=st.integers(1, 3),
    max_tokens=st.integers(1, 120),
    alike=st.booleans(),
)
def test_packed_logprobs_are_those_of_padded_rows_for_any_split(
    seed: int, num_groups: int, max_tokens: int, alike: bool
) -> None:
    model = tiny_model(dtype=torch.float64)
    traces = [random_trace(seed + i, key=str(i), alike=alike) for i in range(num_groups)]
    paths = rollout_paths(traces)
    if not paths:
        return
    with torch.no_grad():
        batches = list(pack(paths, max_tokens=max_tokens))
        found = torch.cat([Policy(model, OptimizerSettings()).score(batch).logprobs_T for batch in batches])
        owners = torch.cat([batch.rollout_index_T for batch in batches])
        expected = padded_logprobs(eager(model), paths)
    for path, reference in zip(paths, expected, strict=True):
        assert float((found[owners == path.rollout_index] - reference).abs().max()) < 1e-10
    assert found.dtype is torch.float64 and len(found) == sum(map(len, expected))
    for batch in batches:
        assert batch.num_tokens <= max_tokens or len(set(batch.rollout_index_T.tolist())) == 1
    if len(batches) == 1:
        assert batches[0].num_tokens == unique_tokens(paths)  # what rollouts share is computed once


def forked_trace(seed: int, *, num_rollouts: int = 5) -> tuple[Trace, list[float], list[float]]:
    """Rollouts that start anew or leave another one behind any of its nodes; their advantages and ratio
    scales.
    """
    dice = random.Random(seed)
    trace = Trace(task=Task(key="forked", question=""))
    root = node(trace, None, Origin.PROMPT, ids(dice, 1, 6))
    for rollout in range(num_rollouts):
        tip = dice.choice(trace.nodes) if dice.random() < 0.8 else root
        for turn in range(dice.randint(1, 3)):
            if turn or tip.origin is not Origin.PROMPT:
                tip = node(trace, tip, dice.choice([Origin.ENVIRONMENT, Origin.BUFFER]), ids(dice, 1, 4))
            tip = node(trace, tip, Origin.POLICY, ids(dice, 1, 5), dice=dice)
        trace.finish(Leaf(node_id=tip.node_id, rollout=rollout, outcome=Outcome.FINISHED, episode_return=0.0))
    advantages = [dice.choice([-2.0, -0.75, 0.0, 0.5, 1.5]) for _ in range(num_rollouts)]
    return trace, advantages, [dice.choice([1.0, 1.25]) for _ in range(num_rollouts)]


def unshared(trace: Trace, attribution: str) -> list[RolloutPath]:
    """Every rollout with nodes of its own: what the shared computation stands for."""
    paths = []
    for index, (leaf, path) in enumerate(trace.rollouts()):
        copies = []
        for one in path:
            twin = replace(one, shares=None, owner=None)
            if one.shares is not None:
                share = one.shares[leaf.rollout]
                twin.credit, twin.ratio_scale = share.credit, share.ratio_scale
            if one.owner not in (None, leaf.rollout):  # hard attribution: counted by its owner alone
                twin.origin, twin.logprobs, twin.entropies = Origin.ENVIRONMENT, (), ()
            copies.append(twin)
        paths.append(RolloutPath(nodes=copies, rollout_index=index))
    return paths


@settings(max_examples=8)
# opposite advantages meet in a shared node
@example(seed=128, options=OBJECTIVES[0], max_tokens=10_000, attribution="hard")
@given(
    seed=st.integers(0, 10**6), options=st.sampled_from(OBJECTIVES),
    max_tokens=st.sampled_from([1, 25, 10_000]), attribution=st.sampled_from(["soft", "hard"]),
)  # fmt: skip
def test_shared_tokens_give_the_gradient_of_the_unshared_computation(
    seed: int, options: dict[str, Any], max_tokens: int, attribution: str
) -> None:
    """Random trees, two epochs, so that every clip acts in the second."""
    objective = ObjectiveSettings(**nested(options | {"kl_weight": 0.0}))
    trace, values, scales = forked_trace(seed)
    scales = scales if attribution == "soft" else [1.0] * len(scales)
    advantages = RolloutAdvantages(
        values=np.array(values), assigned=np.ones(len(values), dtype=bool), has_signal=True, reason=None
    )
    write_advantages(trace, advantages, scales, attribution=attribution)
    paths = unshared(trace, attribution)
    if not any(value for value in values):
        return
    model = tiny_model(dtype=torch.float64)
    plain, policy = eager(model), Recorder(model, shift)
    chosen = UpdateSettings(num_epochs=2, max_tokens=max_tokens)
    report = update(policy, [trace], objective=objective, settings=chosen, reference=None)
    with torch.no_grad():
        olds = padded_logprobs(plain, paths)
    for found in policy.gradients:
        loss = written_loss(padded_logprobs(plain, paths), olds, paths, objective, None)
        expected = gradients_of(plain, loss) if loss.requires_grad else {}
        assert_equal_gradients(
            found, {name: expected.get(name, torch.zeros_like(value)) for name, value in found.items()}
        )
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.add_(shift(name, parameter))
    unique = {id(one): one for _, path in trace.rollouts() for one in path if one.trainable}.values()
    # hard: the mean of a shared node may be 0
    cancels = any(one.credit is not None and not any(one.credit) for one in unique)
    if max_tokens == 10_000 and all(values) and not cancels:
        # two epochs, each token once
        assert report.num_scored_tokens == 2 * sum(len(one.token_ids) for one in unique)


def test_a_shared_node_needs_an_attribution_and_hard_needs_equal_scales() -> None:
    trace, values, _ = forked_trace(1)
    advantages = RolloutAdvantages(
        values=np.array(values), assigned=np.ones(len(values), dtype=bool), has_signal=True, reason=None
    )
    with pytest.raises(ValueError, match="already"):
        write_advantages(trace, advantages)
    trace, values, _ = forked_trace(1)
    with pytest.raises(ValueError, match="differently"):
        write_advantages(trace, advantages, [1.0, 1.1, 1.2, 1.3, 1.4], attribution="hard")


def test_one_step_has_ratio_one_and_its_own_logprobs_as_old() -> None:
    model = tiny_model(dtype=torch.float64)
    plain, traces, objective = eager(model), [random_trace(1), random_trace(2, key="u")], ObjectiveSettings()
    for trace in traces:
        for one in trace.nodes:
            one.ratio_scale = 1.0
    policy = Recorder(model)
    report = update(policy, traces, objective=objective, settings=NO_CHECK, reference=None)
    assert report.metrics["ratio/max"] == report.metrics["ratio/min"] == 1.0
    paths = rollout_paths(traces)
    logprobs = padded_logprobs(plain, paths)
    assert_equal_gradients(
        policy.gradients[0], gradients_of(plain, written_loss(logprobs, logprobs, paths, objective, None))
    )


def gradient_norms(traces: Sequence[Trace], **options: Any) -> dict[str, Tensor]:
    policy = Recorder(tiny_model(dtype=torch.float64))
    update(policy, traces, objective=ObjectiveSettings(**nested(options)), settings=NO_CHECK, reference=None)
    return policy.gradients[0]


def test_equal_turns_of_siblings_are_computed_once_with_their_own_advantages() -> None:
    """The same first turn three times, with three credits and three engines' log-probs; then they part."""
    trace = Trace(task=Task(key="t", question=""))
    root = node(trace, None, Origin.PROMPT, (5, 6, 7))
    for rollout, last in enumerate((8, 8, 9)):
        turn = node(trace, root, Origin.POLICY, (20, 21), dice=random.Random(rollout))
        turn.credit = (float(rollout + 1),) * 2
        seen = node(trace, turn, Origin.BUFFER if rollout else Origin.ENVIRONMENT, (30, 31, 32))
        tip = node(trace, seen, Origin.POLICY, (last,), dice=random.Random(rollout))
        tip.credit = (float(rollout + 1),)
        trace.finish(Leaf(node_id=tip.node_id, rollout=rollout, outcome=Outcome.FINISHED, episode_return=1.0))
    [batch] = pack(rollout_paths([trace]), max_tokens=100)
    assert batch.ids_N.tolist() == [5, 6, 7, 20, 21, 30, 31, 32, 8, 9]
    assert batch.targets_U.tolist() == [20, 21, 8, 9]
    entries = zip(
        batch.token_T.tolist(), batch.rollout_index_T.tolist(), batch.advantages_T.tolist(), strict=True
    )
    assert sorted(entries) == [
        (0, 0, 1.0), (0, 1, 2.0), (0, 2, 3.0), (1, 0, 1.0), (1, 1, 2.0), (1, 2, 3.0), (2, 0, 1.0),
        (2, 1, 2.0), (3, 2, 3.0)
    ]  # fmt: skip
    of_first = batch.engine_logprobs_T[batch.token_T == 0]
    assert len(set(of_first.tolist())) == 3  # each rollout keeps what its own sampler said


def test_rollouts_of_a_fault_are_masked_and_in_no_denominator() -> None:
    trace = random_trace(21, num_rollouts=3, faults=False)
    expected = gradient_norms([trace])
    tip = node(trace, trace.nodes[0], Origin.POLICY, (5, 6, 7), dice=random.Random(0))
    tip.credit = (3.0,) * 3  # even if somebody wrote credit on it
    trace.finish(Leaf(node_id=None, rollout=3, outcome=Outcome.ENGINE_FAULT, episode_return=None))
    assert_equal_gradients(gradient_norms([trace]), expected)


@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
def test_a_group_without_any_policy_token_changes_nothing(kl_weight: float) -> None:
    """A prompt that fills the context: rollouts with a return and nothing to train."""
    trace = Trace(task=Task(key="long", question=""))
    root = node(trace, None, Origin.PROMPT, (3, 4))
    for rollout in range(2):
        trace.finish(
            Leaf(node_id=root.node_id, rollout=rollout, outcome=Outcome.TRUNCATED_TOKENS, episode_return=0.0)
        )
    policy = Recorder(tiny_model())
    reference = policy.frozen_copy() if kl_weight else None
    objective = ObjectiveSettings(kl_weight=kl_weight)
    report = update(
        policy, [trace], objective=objective, settings=UpdateSettings(max_tokens=1), reference=reference
    )
    assert policy.gradients == [] and report.num_computed_tokens == 0


def honest(policy: Policy, traces: Sequence[Trace]) -> None:
    """Give every policy node the log-probs that the trainer itself computes."""
    for path in rollout_paths(traces):
        with torch.no_grad():
            [batch] = list(pack([path], max_tokens=10_000))
            values = iter(policy.score(batch).logprobs_T.tolist())
        for one in path.nodes:
            if one.trainable:
                one.logprobs = tuple(next(values) for _ in one.token_ids)


@pytest.mark.parametrize("wrong", [3.0, float("nan"), float("-inf")])
@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_the_engine_check_stops_the_first_update_only(wrong: float, num_mini_batches: int) -> None:
    policy = Policy(tiny_model(), OptimizerSettings(learning_rate=1e-2))
    traces = [random_trace(seed, key=str(seed), faults=False) for seed in (31, 32)]
    chosen = UpdateSettings(num_mini_batches=num_mini_batches)
    honest(policy, traces)
    objective = ObjectiveSettings(sampler_correction=None)
    before = {name: master.clone() for name, master in policy.masters.items()}
    spoiled = copy.deepcopy(traces)
    victim = next(one for one in spoiled[0].nodes if one.trainable and one.credit and one.credit[0])
    victim.logprobs = tuple(value + wrong for value in victim.logprobs)
    with pytest.raises(EngineFault, match="disagree"):
        update(policy, spoiled, objective=objective, settings=chosen, reference=None)
    assert all(torch.equal(before[name], master) for name, master in policy.masters.items())
    update(policy, traces, objective=objective, settings=chosen, reference=None)
    assert not all(torch.equal(before[name], master) for name, master in policy.masters.items())


def test_the_frozen_reference_does_not_move_and_does_not_share_memory() -> None:
    policy = Policy(tiny_model(), OptimizerSettings(learning_rate=1e-2))
    reference = policy.frozen_copy()
    traces = [random_trace(41, faults=False)]
    [batch] = list(pack(rollout_paths(traces), max_tokens=10_000))
    before = reference.score(batch).logprobs_T.detach().clone()
    report = update(
        policy, traces, objective=ObjectiveSettings(kl_weight=0.5), settings=NO_CHECK, reference=reference
    )
    assert report.metrics["loss/kl"] == 0.0  # equal policies
    assert torch.equal(reference.score(batch).logprobs_T, before)
    assert not torch.equal(policy.score(batch).logprobs_T, before)
    again = update(
        policy, traces, objective=ObjectiveSettings(kl_weight=0.5), settings=NO_CHECK, reference=reference
    )
    assert again.metrics["loss/kl"] > 0.0
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())


def test_the_reference_survives_a_resume_and_is_checked(tmp_path: Path) -> None:
    policy = Policy(tiny_model(), OptimizerSettings())
    reference, path = policy.frozen_copy(), tmp_path / "reference.safetensors"
    checksum = save_reference(path, reference)
    other = Policy(tiny_model(seed=8), OptimizerSettings()).frozen_copy()
    load_reference(path, other, checksum=checksum)
    weights = dict(reference.model.named_parameters())
    assert all(torch.equal(weights[name], value) for name, value in other.model.named_parameters())
    for broken in (tmp_path / "missing", tmp_path / "cut"):
        (tmp_path / "cut").write_bytes(path.read_bytes()[:100])
        with pytest.raises(
            CheckpointError, match="missing is missing" if broken.name == "missing" else "damaged"
        ):
            load_reference(broken, other, checksum=None)
    with pytest.raises(CheckpointError, match="not what was written"):
        load_reference(path, other, checksum=checksum ^ 1)
    with pytest.raises(CheckpointError, match="another model"):
        load_reference(
            path, Policy(tiny_model(num_layers=1), OptimizerSettings()).frozen_copy(), checksum=checksum
        )


def test_lora_trains_only_adapters_and_the_same_seed_gives_the_same_ones() -> None:
    def run(seed: int) -> Policy:
        torch.manual_seed(seed + 1000)  # the global generator must not matter
        policy = Policy(
            tiny_model(), OptimizerSettings(learning_rate=1e-2), lora=LoraSettings(rank=2), seed=seed
        )
        base = {
            name: p.detach().clone() for name, p in policy.model.named_parameters() if "lora_" not in name
        }
        state = torch.random.get_rng_state()
        for _ in range(2):
            update(
                policy,
                [random_trace(51, faults=False)],
                objective=ObjectiveSettings(),
                settings=NO_CHECK,
                reference=None,
            )
        assert torch.equal(state, torch.random.get_rng_state())
        assert all(
            torch.equal(value, dict(policy.model.named_parameters())[name]) for name, value in base.items()
        )
        return policy

    one, same, other = run(0), run(0), run(1)
    assert one.masters and all("lora_" in name for name in one.masters)
    assert any("lora_A" in name for name in one.masters) and all(
        float(one.masters[name].abs().max()) > 0 for name in one.masters
    )
    assert all(torch.equal(one.masters[name], same.masters[name]) for name in one.masters)
    assert not all(torch.equal(one.masters[name], other.masters[name]) for name in one.masters)


def test_lora_starts_as_the_base_model_and_its_reference_keeps_the_adapters() -> None:
    [batch] = list(pack(rollout_paths([random_trace(61, faults=False)]), max_tokens=10_000))
    with torch.no_grad():
        plain = Policy(tiny_model(), OptimizerSettings()).score(batch).logprobs_T
        policy = Policy(tiny_model(), OptimizerSettings(), lora=LoraSettings(rank=2))
        assert torch.equal(policy.score(batch).logprobs_T, plain)
        for name, master in policy.masters.items():
            master.add_(0.3 if "lora_B" in name else 0.0)
        policy.round_masters()
        moved = policy.score(batch).logprobs_T
        assert not torch.equal(moved, plain) and torch.equal(
            policy.frozen_copy().score(batch).logprobs_T, moved
        )


def test_checkpointed_activations_give_the_same_gradients_from_a_second_forward_pass() -> None:
    batch = next(iter(pack(rollout_paths([random_trace(3, faults=False)]), max_tokens=1000)))
    gradients, calls = [], []
    for checkpointed in (False, True):
        model = tiny_model()
        model.model.eval()
        counted: list[int] = []
        model.model.model.layers[0].mlp.register_forward_pre_hook(
            lambda *_, counted=counted: counted.append(1)
        )
        policy = Policy(model, OptimizerSettings(), checkpoint_activations=checkpointed)
        policy.score(batch).logprobs_T.sum().backward()
        gradients.append({name: master.grad for name, master in policy.masters.items()})
        calls.append(len(counted))
    assert calls == [1, 2]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_updates_below_the_working_precision_are_not_lost() -> None:
    """Adam moves by about the rate a step: 1e-5 is under half a bf16 unit of almost every weight, yet the
    mean of the working copy moves with the masters from the first step on.
    """
    model = tiny_model(dtype=torch.bfloat16)
    files = {name: parameter.detach().clone() for name, parameter in model.model.named_parameters()}
    policy = Policy(model, OptimizerSettings(learning_rate=1e-5, max_grad_norm=1e9))
    assert all(policy.working[name].equal(weights) for name, weights in files.items())
    policy.round_masters()  # also rounded from the masters, they are those of the files
    assert all(policy.working[name].equal(weights) for name, weights in files.items())
    name = next(iter(policy.masters))
    start, begun = policy.working[name].detach().float(), policy.masters[name].clone()
    assert begun.dtype is torch.float32 and policy.working[name].dtype is torch.bfloat16
    large = start.abs() > 0.01  # half of the distance between two values is above 1.5e-5
    for number in range(1, 401):
        (policy.working[name].float().sum() * 1e-3).backward()
        policy.step()
        if number in (1, 10, 400):
            moved = (policy.working[name].detach().float() - start)[large]
            noise = 4 * float(moved.std()) / moved.numel() ** 0.5
            assert float(moved.mean()) == pytest.approx(-number * 1e-5, abs=noise)
            assert noise < 0.8e-5 * number
    assert float((policy.masters[name] - begun + 400e-5).abs().max()) < 1e-4


def test_gradients_of_micro_batches_are_added_in_float32() -> None:
    policy = Policy(tiny_model(dtype=torch.bfloat16), OptimizerSettings())
    name = next(iter(policy.masters))
    for value in [1.0] + [2.0**-9] * 64:  # each is lost when added to 1 in bfloat16
        (policy.working[name].float().sum() * value).backward()
    gradient = policy.masters[name].grad
    assert gradient is not None and gradient.dtype is torch.float32 and policy.working[name].grad is None
    assert torch.equal(gradient, torch.full_like(gradient, 1.125))


def test_a_batch_whose_tokens_are_all_rejected_moves_nothing() -> None:
    """Nor does it count as a step of the warm-up: the moments of the step before it would move the
    weights.
    """
    policy = Policy(tiny_model(), OptimizerSettings(learning_rate=1e-2, weight_decay=0.1))
    traces = [random_trace(31, faults=False)]
    honest(policy, traces)
    update(policy, traces, objective=ObjectiveSettings(), settings=NO_CHECK, reference=None)
    before = {name: master.clone() for name, master in policy.masters.items()}
    for node in traces[0].nodes:
        if node.trainable:
            node.logprobs = tuple(value - 5.0 for value in node.logprobs)
    rejecting = ObjectiveSettings(sampler_rejection=RejectionMask(lower=0.5, upper=2.0))
    report = update(policy, traces, objective=rejecting, settings=NO_CHECK, reference=None)
    assert (
        report.metrics["ratio/num_rejected"]
        > 0
        == report.metrics["grad/norm"]
        == report.metrics["grad/num_skipped"]
    )
    assert policy.num_steps == 1
    assert all(torch.equal(before[name], master) for name, master in policy.masters.items())


def test_the_engine_check_waits_for_the_first_mini_batch_with_signal() -> None:
    policy = Policy(tiny_model(), OptimizerSettings(learning_rate=1e-2))
    traces = [random_trace(seed, key=str(seed), faults=False) for seed in (31, 32)]
    honest(policy, traces)
    for node in traces[0].nodes:
        if node.trainable and node.credit:
            node.credit = (0.0,) * len(node.credit)
    for node in traces[1].nodes:
        if node.trainable:
            node.logprobs = tuple(value + 5.0 for value in node.logprobs)
    with pytest.raises(EngineFault, match="disagree"):
        update(
            policy, traces, objective=ObjectiveSettings(sampler_correction=None),
            settings=UpdateSettings(num_mini_batches=2), reference=None,
        )  # fmt: skip


def test_the_mismatch_is_measured_with_the_weights_before_the_update() -> None:
    policy = Policy(tiny_model(), OptimizerSettings(learning_rate=1e-1))
    traces = [random_trace(seed, key=str(seed), faults=False) for seed in (31, 32, 33, 34)]
    honest(policy, traces)
    report = update(
        policy, traces, objective=ObjectiveSettings(),
        settings=UpdateSettings(num_mini_batches=4, num_epochs=2), reference=None,
    )  # fmt: skip
    assert report.metrics["gap/logprob_max"] < 1e-3 < abs(report.metrics["ratio/max"] - 1)


def test_the_cold_start_s_rate_is_not_warmed_up_twice() -> None:
    policy = Policy(tiny_model(), OptimizerSettings(learning_rate=1e-2, warmup_steps=100))
    weight = next(iter(policy.working.values()))
    weight.sum().backward()
    policy.step(learning_rate=1e-4)
    assert policy.optimizer.param_groups[0]["lr"] == 1e-4
    weight.sum().backward()
    policy.step()
    assert policy.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 2 / 100)


@pytest.mark.parametrize("num", [1, 3, 4, 7])
def test_as_many_optimiser_steps_as_mini_batches(num: int) -> None:
    policy = Policy(tiny_model(), OptimizerSettings(learning_rate=1e-3))
    traces = [random_trace(seed, key=str(seed), faults=False) for seed in range(31, 38)]
    honest(policy, traces)
    update(
        policy, traces, objective=ObjectiveSettings(kl_weight=0.1),
        settings=UpdateSettings(num_mini_batches=num, max_logprob_gap=99), reference=policy.frozen_copy(),
    )  # fmt: skip
    assert policy.num_steps == num


def test_tokens_count_once_only_behind_the_same_tokens() -> None:
    """Two rollouts that part and then write the same: 3 + 2 + 2 tokens and 2 + 2 more, which do not fit into
    8 together.
    """
    trace = Trace(task=Task(key="t", question=""))
    root = node(trace, None, Origin.PROMPT, (5, 6, 7))
    for rollout, first in enumerate((20, 30)):
        turn = node(trace, root, Origin.POLICY, (first, first + 1), dice=random.Random(rollout))
        tip = node(trace, turn, Origin.POLICY, (40, 41), dice=random.Random(rollout))
        turn.credit = tip.credit = (1.0, 1.0)
        trace.finish(Leaf(node_id=tip.node_id, rollout=rollout, outcome=Outcome.FINISHED, episode_return=1.0))
    paths = rollout_paths([trace])
    assert [batch.num_tokens for batch in pack(paths, max_tokens=10)] == [7, 7]
    [together] = pack(paths, max_tokens=11)
    assert together.num_tokens == 11
