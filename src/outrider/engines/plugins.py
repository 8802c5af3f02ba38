"""The built-in engines as plug-ins; their settings are read without torch."""

from typing import TYPE_CHECKING

from outrider.engines.base import Engine, EngineContext, LocalSettings, VllmSettings

if TYPE_CHECKING:
    from outrider.engines.vllm.engine import VllmEngine


class Local:
    """The trained model generates in process, on a CPU or one GPU."""

    Settings = LocalSettings

    @classmethod
    def build(cls, settings: LocalSettings, context: EngineContext) -> Engine:
        from outrider.engines.local.engine import make_engine

        return make_engine(
            context.language_model,
            context_length=context.context_length,
            max_rows=settings.max_rows,
            on_tokens=context.on_tokens,
        )


class Vllm:
    """vLLM in process; weights go through a folder (extra vllm)."""

    Settings = VllmSettings

    @classmethod
    def build(cls, settings: VllmSettings, context: EngineContext) -> "VllmEngine":
        """Raises ModelError if vLLM is missing or cannot load the model."""
        from outrider.engines.vllm.engine import VllmEngine

        model = context.language_model
        return VllmEngine(
            folder=context.folder,
            export=context.export,
            tokenizer=model.tokenizer,
            eos_token_ids=model.eos_token_ids,
            eos_texts=model.eos_texts,
            context_length=min(context.context_length or model.context_length, model.context_length),
            precision=context.precision,
            device=context.device,
            settings=settings,
            on_tokens=context.on_tokens,
        )
