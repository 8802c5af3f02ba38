"""recipes/one-card: every recipe fits the card that its header names, has data and prompts, and runs in its
smoke size.
"""

import importlib
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import main
from outrider.runs import Run
from outrider.testing import check_tool

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "one-card"
PACKAGES = {"sokoban": "gem", "countdown": "reasoning_gym"}


def recipes(*, long: str = "none") -> pytest.MarkDecorator:
    """All recipes; those whose name begins with ``long`` take tens of seconds."""
    cases = []
    for path in sorted(FOLDER.glob("*.toml")):
        package = PACKAGES.get(path.stem.split("-")[0])
        is_missing = package is not None and find_spec(package) is None
        marks = [pytest.mark.skipif(is_missing, reason=f"needs {package}")]
        if path.stem.startswith(long):
            marks.append(pytest.mark.long)
        cases.append(pytest.param(path, id=path.stem, marks=marks))
    return pytest.mark.parametrize("recipe", cases)


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # paths of data start at the root of the repository


@recipes()
def test_a_recipe_fits_the_card_that_it_names(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = " ".join(line.strip("# ") for line in recipe.read_text().split("\nseed")[0].splitlines())
    assert "Expected: " in header and "It has not been run on a card." in header
    card = re.match(r"Card: (\d+) GB\.", header)
    assert card is not None
    assert main(["plan", str(recipe), "--gpu-memory", card[1], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and plan["change"] == [] and plan["layout"]["num_gpus"] == 1
    page = (ROOT / "docs" / "howto" / "one-card.md").read_text(encoding="utf-8")
    assert re.search(rf"\| `{recipe.stem}` \|.*\| {card[1]} GB \|", page)


@recipes(long="countdown")  # its verifier starts in a sandbox
def test_the_data_and_functions_of_a_recipe_are_there(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = recipe.read_text()
    fewer = [
        f"environment.{name}=32"
        for name in re.findall(r"^(num_\w+) = \d+$", text.split("[rollout]")[0], re.M)
    ]
    assert main(["train", str(recipe), "--dry-run", *fewer, "evaluation.num_tasks=8"]) == 0
    assert re.search(r"\n# model: Qwen/Qwen3-", capsys.readouterr().out)


@recipes(long="")
def test_a_recipe_trains_in_its_smoke_size(recipe: Path, tmp_path: Path) -> None:
    assert main(["train", str(recipe), "--smoke", "--run", str(tmp_path / "run")]) == 0
    assert Run.from_path(tmp_path / "run").metrics("train").num_rows == 1


def test_the_questions_are_those_of_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    shop: Any = importlib.import_module("own_functions")
    splits = shop.questions()
    for name, rows in zip(("train", "test"), splits, strict=True):
        lines = (FOLDER / "own_functions" / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows
    assert not {row["question"] for row in splits[0]} & {row["question"] for row in splits[1]}
    for function in (shop.price, shop.exchange_rate, shop.multiply):
        check_tool(function, texts=["CHF", "lamp"])


@pytest.mark.parametrize(
    ("package", "overrides", "extra"),
    [
        ("peft", ["model.lora={rank=4}"], "model.lora needs an extra: pip install 'outrider[lora]'"),
        ("bitsandbytes", ["optimizer.states=8bit"], "optimizer.states = 8bit needs an extra"),
        ("bitsandbytes", ["model.lora={base='4bit'}"], "model.lora.base = 4bit needs an extra"),
    ],
)
def test_a_missing_extra_is_reported_before_anything_is_loaded(
    package: str,
    overrides: list[str],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(
        "outrider.training.settings.find_spec", lambda name: None if name == package else find_spec("json")
    )
    recipe, run = str(ROOT / "recipes" / "demo.toml"), tmp_path / "run"
    for options in (["--dry-run"], ["--run", str(run)]):
        assert main(["train", recipe, *options, "model.trained_layers=none", *overrides]) == 2
        assert extra in " ".join(capsys.readouterr().err.split())
    assert not run.exists()


def test_more_episodes_than_the_local_engine_has_room_for_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = str(FOLDER / "functions-qwen3-1.7b-lora.toml")
    assert main(["plan", recipe, "--gpu-memory", "24", "train.max_concurrent=64"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^change +train.max_concurrent=32 ", out, re.MULTILINE)
