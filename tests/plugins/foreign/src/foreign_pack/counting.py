"""An engine: the local one, which counts its batches."""

from collections.abc import Sequence

from pydantic import Field

import outrider as o


class Counting:
    """Generates in process, and counts."""

    class Settings(o.EngineSettings):
        rows: int = Field(64, ge=1)

    def __init__(self, settings: Settings, context: o.EngineContext) -> None:
        from outrider.engines.local.engine import LocalEngine

        self._inner = LocalEngine(
            context.language_model,
            context_length=context.context_length,
            max_rows=settings.rows,
            on_tokens=context.on_tokens,
        )
        self.tokenizer = self._inner.tokenizer
        self.context_length = self._inner.context_length
        self.num_batches = 0

    @classmethod
    def build(cls, settings: Settings, context: o.EngineContext) -> "Counting":
        return cls(settings, context)

    @property
    def weight_version(self) -> int:
        return self._inner.weight_version

    def generate(self, requests: Sequence[o.Request]) -> list[o.Generation]:
        self.num_batches += 1
        return self._inner.generate(requests)

    def release(self, cache_keys: Sequence[str]) -> None:
        self._inner.release(cache_keys)

    def free_cache(self) -> None:
        self._inner.free_cache()

    def load(self, version: int) -> None:
        self._inner.load(version)
