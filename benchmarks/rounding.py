"""The share of a small step that reaches the weights of a bfloat16 model.

    python -m benchmarks.rounding [--model NAME]

The float32 masters of all weights move by one distance, in random directions. The table has the mean movement
of the rounded weights as a share of it: with masters that start at the rounded weights, and with masters that
start at random places of their rounding intervals (:mod:`outrider.training.rounding`).
"""

import argparse

import torch
from rich.console import Console
from rich.table import Table

from outrider.engines.local.model import LanguageModel, load_model
from outrider.training.rounding import dither

DISTANCES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


def main() -> None:
    """Load the model and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    arguments = parser.parse_args()
    language_model = load_model(arguments.model, precision="bfloat16")
    table = Table("distance of the masters", "from the rounded weights", "from random places")
    for distance in DISTANCES:
        shares = (arriving_share(language_model, distance, dithered=on) for on in (False, True))
        table.add_row(f"{distance:g}", *(f"{share:.1%}" for share in shares))
    Console().print(table)


@torch.no_grad()
def arriving_share(language_model: LanguageModel, distance: float, *, dithered: bool) -> float:
    """Return the mean movement of the rounded weights as a share of ``distance``."""
    generator = torch.Generator().manual_seed(0)
    total, count = 0.0, 0
    for name, parameter in language_model.model.named_parameters():
        masters = parameter.float()
        if dithered:
            dither(masters, name, seed=0)
        signs = 1.0 - 2.0 * torch.randint(2, masters.shape, generator=generator)
        rounded = (masters + distance * signs).bfloat16().float()
        total += float(((rounded - parameter.float()) * signs).double().sum())
        count += masters.numel()
    return total / count / distance


if __name__ == "__main__":
    main()
