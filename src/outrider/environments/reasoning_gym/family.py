"""Reasoning-gym's generated tasks: ``environment.type = "reasoning_gym"``."""

from collections.abc import Sequence
from typing import Literal

from outrider.environments.reasoning_gym.generating import generate
from outrider.environments.reasoning_gym.settings import SPLITS, ReasoningGymConfig, check_package
from outrider.environments.reasoning_gym.verifying import SandboxedVerifier
from outrider.environments.tool_qa.episode import ToolEnvironmentFactory
from outrider.environments.tool_qa.named_tools import load_tools, usages
from outrider.environments.tool_qa.tag_protocol import stop_strings
from outrider.errors import DataError
from outrider.types import Step, Task


class ReasoningGymFactory(ToolEnvironmentFactory):
    """Makes environments over the tools and the verifier, which it owns."""

    def __init__(self, config: ReasoningGymConfig) -> None:
        """Raises ToolUnavailable where a tool, the sandbox or the package is missing."""
        check_package()
        self.verifier = SandboxedVerifier(allow_unsafe=config.unsafe_verifier)
        try:
            super().__init__(
                tools=load_tools(config.tools, config),
                config=config,
                system_prompt=system_prompt(config),
                verifier=self.verifier,
            )
        except BaseException:
            self.verifier.close()
            raise

    def close(self) -> None:
        """Close the tools and the verifier; may be called twice."""
        super().close()
        self.verifier.close()


class ReasoningGymTaskSet:
    """The generated tasks of a config."""

    Settings = ReasoningGymConfig
    name = "reasoning_gym"
    protocol: Literal["inline", "chat"] = "inline"
    stateful = False

    def __init__(self, config: ReasoningGymConfig) -> None:
        """Generate nothing."""
        self.config = config
        # a native turn ends where the policy closes its message
        self.stop = stop_strings(config.tool_names()) if config.call_format is None else ()
        self._splits: dict[str, tuple[Task, ...]] | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """The frozen list of ``train``, ``valid`` or ``test``. Raises ToolUnavailable without the package,
        DataError where a data set has too few questions.
        """
        if split not in SPLITS:
            raise DataError(f"reasoning_gym: unknown split {split!r}, expected one of {', '.join(SPLITS)}")
        if self._splits is None:
            check_package()
            self._splits = generate(self.config)
        return self._splits[split]

    def make(self) -> ReasoningGymFactory:
        """Start the tools and the verifier's sandbox; raises ToolUnavailable or DataError."""
        return ReasoningGymFactory(self.config)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """The package's own answer, without a way to it; None where it has none, or the format asks for
        thoughts. Teaches the format.
        """
        if not task.answers or not self.config.has_experts:
            return None
        answer = task.answers[0]
        box = "\\boxed{%s}" if self.config.reward.require_boxed else "%s"
        text = box % answer if self.config.call_format is not None else f"<answer>{box % answer}</answer>"
        return (Step(text=text, observation="", is_terminal=True),)

    def close(self) -> None:
        """Nothing is held."""


def system_prompt(config: ReasoningGymConfig) -> str:
    """How to answer, and how to call tools where there are any."""
    if config.system_prompt is not None:
        return config.system_prompt
    box = r"\boxed{...}" if config.reward.require_boxed else "..."
    thinking = (
        "Think step by step between <think> and </think>" if config.reward.require_think else "Think first"
    )
    if config.call_format is not None:
        answer_form = f" as {box}" if config.reward.require_boxed else " alone"
        return (
            f"{thinking}. You have {config.max_calls} tool calls. Then write the final answer{answer_form}."
        )
    lines = [
        f"{thinking}, then give the final answer between tags: <answer>{box}</answer>.",
        *usages(config.tools),
    ]
    if config.tools:
        lines.append(
            "What a tool returns appears between <result> and </result>; never write that yourself. "
            f"You have {config.max_calls} calls."
        )
    return "\n".join(lines)
