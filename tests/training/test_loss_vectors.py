"""Upstream losses, weights and masks through the real update: a policy whose log-probs are the vector's takes
the model's place.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from outrider.algorithms.base import ObjectiveSettings
from outrider.config import validate
from outrider.training.packing import PackedBatch
from outrider.training.policy import Policy, SingleRank, TokenScores
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import update
from tests.algorithms.builders import Rollout, build_trace
from tests.objectives import nested

VECTORS = Path(__file__).parents[1] / "vectors"
CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for name in ("surrogate_losses", "objectives", "sampler_correction")
    for case in json.loads((VECTORS / f"{name}.json").read_text())
}
ANY = 1e9  # a cap that nothing reaches


class VectorPolicy:
    """Scores entries with the numbers of padded rows: the old ones while no gradient is wanted, then the new
    ones.
    """

    num_steps = 1  # no longer compared with the engine
    ranks = SingleRank()
    settings = OptimizerSettings()

    def __init__(self, old: torch.Tensor, new: torch.Tensor, places: Sequence[tuple[int, list[int]]]) -> None:
        self.old, self.new = old, new.requires_grad_()
        self.places = places  # of each rollout: its row, and the columns of its policy tokens
        self.gradients: list[torch.Tensor] = []

    def score(self, batch: PackedBatch) -> TokenScores:
        entries = zip(batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), strict=True)
        rows, columns = zip(
            *((self.places[r][0], self.places[r][1][ordinal]) for r, ordinal in entries), strict=True
        )
        values = (self.new if torch.is_grad_enabled() else self.old)[list(rows), list(columns)]
        return TokenScores(logprobs_T=values, entropies_T=torch.zeros_like(values))

    def num_computed_tokens(self, batch: PackedBatch) -> int:
        return batch.num_tokens

    def step(self) -> float:
        assert self.new.grad is not None
        self.gradients.append(self.new.grad.clone())
        self.new.grad = None
        return 1.0


def wide(rows: Any, shape: torch.Size) -> torch.Tensor:
    """Padded rows; one value a row stands for all of its tokens."""
    values = torch.tensor(rows, dtype=torch.float64)
    return values.reshape(len(values), -1).expand(shape)


def run(
    inputs: dict[str, Any],
    options: dict[str, Any],
    *,
    old: Any = None,
    new: Any = None,
    engine: Any = None,
    keeps_empty: bool = False,
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """The policy loss and its gradient [rows, width], and the metrics of two equal epochs; one rollout a
    micro-batch.
    """
    mask = torch.tensor(inputs["response_mask"] if "response_mask" in inputs else inputs["mask"]) > 0
    new_rows = wide(inputs["log_prob"] if new is None else new, mask.shape).clone()
    old_rows = new_rows.detach().clone() if old is None and "old_log_prob" not in inputs else wide(
        inputs["old_log_prob"] if old is None else old, mask.shape
    )  # fmt: skip
    engine_rows = old_rows if engine is None else wide(engine, mask.shape)
    advantages = wide(inputs["advantages"], mask.shape) if "advantages" in inputs else torch.ones(mask.shape)
    rows = [row for row in range(len(mask)) if keeps_empty or mask[row].any()]
    trace = build_trace([Rollout(value=0.0, mask=mask[row].int().tolist()) for row in rows])
    places = [(row, torch.nonzero(mask[row])[:, 0].tolist()) for row in rows]
    for (row, columns), (_, path) in zip(places, trace.rollouts(), strict=True):
        each = iter(columns)
        for node in path:
            if node.trainable:
                own = [next(each) for _ in node.token_ids]
                node.credit = tuple(advantages[row, own].tolist())
                node.logprobs = tuple(engine_rows[row, own].tolist())
    policy = VectorPolicy(old_rows, new_rows, places)
    report = update(
        cast(Policy, policy), [trace], objective=validate(ObjectiveSettings, nested(options)),
        reference=None,
        settings=UpdateSettings(num_epochs=2, max_tokens=1),
    )  # fmt: skip
    assert torch.equal(policy.gradients[0], policy.gradients[1]) and len(policy.gradients) == 2
    return report.metrics["loss/policy"], policy.gradients[0], report.metrics


CLIP = {"sampler_correction": "none"}
SM = {"aggregation": "sequence_mean_token_mean"}
HIGH = {"clip_high": 0.28}
LOSSES: dict[str, dict[str, Any]] = {
    "loss.ppo_clip.sym0.2.seq-mean-token-sum.verl": CLIP
    | {"dual_clip": 3.0, "aggregation": "sequence_mean_token_sum"},
    "loss.ppo_clip.sym0.2.seq-mean-token-mean.verl": CLIP | SM | {"dual_clip": 3.0},
    "loss.dapo.clip0.2_0.28.c3.0.verl": CLIP | HIGH | {"dual_clip": 3.0},
    "loss.dr_grpo.norm_const.verl": CLIP
    | {"dual_clip": 3.0, "aggregation": "constant_length", "max_length": 16},
    "loss.dapo.with_tis.verl": HIGH | {"dual_clip": 10.0, "sampler_correction": ANY},
    "loss.clip_higher.klear": CLIP | HIGH | {"dual_clip": 10.0},
    "loss.tree_grpo.dual_clip": CLIP | {"dual_clip": 3.0},
    "loss.trl.grpo": CLIP | SM,
    "loss.trl.dr_grpo": CLIP | {"aggregation": "constant_length", "max_length": 16},
    "loss.trl.dapo.eh0.28": CLIP | HIGH,
    "loss.trl.dapo.delta3": CLIP | HIGH | {"dual_clip": 3.0},
    "loss.gspo.0.2_0.2.verl": CLIP | SM | {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    "loss.gspo.0.2_0.2.token_mean.verl": CLIP
    | {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2, "sequence_ratio": "sequence"},
    "loss.trl.gspo.dapo_agg": CLIP | {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    "loss.trl.rloo": CLIP
    | SM
    | {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2, "sequence_ratio": "product"},
    "loss.cispo.low0.2_high0.28.verl": CLIP | {"loss": "cispo", "ratio_cap": 1.28, "ratio_floor": 0.8},
    "loss.trl.cispo.eh0.2": CLIP | {"loss": "cispo", "ratio_cap": 0.2},
    "loss.gppo.0.2_0.28.c10.0": CLIP | HIGH | {"loss": "gppo", "dual_clip": 10.0},
    "loss.sft.luffy": CLIP | {"loss": "reinforce"},
    "loss.trl.dapo.token_tis2": HIGH | {"sampler_correction": ANY},
    "loss.openrlhf.icepop": HIGH
    | {"sampler_outside": "zero", "sampler_floor": 0.5, "sampler_correction": 5.0},
    "loss.openrlhf.seq-mask-tis": HIGH
    | {"sampler_correction": ANY, "sampler_rejection": {"scope": "mean", "lower": 0.2, "upper": 2.0}},
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    """Value and gradient; the constant lengths and TRL count an empty row, the others leave it out."""
    case = CASES[name]
    inputs, engine = case["inputs"], case["inputs"].get("rollout_log_prob")
    for key in ("rollout_is_weights", "importance_sampling_ratio"):
        if key in inputs:  # log-probs of an engine that has these weights
            old = torch.tensor(inputs["old_log_prob"], dtype=torch.float64)
            engine = (old - wide(inputs[key], old.shape).clamp(min=1e-9).log()).tolist()
    if "thresholds" in inputs:
        assert inputs["thresholds"] == [0.5, 5.0]
    counts_empty = name in ("loss.trl.grpo", "loss.trl.dr_grpo", "loss.dr_grpo.norm_const.verl")
    loss, gradient, metrics = run(inputs, LOSSES[name], engine=engine, keeps_empty=counts_empty)
    loose = 1e-7 if any(fork in name for fork in ("klear", "tree", "gppo")) else 1e-8
    assert loss == pytest.approx(case["expected"]["loss"], abs=loose)
    np.testing.assert_allclose(gradient, case["expected"]["grad_log_prob"], atol=loose)
    if "metrics" in case["expected"] and not name.startswith("loss.gspo"):
        clipped = metrics["ratio/clip_fraction_high"] + metrics["ratio/clip_fraction_low"]
        assert clipped == pytest.approx(case["expected"]["metrics"]["actor/pg_clipfrac"], abs=1e-6)


WEIGHTS: dict[str, dict[str, Any]] = {
    "tis.verl.token.0.5_2.0": {"sampler_outside": "zero", "sampler_floor": 0.5},
    "tis.verl.sequence.0.5_2.0": {
        "sampler_outside": "zero",
        "sampler_floor": 0.5,
        "sampler_level": "sequence",
    },
    "tis.trl.token_truncate": {},
    "tis.trl.token_mask": {"sampler_outside": "zero"},
    "tis.trl.sequence_mask": {"sampler_outside": "zero", "sampler_level": "sequence"},
    "rs.verl.token_k1.0.5_2.0": CLIP | {"sampler_rejection": {"lower": 0.5, "upper": 2.0}},
    "rs.verl.token_k1.0.4_1.3": CLIP | {"sampler_rejection": {"lower": 0.4, "upper": 1.3}},
    "rs.verl.seq_mean_k1.0.9_1.1": CLIP
    | {"sampler_rejection": {"scope": "mean", "lower": 0.9, "upper": 1.1}},
    "rs.verl.seq_mean_k3.0.05": CLIP
    | {"sampler_rejection": {"statistic": "k3", "scope": "mean", "upper": 0.05}},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_and_masks(name: str) -> None:
    """With REINFORCE and advantages of 1 the gradient is the weight itself, over the tokens that the
    denominator keeps.
    """
    inputs, expected = CASES[name]["inputs"], CASES[name]["expected"]
    options = WEIGHTS[name] | {"loss": "reinforce"}
    if "clip_max" in inputs:
        options |= {"sampler_correction": inputs["clip_max"]}
    train, engine = inputs["train_log_prob"], inputs["rollout_log_prob"]
    _, gradient, metrics = run(inputs, options, old=train, new=train, engine=engine)
    mask = torch.tensor(inputs["response_mask"]) > 0
    weights = (
        expected["weights"]
        if "weights" in expected
        else expected["mask"]
        if "mask" in expected
        else expected["ratio"]
    )
    found = -gradient * int(mask.sum())
    np.testing.assert_allclose(found, torch.where(mask, wide(weights, mask.shape), 0.0), atol=1e-9)
    if "ess" in expected:
        assert metrics["ratio/importance_ess_share"] == pytest.approx(expected["ess"], abs=1e-7)
        assert metrics["ratio/importance_mean"] == pytest.approx(expected["mean"], abs=1e-7)
    if "masked_fraction" in expected:
        share = metrics["ratio/num_rejected"] / 2 / int(mask.sum())
        assert share == pytest.approx(expected["masked_fraction"], abs=1e-7)
