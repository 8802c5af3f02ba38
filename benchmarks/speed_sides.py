"""Generation workloads of ``speed.py`` and their implementations: plain transformers, Outrider, and vLLM in
its own process.
"""

import json
import os
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from outrider.engines.base import Request
from outrider.engines.local.engine import LocalEngine
from outrider.engines.local.model import LanguageModel

Contexts = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``num_prompts`` different prompts with ``samples`` rows each; after a turn every row gets ``observed``
    tokens.
    """

    num_prompts: int
    samples: int
    prompt: int
    new: int
    turns: int = 1
    observed: int = 0


WORKLOADS = {
    "32 prompts of 256, 64 new": Workload(num_prompts=32, samples=1, prompt=256, new=64),
    "4 prompts of 256 x 8, 64 new": Workload(num_prompts=4, samples=8, prompt=256, new=64),
    "8 rows x 6 turns, 32 new, 80 observed": Workload(
        num_prompts=8, samples=1, prompt=200, new=32, turns=6, observed=80
    ),
}


class Side(Protocol):
    def begin(self) -> None:
        """Nothing of an earlier round may be cached."""

    def turn(self, contexts: Contexts, new: int) -> Sequence[Sequence[int]]: ...

    def close(self) -> None: ...


def play(side: Side, workload: Workload) -> int:
    """Return the number of new tokens of a workload."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(100, 10_000) for _ in range(count)]

    prompts = [tokens(workload.prompt) for _ in range(workload.num_prompts)]
    contexts = [list(prompt) for prompt in prompts for _ in range(workload.samples)]
    side.begin()
    count = 0
    for _ in range(workload.turns):
        for context, ids in zip(contexts, side.turn(contexts, workload.new), strict=True):
            count += len(ids)
            context.extend([*ids, *tokens(workload.observed)])
    return count


class Plain:
    """``generate`` computes every context from its start."""

    def __init__(self, model: Any, *, static: bool) -> None:
        self.model = model
        self.options = {"cache_implementation": "static", "disable_compile": True} if static else {}

    def begin(self) -> None:
        pass

    @torch.no_grad()
    def turn(self, contexts: Contexts, new: int) -> Sequence[Sequence[int]]:
        ids = torch.tensor(contexts, device=self.model.device)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
            min_new_tokens=new, max_new_tokens=new, eos_token_id=0, pad_token_id=0, **self.options,
        )  # fmt: skip
        return out[:, ids.shape[1] :].tolist()

    def close(self) -> None:
        pass


class Outrider:
    def __init__(self, language_model: LanguageModel) -> None:
        self.engine = LocalEngine(language_model)

    def begin(self) -> None:
        self.engine.load(self.engine.weight_version + 1)

    def turn(self, contexts: Contexts, new: int) -> Sequence[Sequence[int]]:
        requests = [
            Request(request_id=f"{i:04d}", token_ids=tuple(context), max_tokens=new, seed=i, cache_key=str(i))
            for i, context in enumerate(contexts)
        ]
        return [one.token_ids for one in self.engine.generate(requests)]

    def close(self) -> None:
        self.engine.free_cache()


class Vllm:
    """Communicates with ``vllm_worker.py`` by one JSON line per request."""

    def __init__(
        self,
        python: str,
        folder: str,
        precision: str,
        *,
        eager: bool,
        threads: int,
        options: dict[str, Any] | None = None,
    ) -> None:
        """``options`` are further arguments of vLLM's ``LLM``."""
        command = [
            python,
            str(Path(__file__).with_name("vllm_worker.py")),
            folder,
            precision,
            str(int(eager)),
            json.dumps(options or {}),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._ask({"begin": True})

    def begin(self) -> None:
        self._ask({"begin": True})

    def turn(self, contexts: Contexts, new: int) -> Sequence[Sequence[int]]:
        return self._ask({"contexts": contexts, "new": new})

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise SystemExit("vLLM's process ended; its last words are above")

    def close(self) -> None:
        self.process.terminate()
