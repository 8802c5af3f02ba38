"""Outrider trains LLM agents to explore.

Everything that a user needs is in this module, and imported when it is first used; ``import outrider`` alone
imports neither torch nor any other large package::

    import outrider as o

    run = o.train("recipe.toml", run="runs/first")

The reference of all names is ``docs/reference/api.md``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from outrider import deprecated

if TYPE_CHECKING:  # for type checkers and editors; the same names as in _NAMES_BY_MODULE
    from outrider.algorithms.advantages import RolloutAdvantages as RolloutAdvantages
    from outrider.algorithms.base import Algorithm as Algorithm
    from outrider.algorithms.base import AlgorithmContext as AlgorithmContext
    from outrider.algorithms.base import Augmentation as Augmentation
    from outrider.algorithms.base import GroupAdvantages as GroupAdvantages
    from outrider.algorithms.base import GroupFilter as GroupFilter
    from outrider.algorithms.base import ObjectiveSettings as ObjectiveSettings
    from outrider.algorithms.base import TaskChoice as TaskChoice
    from outrider.algorithms.base import group_advantages as group_advantages
    from outrider.algorithms.base import total_returns as total_returns
    from outrider.algorithms.base import with_values as with_values
    from outrider.algorithms.base import write_advantages as write_advantages
    from outrider.algorithms.losses import TokenLoss as TokenLoss
    from outrider.algorithms.losses import TokenLossInputs as TokenLossInputs
    from outrider.api import compare as compare
    from outrider.api import evaluate as evaluate
    from outrider.api import evaluate_tasks as evaluate_tasks
    from outrider.api import load_run as load_run
    from outrider.api import train as train
    from outrider.config import Settings as Settings
    from outrider.engines.base import Engine as Engine
    from outrider.engines.base import EngineContext as EngineContext
    from outrider.engines.base import EngineSettings as EngineSettings
    from outrider.engines.base import FinishReason as FinishReason
    from outrider.engines.base import Generation as Generation
    from outrider.engines.base import Request as Request
    from outrider.environments.base import Environment as Environment
    from outrider.environments.base import EnvironmentSettings as EnvironmentSettings
    from outrider.environments.base import EpisodeResult as EpisodeResult
    from outrider.environments.base import StepResult as StepResult
    from outrider.errors import ConfigError as ConfigError
    from outrider.errors import DataError as DataError
    from outrider.errors import EngineFault as EngineFault
    from outrider.errors import EnvironmentFault as EnvironmentFault
    from outrider.errors import InvalidResult as InvalidResult
    from outrider.errors import ModelError as ModelError
    from outrider.errors import NonFiniteResult as NonFiniteResult
    from outrider.errors import OutriderError as OutriderError
    from outrider.errors import ToolFault as ToolFault
    from outrider.errors import ToolUnavailable as ToolUnavailable
    from outrider.evaluation.compare import Comparison as Comparison
    from outrider.evaluation.compare_report import markdown_page as markdown_page
    from outrider.evaluation.tasks import EvalTasksSettings as EvalTasksSettings
    from outrider.memory.embedders import Embedder as Embedder
    from outrider.memory.embedders import EmbedderContext as EmbedderContext
    from outrider.metrics import Metric as Metric
    from outrider.rollout.hooks import Attempt as Attempt
    from outrider.rollout.hooks import EpisodeState as EpisodeState
    from outrider.rollout.hooks import Hook as Hook
    from outrider.rollout.hooks import Splice as Splice
    from outrider.rollout.hooks import StatelessHook as StatelessHook
    from outrider.runs import Run as Run
    from outrider.runs import plot as plot
    from outrider.seeding import stream as stream
    from outrider.tokens.tool_calls import CallFormat as CallFormat
    from outrider.tokens.tool_calls import ParsedCalls as ParsedCalls
    from outrider.tools.base import Tool as Tool
    from outrider.tools.base import ToolContext as ToolContext
    from outrider.tools.base import ToolGroup as ToolGroup
    from outrider.tools.base import ToolOutput as ToolOutput
    from outrider.tools.base import ToolSettings as ToolSettings
    from outrider.tools.functions import tool as tool
    from outrider.trace import Leaf as Leaf
    from outrider.trace import Node as Node
    from outrider.trace import Trace as Trace
    from outrider.types import CallRecord as CallRecord
    from outrider.types import Message as Message
    from outrider.types import Origin as Origin
    from outrider.types import Outcome as Outcome
    from outrider.types import Step as Step
    from outrider.types import Task as Task
    from outrider.types import ToolCall as ToolCall
    from outrider.types import ToolSchema as ToolSchema
    from outrider.types import Trajectory as Trajectory
    from outrider.viewer.trackers import Tracker as Tracker
    from outrider.viewer.trackers import TrackerContext as TrackerContext

__version__ = "0.3.9"

_NAMES_BY_MODULE: Final = {
    "outrider.algorithms.advantages": "RolloutAdvantages",
    "outrider.algorithms.base": (
        "Algorithm AlgorithmContext Augmentation GroupAdvantages GroupFilter ObjectiveSettings "
        "TaskChoice group_advantages total_returns with_values write_advantages"
    ),
    "outrider.algorithms.losses": "TokenLoss TokenLossInputs",
    "outrider.api": "compare evaluate evaluate_tasks load_run train",
    "outrider.config": "Settings",
    "outrider.engines.base": "Engine EngineContext EngineSettings FinishReason Generation Request",
    "outrider.environments.base": "Environment EnvironmentSettings EpisodeResult StepResult",
    "outrider.errors": (
        "ConfigError DataError EngineFault EnvironmentFault InvalidResult ModelError "
        "NonFiniteResult OutriderError ToolFault ToolUnavailable"
    ),
    "outrider.evaluation.compare": "Comparison",
    "outrider.evaluation.compare_report": "markdown_page",
    "outrider.evaluation.tasks": "EvalTasksSettings",
    "outrider.memory.embedders": "Embedder EmbedderContext",
    "outrider.metrics": "Metric",
    "outrider.rollout.hooks": "Attempt EpisodeState Hook Splice StatelessHook",
    "outrider.runs": "Run plot",
    "outrider.seeding": "stream",
    "outrider.tokens.tool_calls": "CallFormat ParsedCalls",
    "outrider.tools.base": "Tool ToolContext ToolGroup ToolOutput ToolSettings",
    "outrider.tools.functions": "tool",
    "outrider.trace": "Leaf Node Trace",
    "outrider.types": "CallRecord Message Origin Outcome Step Task ToolCall ToolSchema Trajectory",
    "outrider.viewer.trackers": "Tracker TrackerContext",
}
_MODULES: Final = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}

__all__ = ["__version__", *sorted(_MODULES)]

deprecated.install()


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES and (new_name := deprecated.NAMES.get(name)) in _MODULES:
        deprecated.warn(f"outrider.{name}", f"outrider.{new_name}")
        name = str(new_name)
    if name not in _MODULES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    """All public names, also those that were not imported yet."""
    return sorted({*globals(), *__all__})
