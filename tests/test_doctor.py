"""The doctor never crashes and says what is missing; the starting recipe loads."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from docsite.models import ARCHITECTURES

from outrider import doctor as processor
from outrider.algorithms.exploration import RapoSettings
from outrider.cli import main
from outrider.config import load_settings
from outrider.doctor import Check, examine, examine_model, find, write_recipe
from outrider.engines.local import cpu_kernels as onednn
from outrider.errors import ConfigError, ToolUnavailable
from outrider.training.settings import RunSettings
from tests.tiny import save_tiny_model
from tests.training.test_families_run import save_model


def raising(error: Exception) -> Any:
    def look() -> str:
        raise error

    return look


@pytest.mark.parametrize(
    "error",
    [
        ToolUnavailable("no java"),
        ImportError("libx.so"),
        RuntimeError("two\nlines"),
        OSError(2, "gone"),
        AssertionError(),
    ],
)
def test_an_exception_of_a_check_is_a_finding(error: Exception) -> None:
    finding = find(Check(name="x", look=raising(error), advice="install it", required=True))
    assert not finding.works and finding.required and finding.advice == "install it"
    assert str(error).split("\n")[0] in finding.detail and "\n" not in finding.detail


@pytest.mark.long
def test_a_full_examination(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # wide enough for the instruction sets of any processor
    assert main(["doctor"]) == 0
    lines = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("│") for line in capsys.readouterr().out.splitlines())
        if len(cells) > 4
    }
    assert lines["python"] == lines["torch"] == lines["transformers"] == "ok"
    parts = (
        "processor",
        "linear layers",
        "fast bfloat16",
        "matrix rate",
        "CUDA",
        "packaged models",
        "embedder minilm",
        "Java for ScienceWorld",
        "Python sandbox",
        "Factbook data",
    )
    assert {lines[name] for name in (*parts, "tracker tensorboard", "tracker wandb", "tracker trackio")} <= {
        "ok",
        "missing",
    }
    assert lines["processor"] == lines["linear layers"] == lines["matrix rate"] == "ok"
    expected = "ok" if importlib.util.find_spec("tensorboardX") else "missing"
    assert lines["tracker tensorboard"] == expected


def test_a_machine_that_lacks_everything(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No torch, no packages, no Java: every line says so, what every run needs decides the status, nothing
    raises.
    """
    monkeypatch.setenv("COLUMNS", "400")  # wide enough for the instruction sets of any processor
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    for name in (
        "torch",
        "transformers",
        "onnxruntime",
        "outrider.engines.local.model",
        "outrider.tools.python.tool",
    ):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert examine() == 1
    text = capsys.readouterr().out
    assert "MISSING" in text and "pip install torch" in text
    assert "no 'java' on PATH" in text and "pip install 'outrider[wandb]'" in text
    assert text.count("missing") + text.count("MISSING") >= 9


def test_the_execution_path_of_a_model_and_its_reason(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    assert examine_model(str(save_tiny_model(tmp_path))) == 0
    told = capsys.readouterr().out
    assert "runs packed; contexts of up to 512 tokens" in told and "no place for calls" in told
    [lfm2] = [one for one in ARCHITECTURES if one.title == "LFM2"]
    lfm2.save(tmp_path / "other")
    assert examine_model(str(tmp_path / "other")) == 0
    told = capsys.readouterr().out
    assert "runs unpacked" in told and "because it has layers beside attention that carry state" in told
    assert examine_model(str(tmp_path / "nothing")) == 1
    assert "MISSING" in capsys.readouterr().out


def test_the_matrix_rate_estimates_the_time_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the rates that it was measured at: 5 min 2 s, and 8 min 42 s on a processor of the slow kind."""
    threads = torch.get_num_threads()
    for rate, minutes in ((0.266, 5), (0.122, 9)):
        monkeypatch.setattr("outrider.engines.local.model.product_rate", lambda *_, rate=rate, **__: rate)
        told = processor.matrix_rate()
        assert told.startswith(f"{rate:.3f} TFLOP/s") and f"about {minutes} minutes" in told
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("packs", [True, False])
def test_implementations_of_linear_layers(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "can_pack", lambda dtype: packs)
    way = "packed" if packs else "plain"
    assert f"float32 {way}" in processor.kernels() and f"bfloat16 {way}" in processor.kernels()
    if not packs:
        assert 'model.precision = "auto" selects float32' in processor.kernels()


def test_the_recipe_loads_and_every_commented_setting_exists(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    assert write_recipe(file) == 0
    settings = load_settings(RunSettings, file=file)
    assert settings.algorithm.type == "grpo" and settings.environment.type == "factbook"
    text = file.read_text()
    # the sections in comments load in place of those above them
    own_tasks = uncommented(text, "environment", before="[algorithm]")
    rapo = uncommented(text, "algorithm", before="[rollout]")
    demonstrations = text.replace("# demonstrations", "demonstrations")
    for changed in (own_tasks, rapo, demonstrations):
        assert changed != text
    other = tmp_path / "other.toml"
    other.write_text(own_tasks)
    assert load_settings(RunSettings, file=other).environment.type == "tools"
    other.write_text(demonstrations)
    assert load_settings(RunSettings, file=other).cold_start.demonstrations == "chats.jsonl"
    other.write_text(rapo.replace("# path", "path"))
    settings = load_settings(RunSettings, file=other)
    assert isinstance(settings.algorithm, RapoSettings) and settings.buffer.path == "steps.sqlite"
    retrieval = settings.algorithm.retrieval
    assert (retrieval.schedule, retrieval.final_probability, retrieval.min_similarity) == ("linear", 0, 0.99)


def uncommented(text: str, section: str, *, before: str) -> str:
    """Replace a section with the one in comments below it."""
    head, _, rest = text.partition(f"[{section}]\n")
    block = rest[rest.index(f"# [{section}]") : rest.index(f"\n{before}")]
    return head + re.sub("^# ", "", block, flags=re.MULTILINE) + rest[rest.index(f"\n{before}") :]


def test_a_recipe_is_never_overwritten(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "r.toml"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="not overwritten"):
        write_recipe(file)
    with pytest.raises(ConfigError, match="cannot write"):
        write_recipe(tmp_path / "no" / "such" / "folder.toml")
    assert file.read_text() == "mine" and main(["init", str(file)]) == 2
    assert main(["init", str(tmp_path / "new.toml")]) == 0
    assert tomllib.loads((tmp_path / "new.toml").read_text())["seed"] == 0


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("glm4", ["answers as user messages: ok", "results inside the answer: ok"]),
        ("phi3", ["answers as user messages: ok", "results of native calls: refused: the chat template of"]),
        ("command-r", ["tool_use renders conversations with tools, default renders others"]),
    ],
)
def test_the_chat_template_of_a_model_is_checked(
    name: str, lines: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "900")
    assert examine_model(str(save_model(name, tmp_path / "model"))) == 0
    told = capsys.readouterr().out
    assert all(line in told for line in lines), told
