"""A run from another terminal: whatever its state, in words, and no text of it steers the terminal."""

import hashlib
import io
import json
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider import cli
from outrider.commands import watch as following
from outrider.errors import ConfigError
from outrider.files import FileLock
from outrider.training.run_dir import require_free
from outrider.viewer import summary as run_summary
from outrider.viewer.progress import PlainProgress, Progress
from outrider.viewer.run_reader import LIVE, NOTES, RecordedProgress, read_run
from outrider.viewer.summary import one_line_summary, read_snapshot, summary_lines
from tests.viewer.synthetic_run import write_run

ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\r\u202e"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", num_steps=12)


@contextmanager
def running(run: Path) -> Iterator[RecordedProgress]:
    with FileLock(run / "lock"):
        shown = RecordedProgress(Progress(), run)
        shown.stage("train", 40, done=12)
        yield shown


def wants(run: Path, steps: int) -> None:
    config = run / "config.toml"
    config.write_text(config.read_text() + f"[train]\nnum_steps = {steps}\n")


def once(run: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(["watch", str(run), "--once"]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_running_run_shows_stage_steps_and_notes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(run) as shown:
        shown.advance(12, generated=345)
        shown.note("ALARM: something in step 12")
        lines = once(run, capsys)
    assert lines[0] == f"{run}: running" and lines[1].startswith("train 12/40")
    assert [line.split("/")[0] for line in lines[2:7]] == [f"step {step:>1}" for step in range(8, 13)]
    assert lines[-1] == "> ALARM: something in step 12"


def test_a_run_that_is_silent_says_since_when(run: Path) -> None:
    with running(run):
        seen = read_snapshot(run, now=time.time() + 600)
    assert seen.status == "running" and "last heard of 10:00 ago" in seen.lines


def test_finished_stopped_and_killed_runs_are_distinguished(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(run):
        pass  # and its lock is free, without a word: a kill
    assert read_snapshot(run).status == "gone"
    assert "its process is gone" in (lines := once(run, capsys))[0] and "train --resume" in lines[0]
    with running(run) as shown:
        shown.close()
    assert read_snapshot(run).status == "stopped" and "train --resume" in once(run, capsys)[0]
    wants(run, 12)
    lines = once(run, capsys)
    assert lines[0] == f"{run}: finished"
    assert any(line.startswith("learned ") for line in lines) and f"outrider view {run}" in lines[-1]


def write_folder(run: Path, config: str, records: list[dict[str, object]], labels: tuple[str, ...]) -> Path:
    run.mkdir()
    (run / "config.toml").write_text('algorithm.type = "grpo"\nenvironment.type = "tools"\n' + config)
    for record in records:
        with (run / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"kind": "train", "reward/mean": 0.5} | record) + "\n")
    for label in labels:
        line = {"label": label, "split": "test", "num_tasks": 2, "step": 0, "temperature": 1.0}
        metric = {"score": {"value": 0.5, "ci_low": 0.1, "ci_high": 0.9}}
        with (run / "evaluations.jsonl").open("a") as stream:
            stream.write(json.dumps(line | {"panel_hash": "0", "metric": metric}) + "\n")
    return run


STEPS: list[dict[str, object]] = [
    {"step": 1, "tokens/policy_total": 40},
    {"step": 2, "tokens/policy_total": 80},
]
IMITATION = "train.num_steps = 0\ncold_start.num_examples = 4\n"


@pytest.mark.parametrize(
    ("config", "records", "labels", "status", "summary"),
    [
        ("train.num_steps = 2\n", STEPS, (), "finished", "grpo on tools, 2 of 2 steps"),
        ("train.num_steps = 3\n", STEPS, (), "stopped", "grpo on tools, 2 of 3 steps"),
        ("train.num_steps = 2\n", STEPS, ("before training",), "stopped", "grpo on tools, 2 of 2 steps"),
        (
            "train.num_steps = 2\nevaluation.at_start = false\n", STEPS, (), "stopped",
            "grpo on tools, 2 of 2 steps",
        ),
        (
            "train.num_steps = 99\ntrain.max_policy_tokens = 80\n", STEPS, (), "finished",
            "grpo on tools, 2 steps until the token budget was spent",
        ),
        (
            "train.num_steps = 99\ntrain.max_policy_tokens = 30\n", STEPS[:1], (), "finished",
            "grpo on tools, 1 step until the token budget was spent",
        ),
        ("train.num_steps = 99\ntrain.max_policy_tokens = 81\n", STEPS, (), "stopped", "grpo on tools"),
        ("train.num_steps = 9\n", [], (), "not started", "grpo on tools, 0 of 9 steps"),
        ("train.num_steps = 0\n", [], (), "not started", "evaluation on tools"),
        ("train.num_steps = 0\n", [], ("before training",), "finished", "evaluation on tools"),
        (IMITATION, [], (), "not started", "imitation on tools"),
        (IMITATION, [{"kind": "sft", "step": 1}], ("before training",), "stopped", "imitation on tools"),
        (IMITATION, [{"kind": "sft", "step": 1}], ("after cold start",), "finished", "imitation on tools"),
    ],
)  # fmt: skip
def test_a_run_is_finished_if_nothing_is_left_to_do(
    tmp_path: Path, config: str, records: list[dict[str, object]], labels: tuple[str, ...], status: str,
    summary: str, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = write_folder(tmp_path / "run", config, records, labels)
    assert read_snapshot(run).status == status
    assert one_line_summary(run).startswith(summary)
    [head, *_] = once(run, capsys)
    assert head.startswith(f"{run}: {status}")
    assert ("train --resume" in head) == (status != "finished")
    assert ("start with" in head) == (status == "not started")


@pytest.mark.parametrize(
    ("tasks", "status"), [(("",), "finished"), (("some",), "stopped"), (("", "some"), "stopped")]
)
@pytest.mark.parametrize("config", ["train.num_steps = 2\nevaluation.at_start = false\n", IMITATION])
def test_a_run_without_evaluation_tasks_is_finished_after_its_steps(
    tmp_path: Path, config: str, tasks: tuple[str, ...], status: str
) -> None:
    run = write_folder(tmp_path / "run", config, STEPS, ())
    (checkpoint := run / "checkpoints" / "step-000002").mkdir(parents=True)
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in tasks]
    names = ("held-out", "evaluation far")[: len(tasks)]
    state = {"tasks": {"train": "some", **dict(zip(names, digests, strict=True))}}
    (checkpoint / "state.json").write_text(json.dumps(state))
    assert read_snapshot(run).status == status


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_is_finished_after_its_last_evaluation_set(tmp_path: Path, steps: int) -> None:
    panels = 'evaluation.panels = [{ name = "near", split = "test" }, { name = "it\'s far" }]\n'
    config = f"train.num_steps = {steps}\n{panels}"
    run = write_folder(tmp_path / "run", config, STEPS[:steps], ("after", "after"))
    file = run / "evaluations.jsonl"
    line = json.loads(file.read_text().splitlines()[0]) | {"step": steps}
    near, far = (json.dumps(line | {"panel": name}) + "\n" for name in ("near", "it's far"))
    for text, status in ((near, "stopped"), (near + far, "finished"), (near + far + near, "stopped")):
        file.write_text(text)
        assert read_snapshot(run).status == status


@pytest.mark.parametrize(
    ("memory", "score", "status"),
    [("tips", "0.5", "stopped"), ("tips", "1.0", "stopped"), ("reflexion", "1.0", "finished")],
)
def test_an_adaptation_is_finished_after_its_trials_and_is_not_resumed(
    tmp_path: Path, memory: str, score: str, status: str
) -> None:
    config = f'train.num_steps = 0\nevaluation.num_trials = 2\nevaluation.memory = "{memory}"\n'
    run = write_folder(tmp_path / "run", config, [], ("trial 1",))
    file = run / "evaluations.jsonl"
    file.write_text(file.read_text().replace('"value": 0.5', f'"value": {score}'))
    assert read_snapshot(run).lines[0] == f"{run}: {status}"
    with pytest.raises(ConfigError, match=r"never overwritten$"):
        require_free(run)
    file.write_text(file.read_text() * 2)
    assert read_snapshot(run).status == "finished"


def test_the_log_and_watch_show_one_reward_of_a_step(run: Path) -> None:
    stream = io.StringIO()
    log = PlainProgress(stream=stream)
    log.stage("train", 12, unit="step")
    for record in read_run(run).records:
        if record["kind"] == "train":
            log.advance(record["step"], reward=record["reward/mean"])  # type: ignore[arg-type]
    rewards = re.compile(r"step +(\d+)/\S+ +reward +(\S+)")
    wants(run, 12)
    shown = rewards.findall("\n".join(read_snapshot(run).lines))
    assert len(shown) == 5 and shown == rewards.findall(stream.getvalue())[-5:]


@pytest.mark.parametrize("missing", [None, "starlette", "uvicorn"])
def test_the_advised_command_can_run_without_the_extra_view(
    run: Path, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_summary, "find_spec", lambda name: None if name == missing else name)
    advised = summary_lines(run)[-1].split()
    assert advised[-2:] == ["view" if missing is None else "report", str(run)]


def test_a_run_of_another_machine_says_which(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / LIVE).write_text(
        json.dumps({"host": platform.node() + "-2", "has_ended": False, "stage": "train"})
    )
    assert f"it ran on {platform.node()}-2" in once(run, capsys)[0]


def test_control_characters_of_a_run_are_not_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(run) as shown:
        shown.advance(12, reward=f"{ESCAPES}0.5", **{ESCAPES: 1})
        shown.note(f"ALARM: {ESCAPES}")
        text = "\n".join(once(run, capsys))
    text += "\n".join(once(run, capsys))
    assert "ALARM" in text and all(one.isprintable() for one in text.replace("\n", ""))


@pytest.mark.parametrize("live", ["", "[]", "null", '{"time": "x", "done": []}', '{"has_ended": 7}'])
def test_damaged_files_are_no_error(run: Path, live: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / LIVE).write_text(live)
    (run / NOTES).write_text('torn {"\nnull\n{"text": 3}\n')
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "reward/mean": "x"}\n{')
    assert once(run, capsys)
    with FileLock(run / "lock"):
        assert once(run, capsys)[0].endswith("running")


def test_it_follows_until_the_run_ends(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wants(run, 12)
    with running(run) as shown:
        todo = iter((lambda: None, lambda: shown.note("checkpoint"), shown.close))

        def sleep(seconds: float) -> None:
            act = next(todo, None)
            if act is None:
                (run / "lock").unlink()
            else:
                act()

        monkeypatch.setattr(following.time, "sleep", sleep)
        assert cli.main(["watch", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.count(": running") == 1 and out.count(": finished") == 1 and "learned " in out
    while_running = out.partition(": finished")[0].splitlines()
    assert len(set(while_running)) == len(while_running) and "> checkpoint" in while_running


def test_ctrl_c_ends_only_the_watching(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(following.time, "sleep", sleep)
    with running(run):
        assert cli.main(["watch", str(run)]) == 0
    assert "no longer watching" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", str(tmp_path)]) != 0
    assert "no run directory" in capsys.readouterr().err


def test_the_summary_has_scores_costs_and_alarms_within_80_columns(run: Path) -> None:
    with running(run) as shown:
        shown.note("ALARM: " + "long " * 40)
        shown.note("ALARM: every rollout of step 7 was lost")
    lines = summary_lines(run)
    text = "\n".join(lines)
    for part in (
        "after training",
        "58.0 % [54.0, 62.0]",
        "12 steps in 2:24",
        "48000 tokens written",
        "2 alarms, of 2 steps",
        "step 12: ALARM: long",
        "every rollout of step 7",
    ):
        assert part in text
    assert all(len(line) <= 80 for line in lines[:-1])


def test_a_summary_of_one_of_everything_has_no_plurals(tmp_path: Path) -> None:
    run = write_folder(tmp_path / "run", "train.num_steps = 1\n", [{"step": 1, "time/step": 2.0}], ())
    (run / "metrics.jsonl").open("a").write('{"kind": "eval", "step": 1, "time/evaluation": 3.0}\n')
    (run / NOTES).write_text(json.dumps({"step": 1, "text": "ALARM: no signal"}) + "\n")
    text = "\n".join(summary_lines(run))
    for part in ("1 step in", "1 evaluation in", "1 alarm, of 1 step; the last:"):
        assert part in text
    assert one_line_summary(run) == "grpo on tools, 1 of 1 step"
    (run / NOTES).write_text('{"step": null, "text": "ALARM: of the set-up"}\n' * 2)
    assert "1 alarm; the last:" in "\n".join(summary_lines(run))


def test_a_run_without_anything_has_a_summary(tmp_path: Path) -> None:
    assert "no evaluation was recorded" in summary_lines(tmp_path)[0]
