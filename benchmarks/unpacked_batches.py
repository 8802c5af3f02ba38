"""Tokens per second of models that need more than packed attention, in batches and one sequence at a time.

    python -m benchmarks.unpacked_batches [--rows 16] [--only Qwen3.5 LFM2 gpt-oss Granite]

Random models of four families, one thread, float32, processor time; the batches of Granite are packed. Every
request has a prompt of its own, of 24 to 40 tokens, and generates 24 tokens; the update is a forward and a
backward pass over all of them. The last two columns are the largest differences of log-probs between both
ways, of the engine and of the update.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from docsite.models import ARCHITECTURES, Architecture

from benchmarks.markdown_table import markdown
from benchmarks.paths import endless, paths_of
from outrider.engines.base import Generation, Request
from outrider.engines.local.engine import make_engine
from outrider.engines.local.model import LanguageModel, load_model
from outrider.training.packing import RolloutPath, pack
from outrider.training.policy import Policy, set_threads
from outrider.training.settings import OptimizerSettings

ResultT = TypeVar("ResultT")

_NEW: Final = 24
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 8192, "hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 12,
    "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 64, "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}  # fmt: skip
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Qwen3.5": {
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 10,
        "linear_num_value_heads": 10, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 3,
    },
    "LFM2": {"layer_types": ["conv", "conv", "full_attention"] * 4},
    "gpt-oss": {
        "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_hidden_layers": 6, "intermediate_size": 640, "num_local_experts": 8,
    },
    "Granite": {},
}  # fmt: skip
COLUMNS: Final = (
    "model", "parameters, M", "generation, one by one, tokens/s", "batched", "ratio",
    "update, one by one, tokens/s", "batched", "ratio", "largest difference, generation", "update",
)  # fmt: skip


def load_random_model(title: str, sizes: Mapping[str, Any]) -> tuple[LanguageModel, LanguageModel]:
    """Load a random model of a family of ``docsite.models``: a sequence at a time, and in batches."""
    [tiny] = [each for each in ARCHITECTURES if each.title == title]
    settings = {**tiny.settings, **sizes, **MODELS[title]}
    model = Architecture(title=title, model_type=tiny.model_type, without=tiny.without, settings=settings)
    with tempfile.TemporaryDirectory() as name:
        model.save(Path(name), scale=1.0)
        alone, batched = (
            endless(load_model(name, precision="float32", forward=forward))
            for forward in ("unpacked", "auto")
        )
    assert alone.unpacked is not None
    unpacked = replace(alone.unpacked, batches_generation=False, batches_scoring=False)
    return replace(alone, unpacked=unpacked), batched


def make_requests(num: int) -> list[Request]:
    """Return requests with prompts of different lengths."""
    dice = torch.Generator().manual_seed(0)
    lengths = torch.randint(24, 41, (num,), generator=dice).tolist()
    return [
        Request(
            request_id=str(index), max_tokens=_NEW, seed=index,
            token_ids=tuple(torch.randint(3, 90, (length,), generator=dice).tolist()),
        )
        for index, length in enumerate(lengths)
    ]  # fmt: skip


def measure(title: str, *, num_rows: int, sizes: Mapping[str, Any] = _SIZES) -> tuple[str, ...]:
    """Return the table row of one family."""
    ways, requests = load_random_model(title, sizes), make_requests(num_rows)
    num_parameters = sum(parameter.numel() for parameter in ways[0].model.parameters())
    generations, rates = zip(
        *(_timed(partial(make_engine(way).generate, requests), num_rows * _NEW) for way in ways),
        strict=True,
    )
    same = zip(*generations, strict=True)
    differences = [
        abs(ours - theirs)
        for one, other in same
        if one.token_ids == other.token_ids
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True)
    ]
    [batch] = pack(_join(requests, generations[0]), max_tokens=100_000)

    policies = [Policy(way, OptimizerSettings()) for way in ways]

    def update(policy: Policy) -> torch.Tensor:
        logprobs_T = policy.score(batch).logprobs_T
        (-logprobs_T.mean()).backward()
        policy.drop_gradients()
        return logprobs_T.detach()

    num_tokens = policies[0].num_computed_tokens(batch)
    scores, update_rates = zip(
        *(_timed(partial(update, policy), num_tokens) for policy in policies), strict=True
    )
    return (
        title, f"{num_parameters / 1e6:.0f}", *_compare(rates), *_compare(update_rates),
        f"{max(differences):.1e}", f"{float((scores[0] - scores[1]).abs().max()):.1e}",
    )  # fmt: skip


def _join(requests: Sequence[Request], generations: Sequence[Generation]) -> list[RolloutPath]:
    pairs = zip(requests, generations, strict=True)
    paths = [path for request, generation in pairs for path in paths_of([request], [generation])]
    return [replace(path, rollout_index=index, group=index) for index, path in enumerate(paths)]


def _timed(work: Callable[[], ResultT], num_tokens: int) -> tuple[ResultT, float]:
    began = time.process_time()  # of one thread, without other processes
    result = work()
    return result, num_tokens / (time.process_time() - began)


def _compare(rates: Sequence[float]) -> Iterator[str]:
    yield from (f"{rate:.0f}" for rate in rates)
    yield f"{rates[1] / rates[0]:.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    set_threads(1)
    print(markdown(COLUMNS, [measure(title, num_rows=arguments.rows) for title in arguments.only]))


if __name__ == "__main__":
    main()
