"""Self-distillation of a real model: gradients of plain passes, and averaged teachers."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from outrider.algorithms.base import Algorithm, ObjectiveSettings
from outrider.algorithms.distill import DistillSettings
from outrider.algorithms.distill_losses import divergence_per_token
from outrider.config import validate
from outrider.engines.local.attention import Segment, TreePlan
from outrider.errors import CheckpointError
from outrider.trace import Insertion, Node, Trace, with_help, without_memory
from outrider.training.learner import LocalLearner
from outrider.training.policy import TEACHER, AveragedTeacher, Policy
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import UpdateReport, update
from outrider.types import Origin
from tests.distributed.groups import groups
from tests.tiny import tiny_model
from tests.training.test_pack_update import Recorder, assert_equal_gradients, double_precision
from tests.training.test_tips_update import group as tips_group
from tests.training.test_unpacked_update import unpacked_twin

__all__ = ["double_precision"]  # a fixture of every test here


def objective(weight: float = 1.0, **distill: Any) -> ObjectiveSettings:
    distill = {"help": "tips", "policy_weight": 0.0, "policy_outside": 0.0, "weight": weight} | distill
    return ObjectiveSettings(sampler_correction=None, distill=validate(DistillSettings, distill))


def helped_groups(num: int = 3) -> list[Trace]:
    """Groups with forks; every rollout but one has help of its own."""
    traces = groups(num, rollouts=3, longest=14)
    for number, trace in enumerate(traces):
        for leaf, path in trace.rollouts():
            if (number, leaf.rollout) != (0, 1):
                ids = tuple(30 + 7 * leaf.rollout + i for i in range(2 + leaf.rollout))
                trace.help[leaf.rollout] = (
                    Insertion(node_id=path[0].node_id, offset=4, token_ids=ids, text="", source="file"),
                )
    return traces


def gradient(
    traces: Sequence[Trace], chosen: ObjectiveSettings, *, max_tokens: int = 4096, model: Any = None
) -> tuple[dict[str, Tensor], UpdateReport]:
    policy = Recorder(model or tiny_model(dtype=torch.float64))
    settings = UpdateSettings(max_tokens=max_tokens, max_logprob_gap=1e9)
    report = update(policy, traces, objective=chosen, settings=settings, reference=None)
    return policy.gradients[0], report


def rows(model: Any, path: Sequence[Node]) -> tuple[Tensor, Tensor]:
    """Log-probs over the vocabulary that predict the policy's tokens, and these, by one plain pass."""
    tokens = torch.tensor([[token for node in path for token in node.token_ids]])
    plan = TreePlan(segments=(Segment(length=tokens.shape[1]),))
    logits = model(input_ids=tokens, use_cache=False, plan=plan).logits[0].log_softmax(-1)
    own = [i for i, node in enumerate(n for n in path for _ in n.token_ids) if node.trainable]
    return logits[[i - 1 for i in own]], tokens[0, own]


def plain_gradient(
    renderings: Sequence[tuple[Sequence[Node], Sequence[Node]]], distill: DistillSettings
) -> dict[str, Tensor]:
    """The same by one pass for each rollout and context."""
    model = tiny_model(dtype=torch.float64).model
    losses = []
    for trained, other in renderings:
        student, targets = rows(model, trained)
        with torch.no_grad():
            teacher, others = rows(model, other)
        assert torch.equal(targets, others)
        if distill.form == "divergence":
            ids = teacher.topk(teacher.shape[1] if distill.support == "all" else distill.support).indices
            losses.append(
                divergence_per_token(
                    student.gather(1, ids), teacher.gather(1, ids), alpha=distill.alpha, tail=True
                )
            )
        else:
            own, high = (table.gather(1, targets[:, None])[:, 0] for table in (student, teacher))
            losses.append(-(high - own.detach()) * own)
    torch.cat(losses).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


FORMS: list[dict[str, Any]] = [
    {"support": 8, "alpha": 0.5}, {"support": "all"}, {"support": "all", "alpha": 1.0},
    {"form": "reverse_kl"},
]  # fmt: skip


@pytest.mark.parametrize("distill", FORMS, ids=str)
@pytest.mark.parametrize("max_tokens", [1, 60, 4096])
def test_the_gradient_is_that_of_plain_passes_where_the_unhelped_context_plays(
    distill: dict[str, Any], max_tokens: int
) -> None:
    """Forks share policy tokens, which have another teacher in each rollout."""
    traces, chosen = helped_groups(), objective(**distill)
    assert chosen.distill is not None
    renderings = [
        (path, with_help(path, trace.help[leaf.rollout]))
        for trace in traces
        for leaf, path in trace.rollouts()
        if leaf.rollout in trace.help
    ]
    found, report = gradient(traces, chosen, max_tokens=max_tokens)
    assert_equal_gradients(found, plain_gradient(renderings, chosen.distill), limit=1e-9)
    tokens = sum(len(node.token_ids) for path, _ in renderings for node in path if node.trainable)
    assert report.metrics["distill/num_tokens"] == tokens
    assert report.metrics["distill/gap_mean"] != 0.0


@pytest.mark.parametrize("distill", FORMS, ids=str)
@pytest.mark.parametrize("max_tokens", [1, 4096])
def test_help_at_a_turn_changes_that_turn_and_later_ones(distill: dict[str, Any], max_tokens: int) -> None:
    """The gradient of plain passes with help before the last turn, or before every turn but the first."""
    traces, chosen = groups(3, rollouts=3, longest=14), objective(**distill)
    assert chosen.distill is not None
    renderings, num_early = [], 0
    for trace in traces:
        for leaf, path in trace.rollouts():
            observations = [node for node in path if node.origin is Origin.ENVIRONMENT]
            own = observations[-1:] if leaf.rollout == 1 else observations
            trace.help[leaf.rollout] = tuple(
                Insertion(
                    node_id=node.node_id, offset=3, token_ids=(31 + i, 40 + leaf.rollout), text="",
                    source="file",
                )
                for i, node in enumerate(own)
            )  # fmt: skip
            helped = with_help(path, trace.help[leaf.rollout])
            renderings.append((path, helped))
            before = path[: path.index(own[0])]
            assert [node.token_ids for node in helped[: len(before)]] == [node.token_ids for node in before]
            num_early += sum(len(node.token_ids) for node in before if node.trainable)
    found, report = gradient(traces, chosen, max_tokens=max_tokens)
    assert_equal_gradients(found, plain_gradient(renderings, chosen.distill), limit=1e-9)
    # the tokens before the help have a gap of 0, and count in the mean
    gaps = torch.cat([_gaps(path, helped) for path, helped in renderings])
    assert int((gaps == 0.0).sum()) >= num_early > 0
    assert report.metrics["distill/gap_abs"] == pytest.approx(float(gaps.abs().mean()), abs=1e-12)


def _gaps(path: Sequence[Node], helped: Sequence[Node]) -> Tensor:
    model = tiny_model(dtype=torch.float64).model
    with torch.no_grad():
        (student, targets), (teacher, _) = rows(model, path), rows(model, helped)
    gap = (teacher - student).gather(1, targets[:, None])[:, 0]
    return torch.where(gap.abs() < 1e-12, 0.0, gap)


def test_the_teacher_reads_nothing_behind_the_last_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last observation predicts nothing; the gradient is the same without it."""
    [trace] = groups(1, rollouts=3, longest=14)
    ends = {leaf.rollout: path[-1] for leaf, path in trace.rollouts()}
    for rollout, end in ends.items():
        last = trace.append(
            parent=end.node_id, origin=Origin.ENVIRONMENT, token_ids=(5, 6, 7, 8), message=end.message
        )
        trace.leaves[rollout].node_id = last.node_id
        trace.help[rollout] = (
            Insertion(node_id=0, offset=4, token_ids=(30, 31 + rollout), text="", source="file"),
        )
    sizes: list[int] = []
    score = Policy.score

    def counted(policy: Policy, batch: Any, **options: Any) -> Any:
        sizes.append(batch.num_tokens)
        return score(policy, batch, **options)

    monkeypatch.setattr(Policy, "score", counted)
    found, _ = gradient([trace], objective(support=8))
    shared, rest = 4, len(trace.nodes[0].token_ids) - 4
    turns = [sum(len(node.token_ids) for node in path[1:-1]) for _, path in trace.rollouts()]
    assert sizes[0] == shared + sum(2 + rest + num for num in turns)  # of the teacher
    renderings = [(path, with_help(path, trace.help[leaf.rollout])) for leaf, path in trace.rollouts()]
    chosen = objective(support=8).distill
    assert chosen is not None
    assert_equal_gradients(found, plain_gradient(renderings, chosen), limit=1e-9)


@pytest.mark.parametrize("distill", [*FORMS[:2], {"form": "likelihood"}], ids=str)
def test_the_gradient_is_that_of_plain_passes_where_the_helped_context_plays(distill: dict[str, Any]) -> None:
    trace = tips_group(None, off=True, num_with_tips=1)
    chosen = objective(plays="helped", **distill)
    assert chosen.distill is not None
    found, report = gradient([trace], chosen)
    [path, _] = (path for _, path in trace.rollouts())
    if chosen.distill.form == "likelihood":
        model = tiny_model(dtype=torch.float64).model
        student, targets = rows(model, without_memory(path))
        (-student.gather(1, targets[:, None]).mean()).backward()
        wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    else:
        wanted = plain_gradient([(without_memory(path), path)], chosen.distill)
    assert_equal_gradients(found, wanted, limit=1e-9)
    assert report.metrics["distill/num_tokens"] == 6.0


@pytest.mark.parametrize("distill", FORMS, ids=str)
def test_the_unpacked_path_has_the_same_gradient(distill: dict[str, Any]) -> None:
    traces, chosen = helped_groups(2), objective(**distill)
    packed, _ = gradient(traces, chosen)
    unpacked, _ = gradient(traces, chosen, model=unpacked_twin())
    assert_equal_gradients(unpacked, packed)


@pytest.mark.parametrize("distill", FORMS[:2], ids=str)
def test_empty_help_teaches_nothing(distill: dict[str, Any]) -> None:
    traces = helped_groups()
    for trace in traces:
        trace.help = {
            rollout: (Insertion(node_id=0, offset=4, token_ids=(), text="", source="file"),)
            for rollout in trace.leaves
        }
    found, report = gradient(traces, objective(**distill))
    assert max(float(each.abs().max()) for each in found.values()) < 1e-9
    assert report.metrics["distill/gap_abs"] < 1e-12
    assert abs(report.metrics["distill/loss"]) < 1e-12


def test_a_group_without_help_and_replayed_rollouts_have_no_term() -> None:
    for is_replayed in (False, True):
        traces = helped_groups(1)
        traces[0].is_replayed = is_replayed
        if not is_replayed:
            traces[0].help = {}
        policy = Recorder(tiny_model(dtype=torch.float64))
        settings = UpdateSettings(max_logprob_gap=1e9)
        report = update(policy, traces, objective=objective(), settings=settings, reference=None)
        assert "distill/loss" not in report.metrics


def test_a_rollout_without_advantage_is_distilled_and_demonstrations_are_not() -> None:
    [trace] = helped_groups(1)
    for node in trace.nodes:
        if node.shares is not None:
            node.shares = {rollout: share.scaled((0.0,) * len(share.credit))
                           for rollout, share in node.shares.items()}  # fmt: skip
        elif node.credit is not None:
            node.credit = (0.0,) * len(node.credit)
    chosen = objective(policy_weight=1.0)
    found, _ = gradient([trace], chosen)
    assert max(float(each.abs().max()) for each in found.values()) > 1e-4
    for node in trace.nodes:
        if node.trainable:
            node.origin = Origin.DEMONSTRATION
            node.logprobs = node.entropies = ()
    found, report = gradient([trace], chosen)
    assert "distill/loss" not in report.metrics
    assert all(not bool(each.any()) for each in found.values())


# Teachers


def learner(distill: dict[str, Any], *, seed: int = 0) -> LocalLearner:
    policy = Policy(tiny_model(seed=seed), OptimizerSettings(learning_rate=0.01))
    chosen = objective(**distill)
    settings = SimpleNamespace(
        algorithm=chosen, update=UpdateSettings(max_logprob_gap=1e9),
        engine=SimpleNamespace(is_exact=True), cluster=SimpleNamespace(is_remote=False), seed=0,
    )  # fmt: skip
    return LocalLearner(settings=cast(Any, settings), policy=policy, reference=policy.frozen_copy())


def step(of: LocalLearner, traces: Sequence[Trace]) -> None:
    algorithm = SimpleNamespace(objective=of.settings.algorithm, token_loss=of.settings.algorithm.token_loss)
    of.update(traces, cast(Algorithm, algorithm), on_batch=lambda num: None)


EMA = {"teacher": "ema", "teacher_rate": 0.25}


def test_an_averaged_teacher_follows_every_update_that_made_a_step() -> None:
    ours = learner(EMA)
    teacher = ours.teacher
    assert teacher is not None
    wanted = {name: one.clone() for name, one in teacher.averages.items()}
    for number, traces in enumerate((helped_groups(2), helped_groups(1))):
        if number:
            traces[0].help = {}  # nothing to learn, so no step
        step(ours, traces)
        for name, average in wanted.items():
            if not number:
                average += 0.25 * (ours.policy.masters[name] - average)
            torch.testing.assert_close(teacher.averages[name], average, rtol=1e-6, atol=1e-7)
    assert ours.policy.num_steps == 1
    weights = dict(teacher.model.named_parameters())
    assert all(torch.equal(weights[name], average) for name, average in teacher.averages.items())
    # its policy is another model now
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(weights[name], dict(ours.policy.model.named_parameters())[name])


def test_a_resumed_run_with_an_averaged_teacher_has_the_same_bits(tmp_path: Path) -> None:
    whole, traces = learner(EMA), [helped_groups(2), helped_groups(3)]
    step(whole, traces[0])
    whole.save(tmp_path)
    step(whole, traces[1])
    resumed = learner(EMA, seed=5)
    resumed.load(tmp_path, num_steps=1)
    step(resumed, traces[1])
    assert whole.teacher is not None and resumed.teacher is not None
    for one, other in ((whole.policy.masters, resumed.policy.masters),
                       (whole.teacher.averages, resumed.teacher.averages)):  # fmt: skip
        assert all(torch.equal(one[name], other[name]) for name in one)
    other_teacher = AveragedTeacher(Policy(tiny_model(num_layers=1), OptimizerSettings()))
    with pytest.raises(CheckpointError, match="another model"):
        other_teacher.load(tmp_path)
    (tmp_path / TEACHER).unlink()
    resumed.load(tmp_path, num_steps=1)  # weights that another run wrote
    masters = resumed.policy.masters
    assert all(torch.equal(average, masters[name]) for name, average in resumed.teacher.averages.items())


@pytest.mark.parametrize(
    "distill", [{}, {"form": "likelihood", "gate": "gap_centered"}, {"form": "advantage_add"}], ids=str
)
def test_a_teacher_without_numbers_skips_the_step_and_leaves_finite_metrics(distill: dict[str, Any]) -> None:
    ours = learner(EMA | {"policy_weight": 1.0} | distill)
    assert ours.teacher is not None
    masters = {name: master.clone() for name, master in ours.policy.masters.items()}
    with torch.no_grad():
        next(iter(ours.teacher.model.parameters())).fill_(torch.nan)
    algorithm = SimpleNamespace(objective=ours.settings.algorithm,
                                token_loss=ours.settings.algorithm.token_loss)  # fmt: skip
    report = ours.update(helped_groups(2), cast(Algorithm, algorithm), on_batch=lambda num: None)
    assert report.metrics["grad/num_skipped"] == 1.0
    assert all(map(math.isfinite, report.metrics.values()))
    assert "distill/gap_mean" not in report.metrics and ours.policy.num_steps == 0
    assert all(torch.equal(master, masters[name]) for name, master in ours.policy.masters.items())


def test_a_frozen_teacher_is_the_reference_and_the_start_is_the_policy() -> None:
    results = []
    for distill in ({"teacher": "frozen"}, {"teacher": "start"}):
        ours = learner(distill)
        for number in range(2):
            with torch.no_grad():  # the reference stays at the start of the run
                if number:
                    for master in ours.policy.masters.values():
                        master += 0.01
            step(ours, helped_groups(2))
        results.append(ours.policy.masters["model.embed_tokens.weight"].clone())
    assert not torch.equal(*results)
    assert objective(teacher="frozen").needs_reference and not objective().needs_reference
    with pytest.raises(ValueError, match="needs a frozen model"):
        gradient(helped_groups(1), objective(teacher="frozen"))
