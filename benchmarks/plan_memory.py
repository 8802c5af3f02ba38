"""Compares the memory of a trainer according to ``outrider plan`` with the measured peak of a process.

    python -m benchmarks.plan_memory [--quick]

Each row is a model of random weights in its own process: two updates over four groups of eight rollouts, in
several micro-batches, on a CPU with one thread. The peak is Linux's VmHWM minus the resident memory before
the model is loaded: interpreter, libraries, and the same two updates with a tiny model. The plan is its sum,
without the margin of 1.1 and the 2 GB of a GPU's context. Rows with two ranks have the larger of two
processes that communicate over gloo. malloc returns blocks of more than 64 KiB (MALLOC_MMAP_THRESHOLD_), so
that freed memory is not counted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.tiny import save_tiny_model, tiny_tokenizer

from outrider.planning.memory import Training, rank_bytes
from outrider.planning.shape import find_shape
from outrider.training.settings import LoraSettings

_LIMIT_S = 400.0
MODELS: dict[str, dict[str, Any]] = {
    "42M, tied": {
        "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True,
    },
    "60M, deep, own head": {
        "vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 18,
        "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One row."""

    model: str = "42M, tied"
    precision: str = "float32"
    checkpoint: bool = True
    reference: bool = False
    ranks: int = 1
    max_tokens: int = 1024
    lora_rank: int | None = None
    trained_layers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """``measured`` bytes above the baseline, ``planned`` without the margin."""

    job: Job
    measured: int
    planned: float

    @property
    def off(self) -> float:
        """Plan over measurement, less 1."""
        return self.planned / self.measured - 1


QUICK = (Job(), Job(precision="bfloat16"))
JOBS = (
    *(
        Job(precision=precision, checkpoint=checkpoint)
        for precision in ("float32", "bfloat16")
        for checkpoint in (True, False)
    ),
    *(Job(precision=precision, reference=True) for precision in ("float32", "bfloat16")),
    *(
        Job(model="60M, deep, own head", precision=precision, checkpoint=checkpoint)
        for precision in ("float32", "bfloat16")
        for checkpoint in (True, False)
    ),
    *(
        Job(model="60M, deep, own head", precision=precision, ranks=2, reference=reference)
        for precision in ("float32", "bfloat16")
        for reference in (False, True)
    ),
    *(
        Job(model=model, precision=precision, checkpoint=False, **part)
        for model, precision in (("42M, tied", "float32"), ("60M, deep, own head", "bfloat16"))
        for part in ({"lora_rank": 16}, {"trained_layers": 4})
    ),
    *(
        Job(model="60M, deep, own head", ranks=2, checkpoint=False, **part)
        for part in ({"lora_rank": 16}, {"trained_layers": 4})
    ),
)


def save_model(folder: Path, **shape: Any) -> Path:
    """A Llama of random weights with the tests' tokenizer."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(eos_token_id=1, bos_token_id=None, max_position_embeddings=2048, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def measure(job: Job, folder: Path, tiny: Path) -> Row:
    """Run the job. Raises RuntimeError with the last output of a failed process."""
    shape = find_shape(str(folder))
    planned = rank_bytes(
        shape,
        Training(
            on_cpu=True, ranks=job.ranks, max_tokens=job.max_tokens, precision=job.precision,
            checkpointed=job.checkpoint, has_reference=job.reference, lora_rank=job.lora_rank,
            lora_targets=LoraSettings().target_modules, trained_layers=job.trained_layers,
        ),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "job.json"
        file.write_text(json.dumps({**asdict(job), "folder": str(folder), "tiny": str(tiny)}))
        peaks = _peaks(file, job.ranks)
    return Row(job=job, measured=max(peaks), planned=sum(planned.values()))


def _peaks(file: Path, ranks: int) -> list[int]:
    first = _start(file, 0)
    processes = [first]
    try:
        if ranks > 1:
            assert first.stdout is not None
            port = json.loads(first.stdout.readline() or "{}").get("port")
            processes += [_start(file, rank, str(port)) for rank in range(1, ranks)]
        return [_peak(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(file: Path, *arguments: object) -> "subprocess.Popen[str]":
    environment = {
        **os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.plan_memory_child", str(file), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _peak(process: "subprocess.Popen[str]") -> int:
    out, err = process.communicate(timeout=_LIMIT_S)
    if process.returncode:
        raise RuntimeError(err[-2000:])
    found = json.loads(out.splitlines()[-1])
    return int(found["peak"]) - int(found["before"])


def rows(jobs: tuple[Job, ...]) -> Iterator[Row]:
    """Yield the rows of all jobs in order; each model is written once."""
    with tempfile.TemporaryDirectory() as place:
        tiny = save_tiny_model(Path(place) / "tiny")
        folders = {
            name: save_model(Path(place) / str(number), **MODELS[name])
            for number, name in enumerate(dict.fromkeys(job.model for job in jobs))
        }
        for job in jobs:
            yield measure(job, folders[job.model], tiny)


def _trained(job: Job) -> str:
    if job.lora_rank is not None:
        return f"LoRA, rank {job.lora_rank}"
    return "all" if job.trained_layers is None else f"{job.trained_layers} layers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rows")
    print("| model | trained | ranks | precision | activations | reference | measured MB | plan MB | off |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows(QUICK if parser.parse_args().quick else JOBS):
        job = row.job
        print(
            f"| {job.model} | {_trained(job)} | {job.ranks} | {job.precision} "
            f"| {'again' if job.checkpoint else 'kept'} | {'yes' if job.reference else 'no'} "
            f"| {row.measured / 1e6:,.0f} | {row.planned / 1e6:,.0f} | {row.off:+.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
