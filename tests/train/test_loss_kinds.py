"""Every token loss and sampler correction in the real update: gradients of a written-out reference, for any
micro-batches.
"""

from typing import Any

import pytest
import torch

from outrider.algorithms.base import ObjectiveSettings, OffPolicyObjective
from outrider.algorithms.exploration import ArpoSettings
from outrider.config import validate
from outrider.errors import ConfigError
from outrider.training.settings import UpdateSettings
from outrider.training.update import rollout_paths, update
from tests.objectives import nested
from tests.tiny import tiny_model
from tests.train.test_pack_update import (  # noqa: F401
    Recorder,
    assert_equal_gradients,
    double_precision,
    eager,
    gradients_of,
    padded_logprobs,
    random_trace,
    shift,
)

LOSSES: list[dict[str, Any]] = [
    {"loss": "gppo", "clip_low": 0.02, "clip_high": 0.01, "dual_clip": 1.05},
    {"loss": "cispo", "ratio_cap": 1.01, "ratio_floor": 0.99},
    {"loss": "gspo", "clip_low": 0.003, "clip_high": 0.003, "aggregation": "sequence_mean_token_mean"},
    {"loss": "reinforce"},
    {"sampler_level": "geometric", "sampler_outside": "zero", "sampler_floor": 0.12},
    *(
        {"loss": "gspo", "clip_low": clip, "clip_high": clip, "sequence_ratio": form,
         "sampler_correction": "none", "aggregation": "sequence_mean_token_mean"}
        for form, clip in (("sequence", 0.003), ("product", 0.01))
    ),
    {"sampler_rejection": {"upper": 12.0, "lower": 0.12}},
    {"sampler_rejection": {"statistic": "k3", "scope": "mean", "upper": 1.3}, "loss": "cispo",
     "ratio_cap": 1.01},
    {"positive_nll": 0.1, "loss": "gppo", "clip_low": 0.02, "clip_high": 0.01},
]  # fmt: skip


def coefficient(ratio: float, advantage: float, scale: float, o: ObjectiveSettings) -> float:
    """k in d loss / d log pi = -A k, from the gradient table of the objectives."""
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


def written(logprobs: Any, olds: Any, paths: Any, o: ObjectiveSettings) -> torch.Tensor:
    """The loss of a mini-batch, token by token."""
    num_tokens = sum(len(one) for one in logprobs)
    num_imitated = sum(len(one) for one, path in zip(logprobs, paths, strict=True) if path.succeeded)
    total = torch.zeros((), dtype=torch.float64)
    for own, old, path in zip(logprobs, olds, paths, strict=True):
        nodes = [node for node in path.nodes if node.trainable for _ in node.token_ids]
        engine = torch.tensor([value for node in path.nodes for value in node.logprobs], dtype=torch.float64)
        weight = 1 / num_tokens if o.aggregation == "token_mean" else 1 / (len(paths) * len(own))
        difference = old.detach() - engine
        correction = difference.exp().clamp(max=2.0) if o.sampler_correction else torch.ones_like(difference)
        if o.sampler_correction is not None and o.sampler_correction.level == "geometric":
            mean = float(difference.mean().exp())
            correction = torch.full_like(difference, mean if 0.12 <= mean <= 2.0 else 0.0)
        if (mask := o.sampler_rejection) is not None and mask.statistic == "k1":
            correction = (
                correction * ((-difference).exp() >= mask.lower) * ((-difference).exp() <= mask.upper)
            )
        elif mask is not None:
            correction = correction * float((difference.exp() - 1 - difference).mean() <= mask.upper)
        log_ratio = (own - old.detach()).detach()
        for t, node in enumerate(nodes):
            summed = (
                log_ratio.sum()
                if getattr(o.loss, "sequence_ratio", "token") == "product"
                else log_ratio.mean()
            )
            ratio = float(summed.exp() if o.loss.type == "gspo" else log_ratio[t].exp())
            assert node.credit is not None
            k = coefficient(ratio, node.credit[0], node.ratio_scale, o)
            k = (
                k * len(own) if getattr(o.loss, "sequence_ratio", "token") == "product" else k
            )  # each token moves the whole product
            total = total - weight * float(correction[t]) * node.credit[0] * k * own[t]
            if path.succeeded:
                total = total - o.positive_nll / num_imitated * own[t]
    return total


@pytest.mark.parametrize("options", LOSSES, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize(
    "max_tokens", [40, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 10_000))]
)
def test_gradients_of_every_step_are_those_of_the_written_loss(
    options: dict[str, Any], max_tokens: int
) -> None:
    objective = validate(ObjectiveSettings, nested(options))
    model = tiny_model(dtype=torch.float64)
    plain = eager(model)
    traces = [random_trace(seed, key=str(seed)) for seed in range(4)]
    for trace in traces:
        for rollout, leaf in trace.leaves.items():
            leaf.success = rollout % 2 == 0
    policy = Recorder(model, shift)
    settings = UpdateSettings(num_mini_batches=2, num_epochs=2, max_tokens=max_tokens)
    update(policy, traces, objective=objective, reference=None, first=False, settings=settings)
    minis = [rollout_paths(traces[:2]), rollout_paths(traces[2:])]
    with torch.no_grad():
        olds = [padded_logprobs(plain, paths) for paths in minis]
    for step, found in enumerate(policy.gradients):
        loss = written(padded_logprobs(plain, minis[step % 2]), olds[step % 2], minis[step % 2], objective)
        assert_equal_gradients(found, gradients_of(plain, loss))
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.add_(shift(name, parameter))


WRONG: list[dict[str, Any]] = [
    {"loss": "cispo"}, {"ratio_cap": 2.0}, {"loss": "gspo", "dual_clip": 3.0}, {"ratio_floor": 0.5},
    {"sampler_floor": 2.0},
    {"loss": "cispo", "ratio_cap": 1.0, "ratio_floor": 1.0}, {"loss": "gppo", "keep_clipped_gradient": True},
    {"sequence_ratio": "product"}, {"sampler_rejection": {"statistic": "k2", "lower": 0.1}},
    {"sampler_rejection": {"scope": "max"}}, {"sampler_rejection": {"upper": 0.9}},
    {"sampler_rejection": {"lower": 2.0}},
    {"sampler_correction": {"upper": "none"}}, {"sampler_correction": {"lower": 2.0}},
    {"sampler_correction": 2.0},
    {"group_size": 1},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_has_no_meaning_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        validate(
            ObjectiveSettings, wrong if isinstance(wrong.get("sampler_correction"), float) else nested(wrong)
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": {"type": "gspo"}},
        {"sampler_correction": {"level": "sequence"}},
        {"sampler_rejection": {"scope": "mean"}},
    ],
    ids=str,
)
def test_branching_refuses_ratios_of_whole_rollouts_with_a_reason(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="shares tokens"):
        validate(ArpoSettings, {"type": "arpo", **wrong})


def test_a_ratio_a_rollout_cannot_leave_tokens_out() -> None:
    with pytest.raises(ConfigError, match="gspo"):
        validate(OffPolicyObjective, {"loss": {"type": "gspo"}})
    allowed = validate(OffPolicyObjective, {"loss": {"type": "gspo"}, "student_mask": "none"})
    assert allowed.loss.type == "gspo"


def test_rollouts_without_their_tips_need_a_ratio() -> None:
    """REINFORCE would train on what another context said as if this one had."""
    with pytest.raises(ConfigError, match="ratio"):
        validate(OffPolicyObjective, {"loss": {"type": "reinforce"}})
