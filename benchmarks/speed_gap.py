"""Mismatch of the engine's log-probs with the trainer's, and with its own in another batch or on another
processor.

python benchmarks/speed_gap.py MODEL PRECISION THREADS NEW RULE   (started by speed.py as an older processor)
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import cast
from unittest.mock import patch

import sampling
import torch
from speed_update import rollout_batch

from outrider.engines.base import Generation, Request
from outrider.engines.local import engine as local
from outrider.engines.local.engine import LocalEngine
from outrider.engines.local.model import LanguageModel, Precision, load_model
from outrider.tokens import ChatRenderer
from outrider.training.policy import Policy, set_threads
from outrider.training.settings import OptimizerSettings
from outrider.types import Message

_BATCH = 32
LESSER = {
    "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "MKL_CBWR": "COMPATIBLE",  # MKL heeds the other variable on Intel's processors only
}  # fmt: skip
"""What torch, oneDNN and MKL read when they choose their instructions."""
Written = tuple[list[int], list[float]]
"""Ids and log-probs of one sequence."""


def _random_prompts(num: int) -> list[list[int]]:
    """The hardest case: the model is certain of nothing."""
    random = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = torch.randint(100, 10_000, (num, 256), generator=random).tolist()
    return prompts


def _questions(lm: LanguageModel, num: int) -> list[list[int]]:
    """Return typical questions."""
    renderer = ChatRenderer(lm.tokenizer)
    asked = [
        f"A train leaves at {i % 12 + 1} o'clock and needs {i + 7} minutes. When does it arrive, and why?"
        for i in range(num)
    ]
    return [list(renderer.prompt([Message(role="user", content=text)])) for text in asked]


def _requests(prompts: list[list[int]], new: int) -> list[Request]:
    return [
        Request(request_id=str(i), token_ids=tuple(row), max_tokens=new, seed=i)
        for i, row in enumerate(prompts)
    ]


def trainer_gap(lm: LanguageModel, new: int) -> torch.Tensor:
    """Absolute differences of engine and trainer log-probs per token."""
    policy = Policy(lm, OptimizerSettings(learning_rate=1e-9))
    requests = _requests(_random_prompts(8), new)
    gaps = []
    for request, generation_ in zip(requests, LocalEngine(lm).generate(requests), strict=True):
        batch = rollout_batch(request.token_ids, generation_.token_ids, generation_.logprobs)
        with torch.no_grad():
            gaps.append((policy.score(batch).logprobs_T.cpu() - batch.engine_logprobs_T.cpu()).abs())
    return torch.cat(gaps)


def drawing(*, inverse_cdf: bool) -> AbstractContextManager[object]:
    """Select the current sampling rule of the engine, or the previous one."""
    return patch.object(local, "sample", sampling.inverse_cdf) if inverse_cdf else nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The largest difference of a log-prob in nats over the tokens before the first different one, and the
    number of different sequences.
    """

    largest: float
    num_different: int
    num_sequences: int

    def __str__(self) -> str:
        return (
            f"max {self.largest:.1e} nats up to the first different token; "
            f"{self.num_different} of {self.num_sequences} sequences differ"
        )


def compared(ours: Sequence[Written], theirs: Sequence[Written]) -> Gap:
    largest, num_different = 0.0, 0
    for (ids, logprobs), (other_ids, other_logprobs) in zip(ours, theirs, strict=True):
        num = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ids, other_ids, strict=True))))
        num_different += num < len(ids)
        largest = max(
            [largest, *(abs(a - b) for a, b in zip(logprobs[:num], other_logprobs[:num], strict=True))]
        )
    return Gap(largest=largest, num_different=num_different, num_sequences=len(ours))


def written_together(lm: LanguageModel, new: int) -> dict[str, list[Written]]:
    """Generate all requests of a kind (random tokens, questions) in one batch; no sequence ends early."""
    engine = LocalEngine(replace(lm, eos_token_ids=frozenset(), eos_texts=()))
    return {
        kind: [_written(one) for one in engine.generate(requests)]
        for kind, requests in _both_kinds(lm, new).items()
    }


def written_alone(lm: LanguageModel, new: int) -> dict[str, list[Written]]:
    """Generate the same requests one by one; without cache keys, nothing is reused."""
    engine = LocalEngine(replace(lm, eos_token_ids=frozenset(), eos_texts=()))
    return {
        kind: [_written(engine.generate([request])[0]) for request in requests]
        for kind, requests in _both_kinds(lm, new).items()
    }


def written_elsewhere(
    model: str, precision: str, threads: int, new: int, *, inverse_cdf: bool
) -> dict[str, list[Written]]:
    """Generate like :func:`written_together` in another process, whose libraries use older instructions."""
    command = [
        sys.executable,
        __file__,
        model,
        precision,
        str(threads),
        str(new),
        "inverse" if inverse_cdf else "race",
    ]
    done = subprocess.run(command, env=os.environ | LESSER, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, list[Written]] = json.loads(done.stdout.splitlines()[-1])
    return told


def _both_kinds(lm: LanguageModel, new: int) -> dict[str, list[Request]]:
    prompts = {"random tokens": _random_prompts(_BATCH), "questions": _questions(lm, _BATCH)}
    return {kind: _requests(rows, new) for kind, rows in prompts.items()}


def _written(generation: Generation) -> Written:
    return list(generation.token_ids), list(generation.logprobs)


if __name__ == "__main__":
    name, precision, threads, new, rule = sys.argv[1:]
    set_threads(int(threads), device="cpu")
    with drawing(inverse_cdf=rule == "inverse"):
        print(json.dumps(written_together(load_model(name, precision=cast(Precision, precision)), int(new))))
