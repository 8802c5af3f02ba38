"""A run can be killed at any instant and continued to the same bits, through the command line.

The reference is the same run, never interrupted. What may differ is only what the clock or the machine
decides. The last part of the killed run of "rapo" has a process of its own, with a seed of its own for
hashes; the others are children of one that has done the imports, whose seed is another one.
"""

import functools
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from tests.training.forked import ForkedOutrider, forked_outrider
from tests.training.tool_run import outrider
from tests.training.whole_runs import NUM_STEPS, command, differences, metrics, write_data


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def whole(root: Path) -> Callable[[str], Path]:
    """The uninterrupted run of a case, made once."""
    made: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in made:
            made[case] = root / f"whole-{case}"
            finished = forked_outrider(*command(root, made[case], case))
            assert finished.returncode == 0, finished.stderr
        return made[case]

    return make


def _assert_same(one: Path, other: Path) -> None:
    """Weights, optimiser, metrics, traces and evaluations."""
    assert differences(one, other) == []


def _kill_after(process: ForkedOutrider, run: Path, delay: float) -> None:
    """SIGKILL ``delay`` seconds after training has begun to write metrics; a negative delay: inside a
    checkpoint.
    """
    size = (run / "metrics.jsonl").stat().st_size if (run / "metrics.jsonl").exists() else 0
    patience = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < patience:
        if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size != size:
            break
        time.sleep(0.002)
    if delay >= 0:
        time.sleep(delay)
    while delay < 0 and process.poll() is None and not list((run / "checkpoints").glob(".step-*.partial")):
        pass
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("case", "delays"),
    [
        ("rapo", (-1.0, 0.3)),
        pytest.param("evolve", (-1.0, 0.6), marks=pytest.mark.slow),
        pytest.param("rollout_replay", (0.4, -1.0), marks=pytest.mark.slow),
        pytest.param("combined", (-1.0, 0.4), marks=pytest.mark.long),
        pytest.param("agent", (0.4, -1.0), marks=pytest.mark.long),
        pytest.param("rnd", (-1.0, 0.4), marks=pytest.mark.slow),
        # No state of their own beside what the cases above have.
        pytest.param("combined_house", (-1.0, 0.4), marks=pytest.mark.slow),
        pytest.param("grpo", (0.4, -1.0), marks=pytest.mark.slow),
        pytest.param("empo2", (-1.0, 0.5, 0.3), marks=pytest.mark.slow),
        pytest.param("dapo", (0.4, -1.0, 0.3), marks=pytest.mark.slow),
        pytest.param("luffy", (0.4, -1.0), marks=pytest.mark.slow),
        pytest.param("tree_grpo", (-1.0, 0.4), marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_in_the_same_bits(
    case: str, delays: tuple[float, ...], root: Path, whole: Callable[[str], Path]
) -> None:
    run = root / f"killed-{case}"
    draws = random.Random(f"kills of {case}")
    # on a busy machine a kill may come after the end: then again, with shorter delays
    for attempt in range(6):
        shutil.rmtree(run, ignore_errors=True)
        num_killed = 0
        for number, delay in enumerate(delays):
            arguments = (
                ["train", "--resume", run, "--progress", "plain"] if number else command(root, run, case)
            )
            process = ForkedOutrider(*arguments)
            _kill_after(process, run, delay * draws.uniform(0.5, 1.5) / 2**attempt)
            num_killed += process.returncode == -signal.SIGKILL
        if num_killed >= 2:
            break
    assert num_killed >= 2, "the kills came too late to test anything"
    program = outrider if case == "rapo" else forked_outrider
    finished = program("train", "--resume", run, "--progress", "plain")
    assert finished.returncode == 0, finished.stderr
    _assert_same(whole(case), run)


def test_what_these_runs_exercise(root: Path, whole: Callable[[str], Path]) -> None:
    """Retrievals, tool calls, rewards that differ, a buffer that grew: otherwise the comparison above says
    little.
    """
    train = [record for record in metrics(whole("rapo")) if record["kind"] == "train"]
    assert sum(record["retrieval/num_inserted"] for record in train) >= 3
    assert sum(record["rollout/num_tool_calls"] for record in train) >= 3
    assert sum(record["group/fraction_without_signal"] < 1 for record in train) >= 5
    assert len((whole("rapo") / "evaluations.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("case", "metric", "least"),
    [
        pytest.param("evolve", "buffer/num_added", 2, marks=pytest.mark.slow),
        pytest.param("rollout_replay", "replay/num_groups", 5, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_stores_rollouts_uses_them(
    case: str, metric: str, least: int, whole: Callable[[str], Path]
) -> None:
    assert sum(record[metric] for record in metrics(whole(case)) if record["kind"] == "train") >= least


@pytest.mark.slow
def test_the_run_that_samples_dynamically_takes_more_tasks(whole: Callable[[str], Path]) -> None:
    sampled = [record for record in metrics(whole("dapo")) if record["kind"] == "train"]
    assert sum(record["group/num_extra_batches"] for record in sampled) >= 2
    cursor = json.loads((whole("dapo") / "checkpoints" / f"step-{NUM_STEPS:06d}" / "state.json").read_text())[
        "task_cursor"
    ]
    assert cursor > 2 * NUM_STEPS  # no longer the step's number times its tasks


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("combined", marks=pytest.mark.long),
        pytest.param("combined_house", marks=pytest.mark.slow),
    ],
)
def test_the_run_of_three_methods_has_all_three(root: Path, whole: Callable[[str], Path], case: str) -> None:
    train = [record for record in metrics(whole(case)) if record["kind"] == "train"]
    for name in ("retrieval/num_inserted", "branch/num_forks", "tips/num_shown"):
        assert sum(record[name] for record in train) >= 2, name


@pytest.mark.long
def test_the_run_of_a_program_has_forks_and_several_samples(whole: Callable[[str], Path]) -> None:
    train = [record for record in metrics(whole("agent")) if record["kind"] == "train"]
    assert sum(record["branch/num_forks"] for record in train) >= 2
    assert all(record["rollout/num_restarts"] >= 8 for record in train)
    assert sum(record["group/fraction_without_signal"] < 1 for record in train) >= 5


@pytest.mark.slow
def test_the_run_with_tips_shows_some_and_has_all_modes(root: Path, whole: Callable[[str], Path]) -> None:
    """Also after the first steps: what a restored memory holds must matter for the comparison above."""
    train = [record for record in metrics(whole("empo2")) if record["kind"] == "train"]
    for half in (train[: NUM_STEPS // 2], train[NUM_STEPS // 2 :]):
        assert sum(record["tips/num_shown"] for record in half) > 0
        for mode in ("plain", "tips_on", "tips_off"):
            assert sum(record[f"tips/num_groups_{mode}"] for record in half) > 0
    assert sum(record.get("tips/num_off_tokens", 0) for record in train) > 0
    assert (
        train[-1]["tips/state_visits"] > train[0]["tips/state_visits"] and train[-1]["tips/memory_size"] > 0
    )


@pytest.mark.slow
def test_the_run_with_a_predictor_learns_its_states(root: Path, whole: Callable[[str], Path]) -> None:
    """What a restored predictor holds must matter for the comparison above."""
    train = [record for record in metrics(whole("rnd")) if record["kind"] == "train"]
    assert train[-1]["tips/novelty_error"] < 0.7 * train[0]["tips/novelty_error"]
    assert len({record["tips/intrinsic_mean"] for record in train}) == len(train)


@pytest.mark.slow
def test_an_evolved_buffer_has_the_same_contents(root: Path, whole: Callable[[str], Path]) -> None:
    if not (root / "killed-evolve" / "buffer.sqlite").exists():
        pytest.skip("needs the killed run of the case evolve")
    dumps = []
    for name in (whole("evolve").name, "killed-evolve"):
        with StepTraceBuffer(root / name / "buffer.sqlite", load_embedder("hash"), mode="read") as buffer:
            found = {
                f"self/{step}/tasks-{task}/{rollout}"
                for step in range(11)
                for task in range(6)
                for rollout in range(4)
            }
            dumps.append((buffer.revision, buffer.stats(), [buffer.trajectory(one) for one in sorted(found)]))
    assert dumps[0] == dumps[1]
    assert any(dumps[0][2])


def test_sigterm_writes_a_checkpoint_and_exits_cleanly(root: Path, whole: Callable[[str], Path]) -> None:
    run = root / "terminated"
    process = ForkedOutrider(*command(root, run, "rapo"), "train.checkpoint_every=100")
    patience = time.monotonic() + 240
    while not (run / "traces" / "step-000002.parquet").exists() and time.monotonic() < patience:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    told = [line for line in (stdout + stderr).splitlines() if "stopped on request" in line]
    assert len(told) == 1 and f"--resume {run}" in told[0]
    newest = max(int(path.name.split("-")[1]) for path in (run / "checkpoints").iterdir())
    assert 2 <= newest < NUM_STEPS  # not a multiple of checkpoint_every: the signal wrote it
    assert forked_outrider("train", "--resume", run).returncode == 0
    _assert_same(whole("rapo"), run)


def test_sigterm_in_the_first_evaluation_gives_it_up_and_the_run_starts_again(
    root: Path, whole: Callable[[str], Path]
) -> None:
    run = root / "terminated-early"
    process = ForkedOutrider(*command(root, run, "rapo"))
    patience = time.monotonic() + 240
    while "evaluation before training" not in process.stdout_so_far() and time.monotonic() < patience:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert "nothing was trained yet" in stdout + stderr or "the checkpoint of step" in stdout + stderr
    assert forked_outrider("train", "--resume", run).returncode == 0
    _assert_same(whole("rapo"), run)


def test_a_stop_loses_no_evaluation_between_steps(root: Path) -> None:
    run = root / "terminated-evaluations"
    process = ForkedOutrider(*command(root, run, "rapo"), "evaluation.every=1", "train.num_steps=4")
    patience = time.monotonic() + 240
    while not (run / "traces" / "step-000002.parquet").exists() and time.monotonic() < patience:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)  # in the second step's record, its evaluation or the third step
    process.communicate(timeout=240)
    assert forked_outrider("train", "--resume", run).returncode == 0
    labels = [json.loads(line)["label"] for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert labels == ["before training", "step 1", "step 2", "step 3", "after RAPO"]


def test_a_finished_run_says_so_and_changes_nothing(root: Path, whole: Callable[[str], Path]) -> None:
    run = root / "finished"
    shutil.copytree(whole("rapo"), run)
    before = {
        path: path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name != "report.html"
    }
    finished = forked_outrider("train", "--resume", run, "--progress", "plain")
    assert finished.returncode == 0, finished.stderr
    assert f"this run is finished: {NUM_STEPS} of {NUM_STEPS} steps" in finished.stdout + finished.stderr
    assert before == {path: path.read_bytes() for path in before}
    assert {path for path in run.rglob("*") if path.is_file()} == {*before, run / "report.html"}


def _truncate_weights(checkpoint: Path) -> None:
    path = checkpoint / "masters.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def _flip_a_bit(checkpoint: Path) -> None:
    """In the last value: safetensors reads it without a word."""
    path = checkpoint / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _remove_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


@pytest.mark.parametrize("damage", [_truncate_weights, _flip_a_bit, _remove_state])
def test_a_damaged_checkpoint_gives_way_to_an_older_one_loudly(
    damage: Callable[[Path], None], root: Path, whole: Callable[[str], Path]
) -> None:
    run = root / f"damaged{damage.__name__}"
    shutil.copytree(whole("rapo"), run)
    damage(run / "checkpoints" / f"step-{NUM_STEPS:06d}")
    finished = forked_outrider("train", "--resume", run, "--progress", "plain")
    assert finished.returncode == 0, finished.stderr
    told = finished.stdout + finished.stderr
    assert "DAMAGED CHECKPOINT" in told and f"continuing from step {NUM_STEPS - 1}" in told
    _assert_same(whole("rapo"), run)


def test_only_damaged_checkpoints_are_one_clear_line(root: Path, whole: Callable[[str], Path]) -> None:
    run = root / "all-damaged"
    shutil.copytree(whole("rapo"), run)
    for checkpoint in (run / "checkpoints").iterdir():
        _truncate_weights(checkpoint)
    before = (run / "metrics.jsonl").read_bytes()
    failed = forked_outrider("train", "--resume", run, "--progress", "none")
    assert failed.returncode == 1
    assert len(failed.stderr.splitlines()) == 1 and "is damaged" in failed.stderr
    assert (run / "metrics.jsonl").read_bytes() == before  # and nothing started over


def _limit_files(limit: int, _: Path) -> None:
    """In the child."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def test_a_full_disk_leaves_the_last_checkpoint_readable(root: Path, whole: Callable[[str], Path]) -> None:
    """A limit on the size of files stands for the disk: the small files still fit, the weights do not."""
    run = root / "full-disk"
    shutil.copytree(whole("rapo"), run)
    shutil.rmtree(run / "checkpoints" / f"step-{NUM_STEPS:06d}")
    weights = run / "checkpoints" / f"step-{NUM_STEPS - 1:06d}" / "masters.safetensors"
    before, limit = weights.read_bytes(), weights.stat().st_size - 1
    assert max(path.stat().st_size for path in [run / "metrics.jsonl", *(run / "traces").iterdir()]) < limit
    process = ForkedOutrider(
        "train", "--resume", run, "--progress", "none", prepare=functools.partial(_limit_files, limit)
    )
    _, stderr = process.communicate()
    assert process.returncode == 1
    assert len(stderr.splitlines()) == 1 and "cannot write checkpoint" in stderr
    assert weights.read_bytes() == before and not list((run / "checkpoints").glob(".*"))
    assert forked_outrider("train", "--resume", run).returncode == 0
    _assert_same(whole("rapo"), run)
