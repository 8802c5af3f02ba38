"""Trying a server before the first rollout: what it is, how it is spoken to, how many sessions it takes, and
whether its seeds decide its games.
"""

from contextlib import ExitStack

from outrider.environments.openenv.actions import make_action
from outrider.environments.openenv.asking import ServerDescription, fetch_description
from outrider.environments.openenv.environment import Contact, OpenEnvEnvironment
from outrider.environments.openenv.observations import require_fields
from outrider.environments.openenv.server import Server
from outrider.environments.openenv.session import CAPACITY, Session
from outrider.environments.openenv.settings import OpenEnvConfig
from outrider.errors import ConfigError, EnvironmentFault, ToolUnavailable
from outrider.types import Message

_NUM_STEPS = 2
_NUM_SEEDS = 2


def describe_server(server: Server, config: OpenEnvConfig) -> ServerDescription:
    """What the server says of itself. Raises :class:`ToolUnavailable` where it does not."""
    try:
        return fetch_description(server.address()[0], config.step_limit_s)
    except EnvironmentFault as error:
        raise ToolUnavailable(f"no OpenEnv server: {error}") from error


def check_server(server: Server, config: OpenEnvConfig) -> Contact:
    """How the server is spoken to. Raises :class:`ToolUnavailable` where it fails, :class:`ConfigError` where
    it is not what the settings say.
    """
    description = describe_server(server, config)
    fields = [*config.observation, *([config.success_key] if config.success_key else [])]
    require_fields(description.observation, fields)
    action = make_action(description.action, config.action_field)
    contact = Contact(name=description.name, server=server, action=action, config=config)
    try:
        _require_sessions(contact)
        if config.takes_seeds:
            _require_seeds(contact)
    except EnvironmentFault as error:
        raise ToolUnavailable(f"the OpenEnv server {description.name} does not play: {error}") from error
    return contact


def _require_sessions(contact: Contact) -> None:
    """As many at a time as the settings say. Somebody else's sessions, which end, are no reason to refuse."""
    config, url = contact.config, contact.server.address()[0]
    with ExitStack() as opened:
        sessions: list[Session] = []
        for _ in range(config.num_sessions):
            sessions.append(Session(url, limit_s=config.step_limit_s))
            opened.callback(sessions[-1].close)
        for session in sessions:
            answer = session.request("state", limit_s=config.load_limit_s)
            most = answer.data.get("max_sessions")
            if answer.code == CAPACITY and isinstance(most, int) and most < config.num_sessions:
                raise ConfigError(
                    f"{contact.name} takes {most} sessions at a time (max_concurrent_envs): "
                    f"environment.num_sessions = {most}"
                )


def _require_seeds(contact: Contact) -> None:
    config = contact.config
    for seed in range(config.first_seed, config.first_seed + _NUM_SEEDS):
        first, again = (_play(contact, seed) for _ in range(2))
        if first != again:
            raise ConfigError(
                f"{contact.name} plays another game when it is reset to the seed {seed} again: "
                "environment.takes_seeds = false (methods that fork by replay are then refused)"
            )


def _play(contact: Contact, seed: int) -> list[object]:
    """What the policy would read, and the rewards, of a few steps. A step may fail, which tells as much of a
    game as another answer; a reset may not.
    """
    environment = OpenEnvEnvironment(contact=contact, seed=seed)
    try:
        seen: list[object] = [environment.reset(0)]
        for _ in range(_NUM_STEPS):
            try:
                result = environment.step(Message(role="assistant", content=contact.action.probe))
            except EnvironmentFault as fault:
                return [*seen, str(fault)]
            seen.append(result)
            if result.done:
                break
        return seen
    finally:
        environment.close()
