"""The contract of an engine (:mod:`outrider.engines.base`)."""

from collections.abc import Sequence
from dataclasses import replace

from outrider.engines.base import Engine, FinishReason, Generation, Request
from outrider.errors import EngineFault
from outrider.testing.common import require, require_finite


def check_engine(
    engine: Engine,
    *,
    text: str = "Once upon a time",
    max_tokens: int = 6,
    is_deterministic: bool = True,
) -> None:
    """Sample a few continuations of ``text``.

    Checked: one result per request, in order; one finite log-prob and entropy per token; limits; equal tokens
    for equal seeds, also after caches were dropped; a weight version that rises; a context that is too long
    is an EngineFault and nothing else; what is released may be unknown.
    """
    ids = tuple(engine.tokenizer.encode(text, add_special_tokens=False))
    require(ids, f"the tokenizer has no token for {text!r}")
    requests = [
        Request(
            request_id=f"check-{i}",
            token_ids=ids,
            max_tokens=max_tokens,
            seed=i // 2,
            cache_key=f"key-{i}",
        )
        for i in range(4)
    ]
    requests.append(Request(request_id="greedy", token_ids=ids, max_tokens=1, seed=9, temperature=0.0))
    first = _generate(engine, requests)
    engine.release([request.cache_key for request in requests if request.cache_key is not None])
    engine.release(["nobody"])
    engine.free_cache()
    engine.free_cache()
    again = _generate(engine, requests)
    if is_deterministic:
        _require_same(first, again, "after the caches were dropped")
    version = engine.weight_version
    engine.load(engine.weight_version + 1)
    require(engine.weight_version == version + 1, "load does not take the version that it is given")
    later = _generate(engine, requests)
    if is_deterministic:
        _require_same(first, later, "with weights that did not move")
    _check_garbage(engine, requests[0])


def _generate(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    generations = engine.generate(requests)
    names = [item.request_id for item in generations]
    require(
        names == [item.request_id for item in requests],
        f"results {names} are not in the order of the requests",
    )
    for request, item in zip(requests, generations, strict=True):
        num = len(item.token_ids)
        require(
            0 < num <= request.max_tokens,
            f"{item.request_id}: {num} tokens, asked for 1 to {request.max_tokens}",
        )
        require(
            len(item.logprobs) == len(item.entropies) == num,
            f"{item.request_id}: not one log-prob and entropy per token",
        )
        require_finite({f"log-prob {i}": value for i, value in enumerate(item.logprobs)}, item.request_id)
        require_finite({f"entropy {i}": value for i, value in enumerate(item.entropies)}, item.request_id)
        require(max(item.logprobs) <= 1e-6, f"{item.request_id}: a log-prob above 0")
        require(min(item.entropies) >= -1e-6, f"{item.request_id}: an entropy below 0")
        require(
            isinstance(item.finish_reason, FinishReason),
            f"{item.request_id}: finish_reason {item.finish_reason!r}",
        )
        require(
            item.weight_version == engine.weight_version,
            f"{item.request_id}: another weight version than the engine's",
        )
    require(engine.generate([]) == [], "no request, and yet a result")
    return generations


def _require_same(expected: Sequence[Generation], actual: Sequence[Generation], when: str) -> None:
    for first, second in zip(expected, actual, strict=True):
        same = first.token_ids == second.token_ids and first.logprobs == second.logprobs
        require(same, f"{first.request_id}: other tokens or log-probs for the same seed {when}")


def _check_garbage(engine: Engine, request: Request) -> None:
    """An answer or a typed fault."""
    longest = replace(
        request,
        token_ids=request.token_ids * (engine.context_length // len(request.token_ids) + 1),
    )
    try:
        engine.generate([longest])
    except EngineFault:
        pass
    except Exception as error:
        raise AssertionError(
            f"a context that is too long raises {type(error).__name__}, no EngineFault: {error}",
        ) from error
    _generate(engine, [request])
