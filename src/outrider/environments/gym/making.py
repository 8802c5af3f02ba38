"""Settings of Gymnasium, GEM and your own environments, how they are made, their actions and observations as
text, and their random generators.
"""

import copy
import importlib
import importlib.metadata
import importlib.util
import json
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field, model_validator

from outrider.environments.seeded import ActionFormat, SeedSettings
from outrider.environments.text_games import parse_action
from outrider.errors import ConfigError, EnvironmentFault, ToolUnavailable
from outrider.plugins.imports import describe_exception, import_target
from outrider.plugins.registry import is_import_path

NUM_PROBES: Final = 5


def raw_action() -> ActionFormat:
    """The whole text of a turn, for environments that look for their own marks."""
    boxes = tuple(f"\\boxed{{{number}}}" for number in range(1, NUM_PROBES + 1))  # as GEM's games read
    return ActionFormat(instructions="", probes=boxes, read=lambda text: (text, ""))


def text_action(words: Sequence[str] = ()) -> ActionFormat:
    """The text between the tags with white space collapsed.

    ``words`` are the actions of an environment that lists them. It checks the text itself: some environments
    look for the word inside a mark of their own, such as GEM's games inside a box.
    """
    instructions = f"Write one action a turn, for example <action>{words[0] if words else 'look'}</action>."
    if words:
        instructions += f" The actions are: {', '.join(words)}."
    texts = tuple(words) or tuple(map(str, range(1, NUM_PROBES + 1)))
    return ActionFormat(
        instructions=instructions,
        probes=tuple(f"<action>{text}</action>" for text in texts),
        read=lambda text: parse_action(text, lower=False),
    )


def discrete_action(names: Sequence[str], first: int) -> ActionFormat:
    """The name of an action of a discrete space between the tags, in upper or lower case.

    ``first`` is the space's smallest number.
    """
    numbers = {" ".join(name.lower().split()): first + number for number, name in enumerate(names)}
    listing = ", ".join(names)
    example = f"Write one action a turn, for example <action>{names[0]}</action>."

    def read(text: str) -> tuple[int | None, str]:
        action, problem = parse_action(text)
        if not problem and action not in numbers:
            problem = f"There is no action {action!r}. The actions are: {listing}."
        return numbers.get(action), problem

    return ActionFormat(
        instructions=f"{example} The actions are: {listing}.",
        probes=tuple(f"<action>{name}</action>" for name in numbers),
        read=read,
    )


ObservationMode = Literal["text", "render", "json"]
_COLOURED: Final = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def observation_text(observation: Any, info: Mapping[str, Any], mode: ObservationMode, rendered: Any) -> str:
    """The text of an observation. ``rendered`` is the result of ``render``; GEM's games add text before and
    after with ``info["prefix"]`` and ``info["suffix"]``.
    """
    if mode == "render":
        body = plain(str(rendered))
    elif mode == "json":
        body = json.dumps(_keyed(observation), default=_listed, ensure_ascii=False)
    else:
        body = str(observation)
    sections = (str(info.get("prefix") or ""), body, str(info.get("suffix") or ""))
    return "\n".join(part.strip("\n") for part in sections if part.strip())


def plain(rendered: str) -> str:
    """A terminal's picture without its escapes. Coloured text is put in brackets, because often only the
    colour shows where the player is.
    """
    return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", rendered))


def _keyed(value: Any) -> Any:
    """Convert keys that JSON does not allow, such as numbers of NumPy and tuples."""
    if isinstance(value, Mapping):
        return {
            key
            if (key is None or isinstance(key, str | int | float)) and not isinstance(key, np.generic)
            else str(key): _keyed(item)
            for key, item in value.items()
        }
    return [_keyed(item) for item in value] if isinstance(value, list | tuple) else value


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        # Row by row, so that numbers of less than double precision are converted one by one.
        return (
            list(value) if value.dtype.kind == "f" and value.ndim and value.itemsize < 8 else value.tolist()
        )
    if isinstance(value, np.floating):
        return float(str(value))  # the shortest digits of its own precision: 0.1, not 0.10000000149
    return value.item() if isinstance(value, np.generic) else str(value)


def require_registered(name: str) -> None:
    """Raises ConfigError if ``gymnasium.make`` would not find the environment. Without the package nothing is
    checked, because a run then fails anyway.
    """
    if importlib.util.find_spec("gymnasium") is None:
        return
    from gymnasium import spec
    from gymnasium.envs.registration import find_highest_version, parse_env_id
    from gymnasium.error import Error

    module, _, bare = name.rpartition(":")
    if module:
        try:
            importlib.import_module(module)  # it registers its environments
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


_PACKAGES: Final = {"gymnasium": ("gymnasium", "gymnasium"), "gem": ("gem", "gem-llm")}
_INSIDE = threading.Lock()


class GymConfig(SeedSettings):
    """An environment with Gymnasium's ``reset(seed=...)`` and ``step(action)``. An ``expert`` is called with
    an environment that was reset to the task's seed, and returns the texts of the turns.
    """

    type: Literal["gym"] = "gym"
    source: Literal["gymnasium", "gem", "factory"] = "gymnasium"
    """What makes the environment: ``gymnasium.make``, ``gem.make`` (package ``gem-llm``), or a function of
    yours, with ``id`` as ``my_module:make``.
    """
    id: Annotated[str, Field(min_length=1)] = "FrozenLake-v1"
    """Id under which the environment is registered."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function that makes the environment."""
    actions: tuple[str, ...] = ()
    """Names of a discrete space's actions, first to last; if empty, the numbers are the names."""
    action_format: Literal["auto", "tag", "raw"] = "auto"
    """``tag`` reads ``<action>left</action>``; ``raw`` passes the whole text of a turn, for games that look
    for their own marks. ``auto``: ``raw`` with GEM, else ``tag``.
    """
    observation: Literal["auto", "text", "render", "json"] = "auto"
    """How an observation is converted to text: as it is, by the environment's ``ansi`` rendering, or as JSON.
    ``auto``: the first of these that is possible.
    """
    draws_globally: bool | None = None
    """Whether the environment uses Python's or NumPy's global random generator. Each episode then has its own
    state of them, and only one at a time runs its environment. None: yes with GEM and factories.
    """
    lock_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that an episode waits for others in that case before it is a fault."""

    @model_validator(mode="after")
    def _validate(self) -> "GymConfig":
        if self.source == "factory" and not is_import_path(self.id):
            raise ValueError(
                f"with source = factory the id is an import path such as my_module:make, not {self.id!r}"
            )
        # Case and the number of blanks are ignored in a turn.
        names = [" ".join(action.lower().split()) for action in self.actions]
        if len(set(names)) != len(names) or not all(names):
            raise ValueError(
                "actions must be different names (also without regard to case), none of them empty"
            )
        if self.actions and self.reads_raw:
            raise ValueError("actions need action_format = tag: with raw the environment reads the turn")
        return self

    @property
    def reads_raw(self) -> bool:
        """Whether the environment gets the whole text of a turn."""
        return self.action_format == "raw" or (self.action_format == "auto" and self.source == "gem")

    @property
    def has_own_draws(self) -> bool:
        """Whether each episode has its own state of the global generators."""
        return self.source != "gymnasium" if self.draws_globally is None else self.draws_globally

    def waiting_s(self, num_concurrent: int) -> float:
        """Only one episode at a time runs an environment that uses the global generators."""
        return self.lock_timeout_s if self.has_own_draws else 0.0

    def imported(self) -> Mapping[str, str]:
        """The functions that make environments and the expert's turns."""
        own = {"id": self.id} if self.source == "factory" else {}
        return {**own, **super().imported()}

    def reference_checks(self) -> Mapping[str, Callable[[], object]]:
        """Checks of the functions, or of the id that Gymnasium must know."""
        checks = {"id": partial(require_registered, self.id)} if self.source == "gymnasium" else {}
        return {**checks, **super().reference_checks()}


class IsolatedRandom:
    """An episode's own state of Python's and NumPy's global generators.

    Games that use them (GEM seeds them in ``reset`` and draws in ``step``) would otherwise take each other's
    numbers if several episodes run in one process, and the same seed would be another game from run to run.
    """

    def __init__(self, seed: int, timeout_s: float) -> None:
        """The state after ``random.seed`` and ``numpy.random.seed``, without calling them.

        ``timeout_s`` limits the wait for other episodes: one that hangs must not block the others for ever.
        """
        self._state: tuple[Any, Any] = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
        )
        self._timeout_s = timeout_s

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Set this state, and keep other episodes out. Raises EnvironmentFault if the wait is too long."""
        if not _INSIDE.acquire(timeout=self._timeout_s):
            raise EnvironmentFault(f"another environment has not returned for {self._timeout_s:g} s")
        outside = random.getstate(), np.random.get_state()
        try:
            random.setstate(self._state[0])
            np.random.set_state(self._state[1])
            yield
        finally:
            self._state = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])
            _INSIDE.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the environments of a config are made, and their texts.

    ``copies_are_exact``: whether a deep copy forks an episode.
    """

    make: Callable[[], Any]
    action: ActionFormat
    observation: ObservationMode
    copies_are_exact: bool = False


def make_recipe(config: GymConfig) -> Recipe:
    """Make one environment and inspect it.

    Raises ToolUnavailable if the package is missing, and ConfigError for an id, an action space or an
    observation that cannot be used as text.
    """
    maker = _maker(config)
    with IsolatedRandom(0, config.lock_timeout_s).inside() if config.has_own_draws else nullcontext():
        try:
            environment = maker()
        except Exception as error:
            raise ConfigError(
                f"the environment {config.id!r} cannot be made{describe_exception(error)}"
            ) from error
        try:
            mode, render_options = _observation(config, environment, maker)
            action = _action(config, environment)
        finally:
            close(environment)
        recipe = Recipe(make=lambda: maker(**render_options), action=action, observation=mode)
        _check_recipe(config, recipe)
    return recipe


def _check_recipe(config: GymConfig, recipe: Recipe) -> None:
    """Start an episode as a rollout does, to report an environment without Gymnasium's methods early."""
    environment = recipe.make()
    try:
        try:
            observation, info = environment.reset(seed=config.first_seed)
            rendered = environment.render() if recipe.observation == "render" else None
            observation_text(observation, info, recipe.observation, rendered)
        except Exception as error:
            raise ConfigError(
                f"{config.id}: reset(seed=...) has to return an observation and a "
                f"dictionary{describe_exception(error)}"
            ) from error
        try:
            result = environment.step(recipe.action.read(recipe.action.probes[0])[0])
        except Exception:  # it may not know this action; in a rollout that is a fault
            return
        if not isinstance(result, tuple) or len(result) != 5:
            raise ConfigError(
                f"{config.id}: step(action) has to return an observation, a reward, terminated, truncated "
                "and a dictionary"
            )
    finally:
        close(environment)


def close(environment: Any) -> None:
    """Close an environment if it has ``close``, unlike GEM's games."""
    if callable(closing := getattr(environment, "close", None)):
        closing()


def _maker(config: GymConfig) -> Callable[..., Any]:
    if config.source == "factory":
        make = import_target(config.id)
        if not callable(make):
            raise ConfigError(f"{config.id} is no function that makes an environment")
    else:
        module, package = _PACKAGES[config.source]
        if importlib.util.find_spec(module) is None:
            raise ToolUnavailable(f"{package} is not installed: pip install {package}")
        make = partial(importlib.import_module(module).make, config.id)
    # A copy of the arguments, because an environment may keep and change them.
    return lambda **options: make(**copy.deepcopy(config.kwargs), **options)


def _observation(
    config: GymConfig, environment: Any, maker: Callable[..., Any]
) -> tuple[ObservationMode, dict[str, Any]]:
    """How observations are converted to text, and the arguments of the maker for it."""
    modes = (getattr(environment, "metadata", None) or {}).get("render_modes", ())
    # GEM's environments declare no spaces; their observations are text.
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
            f"{config.id} has no rendering in text (render mode ansi); set observation = json for its values"
        )
    if getattr(environment, "render_mode", None) == "ansi":  # set by the user's function
        return "render", {}
    try:
        close(maker(render_mode="ansi"))
    except Exception as error:  # a user's function without this argument
        if chosen == "auto" and config.source == "factory":
            return "json", {}
        raise ConfigError(
            f"{config.id} cannot be made with render_mode{describe_exception(error)}"
        ) from error
    return "render", {"render_mode": "ansi"}


def _action(config: GymConfig, environment: Any) -> ActionFormat:
    space: Any = getattr(environment, "action_space", None)
    kind = type(space).__name__
    kinds = _kinds(space)
    # A space that is a plain list of words, as in GEM's Sokoban.
    is_list = isinstance(space, list | tuple | set | frozenset) and bool(space)
    words = tuple(space) if is_list and all(isinstance(word, str) and word.strip() for word in space) else ()
    if config.reads_raw:
        if not (_is_text(space) or words):
            advice = ": action_format = tag" if "Discrete" in kinds else ""
            raise ConfigError(f"{config.id} takes actions of {kind}, not text{advice}")
        return raw_action()
    if "Discrete" in kinds:
        names = config.actions or tuple(str(int(space.start) + number) for number in range(int(space.n)))
        if len(names) != int(space.n):
            raise ConfigError(f"{config.id} has {space.n} actions, and actions names {len(names)}")
        return discrete_action(names, int(space.start))
    if config.actions:
        raise ConfigError(f"{config.id} has no discrete actions that could have names")
    if _is_text(space) or words:
        return text_action(words)
    raise ConfigError(
        f"{config.id} takes actions of {kind}, which have no form in text here: wrap it in a function of "
        "yours (source = factory) whose actions are Text or Discrete"
    )


def _is_text(space: Any) -> bool:
    return space is None or "Text" in _kinds(space)


def _kinds(space: Any) -> set[str]:
    """Names of a space's class and its base classes; needs no import of Gymnasium."""
    return {cls.__name__ for cls in type(space).__mro__}


def package_version(config: GymConfig) -> str:
    """Name and version of the environment's package; empty for a user's function or a missing package."""
    if config.source == "factory":
        return ""
    package = _PACKAGES[config.source][1]
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""
