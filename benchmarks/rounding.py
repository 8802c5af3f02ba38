"""How much of a small step reaches the bfloat16 weights that generate.

    python -m benchmarks.rounding [--model NAME]

Every weight of the model moves by the learning rate a step, in one direction of its own (what AdamW does
while the sign of a gradient stays). The table has the mean movement of the weights after rounding as a share
of that of the float32 masters: with masters that start at the rounded weights, and with masters that start at
random places of their rounding intervals (:func:`outrider.training.policy.dither`).
"""

import argparse

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from outrider.engines.local.model import LanguageModel, load_model
from outrider.training.policy import dither, rounding_offsets

RATES = (1e-6, 1e-5, 1e-4)
STEPS = (1, 10, 100)


def main() -> None:
    """Load the model and print the table."""
    parser = argparse.ArgumentParser(description="What rounding to bfloat16 leaves of small steps.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    arguments = parser.parse_args()
    language_model = load_model(arguments.model, precision="bfloat16")
    table = Table("learning rate", "steps", "from the rounded weights", "from random places")
    for rate in RATES:
        for num_steps in STEPS:
            shares = (arriving_share(language_model, rate * num_steps, dithered=on) for on in (False, True))
            table.add_row(f"{rate:g}", str(num_steps), *(f"{share:.1%}" for share in shares))
    Console().print(table)


@torch.no_grad()
def arriving_share(language_model: LanguageModel, distance: float, *, dithered: bool) -> float:
    """Return the mean movement of the rounded weights, as a share of ``distance``, which masters move."""
    total, count = 0.0, 0
    for name, parameter in language_model.model.named_parameters():
        masters = parameter.float()
        if dithered:
            dither(masters, rounding_offsets(name, masters.shape, seed=0))
        signs = _signs(name, masters.shape)
        rounded = (masters + distance * signs).bfloat16().float()
        total += float(((rounded - parameter.float()) * signs).double().sum())
        count += masters.numel()
    return total / count / distance


def _signs(name: str, shape: torch.Size) -> Tensor:
    return 1.0 - 2.0 * (rounding_offsets(name, shape, seed=1) < 0)


if __name__ == "__main__":
    main()
