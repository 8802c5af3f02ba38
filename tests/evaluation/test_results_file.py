"""The results file: finished samples stay, faulted ones are pending, and a kill loses at most one line."""

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ConfigError, DataError
from outrider.evaluation.results import EvalTasksStore, SampleResult, summarise
from outrider.types import Outcome, Task

TASKS = [Task(key=key, question="q", answers=("a",)) for key in ("t-1", "t-0", "t-\u2028\u00e9")]
IDENTITY = {"panel_hash": "ab", "model": "m", "temperature": 0.0, "ks": [1, 2]}


def good(key: str, sample: int, score: float = 1.0) -> SampleResult:
    return SampleResult(
        task_key=key, sample=sample, outcome=Outcome.FINISHED, score=score, success=score == 1.0,
        prediction="\ud800 \u2028 x\ny", metrics={"em": score, "f1": 1 / 3}, num_tool_calls=2, num_tokens=9,
    )  # fmt: skip


def bad(key: str, sample: int) -> SampleResult:
    return SampleResult(task_key=key, sample=sample, outcome=Outcome.ENGINE_FAULT, detail="gone")


def opened(path: Path, **identity: object) -> EvalTasksStore:
    return EvalTasksStore.open(path, identity={**IDENTITY, **identity})  # type: ignore[dict-item]


def pending(store: EvalTasksStore, num_samples: int = 2) -> list[tuple[str, int]]:
    return [(task.key, sample) for task, sample in store.pending(TASKS, num_samples=num_samples)]


def test_missing_and_faulted_samples_are_pending_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    store = opened(path)
    assert pending(store) == [(task.key, sample) for task in TASKS for sample in range(2)]
    for result in (good("t-0", 0), bad("t-0", 1), good("t-1", 1, 0.0)):
        store.add(result)
    expected = [("t-1", 0), ("t-0", 1), ("t-\u2028\u00e9", 0), ("t-\u2028\u00e9", 1)]
    assert pending(store) == expected
    kept = store.results
    store.close()
    store.close()
    again = opened(path)
    assert again.results == kept == [good("t-0", 0), bad("t-0", 1), good("t-1", 1, 0.0)]
    assert pending(again) == expected
    again.add(good("t-0", 1))
    assert ("t-0", 1) not in pending(again) and summarise(again.results).faults == {}
    again.close()
    last = opened(path)
    assert last.results[1] == good("t-0", 1)  # the later result took the fault's place
    assert pending(last, num_samples=3)[:2] == [("t-1", 0), ("t-1", 2)]
    last.close()


def test_an_unjudged_answer_is_only_judged_again(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    waiting = replace(bad("t-0", 0), answered=Outcome.TRUNCATED_TOKENS, prediction="x", detail="judge: gone")
    store = opened(path)
    store.add(waiting)
    store.add(bad("t-0", 1))
    store.close()
    again = opened(path)
    assert again.unjudged == [waiting] and again.has("t-0", 1) and not again.has("t-1", 0)
    assert ("t-0", 0) not in pending(again) and ("t-0", 1) in pending(again)
    assert summarise(again.results).faults == {"engine_fault": 2}
    again.add(good("t-0", 0))
    assert again.unjudged == []
    again.close()


def test_a_finished_sample_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    store = opened(path)
    store.add(good("t-0", 0))
    for result in (good("t-0", 0, 0.0), bad("t-0", 0)):
        with pytest.raises(ValueError, match="t-0, sample 0 is finished"):
            store.add(result)
    store.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[-1].replace(b'"score": 1.0', b'"score": 0.5')]))
    again = opened(path)
    assert again.results == [good("t-0", 0)]
    again.close()


def test_a_kill_at_any_byte_loses_one_line_at_most(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    store = opened(path)
    results = [good("t-0", 0), bad("t-0", 1), good("t-1", 0)]
    ends = [path.stat().st_size]
    for result in results:
        store.add(result)
        ends.append(path.stat().st_size)
    store.close()
    whole = path.read_bytes()
    boundaries = {end + offset for end in (0, *ends) for offset in (-2, -1, 0, 1, 2)}
    for cut in sorted((boundaries | set(range(0, len(whole), 11))) & set(range(len(whole) + 1))):
        path.write_bytes(whole[:cut])
        torn = opened(path)
        survived = sum(end <= cut for end in ends[1:])
        assert torn.results == results[:survived]
        for result in results[survived:]:
            torn.add(result)
        torn.close()
        assert path.read_bytes() == whole


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    store = opened(path)
    store.add(good("t-0", 0))
    before = path.read_bytes()
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, bytes(data)[:30])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            store.add(good("t-1", 0))
    assert path.read_bytes() == before and ("t-1", 0) in pending(store)
    store.add(good("t-1", 0))
    store.close()
    again = opened(path)
    assert again.results == [good("t-0", 0), good("t-1", 0)]
    again.close()


def test_a_result_is_on_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path / "r.jsonl")
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    for sample in range(2):
        store.add(good("t-0", sample))
        assert sizes[-1] == store.path.stat().st_size and len(sizes) == sample + 1
    store.close()


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data)[:7]))
        store = opened(tmp_path / "r.jsonl")
        store.add(good("t-0", 0))
        store.close()
    again = opened(tmp_path / "r.jsonl")
    assert again.results == [good("t-0", 0)]
    again.close()


def test_another_identity_is_an_error_that_names_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    opened(path).close()
    with pytest.raises(
        ConfigError,
        match=r"panel_hash was 'ab' and is 'cd'; variant was None and is 'squad'; name another dir",
    ):
        opened(path, panel_hash="cd", variant="squad")
    opened(path).close()


def test_an_identity_that_is_not_json_is_an_error_before_writing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        opened(tmp_path / "r.jsonl", temperature=float("nan"))
    assert (tmp_path / "r.jsonl").read_bytes() == b""
    opened(tmp_path / "r.jsonl").close()


def test_two_processes_cannot_share_a_file(tmp_path: Path) -> None:
    store = opened(tmp_path / "r.jsonl")
    with pytest.raises(ConfigError, match="in use by another process"):
        opened(tmp_path / "r.jsonl")
    store.close()
    opened(tmp_path / "r.jsonl").close()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b"oops\n", r"r\.jsonl:3: malformed JSON"),
        (b"[1]\n", r"r\.jsonl:3: malformed JSON: expected an object, got list"),
        (b"{}\n", r"r\.jsonl:3: no result of a sample"),
        (
            b'{"task_key": "a", "sample": 0, "outcome": "finished"}\n',
            r"r\.jsonl:3: no result of a sample: .* contradict",
        ),
        (
            b'{"task_key": "a", "sample": 0, "outcome": "lost", "score": 1.0, "success": true}\n',
            r"r\.jsonl:3: .*'lost'",
        ),
        (b"\xff\n", r"r\.jsonl:3: malformed JSON"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: bytes, message: str) -> None:
    path = tmp_path / "r.jsonl"
    store = opened(path)
    store.add(good("t-0", 0))
    store.close()
    with path.open("ab") as stream:
        stream.write(damage)
    with pytest.raises(DataError, match=message):
        opened(path)


@pytest.mark.parametrize(
    "header", [b'{"a": 1}\n', b'{"format": "outrider panel 1"}\n', b'{"format": "other", "identity": {}}\n']
)
def test_a_file_of_another_kind_is_left_alone(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(header)
    with pytest.raises(DataError, match=r"r\.jsonl:1: no results of a panel"):
        opened(path)
    assert path.read_bytes() == header


def test_another_file_without_line_ends_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"dear diary")
    with pytest.raises(DataError, match=r"notes\.txt:1: no results of a panel"):
        opened(path)
    assert path.read_bytes() == b"dear diary"


def test_threads_add_whole_lines(tmp_path: Path) -> None:
    store = opened(tmp_path / "r.jsonl")
    threads = [
        threading.Thread(target=lambda start=start: [store.add(good("t-0", start * 5 + i)) for i in range(5)])
        for start in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    again = opened(tmp_path / "r.jsonl")
    assert [one.sample for one in again.results] == list(range(20))
    again.close()


@given(st.lists(st.tuples(st.sampled_from(["t-0", "t-1"]), st.integers(0, 2), st.booleans()), max_size=12))
def test_any_history_reads_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("store") / "r.jsonl"
    for key, sample, ok in history:
        store = opened(path)
        if (key, sample) in [(task.key, number) for task, number in store.pending(TASKS, num_samples=3)]:
            store.add(good(key, sample) if ok else bad(key, sample))
        store.close()
    expected = {
        (key, sample): any(ok for k, s, ok in history if (k, s) == (key, sample))
        for key, sample, _ in history
    }
    last = opened(path)
    assert {(one.task_key, one.sample): one.score is not None for one in last.results} == expected
    last.close()
