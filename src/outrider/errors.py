"""Errors that a user can act on; every one of them prints as a single line on the command line."""

from typing import Final


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
    """The infrastructure of a tool broke (not: the model used it wrongly). Retried, then masked; never a
    reward.
    """


class EnvironmentFault(OutriderError):
    """A simulator died or stalled. Retried with a fresh environment, then masked; never a reward."""


class InvalidResult(OutriderError):
    """An environment or a reward function returned a value of a type that is no result (text as a reward, a
    list as a success flag). Its code is wrong, so no retry helps and the run stops.
    """


class NonFiniteResult(EnvironmentFault):
    """An environment, agent program or reward function returned NaN or an infinite number. Retried, then
    masked; the run stops if every rollout of a step ends like this.
    """


class UnusableReward(EnvironmentFault):
    """An agent program came back with a value that is no reward. The rollout is masked, and the run stops
    after the step: see :class:`InvalidResult`.
    """

    PREFIX: Final = "the agent program gave no usable reward: "

    def __init__(self, problem: str) -> None:
        super().__init__(problem)

    def __str__(self) -> str:
        return f"{self.PREFIX}{self.args[0]}"


class EngineFault(OutriderError):
    """An inference engine failed to answer. Retried, then masked; never a reward."""


class ClusterFault(OutriderError):
    """A process of a run on several ones that died, is silent, or cannot be placed; the run goes on with
    ``--resume``.
    """


class ProcessLost(ClusterFault):
    """The process ``process`` (``engine 1``, ``rollout worker 0``) is dead, or silent (``is_silent``):
    another one may take its place.
    """

    def __init__(self, message: str, process: str, is_silent: bool = False) -> None:
        super().__init__(message, process, is_silent)  # what pickle makes it of again
        self.process = process
        self.is_silent = is_silent
        self.is_charged = True  # whether its repair counts in cluster.max_restarts

    def __str__(self) -> str:
        return str(self.args[0])


class NoRepair(ClusterFault):
    """A process is gone, and to begin anew is not allowed, or would not help: there is no place for it."""


class HubError(OutriderError):
    """The Hugging Face hub, or the way to it, failed; the same call goes on."""


class PackError(OutriderError):
    """A pack that is malformed, or whose files or tables are not what its manifest and its results say."""
