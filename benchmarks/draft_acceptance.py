"""Whether drafts of tokens would speed up generation: how many of them are right in recorded rollouts, and
what a pass over more tokens costs.

    python -m benchmarks.draft_acceptance RUN [RUN ...] [--model NAME] [--threads 1]

A draft is what followed the newest earlier occurrence of the last tokens: in the same rollout, in turns that
its siblings have finished, or in an earlier step. One pass checks a draft of k tokens. A draw depends only on
the request and the position, so the checked tokens are exactly those of generation without drafts, and the
recorded rollouts tell which would have been accepted. A draft has no effect beyond the first wrong token.

The cost is that of all linear layers of the model, which take most of a decoding pass, for (k + 1) tokens per
row in place of one. Drafts pay where the tokens per pass exceed it.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import nn

from benchmarks.markdown_table import markdown
from outrider.config import load_settings
from outrider.engines.local.cpu_kernels import PackedLinears
from outrider.engines.local.model import LanguageModel, load_model, median_seconds, resolve_precision
from outrider.tokens import Tokenizer
from outrider.training.policy import set_threads
from outrider.training.settings import RunSettings
from outrider.viewer.records import TraceReader, TraceRow

LENGTHS: Final = (1, 2, 4)
"""Tokens of a draft."""
ROWS: Final = (1, 4, 8, 16, 32, 64)
_LONGEST_MATCH: Final = 3


class Index:
    """The tokens that followed each n-gram when it was seen last."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, ...], tuple[list[str], int]] = {}

    def add(self, tokens: list[str], begin: int) -> None:
        """Add all n-grams of a text that end at ``begin`` or later."""
        for end in range(max(begin, 1), len(tokens)):
            for size in range(1, min(_LONGEST_MATCH, end) + 1):
                self._next[tuple(tokens[end - size : end])] = tokens, end

    def draft(self, before: Sequence[str], length: int) -> list[str]:
        """Return up to ``length`` tokens after the longest n-gram that is known."""
        for size in range(min(_LONGEST_MATCH, len(before)), 0, -1):
            if (found := self._next.get(tuple(before[-size:]))) is not None:
                tokens, end = found
                return tokens[end : end + length]
        return []


def num_passes(before: list[str], turn: Sequence[str], index: Index, length: int) -> int:
    """Return the passes that generate a turn after ``before`` with drafts of ``length`` tokens."""
    passes = done = 0
    while done < len(turn):
        draft = index.draft([*before, *turn[:done]], length)
        accepted = 0
        for drafted, drawn in zip(draft, turn[done:], strict=False):
            if drafted != drawn:
                break
            accepted += 1
        passes, done = passes + 1, done + accepted + 1
    return passes


def passes_of_step(
    rows: Sequence[TraceRow], tokenizer: Tokenizer, index: Index
) -> tuple[int, dict[int, int]]:
    """Return the policy tokens of a step, and the passes for each length of drafts; adds the step's texts to
    the index, turn by turn.
    """
    children: dict[tuple[str, int], list[TraceRow]] = defaultdict(list)
    for row in rows:
        children[row.trace_id, row.parent_id].append(row)
    ahead: list[tuple[list[str], TraceRow]] = [
        ([], row) for (_, parent), own in children.items() if parent < 0 for row in own
    ]
    num_tokens, passes = 0, dict.fromkeys(LENGTHS, 0)
    while ahead:  # all nodes of one depth, which are generated side by side
        finished, following = list[tuple[list[str], int]](), list[tuple[list[str], TraceRow]]()
        for before, row in ahead:
            own = list(row.tokens) or [
                tokenizer.decode([token]) for token in tokenizer.encode(row.text, add_special_tokens=False)
            ]
            if row.tokens:  # of the policy
                num_tokens += len(own)
                for length in LENGTHS:
                    passes[length] += num_passes(before, own, index, length)
            whole = [*before, *own]
            finished.append((whole, len(before)))
            following += [(whole, child) for child in children[row.trace_id, row.node_id]]
        for whole, begin in finished:
            index.add(whole, begin)
        ahead = following
    return num_tokens, passes


@torch.inference_mode()
def seconds_of_layers(model: LanguageModel, num_rows: int) -> float:
    """Measure one product with each linear layer of the model, as decoding computes it."""
    linears = [module for module in model.model.modules() if isinstance(module, nn.Linear)]
    packed = PackedLinears(model.model)
    inputs = {
        size: torch.randn(num_rows, size, dtype=linears[0].weight.dtype)
        for size in {linear.in_features for linear in linears}
    }
    with packed.active():
        return float(median_seconds(lambda: [linear(inputs[linear.in_features]) for linear in linears]))


def acceptance_table(runs: Iterable[Path]) -> str:
    """Return tokens per pass by run and step, for each length of drafts."""
    lines = []
    for run in runs:
        name = load_settings(RunSettings, file=run / "config.toml").model.name
        tokenizer: Any = load_model(name, precision="float32").tokenizer
        reader, index = TraceReader(run / "traces"), Index()
        for step in reader.steps():
            tokens, passes = passes_of_step(reader.read(step), tokenizer, index)
            per_pass = (f"{tokens / passes[length]:.2f}" for length in LENGTHS)
            lines.append((run.name, str(step), f"{tokens:,}", *per_pass))
    return markdown(("run", "step", "policy tokens", *(f"k = {length}" for length in LENGTHS)), lines)


def cost_table(model: LanguageModel) -> str:
    """Return the time of a pass with drafts relative to one without, by the number of rows."""
    lines = []
    for rows in ROWS:
        alone = seconds_of_layers(model, rows)
        times = (seconds_of_layers(model, rows * (length + 1)) / alone for length in LENGTHS)
        lines.append((str(rows), f"{1000 * alone:.1f}", *(f"{one:.2f}" for one in times)))
    return markdown(("rows", "ms without drafts", *(f"k = {length}" for length in LENGTHS)), lines)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--precision", choices=("auto", "bfloat16", "float32"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    console = Console(soft_wrap=True)
    if arguments.runs:
        console.print(f"Tokens per pass:\n\n{acceptance_table(arguments.runs)}\n")
    precision = resolve_precision(arguments.precision, "cpu")
    model = load_model(arguments.model, precision=precision)
    console.print(
        f"Time of the linear layers, {precision}, {arguments.threads} threads, relative to no draft:\n\n"
        f"{cost_table(model)}"
    )


if __name__ == "__main__":
    main()
