"""How far the engine's log-probs are from the trainer's, and from themselves in another batch, for ``speed.py``."""

from dataclasses import replace
from itertools import takewhile

import torch

from outrider.engines.base import Request
from outrider.engines.local import LocalEngine
from outrider.engines.model import LanguageModel
from outrider.tokens import ChatRenderer
from outrider.trace import Trace
from outrider.train.pack import RolloutPath, pack
from outrider.train.policy import OptimizerSettings, Policy
from outrider.types import Message, Origin, Task

_BATCH = 32


def _random_prompts(num: int) -> list[list[int]]:
    """The hardest case: the model is certain of nothing."""
    random = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = torch.randint(100, 10_000, (num, 256), generator=random).tolist()
    return prompts


def _questions(lm: LanguageModel, num: int) -> list[list[int]]:
    """What a model is asked in use."""
    renderer = ChatRenderer(lm.tokenizer)
    asked = [
        f"A train leaves at {i % 12 + 1} o'clock and needs {i + 7} minutes. When does it arrive, and why?" for i in range(num)
    ]
    return [list(renderer.prompt([Message(role="user", content=text)])) for text in asked]


def _requests(prompts: list[list[int]], new: int) -> list[Request]:
    return [Request(request_id=str(i), token_ids=tuple(row), max_tokens=new, seed=i) for i, row in enumerate(prompts)]


def trainer_gap(lm: LanguageModel, new: int) -> torch.Tensor:
    """Absolute differences of engine and trainer log-probs per token."""
    policy = Policy(lm, OptimizerSettings(learning_rate=1e-9))
    requests = _requests(_random_prompts(8), new)
    gaps = []
    for request, generation_ in zip(requests, LocalEngine(lm).generate(requests), strict=True):
        trace = Trace(task=Task(key="gap", question=""))
        message = Message(role="user", content="")
        root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=request.token_ids, message=message)
        ids, logprobs, entropies = generation_.token_ids, generation_.logprobs, generation_.entropies
        node = trace.append(
            parent=root.node_id, origin=Origin.POLICY, token_ids=ids, message=message, logprobs=logprobs, entropies=entropies
        )
        node.credit = (1.0,) * len(ids)
        path = RolloutPath(nodes=trace.path(node.node_id), rollout_index=0)
        batch = next(iter(pack([path], max_tokens=10_000)))
        with torch.no_grad():
            gaps.append((policy.score(batch).logprobs_T.cpu() - batch.engine_logprobs_T.cpu()).abs())
    return torch.cat(gaps)


def batch_gap(lm: LanguageModel, new: int, *, questions: bool) -> tuple[float, int, int]:
    """Every request (random tokens, or questions) alone and with all the others.

    The largest difference of a log-prob in nats over the tokens before the first different one, the number of sequences that differ,
    and their number.
    """
    engine = LocalEngine(replace(lm, eos_token_ids=frozenset()))
    requests = _requests(_questions(lm, _BATCH) if questions else _random_prompts(_BATCH), new)
    largest, num_different = 0.0, 0
    for request, together in zip(requests, engine.generate(requests), strict=True):
        (alone,) = engine.generate([request])  # a request without a cache key leaves nothing behind: it is computed anew
        pairs = zip(alone.token_ids, together.token_ids, strict=True)
        num = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        num_different += num < new
        largest = max([largest, *(abs(a - b) for a, b in zip(alone.logprobs[:num], together.logprobs[:num], strict=True))])
    return largest, num_different, len(requests)
