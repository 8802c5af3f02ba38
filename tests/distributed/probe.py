"""A rank whose gradients, metrics and weights a test can ask for, and the same of one process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.losses import TokenLoss, TokenLossInputs
from outrider.distributed.learner import Rank, RankGroup, RankSettings, _whole
from outrider.distributed.processes import Cluster
from outrider.engines.local.model import Precision, load_model
from outrider.trace import Trace
from outrider.training.packing import pack
from outrider.training.policy import Policy, Scorer
from outrider.training.settings import ColdStartSettings, OptimizerSettings, UpdateSettings
from outrider.training.update import rollout_paths, update

SETTINGS = UpdateSettings(max_tokens=160, max_logprob_gap=1e9)


@dataclass
class Found:
    """Of an update: the gradient of its first step before clipping, its norms, metrics, and what it left."""

    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    num_computed: int = 0


def run(
    policy: Policy,
    reference: Scorer | None,
    traces: Sequence[Trace],
    objective: ObjectiveSettings,
    settings: UpdateSettings,
    *,
    keep: bool = True,
) -> Found:
    """One update of any policy from where it stands."""
    found, step = Found(), policy.step

    def watched(**options: Any) -> float:
        given = {name: one.grad for name, one in policy.masters.items() if one.grad is not None}
        if not found.norms:
            found.gradients = whole(given, keep=keep)
        found.norms.append(step(**options))
        return found.norms[-1]

    policy.step = watched  # type: ignore[method-assign]
    try:
        report = update(policy, traces, objective=objective, settings=settings, reference=reference)
    finally:
        policy.step = step  # type: ignore[method-assign]
    found.metrics, found.num_computed = report.metrics, report.num_computed_tokens
    found.weights = whole(dict(policy.masters), keep=keep)
    return found


def whole(tensors: dict[str, Any], *, keep: bool) -> dict[str, torch.Tensor]:
    if all(isinstance(one, torch.distributed.tensor.DTensor) for one in tensors.values()):
        return _whole(tensors, is_receiver=keep)
    return {name: one.detach().clone() for name, one in tensors.items()}


class ProbedRank(Rank):
    """A rank that tests can reset to its first weights."""

    def build(self, host: str, port: int) -> tuple[int, int]:
        built = super().build(host, port)
        self._first = {name: one.detach().clone() for name, one in self.policy.masters.items()}
        return built

    @torch.no_grad()
    def anew(self) -> None:
        for name, one in self.policy.masters.items():
            one.copy_(self._first[name])
        self.policy.fresh_optimizer()
        self.policy.scoring.reshard()  # type: ignore[operator]

    def found(
        self,
        traces: Sequence[Trace],
        objective: ObjectiveSettings,
        settings: UpdateSettings,
        num_steps: int | None = None,
    ) -> Found:
        """``num_steps``: of the policy so far; the engine is checked before the first step only."""
        if num_steps is not None:
            self.policy.num_steps = num_steps
        reference = self.reference if objective.kl_weight > 0 else None
        keep = self._rank == 0
        return run(self.policy, reference, traces, objective, settings, keep=keep)

    def state(self) -> dict[str, torch.Tensor]:
        return self.weights(list(self.policy.masters))

    def teacher_state(self) -> dict[str, torch.Tensor]:
        return _whole(self._averages(), is_receiver=self._rank == 0)

    def spin(self) -> None:
        """Compute without progress on the last rank."""
        while self._rank == self._size - 1:
            pass


def rank_settings(folder: Path, **changed: Any) -> RankSettings:
    given: dict[str, Any] = {
        "folder": str(folder), "precision": "float32", "lora": None, "trained_layers": None,
        "initial": None, "has_reference": True,
        "optimizer": OptimizerSettings(learning_rate=1e-3), "update": SETTINGS,
        "cold_start": ColdStartSettings(num_examples=4, batch_size=3), "seed": 0, "num_threads": 1,
        "stall_s": 300.0,
    }  # fmt: skip
    return RankSettings(**{**given, **changed})


def rank_group(cluster: Cluster, folder: Path, size: int, **changed: Any) -> RankGroup:
    return RankGroup(cluster, rank_settings(folder, **changed), size=size, kind=ProbedRank)


def alone(
    folder: Path, optimizer: OptimizerSettings | None = None, precision: Precision = "float32", **part: Any
) -> tuple[Policy, Scorer]:
    """One process with the same weights, and its reference."""
    model = load_model(str(folder), precision=precision)
    policy = Policy(model, optimizer or OptimizerSettings(learning_rate=1e-3), **part)
    return policy, policy.frozen_copy()


@torch.no_grad()
def near_the_truth(policy: Policy, traces: Sequence[Trace], *, seed: int = 0) -> list[Trace]:
    """The same groups with an engine's log-probs that are about the policy's."""
    dice = torch.Generator().manual_seed(seed)
    paths = rollout_paths(traces)
    found: dict[int, dict[int, float]] = {}
    for batch in pack(paths, max_tokens=160):
        noise_T = 0.1 * torch.randn(len(batch.token_T), generator=dice)
        values = (policy.score(batch).logprobs_T + noise_T).tolist()
        for rollout, ordinal, value in zip(
            batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), values, strict=True
        ):
            found.setdefault(rollout, {})[ordinal] = value
    for path in paths:
        each = iter(sorted(found[path.rollout_index].items()))
        for node in (node for node in path.nodes if node.trainable):
            node.logprobs = tuple(next(each)[1] for _ in node.token_ids)
    return list(traces)


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Relative L2 over all tensors, in float64."""
    assert found.keys() == wanted.keys()
    apart = sum(float((found[name].double() - one.double()).square().sum()) for name, one in wanted.items())
    size = sum(float(one.double().square().sum()) for one in wanted.values())
    return float((apart / size) ** 0.5)


class RingObjective(ObjectiveSettings):
    """The objective of a foreign plug-in: an unclipped ratio, with a KL to the reference."""

    def token_loss(self, inputs: TokenLossInputs) -> TokenLoss:
        none_T = torch.zeros_like(inputs.advantages_T, dtype=torch.bool)
        ratio_T = (inputs.logprobs_T - inputs.old_T).exp() * inputs.ratio_scale_T
        inputs.measures.add_sum("ring/num_tokens", float(len(ratio_T)))
        return TokenLoss(
            losses=-inputs.advantages_T * ratio_T,
            clipped_high=none_T,
            clipped_low=none_T,
            dual_clipped=none_T,
        )


def assign_ring_advantages(traces: Sequence[Trace]) -> list[Trace]:
    """Compare every rollout with the next one of its group; the advantage fades towards the start."""
    for trace in traces:
        rollouts = list(trace.rollouts())
        for number, (leaf, path) in enumerate(rollouts):
            value = leaf.episode_return - rollouts[(number + 1) % len(rollouts)][0].episode_return
            own = [node for node in path if node.trainable]
            for age, node in enumerate(reversed(own)):
                node.credit = (value * 0.5**age,) * len(node.token_ids)
    return list(traces)
