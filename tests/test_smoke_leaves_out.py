"""``--smoke`` says what it does not try."""

from pathlib import Path

import pytest

from outrider import cli

RECIPE = """
environment = { type = "factbook" }
algorithm = { type = "grpo" }
"""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("cluster = { num_trainers = 2, num_engines = 3 }", "[cluster] (num_trainers = 2, num_engines = 3)"),
        ('engine = { type = "vllm" }', "leaves out engine.type = vllm"),
        ("", None),
    ],
)
def test_smoke_reports_its_omissions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, expected: str | None
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE + more, encoding="utf-8")
    run = str(tmp_path / "run")
    assert cli.main(["train", str(recipe), "--run", run, "--smoke", "--dry-run"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "leaves out" in line]
    assert len(lines) == (expected is not None)
    assert expected is None or expected in lines[0]
