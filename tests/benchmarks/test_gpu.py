"""``make gpu`` on a CPU: its stages with tiny shapes, budgets that are kept, rows for what is missing."""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.figure_records import render_all
from benchmarks.gpu_contracts import compared, contracts
from benchmarks.gpu_limits import Limits, step_bytes, update_operations
from benchmarks.gpu_models import described, make_model
from benchmarks.gpu_record import Device, write_page, write_record
from benchmarks.gpu_rows import Row, RowFile
from benchmarks.gpu_shapes import KNOWN
from benchmarks.gpu_speed import generation, updates
from benchmarks.speed_update import Shape, batches

from benchmarks import gpu
from outrider.engines.base import FinishReason, Generation
from outrider.planning.shape import shape_from_config

ROOT = Path(__file__).parents[2]
NO_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
MARKED = "<!-- figures: gpu -->\n\n<!-- /figures -->\n"


def given(tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "gpu.md").write_text(MARKED, encoding="utf-8")
    files = ["--out", str(tmp_path / "out"), "--record", str(tmp_path / "records" / "gpu.json")]
    return ["--device", "cpu", "--shapes", "tiny", *files, "--page", str(tmp_path / "gpu.md"), *more]


@pytest.mark.slow
@pytest.mark.timeout(5500)
def test_every_stage_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes may be slow here: their bounds are tested below."""
    stages = [replace(one, share=1200.0) for one in gpu.plan_stages(["tiny"])]
    monkeypatch.setattr(gpu, "plan_stages", lambda shapes: stages)
    monkeypatch.chdir(ROOT)
    assert gpu.main(given(tmp_path, "--minutes", "90")) == 0
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    for told in (
        "square product", "contract, local engine, bfloat16 | holds", "same seed twice | same bits",
        "update twice, master weights | same bits", "after 1 of 2 steps, master weights | same bits",
        "of the bandwidth limit", "of the matrix rate", "peak memory of an update", "demo: steps",
    ):  # fmt: skip
        assert told in page, told


@pytest.mark.long
def test_the_rows_of_a_stage_are_in_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage in its own process, and what was measured with which versions."""
    monkeypatch.chdir(ROOT)
    assert gpu.main(given(tmp_path, "--minutes", "5", "--only", "limits")) == 0
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert page.count("copy, read and written") == page.count("| versions | ") == 1
    assert f"torch {torch.__version__}" in page


def test_a_missing_gpu_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("no GPU to measure: ") and told.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_python_without_packages_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the site's packages, as a bare machine's; nothing is imported before they are looked for."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "benchmarks.gpu"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "lacks torch, transformers, numpy" in done.stderr and done.stderr.count("\n") == 1
    monkeypatch.setattr(gpu, "_PYTHON", (99, 1))
    assert "needs Python 99.1" in (gpu.missing("cpu") or "")


def stage(
    monkeypatch: pytest.MonkeyPatch, folder: Path, program: str, *, left: float
) -> tuple[list[Row], bool]:
    """A stage whose process is a program of ours."""
    folder.mkdir(exist_ok=True)
    write = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom benchmarks.gpu_rows import RowFile\n"
    write += f"from pathlib import Path\nrows = RowFile(Path({str(folder / 'update-tiny.jsonl')!r}))\n"
    run = gpu._run
    monkeypatch.setattr(
        gpu, "_run", lambda command, log, limit: run([command[0], "-c", write + program], log, limit)
    )
    settings = argparse.Namespace(device="cpu", vllm=None, repeats=1)
    asked = gpu.Stage(name="update", shape="tiny", share=300.0, least=1.0)
    return gpu.run_stage(asked, settings, folder, time.monotonic() + left)


@pytest.mark.long
def test_a_stage_over_its_limit_is_stopped_and_keeps_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With its own children, which hold the device too."""
    child = (
        "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    )
    program = f"{child}rows.add('one', '1')\nimport time\ntime.sleep(600)"
    began = time.monotonic()
    rows, is_whole = stage(monkeypatch, tmp_path, program, left=12.0)
    assert time.monotonic() - began < 120
    assert [row.what for row in rows] == ["one", "update of tiny"] and not is_whole
    assert rows[1].measured.startswith("stopped: not done after 1")


def test_a_failed_stage_reports_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows, is_whole = stage(
        monkeypatch, tmp_path, "rows.add('one', '1'); raise SystemExit('no room')", left=200.0
    )
    assert [row.measured for row in rows] == ["1", "failed: no room"] and not is_whole


def test_a_stage_without_time_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows, is_whole = stage(monkeypatch, tmp_path, "raise SystemExit", left=0.5)
    assert [row.measured for row in rows] == ["skipped: 0 s left, it wants 1"] and not is_whole


def test_the_stages_fit_their_budget() -> None:
    """A share is a bound, and the time that a stage leaves is the others'; what has to hold comes first."""
    stages = gpu.plan_stages(["demo", "1.5B", "7B"])
    assert sum(one.least for one in stages) < 25 * 60 / 2
    assert [one.name for one in stages[:4]] == ["limits", "contracts", "determinism", "demo"]
    assert sum(one.share for one in stages[:4]) < 15 * 60


def test_a_torn_line_of_a_stopped_stage_is_ignored(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "rows.jsonl")
    rows.add("whole", "1")
    with rows.path.open("a", encoding="utf-8") as out:
        out.write('{"what": "bro')
    assert rows.read() == [Row(what="whole", measured="1")]


def test_other_devices_and_days_stay_in_the_record(tmp_path: Path) -> None:
    record = tmp_path / "gpu.json"
    for name, date, value in (("A", "1", "old"), ("B", "1", "b"), ("A", "2", "later"), ("A", "1", "new")):
        write_record(record, Device(name=name, date=date, versions="v"), [Row(what="x", measured=value)])
    rows = json.loads(record.read_text())["rows"]
    assert [row[3] for row in rows if row[2] == "x"] == ["b", "later", "new"]
    page = tmp_path / "page.md"
    page.write_text(MARKED, encoding="utf-8")
    write_page(page, record)
    assert render_all(tmp_path)["gpu"] in page.read_text(encoding="utf-8")


def test_models_have_the_shape_of_their_config() -> None:
    for name, known in KNOWN.items():
        assert described(name)["vocab_size"] > 40_000, known
    made = make_model("tiny", device="cpu", dtype=torch.float32)
    assert sum(one.numel() for one in made.language_model.model.parameters()) == made.shape.num_parameters
    with torch.device("meta"):  # nothing of it is on the CPU
        far = make_model("7B", device="meta", dtype=torch.bfloat16)
    tensors = [*far.language_model.model.parameters(), *far.language_model.model.buffers()]
    assert {one.device.type for one in tensors} == {"meta"}
    assert sum(one.numel() for one in far.language_model.model.parameters()) == far.shape.num_parameters


def test_operations_agree_with_the_counter_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the layers' products and the head; what torch counts of attention depends on the kernel, and it does
    not count those of oneDNN.
    """
    from torch.utils.flop_counter import FlopCounterMode

    from outrider.engines.local import cpu_kernels
    from outrider.training.policy import Policy
    from outrider.training.settings import OptimizerSettings

    monkeypatch.setattr(cpu_kernels, "prefers_onednn", lambda: False)
    made = make_model("tiny", device="cpu", dtype=torch.float32)
    policy = Policy(made.language_model, OptimizerSettings())
    [batch] = batches(Shape(rollouts=1, shared=0, own=40, new=24))
    counter = FlopCounterMode(display=False)
    with counter:
        (-policy.score(batch).logprobs_T.mean()).backward()
    ours = update_operations(made.shape, batch, trains_all=True)
    norms = 6 * batch.num_tokens * made.shape.num_layers * 2 * made.shape.width  # no product
    pairs = 12 * made.shape.num_layers * made.shape.attention_width * 64 * 65 // 2
    kernels = sum(
        count for name, count in counter.get_flop_counts()["Global"].items() if "attention" in str(name)
    )
    assert counter.get_total_flops() - kernels == pytest.approx(ours - norms - pairs, rel=0.02)


def test_a_step_reads_every_weight_but_an_untied_embedding() -> None:
    tied, untied = (shape_from_config(described(name), name=name) for name in ("1.5B", "7B"))
    assert step_bytes(tied, rows=0, context=0, value_bytes=2) == 2 * tied.num_parameters
    head_less = untied.num_parameters - untied.vocabulary * untied.width
    assert step_bytes(untied, rows=0, context=0, value_bytes=2) == 2 * head_less
    kept = 2 * 2 * tied.num_layers * tied.kv_width
    assert step_bytes(tied, rows=3, context=5, value_bytes=2) - 2 * tied.num_parameters == 15 * kept


@NO_VLLM
def test_contracts_and_generation_on_a_cpu(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "rows.jsonl")
    contracts("tiny", "cpu", tmp_path, rows)
    generation("tiny", "cpu", Limits(copy=1e9, product=1e12), None, rows, repeats=1)
    told = {row.what: row.measured for row in rows.read()}
    assert told["contract, local engine, float32"] == told["contract, local engine, bfloat16"] == "holds"
    assert told["tiny: vLLM"].startswith("skipped") and told["contract, vLLM engine"].startswith("skipped")
    assert told["tiny: 2 prompts of 8 x 2, 4 new, new tokens/s"].startswith("generate ")
    assert len([what for what in told if "a decoding step" in what]) == 2


@NO_VLLM
def test_a_vllm_process_that_ends_is_a_row(tmp_path: Path) -> None:
    """A Python that has none: its process ends at once."""
    rows = RowFile(tmp_path / "rows.jsonl")
    generation("tiny", "cpu", Limits(copy=1e9, product=1e12), sys.executable, rows, repeats=1)
    assert rows.read()[-1].measured.startswith("failed: vLLM's process ended")


def test_a_model_that_does_not_fit_trains_adapters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import gpu_speed

    monkeypatch.setattr(gpu_speed, "free_memory", lambda device: 1.0)
    rows = RowFile(tmp_path / "rows.jsonl")
    updates("tiny", "cpu", Limits(copy=1e9, product=1e12), rows, repeats=1)
    told = {row.what: row for row in rows.read()}
    assert (
        told["tiny: peak memory of an update, adapters of rank 16"].beside == "plan does not count adapters"
    )
    assert "do not fit" in told["tiny: padded update"].measured
    monkeypatch.setattr(gpu_speed.importlib.util, "find_spec", lambda name: None)
    updates("tiny", "cpu", Limits(copy=1e9, product=1e12), rows, repeats=1)
    assert "peft is not installed" in rows.read()[-1].measured


def test_sequences_are_compared_up_to_their_first_different_token() -> None:
    def one(ids: tuple[int, ...], logprobs: tuple[float, ...]) -> Generation:
        return Generation(
            request_id="", token_ids=ids, logprobs=logprobs, entropies=(0.0,) * len(ids),
            finish_reason=FinishReason.LENGTH, weight_version=0,
        )  # fmt: skip

    ours = one((1, 2, 3), (-1.0, -2.0, -3.0))
    assert compared([ours], [ours]) == "same bits"
    other = one((1, 2, 4), (-1.5, -2.0, -9.0))
    assert compared([ours, ours], [ours, other]) == (
        "1 of 2 sequences differ; log-probs by up to 5.0e-01 nats"
    )
