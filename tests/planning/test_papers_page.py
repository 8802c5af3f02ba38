"""docs/papers.md says which commands one device can hold: its table is that of ``outrider plan``,
and each row is marked by it.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from outrider.cli import main
from outrider.config import load_settings
from outrider.planning.memory import GRADIENT, MASTER, MOMENTS, VALUE_BYTES, Training, rank_bytes
from outrider.planning.shape import find_shape
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings, RunSettings
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and "`outrider train recipes/" in line]


def test_bytes_per_parameter_of_training() -> None:
    """Of the real policy in bfloat16, at the moment of its first step when every part of it is there."""
    policy = Policy(tiny_model(dtype=torch.bfloat16), OptimizerSettings())
    torch.stack([parameter.sum() for parameter in policy.working.values()]).sum().backward()
    gradients = sum(master.grad.nbytes for master in policy.masters.values() if master.grad is not None)
    policy.step()
    moments = [
        value for state in policy.optimizer.state.values() for value in state.values() if value.dim() > 0
    ]
    held = gradients + sum(
        tensor.nbytes for tensor in [*policy.working.values(), *policy.masters.values(), *moments]
    )
    num_parameters = sum(parameter.numel() for parameter in policy.working.values())
    assert held == (MASTER + MOMENTS + GRADIENT + VALUE_BYTES["bfloat16"]) * num_parameters
    assert f"{held // num_parameters} bytes per parameter" in TEXT


@pytest.mark.parametrize(
    ("precision", "ranks", "expected"), [("bfloat16", 1, 18), ("float32", 1, 16), ("bfloat16", 4, 16)]
)
def test_bytes_per_parameter_by_precision_and_ranks(precision: str, ranks: int, expected: int) -> None:
    shape = find_shape("Qwen/Qwen2.5-7B-Instruct")
    by_purpose = rank_bytes(shape, Training(ranks=ranks, max_tokens=1, precision=precision))
    states = ("frozen weights", "masters", "moments", "gradients", "working copy")
    assert ranks * sum(by_purpose[name] for name in states) == expected * shape.num_parameters
    for page in (TEXT, INSTALL):
        assert re.search(rf"\b{expected}\b", page[page.index("ull fine-tuning") :].split("\n\n", 1)[0])


def page_rows() -> list[list[str]]:
    """The table of models."""
    section = TEXT.split("### GPUs that a recipe needs", 1)[1].split("\n#", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()]
    return [row for row in rows if row[0].startswith("`") and "/" in row[0]]


def test_the_page_has_the_numbers_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(page_rows()) == 5
    recipe = str(ROOT / "recipes" / "tool-reasoning.toml")
    for name, total, together, beside in page_rows():
        main(["plan", recipe, "--model", name.strip("`"), "--json"])
        plan = json.loads(capsys.readouterr().out)
        assert f"{plan['model']['num_parameters']:,}" == total
        found = {one["layout"]["placement"]: one["layout"]["num_gpus"] for one in plan["fewest"]}
        assert found.pop("process", None) == (1 if together == "1" else None)
        assert [str(found.get(placement, "none")) for placement in ("colocate", "disaggregate")] == [
            together,
            beside,
        ]


@pytest.fixture(scope="module")
def too_large() -> set[str]:
    return {row[0].strip("`") for row in page_rows() if row[2] != "1"}


def model_of(command: str) -> str:
    words = shlex.split(command)
    return load_settings(
        RunSettings, file=ROOT / words[2], overrides=[word for word in words[3:] if "=" in word]
    ).model.name


def test_every_row_states_whether_its_training_fits_one_device(too_large: set[str]) -> None:
    missing = ""
    num_too_large = 0
    for row in ROWS:
        own = row.split(" | ")[-1]
        missing = missing if own.startswith("the same") else own
        large = [
            model_of(command) in too_large for command in re.findall(r"`(outrider train recipes/[^`]+)`", row)
        ]
        if not any(large):  # the recipe's own model is small; the paper's is named
            assert "over 80 GB" not in missing or "for the paper's model" in missing, row
        assert any(large) <= ("over 80 GB" in missing), row
        assert ("not over 80 GB" in own) == (len(set(large)) == 2), row
        num_too_large += any(large)
    assert num_too_large > 25
