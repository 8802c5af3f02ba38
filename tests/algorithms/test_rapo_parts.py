"""RAPO's parts get what the settings say, and its measures by hand."""

from typing import Literal, cast

import pytest

from outrider.algorithms.entropy_branching import BranchHook, BranchSettings
from outrider.algorithms.exploration import Rapo, RapoSettings
from outrider.algorithms.retrieval import RetrievalHook, RetrievalSettings, scheduled_probability
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.trace import Leaf, Trace
from outrider.types import Message, Origin, Outcome, Task

BUFFER = cast(StepTraceBuffer, object())


def test_the_hooks_get_the_run_s_settings() -> None:
    settings = RapoSettings(group_size=8, num_hybrid=3, ratio_weight=0.0, branch=BranchSettings(first_wave=4))
    rapo = Rapo(settings, buffer=BUFFER, num_training_steps=7, vocabulary_size=50, every_action=True)
    retrieval, branch = rapo.hooks
    assert isinstance(retrieval, RetrievalHook) and isinstance(branch, BranchHook)
    assert retrieval.buffer is BUFFER
    assert (retrieval.settings, retrieval.num_training_steps) == (settings.retrieval, 7)
    assert (branch.settings, branch.group_size, branch.vocabulary_size, branch.every_action) == (
        settings.branch,
        8,
        50,
        True,
    )
    assert rapo.modes == ("on_policy",) * 5 + ("hybrid",) * 3 == rapo.modes_of(0, 0)
    assert rapo.objective is settings


def test_without_hybrid_rollouts_or_a_buffer_nothing_is_retrieved() -> None:
    assert Rapo(RapoSettings(num_hybrid=0), buffer=BUFFER, num_training_steps=1).hooks == ()
    assert Rapo(RapoSettings(num_hybrid=8), buffer=None, num_training_steps=1).hooks == ()
    (hook,) = Rapo(RapoSettings(num_hybrid=1), buffer=BUFFER, num_training_steps=1).hooks
    assert isinstance(hook, RetrievalHook)


@pytest.mark.parametrize("level", ["segment", "trajectory"])
def test_replaying_an_action_has_no_level(level: Literal["segment", "trajectory"]) -> None:
    with pytest.raises(ValueError, match="level"):
        RetrievalSettings(mode="execute", level=level)
    assert (
        RetrievalSettings(mode="execute").level == "step" and RetrievalSettings(level=level).mode == "context"
    )


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("linear", (0.75, 0.625, 0.5, 0.25)), ("cosine", (0.75, 0.6767766952966369, 0.5, 0.25))],
)
def test_a_schedule_moves_from_the_first_step_to_the_last(schedule: str, expected: tuple[float, ...]) -> None:
    """The second step of five is a quarter of the way: (1 - cos(pi / 4)) / 2 of it for the cosine."""
    settings = RetrievalSettings.model_validate(
        {"probability": 0.75, "final_probability": 0.25, "schedule": schedule}
    )
    assert tuple(scheduled_probability(settings, step, 5) for step in (0, 1, 2, 4)) == pytest.approx(expected)
    assert scheduled_probability(settings, 9, 5) == pytest.approx(0.25)  # a run that goes on
    assert scheduled_probability(settings, 0, 1) == 0.75 and scheduled_probability(
        settings, 1, 2
    ) == pytest.approx(0.25)
    assert scheduled_probability(RetrievalSettings(probability=0.3), 3, 5) == 0.3


def hybrid_group() -> Trace:
    """Three turns of entropy 2. One rollout retrieves, its next turn has entropy 1; one is cut after that."""
    trace = Trace(task=Task(key="t", question=""), modes=("on_policy", "hybrid", "hybrid"))
    text = Message(role="user", content="")
    root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=(1, 2), message=text)
    for rollout, (similarity, entropy) in enumerate(((None, None), (0.5, 1.0), (float("nan"), None))):
        tip = trace.append(
            parent=root.node_id, origin=Origin.POLICY, token_ids=(3, 4), message=text, logprobs=(-1.0, -1.0),
            entropies=(3.0, 1.0),
        )  # fmt: skip
        if similarity is not None:
            shown = {"similarity": similarity, "step_ids": [1]}
            tip = trace.append(
                parent=tip.node_id, origin=Origin.BUFFER, token_ids=(7,), message=text, metadata=shown
            )
        if entropy is not None:
            tip = trace.append(
                parent=tip.node_id,
                origin=Origin.POLICY,
                token_ids=(8,),
                message=text,
                logprobs=(-1.0,),
                entropies=(entropy,),
            )
        trace.finish(
            Leaf(
                node_id=tip.node_id,
                rollout=rollout,
                outcome=Outcome.FINISHED,
                episode_return=float(rollout == 1),
            )
        )
    return trace


def test_credit_scales_and_measures_of_a_group_by_hand() -> None:
    """Z = 2 tanh(1) for the scored retrieval, 0 for the others; 1/4 and 1/3 of the tokens were retrieved."""
    trace = hybrid_group()
    settings = RapoSettings(
        group_size=3, num_hybrid=2, advantage="group_centered", advantage_weight=0.3, ratio_weight=0.6
    )
    found = Rapo(settings, buffer=None, num_training_steps=1).assign_advantages(trace)
    z, gain = 2 * 0.7615941559557649, 0.7615941559557649
    std = z / 3**0.5  # of (0, z, 0) with two degrees of freedom
    low, high = 1 + 0.3 * (-z / 3) / (std + 1e-6), 1 + 0.3 * (2 * z / 3) / (std + 1e-6)
    assert found.advantages.values.tolist() == pytest.approx([-low / 3, high * 2 / 3, -low / 3])
    scales = [node.ratio_scale for node in trace.nodes if node.trainable]
    assert scales == pytest.approx([1.0, 1 + 0.6 / 4, 1 + 0.6 / 4, 1 + 0.6 / 3])
    expected: dict[str, list[float]] = {
        "retrieval/z_mean": [z],
        "retrieval/g_mean": [gain],
        "retrieval/entropy_before_mean": [2.0, 2.0],
        "retrieval/entropy_after_mean": [1.0],
        "retrieval/share_g_positive": [1.0],
        "retrieval/token_share": [1 / 4, 1 / 3],
        "retrieval/similarity_mean": [0.5],
        "retrieval/num_unscored": [0.0, 0.0, 1.0],
        "retrieval/num_floored": [0.0, 0.0, 0.0],
        "retrieval/share_factor_negative": [0.0, 0.0, 0.0],
    }
    assert found.measurements.keys() == expected.keys()
    for name, values in expected.items():
        assert found.measurements[name] == pytest.approx(values), name


def test_branching_that_rapo_cannot_do_is_refused() -> None:
    full, hard = BranchSettings(first_wave=8), BranchSettings(first_wave=4, attribution="hard")
    with pytest.raises(ValueError, match="no place for forks"):
        RapoSettings(group_size=8, branch=full)
    RapoSettings(group_size=9, branch=full)
    RapoSettings(group_size=8, branch=full.model_copy(update={"pre_monitor": True}))
    plain = RapoSettings(ratio_weight=0.0, aggregation="token_mean", branch=hard)
    assert plain.branch == hard
    with pytest.raises(ValueError, match="positive_nll"):
        RapoSettings(ratio_weight=0.0, aggregation="token_mean", branch=hard, positive_nll=0.1)
