"""Writes a model whose policy at temperature 1 is that of another model at a lower temperature.

    python -m benchmarks.sharpen FOLDER --temperature 0.6 --out FOLDER

The weights of the norm before the vocabulary projection are divided by the temperature, which divides the
logits. Training samples at temperature 1, so a model that is only good at a lower one needs this first.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from outrider.errors import ConfigError

NORM = "model.norm.weight"  # of Llama, Qwen 2 and 3, Mistral and others


def sharpen(folder: Path, out: Path, temperature: float) -> None:
    """Write the model to the new folder ``out``. Raises ConfigError if the logits are not divided."""
    shutil.copytree(folder, out)
    file = out / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    weights = load_file(file)
    if NORM not in weights:
        raise ConfigError(f"{folder}: no weights {NORM}")
    weights[NORM] = weights[NORM] / temperature
    save_file(weights, file, metadata=metadata)
    ids = torch.arange(5)[None]
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits for path in (folder, out)
    )
    if not torch.allclose(after, before / temperature, rtol=0.02, atol=0.02 * float(after.abs().max())):
        raise ConfigError(f"{folder}: its last norm does not multiply by its weights")


def main(arguments: Sequence[str] | None = None) -> int:
    """Copy a model folder with divided logits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parsed = parser.parse_args(arguments)
    if parsed.out.exists():
        parser.error(f"{parsed.out} exists")
    try:
        with torch.inference_mode():
            sharpen(parsed.folder, parsed.out, parsed.temperature)
    except BaseException:
        shutil.rmtree(parsed.out, ignore_errors=True)
        raise
    print(f"{parsed.out}: the model of {parsed.folder} at temperature {parsed.temperature:g}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
