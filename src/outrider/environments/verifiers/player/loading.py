"""A verifiers environment by its name: how it is made, its rows, and which versions they are of."""

import importlib.metadata
import logging
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from .chatting import HARNESS, register_chat_harness


class Loaded:
    """A verifiers environment: how it is made, its rows, and which versions they are of."""

    def __init__(self, config: Any, rows: list[Any], versions: dict[str, str]) -> None:
        self.config = config
        self.rows = rows
        self.versions = versions

    def ready(self, *, with_rows: bool) -> dict[str, Any]:
        """The first line to the trainer."""
        rows = [{"key": row.key, "question": row.data.prompt_text} for row in self.rows] if with_rows else []
        return {"ready": True, "versions": self.versions, "rows": rows}


def load(request: dict[str, Any]) -> Loaded:
    """Import verifiers and the taskset, and read as many rows as are asked for."""
    import verifiers
    from verifiers.v1.utils.loaders import import_taskset, load_environment, resolve_env_config

    logging.getLogger("verifiers").setLevel(logging.CRITICAL)  # what matters is in an episode's errors
    register_chat_harness()
    config = resolve_env_config(with_defaults(request["id"], request["options"]))
    taskset = load_environment(config).taskset
    number = request["num_rows"]
    if request["shuffle_seed"] is not None:
        bounded = taskset if taskset.bounded else taskset.take(number)
        taskset = bounded.shuffle(request["shuffle_seed"])
    rows = list(islice(taskset, number))
    if len(rows) < number:
        raise ValueError(f"{request['id']} has {len(rows)} rows, and the splits need {number}")
    module = import_taskset(request["id"])
    return Loaded(config, rows, {"verifiers": verifiers.__version__, "taskset": package_version(module)})


def with_defaults(taskset_id: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of the environment's config: agents run on this machine, and chat in this process, where
    neither the recipe nor the environment says otherwise.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    taskset = {**options.get("taskset", {}), "id": taskset_id}
    config = {**options, "taskset": taskset}
    bundled = default_harness_id(taskset_id) == taskset_id
    for name, field in env_config_type(taskset_id, options.get("id", "")).model_fields.items():
        declared = field.default
        if isinstance(declared, AgentConfig):
            agent = dict(options.get(name, {}))
            if "runtime" not in declared.model_fields_set:
                agent.setdefault("runtime", {"type": "subprocess"})
            if declared.harness is None and not bundled:
                agent.setdefault("harness", {"id": HARNESS})
            config[name] = agent
    return config


def package_version(module: Any) -> str:
    """The version of a taskset's package; of a file that belongs to none, what its text hashes to."""
    top = module.__name__.partition(".")[0]
    names = importlib.metadata.packages_distributions().get(top, [])
    if names:
        return f"{names[0]} {importlib.metadata.version(names[0])}"
    return f"{top} {sha256(Path(module.__file__).read_bytes()).hexdigest()[:12]}"
