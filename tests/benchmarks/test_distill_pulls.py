"""The figures of self-distillation equal the recorded vectors, and the records contain what is computed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.distill_pulls import (
    FORM_COLUMNS,
    FORMS,
    LIKELIHOOD,
    SDAR,
    STATES,
    TREE,
    TokenLosses,
    failed_share,
    form_rows,
    of_samples,
    of_states,
    pull_rows,
    pulls,
    raised_shares,
    random_states,
    sdar_values,
    signal_to_noise,
    tree_gradient,
)

from tests.vectors import load_vectors

RECORDS = Path(__file__).parents[2] / "records"
VECTORS = load_vectors("distill")
PULLS = {
    "GRPO": "policy gradient, unhelped plays (GRPO, centred)",
    "EMPO² acting": "EMPO2 tips-off, acting denominator, mask exp(-5), clip .2/.3, dual clip 10",
    "EMPO² student": "EMPO2 tips-off, student denominator",
    "likelihood": "likelihood of helped successes",
    "forward KL": "divergence alpha 0 (SDFT)",
    "alpha 0.5": "divergence alpha 0.5 (OPSD, SDPO)",
    "reverse KL": "reverse_kl (OPSD sampled, SDPO sampled)",
    "SDAR": "SDAR released, beta 5, before its weight 0.01",
}


def vector(group: str, name: str) -> dict[str, Any]:
    return next(case for case in VECTORS[group]["cases"] if case["name"] == name)


@pytest.mark.parametrize("state", STATES)
def test_pulls(state: tuple[float, float]) -> None:
    case = vector("enumerated.pulls", f"unhelped {state[0]:g}, helped {state[1]:g}")
    expected = {column: case[name] for column, name in PULLS.items()}
    assert pulls(*state) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "losses"),
    [
        *(
            (f"divergence alpha {alpha}, unhelped plays", FORMS[f"divergence, alpha {alpha:g}"])
            for alpha in (0.0, 0.5, 1.0)
        ),
        ("reverse_kl, unhelped plays", FORMS["reverse_kl"]),
        ("gated reverse_kl beta 5, unhelped plays", FORMS["reverse_kl with gate, beta 5"]),
        *(
            (f"sdar released beta {beta}.0, unhelped plays", FORMS[f"SDAR as released, beta {beta}"])
            for beta in (0, 1, 5)
        ),
    ],
)
def test_the_tree(name: str, losses: TokenLosses) -> None:
    expected = vector("enumerated.token_gradients", name)["minus_expected_gradient"]
    np.testing.assert_allclose(tree_gradient(losses), expected, atol=1e-10)


def test_the_tree_played_with_help() -> None:
    case = vector("enumerated.token_gradients", "likelihood of helped successes")
    found = tree_gradient(LIKELIHOOD, plays_helped=True, only_successes=True)
    np.testing.assert_allclose(found, case["minus_expected_gradient"], atol=1e-10)
    case = vector("enumerated.token_gradients", "divergence alpha 0.0, helped plays")
    found = tree_gradient(of_states(0.0), plays_helped=True)
    np.testing.assert_allclose(found, case["minus_expected_gradient"], atol=1e-10)
    assert vector("enumerated.token_gradients", "tree") == {"name": "tree", **TREE}


def test_the_push_on_failed_rollouts() -> None:
    name = "share of the absolute push that raises tokens of failed rollouts"
    case = vector("enumerated.token_gradients", name)
    assert failed_share(FORMS["SDAR as released, beta 5"]) == pytest.approx(case["sdar released beta 5"])
    assert failed_share(FORMS["reverse_kl"]) == pytest.approx(case["reverse_kl"])


@pytest.mark.parametrize("case", VECTORS["sdar.released"]["cases"], ids=lambda case: case["name"][:30])
def test_the_released_sdar_loss(case: dict[str, Any]) -> None:
    """The slope of every token, whose mean over the mask the released loss is."""
    own, other = (
        torch.tensor(case[name], dtype=torch.float64).flatten()
        for name in ("student_logprobs", "teacher_logprobs")
    )
    rows = own[:, None].requires_grad_()
    losses = of_samples(SDAR, beta=case["beta"])(
        rows, other[:, None], torch.zeros(len(own), dtype=torch.long)
    )
    mask = torch.tensor(case["mask"], dtype=torch.float64).flatten()
    (slopes,) = torch.autograd.grad((losses * mask).sum() / max(1.0, float(mask.sum())), rows)
    np.testing.assert_allclose(
        slopes[:, 0], np.ravel(case["released_d_loss_d_logprob"]), rtol=1e-9, atol=1e-14
    )


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("sdar beta 5", "SDAR as released, beta 5"),
        ("sdar beta 1", "SDAR as released, beta 1"),
        ("reverse_kl", "reverse_kl"),
        ("gated reverse_kl beta 5", "reverse_kl with gate, beta 5"),
        ("forward KL", "divergence, alpha 0"),
    ],
)
def test_the_states_in_which_a_step_is_no_descent(name: str, form: str) -> None:
    case = vector("enumerated.no_descent", name)
    found = raised_shares(FORMS[form], *random_states(20_000, 3, seed=11))
    assert found == (case["raises_reverse_kl"], case["raises_forward_kl"])


def test_noise() -> None:
    states = random_states(2_000, 5, seed=13)
    for name, form in (("sdar released beta 5", "SDAR as released, beta 5"), ("reverse_kl", "reverse_kl")):
        case = vector("enumerated.noise", name)
        assert signal_to_noise(FORMS[form], *states) == pytest.approx(case["signal_to_noise"], rel=1e-9)


def test_the_records_are_what_the_command_prints() -> None:
    def recorded(name: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
        return record

    assert recorded("distill-pulls")["rows"] == [list(row) for row in pull_rows()]
    assert recorded("distill-forms")["rows"] == [list(row) for row in form_rows()]
    assert recorded("distill-forms")["columns"] == list(FORM_COLUMNS)
    assert recorded("distill-sdar")["values"] == sdar_values()
