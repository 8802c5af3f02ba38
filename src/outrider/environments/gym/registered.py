"""Whether Gymnasium knows an environment, which nothing is made for."""

import importlib
import importlib.util

from outrider.errors import ConfigError
from outrider.plugins.imports import describe_exception


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
