"""Whether Gymnasium knows an environment, which nothing is made for."""

import copy
import importlib
import importlib.metadata
import importlib.util
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field, model_validator

from outrider.environments.gym.spaces import (
    DiscreteAction,
    ObservationMode,
    RawAction,
    TextAction,
    WordAction,
    observation_text,
)
from outrider.environments.seeded import SeedSettings
from outrider.errors import ConfigError, EnvironmentFault, ToolUnavailable
from outrider.plugins.imports import describe_exception, import_target
from outrider.plugins.registry import is_import_path


def require_registered(name: str) -> None:
    """Raises ConfigError where ``gymnasium.make`` would not find it. Says nothing where the package is not
    installed, of which a run tells.
    """
    if importlib.util.find_spec("gymnasium") is None:
        return
    from gymnasium import spec
    from gymnasium.envs.registration import find_highest_version, parse_env_id
    from gymnasium.error import Error

    module, _, bare = name.rpartition(":")
    if module:
        try:
            importlib.import_module(module)  # it registers its own
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"the module {module!r} cannot be imported{describe_exception(error)}"
            ) from error
    try:
        namespace, short, version = parse_env_id(bare)
        if version is not None or find_highest_version(namespace, short) is None:
            spec(bare)
    except Error as error:
        raise ConfigError(" ".join(str(error).split())) from error


# Which Gymnasium or GEM environment is played, and how its actions and observations are written.


class GymConfig(SeedSettings):
    """An environment with ``reset(seed=...)`` and ``step(action)`` of Gymnasium's form. An ``expert`` is
    called with an environment that was reset to the task's seed and gives the texts of the turns.
    """

    type: Literal["gym"] = "gym"
    source: Literal["gymnasium", "gem", "factory"] = "gymnasium"
    """Who makes the environment: ``gymnasium.make``, ``gem.make`` (package ``gem-llm``), or a function of
    yours, named in ``id`` as ``my_module:make``.
    """
    id: Annotated[str, Field(min_length=1)] = "FrozenLake-v1"
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """What the environment is made with."""
    actions: tuple[str, ...] = ()
    """Names of a discrete space's actions, first to last; empty are the numbers themselves."""
    action_format: Literal["auto", "tag", "raw"] = "auto"
    """``tag`` reads ``<action>left</action>``; ``raw`` hands over the whole text of a turn, for games that
    look for their own marks. ``auto``: ``raw`` with GEM, else ``tag``.
    """
    observation: Literal["auto", "text", "render", "json"] = "auto"
    """How an observation becomes text: as it is, by the environment's ``ansi`` rendering, or as JSON.
    ``auto``: the first of these that is possible.
    """
    draws_globally: bool | None = None
    """Whether the environment draws from Python's or NumPy's global generator, of which each episode then has
    a state of its own and one at a time is in the environment. None: yes with GEM and factories.
    """
    lock_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that an episode waits for others in that case, after which it is faulted."""

    @model_validator(mode="after")
    def _validate(self) -> "GymConfig":
        if self.source == "factory" and not is_import_path(self.id):
            raise ValueError(
                f"with source = factory the id is an import path such as my_module:make, not {self.id!r}"
            )
        # as a turn's action is read: case and the number of blanks do not matter
        names = [" ".join(action.lower().split()) for action in self.actions]
        if len(set(names)) != len(names) or not all(names):
            raise ValueError("actions are different names (in any case), none of them empty")
        if self.actions and self.reads_raw:
            raise ValueError(
                "actions are named for action_format = tag: with raw the environment reads the turn"
            )
        return self

    @property
    def reads_raw(self) -> bool:
        """Whether the environment gets the whole text of a turn."""
        return self.action_format == "raw" or (self.action_format == "auto" and self.source == "gem")

    @property
    def has_own_draws(self) -> bool:
        """Whether each episode keeps a state of the global generators."""
        return self.source != "gymnasium" if self.draws_globally is None else self.draws_globally

    def waiting_s(self, num_concurrent: int) -> float:
        """One episode at a time is in an environment that draws globally; a fault ends a longer wait."""
        return self.lock_timeout_s if self.has_own_draws else 0.0

    def imported(self) -> Mapping[str, str]:
        """The function that makes environments, and the expert's."""
        own = {"id": self.id} if self.source == "factory" else {}
        return {**own, **super().imported()}

    def reference_checks(self) -> Mapping[str, Callable[[], object]]:
        """They, or the id that Gymnasium has to know."""
        checks = {"id": partial(require_registered, self.id)} if self.source == "gymnasium" else {}
        return {**checks, **super().reference_checks()}


# Python's and NumPy's global generators, with a state of its own for every episode.
#
# Games that draw from them (GEM seeds them in ``reset`` and draws in ``step``) would take each other's
# numbers where several episodes are played in one process: the same seed would be another game from run to
# run.


_INSIDE = threading.Lock()


@dataclass(frozen=True, slots=True)
class RandomState:
    """A state of both generators."""

    python: Any
    numpy: Any

    @classmethod
    def from_seed(cls, seed: int) -> "RandomState":
        """The state that ``random.seed`` and ``numpy.random.seed`` would give; nothing is set."""
        return cls(random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state())

    @classmethod
    def current(cls) -> "RandomState":
        """The state that the process has."""
        return cls(random.getstate(), np.random.get_state())

    def set(self) -> None:
        """Make it the process's."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class IsolatedRandom:
    """One episode's state. ``timeout_s`` bounds the wait for other episodes: one that hangs inside its
    environment must not stop all others for ever.
    """

    def __init__(self, state: RandomState, timeout_s: float) -> None:
        self._state = state
        self._timeout_s = timeout_s

    def twin(self) -> "IsolatedRandom":
        """The same state, for a copy of the episode."""
        return IsolatedRandom(self._state, self._timeout_s)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This state is the process's, and nobody else is in an environment. Raises
        :class:`EnvironmentFault` where the wait was too long.
        """
        if not _INSIDE.acquire(timeout=self._timeout_s):
            raise EnvironmentFault(f"another environment has not returned for {self._timeout_s:g} s")
        outside = RandomState.current()
        try:
            self._state.set()
            yield
        finally:
            self._state = RandomState.current()
            outside.set()
            _INSIDE.release()


# Environments of Gymnasium, GEM or a function of one's own: making them, and the form of their texts.


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
                f"{config.id}: reset(seed=...) has to give an observation and a "
                f"dictionary{describe_exception(error)}"
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
