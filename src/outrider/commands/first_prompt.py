"""The first prompt of a task, as an environment writes it and a chat template renders it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.environments.base import EnvironmentFactory, prompt_tools
from outrider.errors import EnvironmentFault, ModelError, OutriderError
from outrider.plugins.imports import describe_exception
from outrider.seeding import reset_seed
from outrider.types import Message, Task, ToolSchema

if TYPE_CHECKING:
    from outrider.tokens import ChatRenderer
    from outrider.train.settings import RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPrompt:
    """The messages and tools with which an episode of ``task`` begins."""

    task: Task
    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]

    def lines(self) -> list[str]:
        """The messages by role, each of their lines on one of its own, and the names of the tools."""
        lines: list[str] = []
        for message in self.messages:
            lines += f"[{message.role}] {message.content}".split("\n")
        if self.tools:
            names = ", ".join(str(tool["name"]) for tool in self.tools)
            lines.append(f"tools, which the chat template describes: {names}")
        return lines


def first_prompt(factory: EnvironmentFactory, task: Task, *, run_seed: int, step: int) -> FirstPrompt:
    """Start an episode and end it. ``step`` is the training step that it would belong to, -1 for an
    evaluation. Raises EnvironmentFault for whatever breaks in an environment.
    """
    try:
        environment = factory(task)
        try:
            messages = tuple(environment.reset(reset_seed(run_seed, step, task.key)))
            tools = tuple(prompt_tools(environment))
        finally:
            environment.close()
        if wrong := [message for message in messages if not isinstance(message, Message)]:
            raise TypeError(f"reset returned a {type(wrong[0]).__name__} among the messages")
    except OutriderError:
        raise
    except Exception as error:  # somebody else's code
        raise EnvironmentFault(
            f"the environment cannot start task {task.key!r}{describe_exception(error)}"
        ) from error
    return FirstPrompt(task=task, messages=messages, tools=tools)


def load_renderer(settings: "RunSettings", folder: str) -> "ChatRenderer":
    """The renderer with the tokenizer of a model folder or Hugging Face id. Raises ModelError."""
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from outrider.train.rendering import make_checked_renderer

    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # damaged files raise whatever their readers raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"cannot load the tokenizer of {settings.model.name!r}: {reason}"[:500]) from error
    if tokenizer.chat_template is None:
        raise ModelError(f"model {settings.model.name!r} has no chat template; use an instruct model")
    note = logging.getLogger(__name__).info
    return make_checked_renderer(tokenizer, settings.model, settings.environment, note=note)


def rendered_ids(prompt: FirstPrompt, renderer: "ChatRenderer") -> tuple[int, ...]:
    """The ids that the policy sees first. Raises ModelError if the template cannot render the messages."""
    return renderer.prompt(prompt.messages, prompt.tools)


def rendered_text(ids: Sequence[int], renderer: "ChatRenderer") -> str:
    """These ids as text, with the template's markers."""
    from outrider.tokens import decode_text

    return decode_text(renderer.tokenizer, ids, skip_special_tokens=False)
