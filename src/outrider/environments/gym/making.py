"""Environments of Gymnasium, GEM or a function of one's own: making them, and the form of their texts."""

import copy
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

from outrider.environments.gym.actions import DiscreteAction, RawAction, TextAction, WordAction
from outrider.environments.gym.generators import IsolatedRandom, RandomState
from outrider.environments.gym.observations import ObservationMode, observation_text
from outrider.environments.gym.settings import GymConfig
from outrider.errors import ConfigError, ToolUnavailable
from outrider.plugins.imports import describe_exception, import_target

_PACKAGES: Final = {"gymnasium": ("gymnasium", "gymnasium"), "gem": ("gem", "gem-llm")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How environments of a config are made and spoken to."""

    make: Callable[[], Any]
    action: RawAction | DiscreteAction
    observation: ObservationMode


def make_recipe(config: GymConfig) -> Recipe:
    """Make one environment and look at it. Raises :class:`ToolUnavailable` where the package is missing and
    :class:`ConfigError` for an id, an action space or an observation that cannot be played in text.
    """
    maker = _maker(config)
    with (
        IsolatedRandom(RandomState.from_seed(0), config.lock_timeout_s).inside()
        if config.has_own_draws
        else nullcontext()
    ):
        environment = _first(config, maker)
        try:
            mode, render_options = _observation(config, environment, maker)
            action = _action(config, environment)
        finally:
            close(environment)
        recipe = Recipe(
            make=lambda: maker(**_copy_kwargs(config), **render_options), action=action, observation=mode
        )
        _check_recipe(config, recipe)
    return recipe


def _check_recipe(config: GymConfig, recipe: Recipe) -> None:
    """Begin an episode as a rollout does: what is not of Gymnasium's form is told before the first one."""
    environment = recipe.make()
    try:
        try:
            observation, info = environment.reset(seed=config.first_seed)
            observation_text(
                observation,
                info,
                recipe.observation,
                environment.render() if recipe.observation == "render" else None,
            )
        except Exception as error:
            raise ConfigError(
                f"{config.id}: reset(seed=...) has to give an observation and a dictionary{describe_exception(error)}"
            ) from error
        try:
            result = environment.step(recipe.action.read(recipe.action.probe(0)).action)
        except Exception:  # it may not know this action: in a rollout that is a fault of its own
            return
        if not isinstance(result, tuple) or len(result) != 5:
            raise ConfigError(
                f"{config.id}: step(action) has to give an observation, a reward, terminated, truncated and "
                "a dictionary"
            )
    finally:
        close(environment)


def close(environment: Any) -> None:
    """Close what has a ``close``: GEM's games have none."""
    if callable(closing := getattr(environment, "close", None)):
        closing()


def _maker(config: GymConfig) -> Callable[..., Any]:
    if config.source == "factory":
        maker = import_target(config.id)
        if not callable(maker):
            raise ConfigError(f"{config.id} is no function that makes an environment")
        return maker  # type: ignore[no-any-return]
    module, package = _PACKAGES[config.source]
    if importlib.util.find_spec(module) is None:
        raise ToolUnavailable(f"{package} is not installed: pip install {package}")
    make = importlib.import_module(module).make
    return lambda **kwargs: make(config.id, **kwargs)


def _copy_kwargs(config: GymConfig) -> dict[str, Any]:
    """What one environment is made with: it may keep and change a list or a table of it."""
    return copy.deepcopy(config.kwargs)


def _first(config: GymConfig, maker: Callable[..., Any]) -> Any:
    try:
        return maker(**_copy_kwargs(config))
    except Exception as error:  # of somebody else's code: one line that names it
        raise ConfigError(
            f"the environment {config.id!r} cannot be made{describe_exception(error)}"
        ) from error


def _observation(
    config: GymConfig, environment: Any, maker: Callable[..., Any]
) -> tuple[ObservationMode, dict[str, Any]]:
    """How it is written, and what the environment is asked for at its making."""
    modes = (getattr(environment, "metadata", None) or {}).get("render_modes", ())
    # GEM declares no spaces: its observations are text.
    is_text = config.source == "gem" or _is_text(getattr(environment, "observation_space", None))
    chosen = config.observation
    if chosen == "auto" and is_text:
        chosen = "text"
    if chosen == "auto" and "ansi" not in modes:
        chosen = "json"
    if chosen in ("text", "json"):
        return chosen, {}
    if "ansi" not in modes:
        raise ConfigError(
            f"{config.id} has no rendering in text (render mode ansi): observation = json writes its values"
        )
    if getattr(environment, "render_mode", None) == "ansi":  # a function of one's own has chosen it
        return "render", {}
    try:
        close(maker(**_copy_kwargs(config), render_mode="ansi"))
    except Exception as error:  # a function of one's own that takes none
        if chosen == "auto" and config.source == "factory":
            return "json", {}
        raise ConfigError(
            f"{config.id} cannot be made with render_mode{describe_exception(error)}"
        ) from error
    return "render", {"render_mode": "ansi"}


def _action(config: GymConfig, environment: Any) -> RawAction | DiscreteAction:
    space: Any = getattr(environment, "action_space", None)
    kind = type(space).__name__
    if config.reads_raw:
        if not (_is_text(space) or _words(space)):
            advice = ": action_format = tag" if "Discrete" in _kinds(space) else ""
            raise ConfigError(f"{config.id} takes actions of {kind}, not text{advice}")
        return RawAction()
    if "Discrete" in _kinds(space):
        names = config.actions or tuple(str(int(space.start) + number) for number in range(int(space.n)))
        if len(names) != int(space.n):
            raise ConfigError(f"{config.id} has {space.n} actions, and actions names {len(names)}")
        return DiscreteAction(names, int(space.start))
    if config.actions:
        raise ConfigError(f"{config.id} has no discrete actions that could have names")
    if _is_text(space):
        return TextAction()
    if words := _words(space):
        return WordAction(words)
    raise ConfigError(
        f"{config.id} takes actions of {kind}, which have no form in text here: wrap it in a function of "
        "yours (source = factory) whose actions are Text or Discrete"
    )


def _is_text(space: Any) -> bool:
    return space is None or "Text" in _kinds(space)


def _words(space: Any) -> tuple[str, ...]:
    """The actions of a space that is a plain list of words, as GEM's Sokoban has; else nothing."""
    is_list = isinstance(space, list | tuple | set | frozenset) and bool(space)
    return tuple(space) if is_list and all(isinstance(word, str) and word.strip() for word in space) else ()


def _kinds(space: Any) -> set[str]:
    """Names of a space's class and of those that it derives from: Gymnasium need not be there."""
    return {cls.__name__ for cls in type(space).__mro__}


def package_version(config: GymConfig) -> str:
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
