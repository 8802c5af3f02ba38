"""The engine that generates with a loaded model, and what a person should know of the model's path."""

from collections.abc import Callable

from outrider.engines.base import Engine
from outrider.engines.local.engine import LocalEngine
from outrider.engines.local.model import LanguageModel, declared_context
from outrider.engines.local.unpacked_engine import UnpackedEngine

_CACHES = {
    "extended": "",
    "stepped": "; every turn is computed from its first token, because its cache takes one token at a time",
    "none": "; every token is computed from the first one, because transformers' cache does not fit",
}


def make_engine(
    language_model: LanguageModel,
    *,
    context_length: int | None = None,
    max_rows: int = 256,
    on_tokens: Callable[[int], None] | None = None,
) -> Engine:
    """The one of the path that the model was loaded on; ``max_rows`` bounds the rows of the packed one."""
    if language_model.unpacked is not None:
        return UnpackedEngine(language_model, context_length=context_length, on_tokens=on_tokens)
    return LocalEngine(language_model, context_length=context_length, max_rows=max_rows, on_tokens=on_tokens)


def describe_path(language_model: LanguageModel, name: str) -> str:
    """One line: how the model is computed, and why."""
    unused = language_model.unused
    rest = f"; it has no place for {len(unused)} weights of its files, such as {unused[0]}" if unused else ""
    return _describe_forward(language_model, name) + rest


def _describe_forward(language_model: LanguageModel, name: str) -> str:
    longest, unpacked = language_model.context_length, language_model.unpacked
    if unpacked is not None:
        return (
            f"model {name!r} runs unpacked (transformers' own forward pass, one sequence at a time: exact, "
            f"and slower), because {unpacked.why}; contexts of up to {longest} tokens"
            + _CACHES[unpacked.cache]
        )
    declared = declared_context(language_model.model.config, name)
    if longest == declared:
        return f"model {name!r} runs packed; contexts of up to {longest} tokens"
    return (
        f"model {name!r} runs packed; contexts end at {longest} of {declared} positions, up to which nothing "
        'depends on a sliding window or on other rotations (model.forward = "unpacked" goes further)'
    )
