"""``outrider list``, and the plug-ins that the settings of a run name: their checks, origins and digests."""

import inspect
import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, cast

from outrider.config import Settings
from outrider.errors import ConfigError
from outrider.files import replace_file
from outrider.plugins.imports import ORIGINS_FILE, Origin, find_origin, import_target
from outrider.plugins.registry import (
    BUILT_IN,
    PAPER,
    Kind,
    field_markers,
    is_known,
    known_names,
    package_labels,
    preset_keys,
    preset_types,
    registered,
    resolve,
)
from outrider.printing import print_lines

_DESCRIPTIONS: Final[Mapping[Kind, Mapping[str, str]]] = {
    "algorithms": {
        "grpo": "GRPO: a rollout's advantage is its return relative to its group.",
        "reinforce++": "REINFORCE++: advantages are whitened over all policy tokens of a step.",
        "rejection": "Rejection sampling and fine-tuning: imitate accepted rollouts of the policy.",
        "rapo": "RAPO (arXiv 2603.03078): some rollouts retrieve steps of other agents from a buffer.",
        "arpo": "ARPO and AEPO (arXiv 2507.19849, 2510.14545): rollouts fork at uncertain steps.",
        "gigpo": "GiGPO: advantages of episodes, and of turns that acted in the same state.",
        "empo2": "EMPO² (arXiv 2602.23008): some rollouts read a memory of tips that the policy writes.",
        "combined": "Retrieval (RAPO), branching (ARPO) and tips (EMPO²) in any combination.",
        "luffy": "LUFFY: a demonstration is one rollout of each group.",
        "rollout_replay": "RolloutReplay: some groups of a step are replayed from earlier steps.",
        "tree_grpo": "Tree-GRPO: the rollouts of a group are branches of a few trees.",
        "lamer": "LaMer: a rollout is several episodes of a task, with reflections between them.",
    },
    "environments": {
        "factbook": "Questions about the CIA World Factbook, with a search tool (extra factbook).",
        "tools": "Your own questions, with search, Python, browser, MCP servers and functions.",
        "scienceworld": "Science experiments in a text simulator (Java, extra scienceworld).",
        "webshop": "Find and buy a product in a web shop.",
        "textworld": "Generated text games (extra textworld).",
        "house": "Find a thing in the rooms of a house; needs no package.",
        "alfworld": "Household tasks; the extra alfworld is needed for the published games only.",
        "gym": "An environment of Gymnasium or GEM (extra gym, or gem-llm).",
        "agent": "A program of yours that calls an OpenAI-compatible endpoint (extra agent).",
        "verifiers": "An environment of verifiers, in a Python of its own.",
        "openenv": "An environment on a server of OpenEnv (extra openenv).",
        "reasoning_gym": "Puzzles that reasoning-gym generates and verifies (extra reasoning-gym).",
    },
    "tools": {
        "search": "BM25 search in your passages.",
        "http-search": "Search by a retrieval server, such as that of Search-R1.",
        "python": "Run Python code in a sandbox without files, network and processes.",
        "browser": "Read a page, from a file or live, for a question.",
        "mcp": "The tools of an MCP server (extra mcp).",
    },
    "engines": {
        "local": "The trained model generates in process, on a CPU or one GPU.",
        "vllm": "vLLM generates, in process or in processes of its own (extra vllm).",
        "retrospex": "The local engine with a critic that selects among candidates (for evaluations).",
    },
    "embedders": {
        "minilm": "all-MiniLM-L6-v2, 384 dimensions, without torch (extra minilm).",
        "hash": "Hashed word counts, for tests and toy tasks; needs no package.",
    },
    "trackers": {
        "tensorboard": "Scalars for TensorBoard in the run directory (extra tensorboard).",
        "wandb": "A Weights & Biases run with the name of the run directory (extra wandb).",
        "trackio": "A Trackio run with the name of the run directory (extra trackio).",
    },
    "call_formats": {
        "hermes": "A JSON object per call, each between tags.",
        "qwen3_coder": "Every argument is text between its own tags.",
        "llama3_json": "JSON objects without tags, one after another or in a list.",
        "pythonic": "A Python list of calls with literal arguments.",
    },
}
"""Descriptions of the built-in plug-ins; those of others are the first sentences of their docstrings."""
_PRESETS: Final[Mapping[str, str]] = {
    "grpo-official": "GRPO as verl trains it.",
    "grpo-paper": "GRPO of its paper.",
    "dr-grpo": "Dr. GRPO: no division by the std or by the length.",
    "dapo": "DAPO: a higher upper clip, dynamic sampling, and a penalty for long answers.",
    "dapo-official": "DAPO of the released script.",
    "gppo": "GPPO: clipped tokens keep a gradient.",
    "gppo-official": "GPPO of the released script.",
    "gspo": "GSPO: one ratio per rollout.",
    "cispo": "CISPO: every token keeps its gradient, times a capped ratio.",
    "cispo-official": "CISPO as verl trains it.",
    "rloo": "RLOO: the baseline is the mean return of the other rollouts.",
    "rloo-official": "RLOO of verl's script.",
    "rloo-trl": "RLOO of TRL's trainer.",
    "reinforce++-official": "REINFORCE++ of OpenRLHF.",
    "reinforce++-verl": "REINFORCE++ as verl trains it.",
    "reinforce++-baseline": "REINFORCE++ with the mean of the group as baseline.",
    "reinforce++-baseline-official": "REINFORCE++ with baseline, of OpenRLHF.",
    "arpo-released": "ARPO of the released code.",
    "aepo": "AEPO: ARPO with balanced entropy in rollouts and in the update.",
    "aepo-released": "AEPO of the released code.",
    "aepo-advised": "AEPO of the released code with pre-monitoring, as its author advises.",
    "gigpo-official": "GiGPO of the released WebShop script.",
    "gigpo-paper": "GiGPO of its paper.",
    "empo2-alg1": "EMPO² with the ratio of its Algorithm 1.",
    "empo2-centered": "EMPO² for small models.",
    "empo2-released": "EMPO² of the released code.",
    "luffy-official": "LUFFY of the released code.",
    "luffy-paper": "LUFFY of its paper.",
    "rollout-replay": "RolloutReplay of its paper.",
    "rollout-replay-official": "RolloutReplay of the released code.",
    "tree-grpo": "Tree-GRPO of its paper.",
    "tree-grpo-official": "Tree-GRPO of the released script.",
}
PREFIX: Final = "plug-in "  # prefix of a digest's name in a checkpoint


def print_plugins(kinds: Sequence[Kind]) -> int:
    """Print the name and description of every plug-in and preset. Returns 1 if a plug-in cannot be imported,
    else 0.
    """
    status = 0
    width = min(80, shutil.get_terminal_size().columns)
    for kind in kinds:
        print_lines(f"{kind.replace('_', ' ')}:")
        for name, source, line, is_broken in rows(kind):
            status |= is_broken
            origin = {"built in": ""}.get(
                source, f"  (preset {source})" if source[:3] == "of " else f"  ({source})"
            )
            print_lines(f"  {name}{origin}")
            text = f"BROKEN: {line}" if is_broken else line
            print_lines(*textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6))
        print_lines("")
    print_lines("A recipe can also name an import path: package.module:Class (docs/plugins.md).")
    return int(status)


def rows(kind: Kind) -> Iterator[tuple[str, str, str, bool]]:
    """Yield name, origin, summary and whether it is broken, for every plug-in of a kind."""
    for name in known_names(kind):
        try:
            cls = resolve(kind, name)
            yield name, str(find_origin(cls)), _DESCRIPTIONS[kind].get(name) or summary(cls), False
        except ConfigError as error:
            yield name, package_labels(registered(kind).get(name, ())) or "built in", str(error), True
            continue
        presets = preset_types(kind)
        for short, (owner, preset) in presets.items():
            has_shorter_name = short.endswith(PAPER) and short.removesuffix(PAPER) in presets
            if owner == name and not has_shorter_name:
                keys = preset_keys(kind, name, preset)
                sets = f"Sets {', '.join(keys)}." if keys else "The default."
                yield short, f"of {name}", f"{_PRESETS.get(short, '')} {sets}".lstrip(), False
    for name, points in sorted(registered(kind).items()):
        if name in BUILT_IN[kind]:
            line = f"hidden by the one that is built in: name it {points[0].value}"
            yield name, package_labels(points), line, False


def description(kind: Kind, name: str) -> str:
    """Return what a built-in plug-in is; "" for another name."""
    return _DESCRIPTIONS[kind].get(name, "")


def summary(cls: type) -> str:
    """Return the first sentence of a class's docstring."""
    text = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".") + "." if text else "no docstring"


def _sections(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Settings]]:
    """Yield the settings and all nested sections, each with the prefix of its dotted keys."""
    yield prefix, settings
    for key, value in settings:
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Settings):
                yield from _sections(item, f"{prefix}{key}.")


def used_plugins(settings: Settings) -> Iterator[tuple[str, Kind, Origin]]:
    """Yield dotted key, kind and origin of every plug-in, function and server that the settings name."""
    for prefix, section in _sections(settings):
        for key, path in section.imported().items():
            yield f"{prefix}{key}", "environments", find_origin(cast(type, import_target(path)))
        for key, origin in section.origins().items():
            yield f"{prefix}{key}", "tools", origin
        for key, value in section:
            for marker in field_markers(type(section), key):
                for item in value if isinstance(value, tuple) else (value,):
                    name = str(item.type) if isinstance(item, Settings) else item  # type: ignore[attr-defined]
                    if isinstance(name, str) and is_known(marker.kind, name):
                        dotted = f"{prefix}{key}.{name}" if isinstance(value, tuple) else f"{prefix}{key}"
                        yield dotted, marker.kind, find_origin(resolve(marker.kind, name))


def validate_references(settings: Settings) -> None:
    """Check the references that only a run imports. Raises ConfigError with the dotted key."""
    for prefix, section in _sections(settings):
        for key, check in section.reference_checks().items():
            try:
                check()
            except ConfigError as error:
                raise ConfigError(f"{prefix}{key}: {error}") from error


def plugin_digests(settings: Settings) -> dict[str, str]:
    """Return digests of the plug-ins' code by their names in a checkpoint. Built-in plug-ins have none, and
    trackers are excluded because they do not influence results.
    """
    return {
        f"{PREFIX}{key}": origin.digest or "defined in the running program"
        for key, kind, origin in used_plugins(settings)
        if not origin.is_built_in and kind != "trackers"
    }


def server_digests(settings: Settings) -> dict[str, str]:
    """Return digests of what the configured servers currently report about themselves, by dotted key.

    Compared on resume, because a process that starts its own server may get another version.
    """
    return {
        f"{prefix}{key}": origin.digest or ""
        for prefix, section in _sections(settings)
        for key, origin in section.origins().items()
    }


def write_origins(settings: Settings, folder: Path) -> None:
    """Write ``plugins.json`` into ``folder``, if any plug-in is not built in: origins and digests."""
    origins = {key: asdict(origin) for key, _, origin in used_plugins(settings) if not origin.is_built_in}
    if origins:
        replace_file(folder / ORIGINS_FILE, (json.dumps(origins, indent=1) + "\n").encode())
