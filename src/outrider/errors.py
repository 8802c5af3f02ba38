"""Errors for users; the command line prints each as a single line."""

from typing import Any, Final


def unwrap_group(error: BaseException, *kinds: type[BaseException]) -> BaseException:
    """Return the exception behind a group, which for example ``asyncio.TaskGroup`` raises: the first one of
    ``kinds``, otherwise the first one. Other exceptions are returned unchanged.
    """
    if isinstance(error, BaseExceptionGroup):
        error = error.subgroup(kinds) or error
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class OutriderError(Exception):
    """Base of all errors that Outrider raises on purpose."""


class ConfigError(OutriderError):
    """A configuration that cannot run: unknown key, wrong type, impossible combination. Exit status 2."""


class DataError(OutriderError):
    """A data set that is missing, empty or malformed; the message names the file and the line."""


class ModelError(OutriderError):
    """A model, tokenizer or embedder that cannot be loaded."""


class ToolUnavailable(OutriderError):
    """A configured tool cannot work on this machine; raised before the first rollout."""


class BufferCorrupt(OutriderError):
    """A step-trace buffer that fails its integrity check."""


class CheckpointError(OutriderError):
    """A checkpoint that is missing, incomplete or does not belong to this run."""


class ToolFault(OutriderError):
    """The infrastructure of a tool failed (not: the model misused it). Retried, then masked; never
    a reward. ``tool_calls`` are the :class:`~outrider.types.CallRecord` objects of the turn, if known.
    """

    tool_calls: tuple[Any, ...] = ()


class EnvironmentFault(OutriderError):
    """A simulator died or stalled. Retried with a fresh environment, then masked; never a reward.
    ``tool_calls`` as in :class:`ToolFault`.
    """

    tool_calls: tuple[Any, ...] = ()


class InvalidResult(OutriderError):
    """An environment or a reward function returned a value of a wrong type (for example text as a reward). No
    retry helps, so the run stops.
    """


class NonFiniteResult(EnvironmentFault):
    """An environment, agent program or reward function returned NaN or an infinite number. Retried, then
    masked; the run stops if every rollout of a step ends like this.
    """


class UnusableReward(EnvironmentFault):
    """An agent program returned an invalid reward. The rollout is masked, and the run stops after
    the step.
    """

    PREFIX: Final = "the agent program gave no usable reward: "

    def __str__(self) -> str:
        return f"{self.PREFIX}{self.args[0]}"


class EngineFault(OutriderError):
    """An inference engine failed. Retried, then masked; never a reward."""


class ClusterFault(OutriderError):
    """A process of a distributed run died, is silent, or cannot be placed; continue with ``--resume``."""


class ProcessLost(ClusterFault):
    """The process ``process`` (for example ``engine 1``) died or is silent (``is_silent``), and may
    be replaced.
    """

    def __init__(self, message: str, process: str, is_silent: bool = False) -> None:
        super().__init__(message, process, is_silent)  # the arguments for unpickling
        self.process = process
        self.is_silent = is_silent

    def __str__(self) -> str:
        return str(self.args[0])


class NoRepair(ClusterFault):
    """A process is lost, and a restart is not allowed or would not help."""


class HubError(OutriderError):
    """The Hugging Face hub or the connection failed; repeat the same command to continue."""


class PackError(OutriderError):
    """A pack that is malformed or does not match its manifest."""
