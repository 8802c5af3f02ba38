"""Which generated reasoning tasks there are."""

import importlib.util
import math
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from outrider.config import Settings
from outrider.environments.tool_qa.named_tools import ToolName, tool_tags, validate_tools, waiting_s
from outrider.environments.tool_qa.rewards import RewardConfig
from outrider.environments.tool_qa.tool_episode import EpisodeConfig
from outrider.errors import ToolUnavailable
from outrider.tokens.calls import ProtocolName
from outrider.tools.python import PythonToolConfig

SPLITS: Final = ("train", "valid", "test")
# Item i of a data set with seed s is that of seed s + i, so the splits begin far apart.
_SEEDS_PER_SPLIT: Final = 10_000_000
VERIFIER_SECONDS: Final = 5
"""Processor time of a verdict, which does not depend on what else the machine does."""
_REFUSED: Final = {
    "codeio": "its items differ from process to process",
    "composite": "name the data sets themselves",
}


class Generator(Settings):
    """A data set of reasoning-gym by name, with the options of its own configuration."""

    name: Annotated[str, Field(min_length=1)]
    options: dict[str, Any] = Field(default_factory=dict)


def _parse_generator(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class ReasoningGymConfig(EpisodeConfig):
    """Tasks that reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760) generates, and its verifiers."""

    is_closed_book: ClassVar[bool] = True
    has_verifier: ClassVar[bool] = True
    details: ClassVar[frozenset[str]] = EpisodeConfig.details | {"system_prompt", "unsafe_verifier"}

    type: Literal["reasoning_gym"] = "reasoning_gym"
    datasets: tuple[Annotated[Generator, BeforeValidator(_parse_generator)], ...] = Field(
        (Generator(name="chain_sum"),), min_length=1
    )
    """Names of data sets, or tables such as ``{name = "countdown", options = {max_numbers = 4}}``. Their
    tasks take turns.
    """
    num_train: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Tasks of the split, all data sets together."""
    num_valid: Annotated[int, Field(ge=0, le=1_000_000)] = 32
    """The same for ``valid``. No question comes twice, within a split or in two."""
    num_test: Annotated[int, Field(ge=0, le=1_000_000)] = 64
    """The same for ``test``."""
    seed: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Decides the tasks. More tasks leave the first ones of ``train`` as they are (but in ``acre``)."""
    tools: tuple[ToolName, ...] = ()
    """Tools that may be called before the answer: ``["python"]``, or plug-ins. None is a single turn."""
    protocol: ProtocolName = "tags"
    """How tools are called: by tags inside one message, or natively (as with ``type = "tools"``)."""
    python: PythonToolConfig = PythonToolConfig()
    reward: RewardConfig = RewardConfig(
        answer="verifier", format_penalty=0.0, require_think=False, require_boxed=False, multi_tool_bonus=0.0
    )
    system_prompt: str | None = None
    """Your own system prompt; None explains the tags, empty is none."""
    unsafe_verifier: bool = False
    """Verify without a sandbox where the kernel lacks its locks. Some verifiers evaluate the answer as
    Python: a policy's text then runs with your rights.
    """

    @model_validator(mode="after")
    def _known(self) -> "ReasoningGymConfig":
        for dataset in self.datasets:
            if dataset.name in _REFUSED:
                raise ValueError(
                    f"the data set {dataset.name} is not possible here: {_REFUSED[dataset.name]}"
                )
        validate_tools(self.tools)
        if not self.tools and self.protocol != "tags":
            raise ValueError("a native protocol needs tools: without any, the answer stands between tags")
        if self.reward.answer == "judge":
            raise ValueError("these tasks have a verifier of their own, and no judge")
        return self

    @property
    def has_experts(self) -> bool:
        """The package's answers; they hold no thoughts."""
        return not self.reward.require_think

    @property
    def call_format(self) -> str | None:
        """See :class:`outrider.environments.base.EnvironmentSettings`."""
        return None if self.protocol == "tags" else self.protocol

    @property
    def calls_tools(self) -> bool:
        """Where the recipe names any."""
        return bool(self.tools)

    def tool_names(self) -> tuple[str, ...]:
        """Tag names, in the recipe's order."""
        return tool_tags(self.tools)

    def waiting_s(self, num_concurrent: int) -> float:
        """Answers are verified one at a time, and Python runs so many calls; the others wait."""
        rounds = math.ceil(num_concurrent / self.python.num_servers) if "python" in self.tools else 0
        calls = max(waiting_s(self.tools, num_concurrent), self.python.wall_seconds * rounds)
        return VERIFIER_SECONDS * num_concurrent + calls

    def first_seed(self, split: str) -> int:
        """Seed of a split's first item."""
        return self.seed * len(SPLITS) * _SEEDS_PER_SPLIT + SPLITS.index(split) * _SEEDS_PER_SPLIT


def check_package() -> None:
    """Raises :class:`ToolUnavailable` where reasoning-gym is missing."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ToolUnavailable("reasoning-gym is not installed: pip install 'outrider[reasoning-gym]'")
