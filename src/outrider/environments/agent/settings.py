"""Which program is the agent, what it works on, and how an episode of it is paid."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from outrider.environments.agent.named import FunctionRole, load_function
from outrider.environments.agent.request_fields import IGNORABLE
from outrider.environments.base import EnvironmentSettings
from outrider.environments.tool_qa.datasets import DatasetConfig
from outrider.plugins.names import is_import_path
from outrider.tokens.calls import CallFormatName


class ProgramConfig(EnvironmentSettings):
    """How an episode is paid whose policy is asked by a program, and what such a program may take."""

    details: ClassVar[frozenset[str]] = frozenset(
        {"max_programs", "failed_return", "cut_return", "response_format", "ignored_fields"}
    )

    tool_calls: CallFormatName | None = None
    """The form of the policy's native tool calls. None: requests with tools are refused."""
    response_format: Literal["refuse", "ignore"] = "refuse"
    """What becomes of requests whose answer has to be JSON (``response_format``, ``text.format``), to which
    nothing holds the policy. ``ignore``: they are answered and counted (``num_ignored_formats``).
    """
    ignored_fields: tuple[str, ...] = ()
    """Fields of requests that are refused by default, and that are ignored and counted instead
    (``num_ignored_fields``), such as ``logit_bias``.
    """
    success_at: float = 1.0
    """An episode with at least this return is a success, where the reward does not say so itself."""
    time_limit_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that a program may take, without those in which it waits for the policy."""
    failed_return: float | None = None
    """Return of a program that ends with an error or runs out of time. None: that is a fault, and the rollout
    is played again.
    """
    cut_return: float = 0.0
    """Return of an episode that ``rollout.max_turns`` or a full context ended."""
    is_repeatable: bool = False
    """Whether a program that gets the same answers always asks the same: methods that fork by replay (ARPO,
    Tree-GRPO) need it.
    """
    max_programs: Annotated[int, Field(ge=1)] | None = None
    """Programs at a time, of all rollout workers together."""

    @field_validator("ignored_fields")
    @classmethod
    def _can_be_ignored(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in IGNORABLE:
                raise ValueError(f"{name!r} is no field that can be ignored: {', '.join(sorted(IGNORABLE))}")
        return names

    @property
    def has_experts(self) -> bool:
        """Nobody knows what a program would have to be told."""
        return False

    @property
    def call_format(self) -> str | None:
        """See :class:`outrider.environments.base.EnvironmentSettings`."""
        return self.tool_calls

    @property
    def keeps_conversations(self) -> bool:
        """See :class:`outrider.environments.base.EnvironmentSettings`."""
        return True

    @property
    def max_concurrent(self) -> int | None:
        """See :class:`outrider.environments.base.EnvironmentSettings`."""
        return self.max_programs

    def waiting_s(self, num_concurrent: int) -> float:
        """A program's own limit ends it first: only then is it one that took too long."""
        return self.time_limit_s

    def replayed_differently(self) -> list[str]:
        """All of them, unless the recipe says otherwise."""
        return [] if self.is_repeatable else [self.type]


class AgentConfig(ProgramConfig):
    """A program of yours that speaks to an OpenAI endpoint. It owns its loop, its prompts and its tools; the
    endpoint that it is given (``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``) is the policy.
    """

    type: Literal["agent"] = "agent"
    function: str | None = None
    """A Python function, as ``my_agent:run``: called with the task, in a process of its own per episode. What
    it returns is the reward (a number, or an object with ``reward``, ``success`` and ``metrics``), or what
    ``reward`` is given.
    """
    command: tuple[str, ...] = ()
    """Or a program with its arguments, in which ``{question}`` stands for the question. The task is its
    standard input, as JSON; its standard output is what ``reward`` is given.
    """
    reward: str | None = None
    """A function ``my_agent:score``, called with the task and what the program came back with; returns as
    ``function`` does. None: the function returns the reward, or the program posts it to ``/reward`` under
    the base URL.
    """
    expert: str | None = None
    """A function ``my_agent:answer`` that knows what to say, for a cold start: called with the task and the
    conversation (a list of objects with ``role`` and ``content``), it gives the text of the policy's turn.
    Episodes that are no success are not used.
    """
    train: DatasetConfig | None = None
    valid: DatasetConfig | None = None
    test: DatasetConfig | None = None

    @model_validator(mode="after")
    def _validate(self) -> "AgentConfig":
        if (self.function is None) == (not self.command):
            raise ValueError("set exactly one of function and command")
        for name in ("function", "reward", "expert"):
            value = getattr(self, name)
            if value is not None and not is_import_path(value):
                raise ValueError(f"{name} is an import path such as my_agent:run, not {value!r}")
        return self

    @property
    def has_experts(self) -> bool:
        """Where a function is named."""
        return self.expert is not None

    def imported(self) -> Mapping[str, str]:
        """The functions that the recipe names."""
        return {str(key): path for key, path in self._functions().items()}

    def reference_checks(self) -> Mapping[str, Callable[[], object]]:
        """They, as they are called."""
        return {key: partial(load_function, key, path) for key, path in self._functions().items()}

    def _functions(self) -> Mapping[FunctionRole, str]:
        paths: dict[FunctionRole, str | None] = {
            "function": self.function, "reward": self.reward, "expert": self.expert
        }  # fmt: skip
        return {key: path for key, path in paths.items() if path is not None}
