"""How hard each form of self-distillation pulls, by enumeration in float64 (docs/algorithms/distill.md).

    python -m benchmarks.distill_pulls [--records records]

Three figures, all computed with the functions of :mod:`outrider.algorithms.distill_losses` and autograd:

- ``pulls``: one state with two actions, of which the right one has a return of 1; minus the gradient of the
  expected loss for the logit of the right action.
- ``tree``: two turns with three tokens each, whose nine trajectories are drawn once with their probability.
- ``sdar``: what the released loss of SDAR pushes up on that tree, how often its expected step raises a KL on
  random states, and its signal-to-noise ratio.

``--records`` writes the tables for ``make figures``.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.markdown_table import markdown
from outrider.algorithms.distill import DistillSettings
from outrider.algorithms.distill_losses import distill_losses, divergence_per_token, gates
from outrider.algorithms.exploration import Empo2Settings
from outrider.algorithms.loss_settings import ClipLoss
from outrider.algorithms.losses import clipped_surrogate_per_token
from outrider.config import validate

STATES: Final = ((0.3, 0.9), (0.05, 0.9), (0.01, 0.9), (0.01, 0.97), (0.005, 0.9), (0.9, 0.9))
"""Probability of the right action without and with help."""
TokenLosses = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The losses of tokens [T], from the rows [T, V] of student and teacher and the tokens [T]."""


def settings(**options: Any) -> DistillSettings:
    """Settings whose help is irrelevant here."""
    return validate(DistillSettings, {"help": ["file"], "path": "help.jsonl", **options})


def of_samples(chosen: DistillSettings, *, beta: float | None = None, gate_mean: float = 0.0) -> TokenLosses:
    """A form of sampled tokens. ``beta`` replaces that of the gate, also by 0, which the settings refuse."""
    if beta is not None:
        chosen = chosen.model_copy(update={"gate_beta": beta})

    def losses(student: Tensor, teacher: Tensor, tokens: Tensor) -> Tensor:
        own, other = sampled(student, tokens), sampled(teacher, tokens)
        return distill_losses(
            chosen, logprobs_T=own, teacher_T=other, start_T=own.detach(), gate_mean=gate_mean
        )

    return losses


def of_states(alpha: float) -> TokenLosses:
    """The divergence, of which the tokens are only the positions."""
    return lambda student, teacher, tokens: divergence_per_token(student, teacher, alpha=alpha)


def sampled(rows: Tensor, tokens: Tensor) -> Tensor:
    """The log-probs of the tokens [T]."""
    return rows.gather(1, tokens[:, None])[:, 0]


SDAR: Final = settings(form="likelihood", gate="gap")
REVERSE_KL: Final = of_samples(settings(form="reverse_kl"))
LIKELIHOOD: Final = of_samples(settings(form="likelihood", plays="helped", help=["tips"], path=None))


# One state, two actions


def pulls(unhelped: float, helped: float) -> dict[str, float]:
    """Return the pull on the right action, by the column of the table."""
    logits = torch.tensor(
        [[unhelped, 1.0 - unhelped]], dtype=torch.float64
    ).log()  # the right action is number 0
    teacher = torch.tensor([[helped, 1.0 - helped]], dtype=torch.float64).log()

    def pull(losses: TokenLosses, *, plays_helped: bool, only_right: bool = False) -> float:
        """Enumerate the actions."""
        leaf = logits.clone().requires_grad_()
        student, total = leaf.log_softmax(-1), torch.zeros((), dtype=torch.float64)
        acting = teacher if plays_helped else student.detach()
        for action in range(1 if only_right else 2):
            token = torch.tensor([action])
            total = total + sampled(acting, token).exp().sum() * losses(student, teacher, token).sum()
        (slope,) = torch.autograd.grad(total, leaf)
        return -float(slope[0, 0])

    return {
        "GRPO": pull(policy_loss("start"), plays_helped=False),
        "EMPO² acting": pull(policy_loss("acting"), plays_helped=True),
        "EMPO² student": pull(policy_loss("student"), plays_helped=True),
        "likelihood": pull(LIKELIHOOD, plays_helped=True, only_right=True),
        "forward KL": pull(of_states(0.0), plays_helped=False),
        "alpha 0.5": pull(of_states(0.5), plays_helped=False),
        "reverse KL": pull(REVERSE_KL, plays_helped=False),
        "SDAR": pull(of_samples(SDAR), plays_helped=False),
    }


def policy_loss(denominator: str) -> TokenLosses:
    """The policy term of EMPO²'s preset with centred advantages of a large group, unclipped for GRPO."""
    preset = Empo2Settings(preset="empo2-centered")
    assert isinstance(preset.loss, ClipLoss)
    clip = preset.loss

    def losses(student: Tensor, teacher: Tensor, tokens: Tensor) -> Tensor:
        own = sampled(student, tokens)
        acting = student.detach() if denominator == "start" else teacher
        old = teacher if denominator == "acting" else student.detach()
        surrogate = clipped_surrogate_per_token(
            logprobs=own,
            old_logprobs=sampled(old, tokens),
            advantages=(tokens == 0).double() - acting[:, 0].exp(),
            clip_low=clip.clip_low,
            clip_high=clip.clip_high,
            dual_clip=clip.dual_clip,
        )
        return surrogate.losses * (denominator != "acting" or own.detach().exp() >= preset.min_probability)

    return losses


# Two turns, three tokens


TREE: Final[Mapping[str, Any]] = {
    "student_logits": [
        [0.00123015335748, 0.298745537508, -0.274137855362],
        [-0.890591838757, -0.454670785172, -0.991646554996],
        [0.0601436025974, 1.34021524555, -0.492206518551],
        [-0.62047489982, 0.489842050185, 0.35688700816],
    ],
    "helped_logits": [
        [0.158121373497, -1.39570206706, -0.0438777336949],
        [1.04295479169, -2.01632182093, -0.68642364156],
        [-2.8518341097, -1.93430660968, -2.76260255669],
        [-0.352636696612, -1.90116972217, 0.406896538233],
    ],
    "returns": [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]],
}
"""Logits of the first turn, then of the second one after each first token; returns by both tokens."""
FORMS: Final[Mapping[str, TokenLosses]] = {
    "divergence, alpha 0": of_states(0.0),
    "divergence, alpha 0.5": of_states(0.5),
    "divergence, alpha 1": of_states(1.0),
    "reverse_kl": REVERSE_KL,
    "reverse_kl with gate, beta 5": of_samples(settings(form="reverse_kl", gate="gap")),
    "SDAR as released, beta 5": of_samples(SDAR),
    "SDAR as released, beta 1": of_samples(SDAR, beta=1.0),
    "SDAR as released, beta 0": of_samples(SDAR, beta=0.0),
}
"""Forms of rollouts that act without help."""


def trajectories() -> list[tuple[Tensor, Tensor, float]]:
    """The rows, the tokens and the return of the nine trajectories."""
    return [
        (torch.tensor([0, 1 + first]), torch.tensor([first, second]), TREE["returns"][first][second])
        for first, second in itertools.product(range(3), repeat=2)
    ]


def tree_tables() -> tuple[Tensor, Tensor]:
    """Logits of the student with gradient, and log-probs of the teacher [4, 3]."""
    student, teacher = (
        torch.tensor(TREE[name], dtype=torch.float64) for name in ("student_logits", "helped_logits")
    )
    return student.requires_grad_(), teacher.log_softmax(-1)


def tree_gradient(losses: TokenLosses, *, plays_helped: bool = False, only_successes: bool = False) -> Tensor:
    """Minus the expected gradient of a rollout's summed token losses for the student's logits [4, 3]."""
    student, teacher = tree_tables()
    acting = teacher if plays_helped else student.detach().log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for rows, tokens, value in trajectories():
        if value or not only_successes:
            probability = sampled(acting[rows], tokens).sum().exp()
            total = total + probability * losses(student[rows].log_softmax(-1), teacher[rows], tokens).sum()
    (gradient,) = torch.autograd.grad(total, student)
    return -gradient


def failed_share(losses: TokenLosses) -> float:
    """The share of the absolute push on sampled tokens that raises tokens of failed rollouts."""
    student, teacher = tree_tables()
    failed = total = 0.0
    for rows, tokens, value in trajectories():
        own = student.detach()[rows].log_softmax(-1)
        leaf = own.clone().requires_grad_()
        (slope,) = torch.autograd.grad(losses(leaf, teacher[rows], tokens).sum(), leaf)
        push = -sampled(slope, tokens) * sampled(own, tokens).sum().exp()
        total += float(push.abs().sum())
        failed += 0.0 if value else float(push.clamp(min=0.0).sum())
    return failed / total


# Random states


def random_states(number: int, size: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Log-probs [number, size] of student and teacher: logits normal with deviation 1.5."""
    import numpy as np

    generator = np.random.Generator(np.random.PCG64(seed))
    logits = 1.5 * generator.normal(size=(number, 2, size))
    student, teacher = torch.from_numpy(logits).unbind(1)
    return student.log_softmax(-1), teacher.log_softmax(-1)


def token_steps(losses: TokenLosses, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Minus the gradient of the loss of every token for the logits of its state [N, tokens, V], and the
    expectation under the student [N, V].
    """
    steps = []
    for token in range(student.shape[1]):
        leaf = student.clone().requires_grad_()
        tokens = torch.full((len(student),), token)
        (slope,) = torch.autograd.grad(losses(leaf.log_softmax(-1), teacher, tokens).sum(), leaf)
        steps.append(-slope)
    by_token = torch.stack(steps, dim=1)
    return by_token, (student.exp()[:, :, None] * by_token).sum(1)


def raised_shares(losses: TokenLosses, student: Tensor, teacher: Tensor) -> tuple[float, float]:
    """The shares of states in which a small expected step raises KL(student, teacher), and KL(teacher,
    student).
    """
    _, step = token_steps(losses, student, teacher)
    shares = []
    for alpha in (1.0, 0.0):
        leaf = student.clone().requires_grad_()
        divergence = divergence_per_token(leaf.log_softmax(-1), teacher, alpha=alpha, tail=False)
        (slope,) = torch.autograd.grad(divergence.sum(), leaf)
        shares.append(float(((slope * step).sum(1) > 1e-12).double().mean()))
    return shares[0], shares[1]


def signal_to_noise(losses: TokenLosses, student: Tensor, teacher: Tensor) -> float:
    """The squared expected step over the variance of the step of one token, both summed over the states."""
    by_token, expected = token_steps(losses, student, teacher)
    squared = (by_token - expected[:, None, :]).square().sum(-1)
    return float(expected.square().sum() / (student.exp() * squared).sum())


# The figures


def pull_rows() -> list[tuple[str, ...]]:
    """A row per state."""
    return [
        (f"{unhelped:g}, {helped:g}", *map(_digits, pulls(unhelped, helped).values()))
        for unhelped, helped in STATES
    ]


def form_rows() -> list[tuple[str, ...]]:
    """A row per form; rollouts act without help unless the form says otherwise."""
    three, five = random_states(20_000, 3, seed=11), random_states(2_000, 5, seed=13)
    mean = float((five[0].exp() * gates(five[1] - five[0], SDAR)).sum(1).mean())
    rows = []
    for name, losses in FORMS.items():
        first_turn = ", ".join(map(_digits, tree_gradient(losses)[0].tolist()))
        raised = (f"{100 * share:.2f}" for share in raised_shares(losses, *three))
        is_sampled = "divergence" not in name
        rows.append(
            (
                name,
                first_turn,
                f"{100 * failed_share(losses):.1f}" if is_sampled else "-",
                *raised,
                f"{signal_to_noise(losses, *five):.3f}" if is_sampled else "-",
            )
        )
    centred = signal_to_noise(of_samples(SDAR, gate_mean=mean), *five)
    helped = tree_gradient(LIKELIHOOD, plays_helped=True, only_successes=True)
    return [
        *rows,
        ("SDAR, beta 5, less its mean gate", *["-"] * 4, f"{centred:.3f}"),
        ("likelihood of helped successes", ", ".join(map(_digits, helped[0].tolist())), "0.0", *["-"] * 3),
    ]


def sdar_values() -> dict[str, str]:
    """Single figures of the page."""
    upward = {"sdar": FORMS["SDAR as released, beta 5"], "reverse-kl": FORMS["reverse_kl"]}
    largest = float(tree_gradient(FORMS["SDAR as released, beta 0"]).abs().max())
    return {
        **{f"{name}-failed": f"{failed_share(losses):.3f}" for name, losses in upward.items()},
        "beta-0-is-zero": "0" if largest < 1e-12 else f"{largest:.1e}",
    }


def _digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) > 1e-9 else "0"


FORM_COLUMNS: Final = (
    "form",
    "pull on the three tokens of the first turn",
    "push that raises tokens of failed rollouts, %",
    "states in which a step raises KL(student, teacher), %",
    "KL(teacher, student), %",
    "signal to noise",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distill_pulls", description="How hard each form pulls."
    )
    parser.add_argument("--records", type=Path, help="folder of the records to write")
    parsed = parser.parse_args(arguments)
    pull_columns = ("without, with help", *pulls(*STATES[0]))
    tables = {"distill-pulls": (pull_columns, pull_rows()), "distill-forms": (FORM_COLUMNS, form_rows())}
    values = sdar_values()
    records: dict[str, dict[str, Any]] = {
        name: {"kind": "cells", "columns": columns, "rows": rows} for name, (columns, rows) in tables.items()
    }
    records["distill-sdar"] = {"kind": "values", "values": values}
    for columns, rows in tables.values():
        print(f"{markdown(columns, rows)}\n")
    for name, value in values.items():
        print(f"{name}: {value}")
    for name, record in records.items() if parsed.records else ():
        source = {"source": "computed in float64, exact", "command": "python -m benchmarks.distill_pulls"}
        text = json.dumps(source | record, indent=1, ensure_ascii=False) + "\n"
        (parsed.records / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
