"""Environments of Gymnasium, GEM or a function of one's own: making them, and the form of their texts."""

import copy
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

from outrider.environments.gym.actions import NamedAction, RawAction, TextAction
from outrider.environments.gym.generators import Drawn, OwnDraws
from outrider.environments.gym.observations import How
from outrider.environments.gym.settings import GymConfig
from outrider.errors import ConfigError, ToolUnavailable
from outrider.plugins.imports import import_target, told_of

_PACKAGES: Final = {"gymnasium": ("gymnasium", "gymnasium"), "gem": ("gem", "gem-llm")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How environments of a config are made and spoken to."""

    make: Callable[[], Any]
    action: RawAction | NamedAction
    observation: How


def recipe_of(config: GymConfig) -> Recipe:
    """Make one environment and look at it. Raises :class:`ToolUnavailable` where the package is missing and
    :class:`ConfigError` for an id, an action space or an observation that cannot be played in text.
    """
    maker = _maker(config)
    with (
        OwnDraws(Drawn.of_seed(0), config.lock_timeout_s).inside() if config.has_own_draws else nullcontext()
    ):
        one = _first(config, maker)
        try:
            how, asked = _observation(config, one)
            action = _action(config, one)
        finally:
            close(one)
    return Recipe(make=lambda: maker(**_own(config), **asked), action=action, observation=how)


def close(environment: Any) -> None:
    """Close what has a ``close``: GEM's games have none."""
    if callable(closing := getattr(environment, "close", None)):
        closing()


def _maker(config: GymConfig) -> Callable[..., Any]:
    if config.source == "factory":
        found = import_target(config.id)
        if not callable(found):
            raise ConfigError(f"{config.id} is no function that makes an environment")
        return found  # type: ignore[no-any-return]
    module, package = _PACKAGES[config.source]
    if importlib.util.find_spec(module) is None:
        raise ToolUnavailable(f"{package} is not installed: pip install {package}")
    make = importlib.import_module(module).make
    return lambda **kwargs: make(config.id, **kwargs)


def _own(config: GymConfig) -> dict[str, Any]:
    """What one environment is made with: it may keep and change a list or a table of it."""
    return copy.deepcopy(config.kwargs)


def _first(config: GymConfig, maker: Callable[..., Any]) -> Any:
    try:
        return maker(**_own(config))
    except Exception as error:  # of somebody else's code: one line that names it
        raise ConfigError(f"the environment {config.id!r} cannot be made{told_of(error)}") from error


def _observation(config: GymConfig, one: Any) -> tuple[How, dict[str, Any]]:
    """How it is written, and what the environment is asked for at its making."""
    modes = (getattr(one, "metadata", None) or {}).get("render_modes", ())
    # GEM declares no spaces: its observations are text.
    is_text = config.source == "gem" or type(getattr(one, "observation_space", None)).__name__ in (
        "Text",
        "NoneType",
    )
    chosen = config.observation
    if chosen == "auto":
        chosen = "text" if is_text else "render" if "ansi" in modes else "json"
    if chosen == "render" and "ansi" not in modes:
        raise ConfigError(
            f"{config.id} has no rendering in text (render mode ansi): observation = json writes its values"
        )
    return chosen, {"render_mode": "ansi"} if chosen == "render" else {}


def _action(config: GymConfig, one: Any) -> RawAction | NamedAction:
    space: Any = getattr(one, "action_space", None)
    kind = type(space).__name__
    if config.reads_raw:
        if kind not in ("Text", "NoneType"):
            raise ConfigError(f"{config.id} takes actions of {kind}, not text: action_format = tag")
        return RawAction()
    if kind == "Discrete":
        names = config.actions or tuple(str(int(space.start) + number) for number in range(int(space.n)))
        if len(names) != int(space.n):
            raise ConfigError(f"{config.id} has {space.n} actions, and actions names {len(names)}")
        return NamedAction(names, int(space.start))
    if config.actions:
        raise ConfigError(f"{config.id} has no discrete actions that could have names")
    if kind in ("Text", "NoneType"):
        return TextAction()
    raise ConfigError(
        f"{config.id} takes actions of {kind}, which have no form in text here: wrap it in a function of "
        "yours (source = factory) whose actions are Text or Discrete"
    )


def package_of(config: GymConfig) -> str:
    """Name and version of the package whose games these are; empty for a function of one's own, or where it
    is not installed.
    """
    if config.source == "factory":
        return ""
    package = _PACKAGES[config.source][1]
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""
