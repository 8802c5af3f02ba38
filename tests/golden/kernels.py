"""Which kernels a process computes with: records hold the bits of one set of them each.

MKL takes other kernels on AMD's processors than on Intel's even where it is told to be compatible (matrix
products, and its exp, log and sqrt), so that the least processor is one for each maker.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.engines.local.processor import read_processor

RECORDS = Path(__file__).with_name("records")
Record = dict[str, Any]
# Adam makes steps of full size of what is only rounding, and the first training step may hold several of its
# steps: the records' norms part by up to 6 %.
NEAR, SMALL = 0.1, 0.001


def fingerprint() -> str:
    """A hash over the results of what a small model computes, from inputs that are the same everywhere."""
    import torch
    from torch.nn import functional

    grid = torch.arange(64 * 96, dtype=torch.int64)
    x = ((grid * 7919 % 100_003).to(torch.float32) / 50_000 - 1).view(64, 96)
    w = ((grid * 104_729 % 99_991).to(torch.float32) / 50_000 - 1).view(64, 96)
    heads = x.view(1, 4, 16, 96)
    found = (
        x @ w.T, functional.linear(x[:3], w), torch.bmm(x.view(4, 16, 96), w.view(4, 96, 16)), w @ x[0],
        x.exp(), x.abs().add(0.001).log(), x.abs().sqrt(), x.abs().add(0.1).rsqrt(), x.sum(-1), x.cos(),
        x.softmax(-1), x.log_softmax(-1), functional.silu(x), x.logsumexp(-1),
        functional.scaled_dot_product_attention(heads, heads, heads),
    )  # fmt: skip
    hashed = hashlib.sha256()
    for tensor in found:
        hashed.update(tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()[:12]


def records() -> dict[str, Record]:
    """Every record by its file's name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))}


def fitting(kept: Mapping[str, Record], kernels: str, model: str | None = None) -> str | None:
    """The name of the record that was made with these ``kernels``.

    A record that does not know its own holds for the maker's processors that it names.
    """
    for name, record in kept.items():
        if record["kernels"] == kernels:
            return name
    model = read_processor().model if model is None else model
    return next(
        (name for name, record in kept.items() if not record["kernels"] and record["maker"] in model), None
    )


def far(
    recorded: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], *, same: Sequence[str] = ()
) -> Iterator[str]:
    """What of the first step is further apart than other kernels explain, or another bit in the parts that
    are to be the ``same``.
    """
    one, other = recorded[0]["shown"], found[0]["shown"]
    yield from (f"step 1: {part}" for part in same if recorded[0][part] != found[0][part])
    for name in sorted(one.keys() | other.keys()):
        was, now = one.get(name), other.get(name)
        if (was is None) != (now is None) or (was is not None and abs(now - was) > NEAR * abs(was) + SMALL):
            yield f"step 1: {name} was {was}, is {now}"


def same_parts(name: str) -> tuple[str, ...]:
    """What no kernel changes: the trees of the scripted engine, and the credit on them."""
    return ("traces", "credit") if name.endswith(" / scripted") else ()
