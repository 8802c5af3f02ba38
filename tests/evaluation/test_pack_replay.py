"""A row of a pack played again: the same bits where nothing changed, one line and status 1 where it does not
agree.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.learning_toys import ARENAS, play, save_result

from benchmarks import learning
from outrider.cli import main
from outrider.errors import ConfigError, PackError
from outrider.evaluation.pack_replay import replay_row
from outrider.evaluation.packs import Verified, make_pack, verify
from outrider.training.policy import set_threads
from tests.evaluation.test_pack import changed_line, resealed
from tests.training.tool_run import write_tool_run

KEYS = {"model.name": "model", "environment.corpus": "corpus.jsonl", "environment.train.path": "tasks.jsonl",
        "environment.test.path": "tasks.jsonl", "buffer.path": "buffer.sqlite"}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainings of one step, the second from what the first had before its step, and a pack of both
    without weights.
    """
    root = tmp_path_factory.mktemp("replay")
    recipe = str(write_tool_run(root / "given"))
    short = ["train.num_steps=1", "evaluation.every=0", "evaluation.at_start=false", "--progress", "none"]
    assert main(["train", recipe, *short, "--run", str(root / "first")]) == 0
    start = f"model.initial_checkpoint={root / 'first' / 'checkpoints' / 'step-000000'}"
    assert (
        main(["train", recipe, *short, start, "algorithm.num_hybrid=0", "--run", str(root / "second")]) == 0
    )
    make_pack([root / "first", root / "second"], root / "pack")
    return root


def paths(root: Path) -> dict[str, Path]:
    return {key: root / "given" / name for key, name in KEYS.items()}


def test_a_run_is_retrained_with_its_start(
    root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = [f"{key}={path}" for key, path in paths(root).items()]
    arguments = [
        "verify",
        str(root / "pack"),
        *given,
        "--replay",
        "second",
        "--progress",
        "none",
        "--run",
        str(tmp_path / "kept"),
    ]
    assert main(arguments) == 0
    assert "0 tasks with another score: it agrees" in capsys.readouterr().out
    assert (
        json.loads((tmp_path / "kept/second/evaluations.jsonl").read_text().splitlines()[-1])["label"]
        == "after GRPO"
    )
    # its cold start was all that was needed
    assert not (tmp_path / "kept/first/checkpoints/step-000001").exists()


def test_a_row_that_does_not_agree_fails(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["cp", "-r", root / "pack", tmp_path / "pack"], check=True)
    verified = verify(resealed(tmp_path / "pack"))
    lines = tmp_path / "pack/runs/first/evaluations.jsonl"
    number = len(lines.read_text().splitlines()) - 1
    changed_line(
        lines, number, lambda line: line["metric"]["score"].update(value=0.5, ci_low=0.49, ci_high=0.51)
    )
    with pytest.raises(PackError, match="it does NOT agree"):
        replay_row(
            tmp_path / "pack",
            verified,
            "first",
            folder=tmp_path / "run",
            local_paths=paths(root),
            progress="none",
        )


def test_a_row_that_cannot_be_replayed_has_a_reason(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, says in (
        (["--replay", "third"], "no row 'third': there are first, second"),
        (["--replay", "first"], "it needs model, SHA-256"),
        ([], "files and tables are correct, but no row can be replayed here: first: it needs model, SHA-256"),
        ([f"model.name={root / 'given'}", "--replay", "first"], "is not the model of the run"),
    ):
        assert main(["verify", str(root / "pack"), "--progress", "none", *arguments]) == 1
        assert says in capsys.readouterr().err
    verified = verify(root / "pack")
    with pytest.raises(ConfigError, match="is not empty"):
        replay_row(root / "pack", verified, "first", folder=root, local_paths={}, progress="none")


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Verified]:
    """A pack of two short trainings on the lock."""
    root = tmp_path_factory.mktemp("toys")
    set_threads(1)
    lock = ARENAS[0]
    grpo = next(method for method in lock.methods() if method.key == "grpo")
    for seed in (0, 1):
        result = play(lock, grpo, seed=seed, max_policy_tokens=40)
        save_result(root, lock, grpo, seed, result, max_policy_tokens=40)
    make_pack([root / "toys"], root / "pack")
    return root / "pack", verify(root / "pack")


def test_a_toy_is_replayed_in_a_clone_only(
    toys: tuple[Path, Verified], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_process(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, learning.main(command[3:]), "", "")

    pack, verified = toys
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("outrider.evaluation.pack_replay.subprocess.run", in_process)
    assert replay_row(
        pack, verified, None, folder=tmp_path / "run", local_paths={}, progress="none"
    ).endswith("it agrees")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PackError, match="clone of Outrider's repository"):
        replay_row(pack, verified, "lock/grpo-1", folder=tmp_path / "other", local_paths={}, progress="none")


def test_a_command_in_a_pack_is_never_executed(
    toys: tuple[Path, Verified], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def instead(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 1, "", "stopped here")

    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("outrider.evaluation.pack_replay.subprocess.run", instead)
    with pytest.raises(PackError, match="stopped here"):
        replay_row(*toys, "lock/grpo-0", folder=tmp_path / "run", local_paths={}, progress="none")
    [command] = started
    assert command[:4] == [sys.executable, "-m", "benchmarks.learning", "toys"] and command[-2:] == [
        "--policy-tokens",
        "40",
    ]
