"""Digests of what decides a run's bits beside its settings and tasks: tokenizer, template, files, buffer."""

import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from outrider.config import Settings
from outrider.errors import CheckpointError
from outrider.plugins.record import PREFIX, plugin_digests
from outrider.train.components import Components

if TYPE_CHECKING:
    from outrider.train.learner import Learner

BUFFER: Final = "step-trace buffer"
_HEX: Final = re.compile(r"[0-9a-f]*")
# another version of transformers may write them in another way
_VERSIONED_INPUTS: Final = {"tokenizer", "model configuration"}


def input_digests(parts: Components) -> dict[str, str]:
    """Hex digests by name. Files are those that the settings of environment, engine and algorithm name; what
    tasks are made of is left out, because tasks are compared themselves, and a buffer, because its revision
    changes.
    """
    tokenizer = parts.learner.language_model.tokenizer
    digests = {
        "chat template": _text_digest(json.dumps(tokenizer.chat_template, sort_keys=True)),
        "tokenizer": _text_digest(_tokenizer(tokenizer)),
        "model configuration": _text_digest(_configuration(parts.learner)),
    }
    if (frozen := _frozen_weights(parts.learner)) is not None:
        digests["frozen weights"] = frozen
    files = {f"environment.{key}": path for key, path in settings_files(parts.settings.environment)}
    files |= {f"engine.{key}": path for key, path in settings_files(parts.settings.engine)}
    if demonstrations := parts.settings.algorithm.model_dump().get("demonstrations"):
        files["algorithm.demonstrations"] = Path(demonstrations)
    if demonstrations := parts.settings.cold_start.demonstrations:
        files["cold_start.demonstrations"] = Path(demonstrations)
    digests |= plugin_digests(parts.settings)
    return digests | {key: _file_digest(path) for key, path in sorted(files.items()) if path.is_file()}


def check_inputs(
    recorded: Mapping[str, str],
    now: Mapping[str, str | None],
    *,
    other_versions: bool,
    allow_changed_plugins: bool = False,
) -> list[str]:
    """A line where the difference may come from other versions, which have been told, or is in a plug-in's
    code and wanted (``allow_changed_plugins``). Raises CheckpointError for any other one; what an earlier Outrider
    did not record is not compared.
    """
    changed = [name for name, digest in now.items() if recorded.get(name, digest) != digest]
    version_changes = [name for name in changed if other_versions and name in _VERSIONED_INPUTS]
    plugin_changes = [name for name in changed if name.startswith(PREFIX)]
    accepted = [*version_changes, *(plugin_changes if allow_changed_plugins else ())]
    if refused := [name for name in changed if name not in accepted]:
        advice = (
            "put the data back"
            if set(refused) - set(plugin_changes)
            else "put its code back, go on with --changed-plugins"
        )
        raise CheckpointError(
            f"not what this run began with: {', '.join(_describe_change(name, recorded, now) for name in refused)}; "
            f"{advice}, "
            "or begin a new run with model.initial_checkpoint"
        )
    lines = [f"OTHER {name.upper()}, perhaps because of the other versions" for name in version_changes]
    return lines + [
        f"OTHER CODE of the {name}; the run goes on, but not to the same bits for sure"
        for name in plugin_changes
    ]


def _describe_change(name: str, recorded: Mapping[str, str], now: Mapping[str, str | None]) -> str:
    """The name, and what was and is where that is in words (a server's version, its list of tools)."""
    before, after = recorded.get(name, ""), now[name] or ""
    if _HEX.fullmatch(before) or _HEX.fullmatch(after):
        return name
    return f"{name} (was: {before}; is: {after})"


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _tokenizer(tokenizer: Any) -> str:
    """All that maps text to ids; padding and truncation are set anew by every call."""
    # Sorted: the order of a vocabulary's dict says nothing.
    vocabulary = sorted(tokenizer.get_vocab().items())
    if not tokenizer.is_fast:
        return json.dumps(vocabulary)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps(
        {**content, "padding": None, "truncation": None, "vocabulary": vocabulary}, sort_keys=True
    )


def _configuration(learner: "Learner") -> str:
    """Without where the model lies, and in which precision it is kept."""
    content = learner.language_model.model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        content.pop(name, None)
    return json.dumps(content, sort_keys=True, default=str)


def _frozen_weights(learner: "Learner") -> str | None:
    """CRC-32 of the weights that no checkpoint holds, because they do not train; None where all train."""
    value = None
    for name, parameter in learner.language_model.model.named_parameters():
        if name not in learner.trained:
            content = parameter.detach().contiguous().cpu().view(torch.uint8).numpy()
            # The name too: weights that changed places are others.
            value = zlib.crc32(content.reshape(-1).data, zlib.crc32(name.encode(), value or 0))
    return None if value is None else f"{value:08x}"


def settings_files(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Paths that settings name, by dotted key, in every section but those of tasks; of a list's tables
    too.
    """
    for name, value in settings:
        yield from _value_files(name, value)


def _value_files(name: str, value: Any) -> Iterator[tuple[str, Path]]:
    if isinstance(value, Path):
        yield name, value
    elif isinstance(value, Settings) and not getattr(value, "makes_tasks", False):
        yield from ((f"{name}.{key}", path) for key, path in settings_files(value))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _value_files(f"{name}.{number}", item)
