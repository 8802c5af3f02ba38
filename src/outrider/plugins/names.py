"""The names that a recipe may use: the table of what is built in, and what installed packages register."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Literal, get_args

from outrider.errors import ConfigError
from outrider.near import did_you_mean

Kind = Literal["algorithms", "environments", "tools", "engines", "embedders", "trackers", "call_formats"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

# The only list of classes. They are strings, so that nothing is imported before a recipe names it.
BUILT_IN: Final[Mapping[Kind, Mapping[str, str]]] = {
    "algorithms": {
        "grpo": "outrider.algorithms.grpo:Grpo",
        "reinforce++": "outrider.algorithms.reinforce_plus_plus:ReinforcePlusPlus",
        "rejection": "outrider.algorithms.rejection:Rejection",
        "rapo": "outrider.algorithms.rapo.algorithm:Rapo",
        "arpo": "outrider.algorithms.arpo.algorithm:Arpo",
        "gigpo": "outrider.algorithms.gigpo.algorithm:Gigpo",
        "empo2": "outrider.algorithms.empo2.algorithm:Empo2",
        "combined": "outrider.algorithms.combined.algorithm:Combined",
        "luffy": "outrider.algorithms.luffy:Luffy",
        "rollout_replay": "outrider.algorithms.rollout_replay.algorithm:RolloutReplay",
        "tree_grpo": "outrider.algorithms.tree_grpo:TreeGrpo",
    },
    "environments": {
        "factbook": "outrider.environments.factbook.family:FactbookTaskSet",
        "tools": "outrider.environments.tool_qa.family:ToolsTaskSet",
        "scienceworld": "outrider.environments.scienceworld.family:ScienceWorldTaskSet",
        "webshop": "outrider.environments.webshop.family:WebShopTaskSet",
        "textworld": "outrider.environments.textworld.family:TextWorldTaskSet",
        "house": "outrider.environments.house.family:HouseTaskSet",
        "alfworld": "outrider.environments.alfworld.family:AlfworldTaskSet",
        "gym": "outrider.environments.gym.family:GymTaskSet",
        "agent": "outrider.environments.agent.family:AgentTaskSet",
        "verifiers": "outrider.environments.verifiers.family:VerifiersTaskSet",
        "openenv": "outrider.environments.openenv.family:OpenEnvTaskSet",
        "reasoning_gym": "outrider.environments.reasoning_gym.family:ReasoningGymTaskSet",
    },
    "tools": {
        "search": "outrider.tools.search:SearchTool",
        "python": "outrider.tools.python_text:PythonAdapter",
        "browser": "outrider.tools.browser.tool:Browser",
        "mcp": "outrider.tools.mcp.tool:McpServer",
    },
    "engines": {
        "local": "outrider.engines.plugins:Local",
        "vllm": "outrider.engines.plugins:Vllm",
        "retrospex": "outrider.algorithms.retrospex.engine:Retrospex",
    },
    "embedders": {
        "minilm": "outrider.memory.embedder:MiniLmEmbedder",
        "hash": "outrider.memory.embedder:HashEmbedder",
    },
    "trackers": {
        "tensorboard": "outrider.watch.trackers:TensorboardTracker",
        "wandb": "outrider.watch.trackers:WandbTracker",
        "trackio": "outrider.watch.trackers:TrackioTracker",
    },
    "call_formats": {
        "hermes": "outrider.tokens.calls.hermes:Hermes",
        "qwen3_coder": "outrider.tokens.calls.qwen3_coder:Qwen3Coder",
        "llama3_json": "outrider.tokens.calls.llama3_json:Llama3Json",
        "pythonic": "outrider.tokens.calls.pythonic:Pythonic",
    },
}


def is_import_path(name: str) -> bool:
    """Whether ``name`` is of the form ``package.module:Class``."""
    module, separator, attribute = name.partition(":")
    return bool(separator and attribute) and all(part.isidentifier() for part in module.split("."))


@cache
def registered(kind: Kind) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Names that installed packages register under ``outrider.KIND``. Two packages may claim one name."""
    points: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=f"outrider.{kind}"):
        if point not in points.get(point.name, ()):
            points[point.name] = (*points.get(point.name, ()), point)
    return points


def known_names(kind: Kind) -> list[str]:
    """Every short name of a kind, those that are built in first."""
    return [*BUILT_IN[kind], *(name for name in sorted(registered(kind)) if name not in BUILT_IN[kind])]


def is_known(kind: Kind, name: str) -> bool:
    """Whether a recipe may use this name. Installed packages are asked only about names that are not built
    in."""
    return name in BUILT_IN[kind] or is_import_path(name) or name in registered(kind)


def resolve_target(kind: Kind, name: str, *, also: Sequence[str] = (), presets: Sequence[str] = ()) -> str:
    """``module:Class`` of a name. Raises ConfigError, with a near match, for one that nobody has.

    ``also`` are words that may stand in its place, ``presets`` names that a message lists behind the others.

    What is built in keeps its name, whatever is installed beside it: no package changes what a recipe meant.
    """
    if name in BUILT_IN[kind]:
        return BUILT_IN[kind][name]
    if is_import_path(name):
        return name
    if len(points := registered(kind).get(name, ())) > 1:
        packages = " and ".join(sorted({package_label(point) for point in points}))
        raise ConfigError(
            f"{name!r} is registered by {packages}: give the import path "
            "(package.module:Class) of the one you mean",
        )
    if points:
        return points[0].value
    known = [*also, *known_names(kind)]
    listed = f"{', '.join(known)}, or package.module:Class"
    raise ConfigError(
        f"there is no {name!r}{_owner(kind, name) or did_you_mean(name, [*known, *presets])} (one of "
        f"{listed}{'; presets: ' if presets else ''}{', '.join(presets)})",
    )


def _owner(kind: Kind, name: str) -> str:
    """The end of a message about a name that another kind has."""
    owners = [other for other in KINDS if other != kind and name in BUILT_IN[other]]
    if not owners:
        return ""
    return f" among the {kind.replace('_', ' ')}; it is one of the {owners[0].replace('_', ' ')}"


def package_label(point: EntryPoint) -> str:
    """Name and version of the package that registers an entry point."""
    return "an unnamed package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
