"""A limit that the model has no positions for was taken in silence."""

import re
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.config import load_settings
from outrider.engines.local.model import check_positions
from outrider.errors import ConfigError
from outrider.evaluation.tasks import EvalTasksSettings
from outrider.training.settings import RunSettings
from tests.chat_server import chat_server, completion
from tests.evaluation.eval_tasks import IMPATIENT, MODELS, evaluate, write_rows
from tests.training.short_runs import assert_same, begin, interrupted, resume
from tests.training.tool_run import write_tool_run


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with 512 positions."""
    return write_tool_run(tmp_path_factory.mktemp("made") / "data")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "rollout.max_response_tokens=100000",
            r"rollout\.max_response_tokens is 100000, .* has 512 positions",
        ),
        ("model.context_length=513", r"model\.context_length is 513, .* has 512 positions, for prompt"),
        (
            "model.context_length=200",
            r"rollout\.max_response_tokens is 300, .* 512 positions, of which model\.context_length",
        ),
    ],
)
def test_a_training_run_is_refused_at_set_up_with_setting_value_and_limit(
    override: str, says: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe), "--run", str(tmp_path / "run"), "--progress", "none", override]) == 2
    output = capsys.readouterr().err.replace("Writing model shards", "")
    (line,) = [line for line in output.splitlines() if line.startswith("outrider: ")]
    assert re.search(says, line) and not (tmp_path / "run").exists()


def test_limits_that_fit_exactly_are_not_reported(recipe: Path) -> None:
    for override in (
        "rollout.max_response_tokens=512",
        "model.context_length=512",
        "model.context_length=300",
    ):
        settings = load_settings(RunSettings, file=recipe, overrides=[override])
        check_positions(settings, model="m", longest=512, note=pytest.fail)


def test_turn_limits_are_held_against_the_positions_too() -> None:
    turns = EvalTasksSettings.model_validate(
        {"tasks": "gsm8k", "model": {}, "rollout": {"max_turn_tokens": 9000}}
    )
    with pytest.raises(ConfigError, match=r"^rollout\.max_turn_tokens is 9000"):
        check_positions(turns, model="m", longest=8192, note=lambda text: None)


def test_a_default_is_reported_and_not_refused() -> None:
    """``eval --tasks`` has room for long answers; a model with less room is evaluated all the same."""
    settings = EvalTasksSettings.model_validate(
        {"tasks": "gsm8k", "model": {}, "rollout": {"max_turn_tokens": 1024}}
    )
    messages: list[str] = []
    check_positions(settings, model="m", longest=512, note=messages.append)
    assert [line.split(",")[0] for line in messages] == [
        "rollout.max_response_tokens is 4096", "rollout.max_turn_tokens is 1024",
    ]  # fmt: skip


def test_a_resumed_run_keeps_its_limits_and_reports_them(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load_settings(RunSettings, file=recipe, overrides=["rollout.max_response_tokens=4096"])
    messages: list[str] = []
    check_positions(settings, model="m", longest=512, note=messages.append, resumed=True)
    assert [line.split(",")[0] for line in messages] == ["rollout.max_response_tokens is 4096"]
    # the default, written out in its config.toml
    run = begin(recipe, tmp_path / "run", "rollout.max_response_tokens=2048")
    killed = interrupted(run)
    capsys.readouterr()
    resume(killed, progress="plain")
    assert "rollout.max_response_tokens is 2048, which no rollout reaches: model" in capsys.readouterr().out
    assert_same(run, killed)


def test_evaluations_of_a_model_are_refused_and_those_of_an_endpoint_are_silent(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = write_rows(tmp_path / "q.jsonl", [{"question": "q0?", "answer": "a"}])
    asked = ("--tasks", str(questions), "rollout.max_response_tokens=100000")
    model = str(recipe.parent / "model")
    assert evaluate(tmp_path / "run", *asked, "--model", model, "num_threads=1") == 2
    assert (
        f"rollout.max_response_tokens is 100000, more than there is room for: model '{model}' has 512"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()
    with chat_server(
        lambda got: MODELS if got.path.endswith("/models") else completion("\\boxed{a}")
    ) as server:
        assert (
            evaluate(
                tmp_path / "run", *asked, "--endpoint", server.url, "--endpoint-model", "agent", *IMPATIENT
            )
            == 0
        )
    output = capsys.readouterr()
    assert "positions" not in output.out + output.err
