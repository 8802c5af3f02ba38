"""Which Gymnasium or GEM environment is played, and how its actions and observations are written."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from outrider.environments.gym.registered import require_registered
from outrider.environments.seeds import SeedSettings
from outrider.plugins.names import is_import_path


class GymConfig(SeedSettings):
    """An environment with ``reset(seed=...)`` and ``step(action)`` of Gymnasium's form. An ``expert`` is
    called with an environment that was reset to the task's seed and gives the texts of the turns.
    """

    details: ClassVar[frozenset[str]] = SeedSettings.details | {"draws_globally", "lock_timeout_s"}

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
