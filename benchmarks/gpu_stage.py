"""One stage of ``benchmarks.gpu`` in its own process, which can be stopped and frees the device.

python -m benchmarks.gpu_stage STAGE SHAPE --device cuda --folder FOLDER [--vllm PYTHON]
"""

import argparse
import json
from pathlib import Path

import torch

from benchmarks.gpu_contracts import contracts, determinism
from benchmarks.gpu_demo import demo
from benchmarks.gpu_limits import Limits, measure_limits
from benchmarks.gpu_rows import RowFile
from benchmarks.gpu_shapes import SHAPES, TINY
from benchmarks.gpu_speed import generation, updates
from outrider.training.policy import set_threads

LIMITS = "limits.json"


def measure(stage: str, shape: str, *, device: str, folder: Path, vllm: str | None, repeats: int) -> None:
    """Write the rows of a stage to ``folder``. The stage ``limits`` must run before those of speed."""
    set_threads(torch.get_num_threads(), device=device)
    rows = RowFile(folder / f"{stage}-{shape}.jsonl")
    place = folder / f"{stage}-{shape}"
    place.mkdir(parents=True, exist_ok=True)
    if stage == "limits":
        small = shape == TINY
        limits = measure_limits(
            device, torch.bfloat16, num_bytes=2**20 if small else 2**30, size=64 if small else 8192
        )
        (folder / LIMITS).write_text(json.dumps(limits.as_json()), encoding="utf-8")
        rows.add("copy, read and written", f"{limits.copy / 1e9:.0f} GB/s")
        rows.add("square product, bfloat16", f"{limits.product / 1e12:.1f} TFLOP/s")
    elif stage == "contracts":
        contracts(shape, device, place, rows)
    elif stage == "determinism":
        determinism(shape, device, place, rows)
    elif stage == "demo":
        demo(shape, device, place, rows)
    else:
        limits = Limits(**json.loads((folder / LIMITS).read_text(encoding="utf-8")))
        if stage == "generation":
            generation(shape, device, limits, vllm, rows, repeats=repeats)
        else:
            updates(shape, device, limits, rows, repeats=repeats)


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(description="One stage of benchmarks.gpu.")
    parser.add_argument(
        "stage", choices=("limits", "contracts", "determinism", "demo", "generation", "update")
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--vllm")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    measure(
        given.stage,
        given.shape,
        device=given.device,
        folder=given.folder,
        vllm=given.vllm,
        repeats=given.repeats,
    )


if __name__ == "__main__":
    main()
