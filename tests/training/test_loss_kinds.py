"""Every token loss, aggregation, KL term and sampler correction in the real update: the gradients are those
of a written-out reference, for any micro-batches.
"""

from typing import Any

import pytest
import torch

from outrider.algorithms.base import ObjectiveSettings, OffPolicyObjective
from outrider.algorithms.exploration import ArpoSettings
from outrider.config import validate
from outrider.errors import ConfigError
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import rollout_paths, update
from tests.objectives import nested
from tests.tiny import tiny_model
from tests.training.test_pack_update import (  # noqa: F401
    OBJECTIVES,
    Recorder,
    assert_equal_gradients,
    double_precision,
    eager,
    gradients_of,
    padded_logprobs,
    random_trace,
    shift,
    written_loss,
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


@pytest.mark.parametrize(
    "options", [*OBJECTIVES, *LOSSES], ids=lambda options: "-".join(map(str, options.values()))
)
@pytest.mark.parametrize(
    ("max_tokens", "alike"),
    [(40, True), *(pytest.param(one, False, marks=pytest.mark.slow) for one in (1, 40, 10_000))],
)
def test_gradients_of_every_step_are_those_of_the_written_loss(
    options: dict[str, Any], max_tokens: int, alike: bool
) -> None:
    """Two mini-batches, two epochs: the first step has ratio 1, later ones clip; old log-probs are those of
    the start.
    """
    objective = validate(ObjectiveSettings, nested(options))
    model = tiny_model(dtype=torch.float64)
    plain = eager(model)
    reference = (
        Policy(tiny_model(dtype=torch.float64, seed=9), OptimizerSettings()).frozen_copy()
        if objective.kl_weight
        else None
    )
    traces = [random_trace(seed, key=str(seed), alike=alike) for seed in range(4)]
    for trace in traces:
        for rollout, leaf in trace.leaves.items():
            leaf.success = rollout % 2 == 0
    policy = Recorder(model, shift)
    settings = UpdateSettings(num_mini_batches=2, num_epochs=2, max_tokens=max_tokens)
    update(policy, traces, objective=objective, reference=reference, settings=settings)
    minis = [rollout_paths(traces[:2]), rollout_paths(traces[2:])]
    with torch.no_grad():
        olds = [padded_logprobs(plain, paths) for paths in minis]
        refs = [
            None if reference is None else padded_logprobs(eager(reference.language_model), paths)
            for paths in minis
        ]
    assert len(policy.gradients) == 4
    for step, found in enumerate(policy.gradients):
        mini = step % 2
        loss = written_loss(
            padded_logprobs(plain, minis[mini]), olds[mini], minis[mini], objective, refs[mini]
        )
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
