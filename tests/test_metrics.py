"""Metrics: declarations are the only names; the file survives kills and equals an unbroken run after a
resume.
"""

import json
import math
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import CheckpointError, DataError, OutriderError
from outrider.metrics import DECLARED, MetricsWriter, UndeclaredMetric, declared_metric
from outrider.metrics.registry import metrics_page

RAPO_SECTION_12 = {
    "retrieval rate": ["retrieval/rate"],
    "share of hybrid trajectories that retrieved": ["retrieval/share_hybrid_retrieved"],
    "mean Z": ["retrieval/z_mean"],
    "mean g": ["retrieval/g_mean"],
    "mean H_b, H_a": ["retrieval/entropy_before_mean", "retrieval/entropy_after_mean"],
    "share of g > 0": ["retrieval/share_g_positive"],
    "reward and length, on-policy against hybrid": [
        "retrieval/reward_on_policy", "retrieval/reward_hybrid", "retrieval/length_on_policy",
        "retrieval/length_hybrid",
    ],
    "retrieved-token share": ["retrieval/token_share"],
    "tool calls executed and saved": ["rollout/num_tool_calls", "rollout/num_tool_calls_saved"],
    "similarity of the retrieved key": ["retrieval/similarity_mean"],
    "buffer hits per source": ["retrieval/num_hits/gold_path"],
    "rollout diversity": ["rollout/diversity"],
}  # fmt: skip


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_declared_names_are_unique_well_formed_and_explained() -> None:
    names = [metric.name for metric in DECLARED]
    assert len(set(names)) == len(names)
    for metric in DECLARED:
        assert re.fullmatch(r"[a-z]+/[a-z_]+(/\{[a-z]+\})?", metric.name)
        assert all((metric.unit, metric.meaning, metric.healthy_range, metric.look_at))


def test_metrics_of_a_group_are_declared_together() -> None:
    page = metrics_page()
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert len(headings) == len(set(headings)) == len({metric.group for metric in DECLARED})
    assert page.count("\n| `") == len(DECLARED)


def test_the_metrics_page_is_generated() -> None:
    page = Path(__file__).parents[1] / "docs" / "metrics.md"
    assert page.read_text() == metrics_page(), "run: python -m outrider.metrics > docs/metrics.md"


@pytest.mark.parametrize("family", RAPO_SECTION_12)
def test_metrics_of_the_rapo_paper_are_declared(family: str) -> None:
    for name in RAPO_SECTION_12[family]:
        assert declared_metric(name).meaning


@pytest.mark.parametrize(
    "name",
    [
        "reward/meen",
        "reward",
        "",
        "retrieval/num_hits",
        "retrieval/num_hits/",
        "retrieval/num_hits/a/b",
        "retrieval/num_hits/{source}",
    ],
)
def test_an_undeclared_name_is_a_key_error_and_writes_nothing(tmp_path: Path, name: str) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(UndeclaredMetric, match="not declared") as caught:
        writer.write(1, "train", {"reward/mean": 1.0, name: 2.0})
    writer.close()
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, OutriderError)
    assert not str(caught.value).startswith('"')  # a KeyError would show the repr
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_non_finite_values_become_null_and_are_counted(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(
        3,
        "train",
        {
            "loss/policy": math.nan,
            "ratio/max": np.float32("inf"),
            "retrieval/g_mean": None,
            "reward/mean": np.float32(0.5),
        },
    )
    writer.close()
    assert lines(tmp_path / "metrics.jsonl") == [
        {
            "step": 3,
            "kind": "train",
            "loss/policy": None,
            "ratio/max": None,
            "retrieval/g_mean": None,
            "reward/mean": 0.5,
            "record/num_non_finite": 2,
        }
    ]


def test_counts_stay_integers_and_other_types_are_refused(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(1, "train", {"rollout/num": np.int64(8)})
    assert '"rollout/num": 8,' in (tmp_path / "metrics.jsonl").read_text()
    for value in ("8", True, np.zeros(2)):
        with pytest.raises(TypeError, match="rollout/num"):
            writer.write(2, "train", {"rollout/num": value})  # type: ignore[dict-item]
    writer.close()


def test_a_step_that_does_not_increase_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(1, "sft", {"sft/loss": 1.0})
    writer.write(1, "train", {"reward/mean": 1.0})
    writer.write(1, "eval", {"eval/score": 1.0})
    writer.write(1, "eval", {"eval/score": 2.0})  # several evaluations of one step are in order
    writer.close()
    writer = MetricsWriter(path)
    for kind in ("sft", "train"):
        with pytest.raises(ValueError, match="does not follow"):
            writer.write(1, kind, {})
    writer.close()


def test_a_torn_last_line_is_dropped_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(1, "train", {"reward/mean": 1.0})
    writer.write(2, "train", {"reward/mean": 2.0})
    writer.close()
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    for cut in range(second, len(whole)):  # a kill at any byte of the second line, its newline included
        path.write_bytes(whole[:cut])
        caplog.clear()
        writer = MetricsWriter(path)
        writer.close()
        assert path.read_bytes() == whole[:second]
        assert bool(caplog.records) == (cut > second)


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "kind": "train"}\n{"step": 2, "ki\n{"step": 3, "kind": "train"}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl line 2"):
        MetricsWriter(path)


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(1, "train", {"reward/mean": 1.0})
    before = path.read_bytes()
    real_write = os.write
    calls = iter([True, False])

    def write(fd: int, data: bytes) -> int:
        if next(calls):
            return real_write(fd, data[:7])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "write", write)
        writer.write(2, "train", {"reward/mean": 2.0})
    assert path.read_bytes() == before
    writer.write(2, "train", {"reward/mean": 2.0})  # space again: the same step may be written
    writer.close()
    assert [line["step"] for line in lines(path)] == [1, 2]


Event = tuple[int, str]


def schedule(num_sft: int, num_train: int, every: int) -> list[Event]:
    """Every line of an unbroken run in order: evaluation, cold start, evaluation, training with
    evaluations.
    """
    events: list[Event] = [(0, "eval"), *((step, "sft") for step in range(1, num_sft + 1)), (0, "eval")]
    for step in range(1, num_train + 1):
        events.append((step, "train"))
        if step % every == 0:
            events.append((step, "eval"))
    return events


def write(path: Path, events: list[Event]) -> None:
    writer = MetricsWriter(path)
    for step, kind in events:
        writer.write(step, kind, {"eval/score": float(step)})  # type: ignore[arg-type]
    writer.close()


@given(data=st.data(), num_sft=st.integers(0, 4), num_train=st.integers(0, 6), every=st.integers(1, 3))
def test_a_resumed_file_equals_that_of_an_uninterrupted_run(
    data: st.DataObject, num_sft: int, num_train: int, every: int
) -> None:
    events = schedule(num_sft, num_train, every)
    # A checkpoint follows a step's own evaluation; the cold start's last one precedes the evaluation after
    # it.
    checkpoints = [
        i for i, (step, kind) in enumerate(events)
        if kind == "sft" or (kind == "train" and step % every) or (kind == "eval" and step > 0)
    ]  # fmt: skip
    if not checkpoints:
        return
    at = data.draw(st.sampled_from(checkpoints))
    with tempfile.TemporaryDirectory() as folder:
        unbroken, broken = Path(folder, "a.jsonl"), Path(folder, "b.jsonl")
        write(unbroken, events)
        killed_at = data.draw(st.integers(at + 1, len(events)))
        write(broken, events[:killed_at])
        writer = MetricsWriter(broken)
        num_cut = writer.cut(at + 1)
        writer.close()
        assert num_cut == killed_at - at - 1
        write(broken, events[at + 1 :])
        assert broken.read_bytes() == unbroken.read_bytes()
        assert not list(Path(folder).glob("*.tmp"))


def test_cut_keeps_lines_and_refuses_a_short_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [(1, "train"), (2, "train")])
    at_checkpoint = path.read_bytes()
    writer = MetricsWriter(path)
    saved = writer.num_records
    # the evaluation of the checkpoint's own step, written after it
    writer.write(2, "eval", {"eval/score": 0.5})
    writer.write(3, "train", {})
    assert writer.cut(saved) == 2
    assert path.read_bytes() == at_checkpoint
    writer.write(3, "train", {"reward/mean": 1.0})  # the file is open for appending, and step 3 is free again
    with pytest.raises(CheckpointError, match="has 3 lines"):
        writer.cut(4)
    writer.close()


def test_metric_names_in_the_source_are_declared() -> None:
    groups = "|".join(sorted({metric.group for metric in DECLARED}))
    source = Path(__file__).parents[1] / "src" / "outrider"
    for folder in ("algorithms", "rollout", "train", "watch"):
        for path in sorted((source / folder).rglob("*.py")):
            for name in re.findall(rf'"((?:{groups})/[a-z_]{{2,}}(?:/[a-z_]+)?)"', path.read_text()):
                assert declared_metric(name), path
