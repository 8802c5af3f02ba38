"""Which OpenEnv server is played with, and how its actions and observations are written."""

from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from outrider.environments.seeds import SeedSettings


class OpenEnvConfig(SeedSettings):
    """An environment behind an OpenEnv server, of which every episode has a session. An ``expert`` is a
    generator function: called with the prompt, it yields the texts of turns and is sent the answers.
    """

    starts_quickly: ClassVar[bool] = False

    type: Literal["openenv"] = "openenv"
    server_url: str | None = None
    """Address of a server that runs (``http://127.0.0.1:8000``)."""
    command: tuple[str, ...] = ()
    """A command that starts the server, in its place: ``{port}`` stands for a free port, ``{python}`` for the
    interpreter of Outrider, and a module beside the recipe is found. It is killed with its children.
    """
    observation: tuple[str, ...] = ()
    """Fields of the observation that the policy reads, in this order; empty: all of them, as JSON where there
    are several.
    """
    action_field: str | None = None
    """The field of the action that takes the text of a turn. None: the only one; an action of several fields
    is written as JSON.
    """
    reset_options: dict[str, Any] = Field(default_factory=dict)
    """What ``reset`` is told besides the seed."""
    takes_seeds: bool = True
    """Whether the seed that ``reset`` is given decides the game, which is tried before the run. False: no
    seed is sent, the rollouts of a group may play different games, and nothing can be forked.
    """
    num_sessions: Annotated[int, Field(ge=1)] = 1
    """Sessions at a time, of all rollout workers together; the server's own limit (``max_concurrent_envs``)
    must be at least this.
    """
    start_limit_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds in which the server has to be ready, and to accept a connection."""
    borrow_limit_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that an episode waits for a session where the server has no free one."""
    load_limit_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds for ``reset``."""
    step_limit_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds for a step."""

    @model_validator(mode="after")
    def _validate_server(self) -> "OpenEnvConfig":
        if (self.server_url is None) == (not self.command):
            raise ValueError("name a server: server_url of one that runs, or the command that starts one")
        if self.server_url is not None:
            _require_address(self.server_url)
        if "seed" in self.reset_options:
            raise ValueError("reset_options holds a seed: the task's is sent (takes_seeds)")
        return self

    @property
    def max_concurrent(self) -> int:
        """Every episode has a session."""
        return self.num_sessions

    def waiting_s(self, num_concurrent: int) -> float:
        """A new episode may wait for a session, and for a server that is started again."""
        return self.borrow_limit_s + (self.start_limit_s if self.command else 0.0)

    def replayed_differently(self) -> list[str]:
        """All tasks of a server that takes no seeds."""
        return [] if self.takes_seeds else ["all of them (environment.takes_seeds = false)"]


def _require_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_address = False
    if not is_address or parts.query or parts.fragment:
        raise ValueError(f"server_url is an address such as http://127.0.0.1:8000, not {url!r}")
    if parts.username or parts.password:
        raise ValueError("server_url holds a user name or a password, which would be written into the run")
