"""Reproducibility packs: the results of runs with the hash of every file, and scores that can be recomputed.

    manifest.json       format, runs with versions and inputs, commands, and the SHA-256 of every other file
    manifest.sha256     SHA-256 of the manifest
    runs/NAME/          config.toml, evaluations.jsonl and metrics.jsonl of a run without the machine's paths;
                        protocol.json compares a run with the protocol that its recipe names
    exact.jsonl         exact returns of trainings without held-out tasks, one line per seed
    tables.json         scores, intervals and costs, computed from the results

Packs are untrusted: nothing outside the folder is read, no link is followed, and no command in a pack is
executed.
"""

import hashlib
import json
import math
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from statistics import fmean
from typing import Annotated, Any, Final, Literal, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider import __version__
from outrider.algorithms.loss_settings import migrate_keys
from outrider.config import to_toml
from outrider.engines.local.processor import read_processor
from outrider.errors import ConfigError, DataError, OutriderError, PackError
from outrider.evaluation.compare import AXES, checkpoint_rule, load_run, run_names, unfinished
from outrider.evaluation.grading import Scorer, find_variant
from outrider.evaluation.report import summarise_samples, task_set_scores
from outrider.evaluation.results import RESULTS, SETTINGS, SUMMARY, read_results, write_results
from outrider.evaluation.statistics import Sample, iqm_estimate
from outrider.files import file_sha256, json_value, read_toml, replacing_folder, whole_lines
from outrider.plugins.registry import is_import_path
from outrider.printing import plural, score
from outrider.protocols import run_difference
from outrider.rollout.evaluate import describe_conditions, evaluation_label, interval
from outrider.viewer.configuration import is_trained
from outrider.viewer.run_reader import CHECKPOINT, finite, numbered_checkpoints

FORMAT: Final = "outrider pack 2"
MANIFEST: Final = "manifest.json"
CHECKSUM: Final = "manifest.sha256"
TABLES: Final = "tables.json"
EXACT: Final = "exact.jsonl"
PROTOCOL: Final = "protocol.json"
MAX_FILES: Final = 10_000
MAX_TEXT: Final = 256 * 2**20  # bytes of a file that is parsed
_NAME: Final = r"^[A-Za-z0-9_=+-][A-Za-z0-9._=+-]{0,199}$"
Name = Annotated[str, Field(pattern=_NAME)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_RelativePath = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_=+-][A-Za-z0-9._=+-]*(/[A-Za-z0-9_=+-][A-Za-z0-9._=+-]*)*$")
]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PackedFile(_Part):
    """Size in bytes and SHA-256 of a file."""

    num_bytes: int = Field(ge=0)
    sha256: Sha256


class PackedInput(_Part):
    """A file or folder that a recipe refers to and that is not in the pack; ``sha256`` is None if it did not
    exist when the pack was made.
    """

    name: str
    sha256: Sha256 | None


class PackedRun(_Part):
    """Provenance of a run's results. ``versions`` is the record in its checkpoints: packages, processor,
    threads. ``inputs`` maps dotted keys of the recipe to inputs. ``checkpoint_rule`` states how the scored
    checkpoint was chosen; only packs of format 1 have none.
    """

    kind: Literal["training", "panel"]
    command: str
    versions: dict[str, str]
    inputs: dict[str, PackedInput]
    checkpoint_rule: str | None = Field(None, min_length=1, max_length=300)


class Manifest(_Part):
    """Contents of a pack. ``packed_on`` describes the machine that made the pack, which may differ from the
    machine of the trainings. ``panels`` exists only in packs of version 0.3 and earlier.
    """

    format: Literal["outrider pack 1", "outrider pack 2"]
    outrider: str
    packed_on: dict[str, str]
    commands: tuple[str, ...]
    runs: dict[Name, PackedRun] = Field(max_length=1000)
    panels: dict[str, Any] = Field(default={}, max_length=1000)
    files: dict[_RelativePath, PackedFile] = Field(max_length=MAX_FILES)

    @model_validator(mode="after")
    def _require_rules(self) -> "Manifest":
        missing = sorted(name for name, run in self.runs.items() if run.checkpoint_rule is None)
        if missing and self.format == FORMAT:
            raise ValueError(f"runs.{missing[0]} states no rule that chose its checkpoint (checkpoint_rule)")
        return self


def read_manifest(pack: Path) -> Manifest:
    """Verify every file of a pack and return its manifest.

    Raises PackError, with the file's name, for a changed, added or missing file, for a link, and for a
    malformed manifest.
    """
    if not pack.is_dir():
        raise PackError(f"{pack} is no pack: there is no such folder")
    sizes = _file_sizes(pack)
    for name in (MANIFEST, CHECKSUM):
        if name not in sizes:
            raise PackError(f"{pack} is no pack: it has no {name}")
    content = read_bytes(pack / MANIFEST)
    if read_bytes(pack / CHECKSUM) != checksum_line(content):
        raise PackError(f"{MANIFEST} does not match {CHECKSUM}")
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        raise PackError(f"{MANIFEST} is malformed: {_first_error(error)}"[:300]) from error
    names = sizes.keys() - {MANIFEST, CHECKSUM}
    for different, problem in (
        (manifest.files.keys() - names, "is missing"),
        (names - manifest.files.keys(), "was added"),
    ):
        if different:
            more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
            raise PackError(f"{min(different)} {problem}{more}")
    for name, packed in sorted(manifest.files.items()):
        if sizes[name] != packed.num_bytes or file_sha256(pack / name) != packed.sha256:
            raise PackError(f"{name} was changed")
    return manifest


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    location = ".".join(map(str, first["loc"]))
    return f"{location}: {first['msg']}" if location else str(first["msg"])


def checksum_line(manifest: bytes) -> bytes:
    """The content of ``manifest.sha256``, as ``sha256sum`` writes it."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def read_bytes(path: Path) -> bytes:
    """Read a file that is parsed as a whole. Raises PackError if it is larger than :data:`MAX_TEXT`."""
    if path.stat().st_size > MAX_TEXT:
        raise PackError(f"{path.name} is larger than {MAX_TEXT >> 20} MiB")
    return path.read_bytes()


def _file_sizes(folder: Path) -> dict[str, int]:
    """Sizes of all files by relative name. Raises PackError for anything that is neither a file nor a folder,
    and for too many files.
    """
    sizes: dict[str, int] = {}
    pending = [(folder, "")]
    while pending:
        parent, before = pending.pop()
        for entry in os.scandir(parent):
            name, status = before + entry.name, entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                pending.append((parent / entry.name, f"{name}/"))
            elif stat.S_ISREG(status.st_mode):
                sizes[name] = status.st_size
            else:
                raise PackError(f"{name} is a link or no plain file: a pack contains neither")
            if len(sizes) > 2 * MAX_FILES:
                raise PackError(f"{folder} has more than {MAX_FILES} files")
    return sizes


# Comparison of two trees of plain data, up to rounding.


_CLOSE: Final = 1e-9  # tolerance for rounding differences between versions of numpy


def first_difference(written: Any, computed: Any, path: str = "") -> str | None:
    """Describe the first difference between two trees; None if they are equal up to rounding."""
    if isinstance(written, dict) and isinstance(computed, dict):
        if other := sorted(written.keys() ^ computed.keys()):
            return f"{path}.{other[0]} is in one of the two only"
        pairs = [(f"{path}.{key}" if path else key, written[key], computed[key]) for key in written]
    elif isinstance(written, list) and isinstance(computed, list):
        if len(written) != len(computed):
            return f"{path} has {len(written)} entries and not {len(computed)}"
        pairs = [
            (f"{path}[{number}]", *both) for number, both in enumerate(zip(written, computed, strict=True))
        ]
    else:
        same = written == computed and isinstance(written, bool) == isinstance(computed, bool)
        numbers = [number for number in map(finite, (written, computed)) if number is not None]
        is_close = len(numbers) == 2 and math.isclose(*numbers, rel_tol=_CLOSE, abs_tol=_CLOSE)
        return None if same or is_close else f"{path} is {written!r}, and the results give {computed!r}"
    differences = (first_difference(a, b, subpath) for subpath, a, b in pairs)
    return next((difference for difference in differences if difference is not None), None)


# Exact returns: trainings whose expected return is computed instead of sampled, without held-out tasks.
#
# One JSON object per training, written by ``python -m benchmarks.learning toys``, and one line of a pack's
# ``exact.jsonl``.


DECIMALS: Final = 3  # of an expected return; values that are equal in a table are ties
_Key = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,99}$")]
_MAX_ROWS: Final = 20_000


class ExactResult(BaseModel):
    """One training with its ``settings`` and ``max_policy_tokens``. ``result`` has the ``expected_return``
    and counters.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    toy: _Key
    method: _Key
    seed: int = Field(ge=0, lt=2**63)
    settings: dict[str, Any]
    max_policy_tokens: int = Field(ge=0)
    result: dict[str, float | int]

    @property
    def name(self) -> str:
        """Name of the row in a pack."""
        return f"{self.toy}/{self.method}-{self.seed}"

    @property
    def expected_return(self) -> float:
        """Expected return of the final policy."""
        return float(self.result["expected_return"])

    @property
    def num_policy_tokens(self) -> int:
        """Tokens that the policy generated in training."""
        return int(self.result.get("num_policy_tokens", 0))


def parse_exact_result(content: bytes | str, location: str) -> ExactResult:
    """Parse one object. Raises PackError with ``location``."""
    try:
        result = ExactResult.model_validate_json(content)
    except ValidationError as error:
        raise PackError(f"{location} is no exact result: {_first_error(error)}"[:300]) from error
    if "expected_return" not in result.result:
        raise PackError(f"{location} is no exact result: result.expected_return is missing")
    return result


def read_exact(pack: Path) -> dict[str, ExactResult]:
    """The exact results of a pack by name, in file order. Raises PackError for a malformed line and for a
    duplicate row.
    """
    path = pack / EXACT
    rows: dict[str, ExactResult] = {}
    lines = read_bytes(path).splitlines() if path.is_file() else []
    if len(lines) > _MAX_ROWS:
        raise PackError(f"{path.name} has more than {_MAX_ROWS} lines")
    for number, line in enumerate(lines, start=1):
        result = parse_exact_result(line, f"{path.name}:{number}")
        if result.name in rows:
            raise PackError(f"{path.name}:{number}: {result.name} is there twice")
        rows[result.name] = result
    return rows


def exact_groups(rows: Mapping[str, ExactResult]) -> list[dict[str, Any]]:
    """Returns by seed, their mean, and their interquartile mean with an interval over seeds, for each toy and
    method.
    """
    groups: list[dict[str, Any]] = []
    rows_by_method: dict[tuple[str, str], list[ExactResult]] = {}
    for row in rows.values():
        rows_by_method.setdefault((row.toy, row.method), []).append(row)
    for (toy, method), unsorted in rows_by_method.items():
        members = sorted(unsorted, key=lambda row: row.seed)
        returns = [entry.expected_return for entry in members]
        rounded = np.asarray([[round(entry, DECIMALS)] for entry in returns], dtype=np.float64)
        iqm = iqm_estimate(Sample(name=method, scores=rounded), seed=0, within=(0.0, 1.0))
        groups.append({
            "toy": toy, "method": method,
            "returns": {str(entry.seed): entry.expected_return for entry in members},
            "mean": math.fsum(returns) / len(returns), "interquartile_mean": iqm.value,
            "ci_low": iqm.low if iqm.has_interval else None,
            "ci_high": iqm.high if iqm.has_interval else None,
        })  # fmt: skip
    return groups


# Portable recipes: settings without the machine's folders, and their conversion back to local paths.


START: Final = "model.initial_checkpoint"
PACK_PREFIX: Final = "pack:"  # prefix of a path in one of the pack's own run folders
EXTERNAL_PREFIX: Final = ".../"  # prefix of a path on the machine that made the pack
_NUM_DIGITS: Final = (
    12  # of a hash in a name, so that different content under one name is a different setting
)
_DATA: Final = frozenset((".jsonl", ".json", ".parquet", ".sqlite", ".toml", ".safetensors"))


def portable(
    tree: Mapping[str, Any], runs: Mapping[Path, str]
) -> tuple[dict[str, Any], dict[str, PackedInput]]:
    """Remove the machine's folders from settings. Returns the portable settings and the inputs that they
    refer to. ``runs`` maps resolved folders of packed runs to their names.

    A path is replaced by its last part and the start of the SHA-256 of its content; a path below a packed run
    becomes ``pack:NAME/...``.
    """
    inputs: dict[str, PackedInput] = {}

    def replaced(key: str, text: str) -> str:
        if not _is_path(key, text):
            return text
        path = Path(text).expanduser()
        for folder, name in runs.items():
            if path.resolve().is_relative_to(folder):
                return f"{PACK_PREFIX}{name}/{path.resolve().relative_to(folder).as_posix()}"
        filename = PureWindowsPath(text).name if "\\" in text else path.name
        sha256 = content_sha256(path)
        inputs[key] = PackedInput(name=filename, sha256=sha256)
        return (
            f"{EXTERNAL_PREFIX}sha256-{sha256[:_NUM_DIGITS]}/{filename}"
            if sha256
            else f"{EXTERNAL_PREFIX}{filename}"
        )

    changed: dict[str, Any] = _mapped(dict(tree), "", replaced)
    return changed, inputs


def local(
    tree: Mapping[str, Any], local_paths: Mapping[str, Path], inputs: Mapping[str, PackedInput]
) -> dict[str, Any]:
    """The inverse of :func:`portable`: replace inputs that are not in the pack by ``local_paths``, by dotted
    key.

    Raises PackError for a missing path, and for a path whose content differs from the run's input.
    """

    def replaced(key: str, text: str) -> str:
        if not text.startswith(EXTERNAL_PREFIX):
            return text
        packed = inputs.get(key, PackedInput(name=text.rpartition("/")[2], sha256=None))
        if key not in local_paths:
            checksum = f", SHA-256 {packed.sha256[:_NUM_DIGITS]}" if packed.sha256 else ""
            raise PackError(
                f"it needs {packed.name}{checksum}, which is not in the pack: add {key}=PATH to replay"
            )
        if packed.sha256 is not None and content_sha256(local_paths[key]) != packed.sha256:
            raise PackError(
                f"{key}={local_paths[key]} is not the {packed.name} of the run: its SHA-256 differs"
            )
        return str(local_paths[key])

    changed: dict[str, Any] = _mapped(dict(tree), "", replaced)
    return changed


def content_sha256(path: Path) -> str | None:
    """SHA-256 (hex) of a file, or of the names and contents in a folder; None if the path does not exist."""
    if path.is_file():
        return file_sha256(path)
    if not path.is_dir():
        return None
    digest = hashlib.sha256()
    names = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
    for name in sorted(names):
        digest.update(f"{name}\0{file_sha256(path / name)}\n".encode())
    return digest.hexdigest()


def _is_path(key: str, text: str) -> bool:
    """Whether a setting is a path: always for a starting checkpoint, otherwise if the text is an absolute
    path or an existing file.
    """
    if key == START and text != "none":
        return not text.startswith((PACK_PREFIX, EXTERNAL_PREFIX))
    if PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute() or text.startswith("~/"):
        return True
    return (
        ("/" in text or Path(text).suffix in _DATA)
        and len(text) < 4096
        and "\n" not in text
        and Path(text).exists()
    )


def _mapped(value: Any, key: str, change: Callable[[str, str], str]) -> Any:
    if isinstance(value, dict):
        return {name: _mapped(item, f"{key}.{name}" if key else name, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, f"{key}.{index}", change) for index, item in enumerate(value)]
    return change(key, value) if isinstance(value, str) else value


_PLUGIN_KEYS: Final = frozenset(("type", "tools", "embedder", "trackers"))


def read_recipe(pack: Path, name: str) -> dict[str, Any]:
    """The table of a packed run's ``config.toml``. Raises PackError."""
    path = f"runs/{name}/config.toml"
    if not (pack / path).is_file():
        raise PackError(f"{path} is missing")
    try:
        recipe = tomllib.loads(read_bytes(pack / path).decode())
    except (ValueError, RecursionError) as error:
        raise PackError(f"{path} is malformed: {error}") from error
    for section in _sections(recipe):
        for key in sorted(_PLUGIN_KEYS & section.keys()):
            for name in section[key] if isinstance(section[key], list) else [section[key]]:
                if isinstance(name, str) and is_import_path(name):
                    raise PackError(
                        f"{path} names {name!r}: code is never imported from a pack by its path; "
                        "install it as a package that registers a name (docs/plugins.md)"
                    )
        if section.get("type") == "mcp":
            server = str(section.get("name", ""))
            raise PackError(f"{path} names the MCP server {server!r}: nothing is started for a pack")
    return migrate_keys(recipe)


def _sections(value: Any) -> Iterator[Mapping[str, Any]]:
    """All tables of a recipe, at any depth."""
    if isinstance(value, Mapping):
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _sections(item)


# Results of ``outrider eval --tasks`` in a pack: every score of ``summary.json`` computed again from
# ``results.jsonl``.


def eval_tasks_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """One row a score of the summary. Raises PackError where the samples give another one."""
    location = f"runs/{name}/{SUMMARY}"
    try:
        summary = json.loads(read_bytes(folder / SUMMARY))
        written: dict[str, Any] = summary["scores"]
        panel_hash, num_samples = str(summary["panel_hash"]), int(summary["num_samples"])
        identity, results = read_results(folder / RESULTS)
        scores = task_set_scores(
            cast("Scorer | None", identity["metric"]),
            summarise_samples(results, num_samples, rules=find_variant(str(identity["rules"]))),
            num_samples=num_samples,
        )
        computed = {
            item.name: {
                "value": item.value, "ci_low": item.low, "ci_high": item.high, "num_tasks": item.num_tasks,
            }
            for item in scores
        }  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise PackError(
            f"{location} is no summary of an evaluation: {type(error).__name__}: {error}"[:300]
        ) from error
    except OutriderError as error:
        raise PackError(f"runs/{name}: {error}".replace(f"{folder}/", "")) from error
    if difference := first_difference(written, computed):
        raise PackError(f"{location}: {difference}"[:300])
    return [
        {"run": name, "score": key, "panel_hash": panel_hash, **values} for key, values in computed.items()
    ]


def write_eval_tasks_run(source: Path, target: Path) -> None:
    """Copy an evaluation's results and summary without replies, texts of judges and messages of faults,
    because the texts of some task sets may not be published.
    """
    identity, results = read_results(source / RESULTS)
    published = [replace(result, detail="", turns=None, token_ids=None) for result in results]
    write_results(target / RESULTS, identity, published)
    (target / SUMMARY).write_bytes((source / SUMMARY).read_bytes())


# One training run in a pack: its recipe, evaluations and metrics without paths of the machine, and weights
# where asked for.


WEIGHTS: Final = "masters.safetensors"
_STATE: Final = "state.json"


def pack_name(name: str) -> str:
    """A run's name as a name in a pack: letters, digits and ``._=+-``."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", name).lstrip(".") or "run"


def write_run(source: Path, target: Path, runs: Mapping[Path, str]) -> PackedRun:
    """Copy what results are made of. ``runs`` are the folders of the pack (resolved) by name.

    Raises DataError for a recipe that cannot be read, and PackError where the machine's folders are still in
    what was copied.
    """
    recipe = read_toml(source / "config.toml")
    if not isinstance(recipe.get("evaluation"), dict):  # an empty file is TOML too
        raise DataError(
            f"{source / 'config.toml'} is no resolved recipe of a run: it has no table evaluation"
        )
    tree, inputs = portable(recipe, runs)
    (target / "config.toml").write_text(to_toml(tree) + "\n", encoding="utf-8")
    if (difference := run_difference(target / "config.toml")) is not None:
        _write_json(target / PROTOCOL, difference.to_dict())
    start = str(recipe.get("model", {}).get("initial_checkpoint"))
    for name in ("evaluations.jsonl", "metrics.jsonl"):
        whole = b"".join(line + b"\n" for line in whole_lines(source / name)).decode()
        if name == "evaluations.jsonl":  # that of the start is named after it
            whole = whole.replace(
                json.dumps(f"of {start}"), json.dumps(f"of {tree.get('model', {}).get('initial_checkpoint')}")
            )
        if whole:
            (target / name).write_text(whole, encoding="utf-8")
    private = {str(source.resolve().parent), str(Path.home()), str(Path.cwd())}
    for file in sorted(target.iterdir()):
        text = file.read_text(encoding="utf-8")
        if leaks := [folder for folder in sorted(private) if len(folder) > 4 and f"{folder}/" in text]:
            raise PackError(f"{source / file.name} contains a path of this machine: {leaks[0]}")
    command = f"train runs/{target.name}/config.toml"
    if trials := recipe["evaluation"].get("num_trials", 0):
        memory = recipe["evaluation"].get("memory", "tips")
        command = f"eval runs/{target.name}/config.toml --adapt {trials} --method {memory}"
    return PackedRun(
        kind="training",
        command=f"outrider {command} --run DIRECTORY",
        versions=_versions(source),
        inputs=inputs,
    )


def copy_checkpoints(pack: Path, folders: Mapping[str, Path]) -> None:
    """Weights of the newest checkpoint of each training, and of those that others of the pack start from."""
    checkpoints: set[tuple[str, str]] = set()
    for name, folder in folders.items():
        if newest := _checkpoints(folder)[-1:]:
            checkpoints.add((name, newest[0].name))
        config = pack / "runs" / name / "config.toml"
        if config.is_file() and (start := packed_start(read_toml(config))):
            checkpoints.add(start)
    for name, checkpoint in sorted(checkpoints):
        _write_checkpoint(
            folders[name] / "checkpoints" / checkpoint, pack / "runs" / name / "checkpoints" / checkpoint
        )


def packed_start(recipe: Mapping[str, Any]) -> tuple[str, str] | None:
    """(run, checkpoint) of the pack that a training starts from; None for another start."""
    match = re.fullmatch(
        rf"{PACK_PREFIX}([^/]+)/checkpoints/({CHECKPOINT.pattern})",
        str(recipe.get("model", {}).get("initial_checkpoint")),
    )
    return None if match is None else (match[1], match[2])


def _write_checkpoint(source: Path, target: Path) -> None:
    """Copy the weights, and of the state only the step and the checksum. An evaluation names the checkpoint
    with its weights; if they are those of the model itself, nothing is copied.
    """
    try:
        state = json.loads((source / _STATE).read_text(encoding="utf-8"))
        checksums, folder = state["checksums"], source
        if (initial := state.get("initial_weights")) is not None:
            if initial["path"] is None:
                return
            checksums, folder = initial["checksums"], Path(initial["path"])
        weights_state = {"step": state["step"], "checksums": {WEIGHTS: checksums[WEIGHTS]}}
        target.mkdir(parents=True)
        shutil.copyfile(folder / WEIGHTS, target / WEIGHTS)
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{source} is no checkpoint with weights ({type(error).__name__})") from error
    (target / _STATE).write_text(json.dumps(weights_state, sort_keys=True) + "\n", encoding="utf-8")


def _versions(folder: Path) -> dict[str, str]:
    """Versions in the newest checkpoint; none for a run without any."""
    for checkpoint in reversed(_checkpoints(folder)):
        try:
            versions = json.loads((checkpoint / _STATE).read_text(encoding="utf-8")).get("versions", {})
            return {str(key): str(value) for key, value in versions.items()}
        except (OSError, ValueError, AttributeError):
            continue
    return {}


def _checkpoints(folder: Path) -> list[Path]:
    """Ascending by step."""
    return [path for _, path in numbered_checkpoints(folder / "checkpoints")]


# Tables of a pack: scores and intervals recomputed from single tasks, and costs. Packing writes them as
# ``tables.json``; verifying computes them again and compares.


MAX_TASKS: Final = 10_000


def make_tables(pack: Path, manifest: Manifest) -> dict[str, Any]:
    """All tables of a pack, as JSON gives them back.

    Raises PackError naming file and line where a score, an interval or a mean return is not what the single
    tasks give.
    """
    trained = [name for name, run in sorted(manifest.runs.items()) if run.kind == "training"]
    for name in trained:
        read_recipe(pack, name)
    evaluated = [name for name, run in sorted(manifest.runs.items()) if run.kind == "panel"]
    try:
        tables = {
            "evaluations": [row for name in trained for row in _evaluation_rows(pack, name)],
            "panels": [row for name in evaluated for row in eval_tasks_rows(pack / "runs" / name, name)],
            "costs": [_costs(pack, name) for name in trained],
            "exact": exact_groups(read_exact(pack)),
        }
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:  # values that no run writes
        raise PackError(f"the results cannot be read: {type(error).__name__}: {error}"[:300]) from error
    plain: dict[str, Any] = json.loads(json.dumps(json_value(tables)))
    return plain


def _evaluation_rows(pack: Path, name: str) -> list[dict[str, Any]]:
    """One row per evaluation, in the order of the file; where it has scores of tasks, all follows from
    them.
    """
    file = pack / "runs" / name / "evaluations.jsonl"
    lines = read_bytes(file).splitlines() if file.is_file() else []
    rows = []
    for number, content in enumerate(lines, start=1):
        location = f"runs/{name}/evaluations.jsonl:{number}"
        try:
            line = json.loads(content)
            score = line["metric"]["score"]
            row = {
                "run": name, "label": str(line["label"]), "step": int(line["step"]),
                "split": str(line["split"]), "panel_hash": str(line["panel_hash"]),
                "temperature": float(line["temperature"]), "num_tasks": int(line["num_tasks"]),
                "num_faults": int(line.get("num_faults", 0)), "score": finite(score["value"]),
                "ci_low": finite(score["ci_low"]), "ci_high": finite(score["ci_high"]),
                "mean_return": finite(line.get("mean_return")), "has_tasks": bool(line.get("task_scores")),
                **{key: line[key] for key in ("panel", "top_p", "top_k") if key in line},
            }  # fmt: skip
            tasks, returns = (
                _finite_values(line.get(key) or {}, f"{location}: {key}")
                for key in ("task_scores", "task_returns")
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            raise PackError(f"{location} is no evaluation: {type(error).__name__}: {error}"[:300]) from error
        if tasks:
            low, high = interval(tasks, binary=all(value in (0.0, 1.0) for value in tasks))
            computed = {"score": fmean(tasks), "ci_low": low, "ci_high": high, "num_tasks": len(tasks)}
            if returns and not row["num_faults"]:  # after a fault the mean over rollouts is another one
                computed["mean_return"] = fmean(returns)
            if difference := first_difference(row, row | computed):
                raise PackError(f"{location}: {difference}")
        rows.append(row)
    return rows


def score_lines(pack: Path) -> list[str]:
    """One line per training and evaluation set of a pack: the last score and its conditions."""
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for row in json.loads(read_bytes(pack / TABLES))["evaluations"]:
        if row["score"] is not None:
            last[row["run"], row.get("panel", "")] = row
    lines = []
    for (name, panel), row in last.items():
        conditions = describe_conditions(
            split=row["split"],
            panel_hash=row["panel_hash"],
            temperature=row["temperature"],
            num_samples=read_recipe(pack, name)["evaluation"].get("num_samples", 1),
            truncation={key: row[key] for key in ("top_p", "top_k") if key in row},
        )
        value = score(row["score"], row["ci_low"], row["ci_high"])
        label = evaluation_label(row["label"], panel)
        lines.append(f"{name}, {label}: {value} on {plural(row['num_tasks'], 'task')}; {conditions}")
    return lines


def _finite_values(task_values: Mapping[str, Any], location: str) -> list[float]:
    if len(task_values) > MAX_TASKS:
        raise PackError(f"{location} has more than {MAX_TASKS} tasks")
    values = [finite(value) for value in task_values.values()]
    if any(value is None for value in values):
        raise PackError(f"{location} has a value that is no number")
    return [value for value in values if value is not None]


def _costs(pack: Path, name: str) -> dict[str, Any]:
    run = load_run(pack / "runs" / name, name)
    spent = {axis: float(run.costs[axis][-1]) for axis in AXES if axis in run.costs and run.num_steps}
    return {"run": name, "seed": run.config["seed"], "algorithm": run.config["algorithm.type"], **spent}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A verified pack: its files are unchanged, and its tables follow from its results."""

    manifest: Manifest
    tables: Mapping[str, Any]


def verify(pack: Path) -> Verified:
    """Check files and tables. Raises PackError, in one line that names the file, for the first error."""
    manifest = read_manifest(pack)
    if TABLES not in manifest.files:
        raise PackError(f"{TABLES} is missing")
    tables = make_tables(pack, manifest)
    try:
        written = json.loads(read_bytes(pack / TABLES))
    except (ValueError, RecursionError) as error:
        raise PackError(f"{TABLES} is malformed: {error}") from error
    if isinstance(written, dict):
        written.pop("comparisons", None)  # in packs of version 0.3 and earlier
    if difference := first_difference(written, tables):
        raise PackError(f"{TABLES}: {difference}")
    for name, run in manifest.runs.items():
        if run.checkpoint_rule == FINAL_STEP and trained_rule(pack / "runs" / name, name) != FINAL_STEP:
            raise PackError(f"{MANIFEST}: runs.{name} was not evaluated at its final step")
    return Verified(manifest=manifest, tables=tables)


# ``outrider pack``: run folders become a reproducibility pack, whole or not at all, without a path of the
# machine.


FINAL_STEP: Final = "final step"
LAST_EVALUATION: Final = "last evaluation of an unfinished training"
LAST_CHECKPOINT: Final = "last checkpoint of its training"
LAST_TRIAL: Final = "last trial of an unfinished adaptation"
NOT_TRAINED: Final = "the model itself, no training"
SERVED: Final = "the model that an endpoint served, its training unknown"


def trained_rule(folder: Path, name: str) -> str:
    """The rule of a training's score, from its configuration, metrics and evaluations."""
    run = load_run(folder, name)
    return LAST_EVALUATION if run.evaluations and unfinished(run) else FINAL_STEP


def _find_rule(folder: Path, stated: str | None) -> str:
    """The rule that chose the checkpoint of a run's scores. Raises ConfigError if neither the run nor
    ``stated`` has one.
    """
    if (folder / RESULTS).exists():
        settings = _evaluated_model(folder)
        if settings is not None and "endpoint" in settings:
            return stated or SERVED
    else:
        run = load_run(folder, folder.name)
        if is_trained(run.settings):
            return trained_rule(folder, folder.name)
        if run.evaluations and unfinished(run):
            return stated or LAST_TRIAL
        settings = run.settings
    rule = None if settings is None else checkpoint_rule(settings)
    if rule in ("final", "none"):
        return LAST_CHECKPOINT if rule == "final" else NOT_TRAINED
    if stated is None:
        raise ConfigError(
            f"{folder} evaluates a checkpoint that is not known to be the last one of its training: state "
            'the rule that chose it, for example --checkpoint-rule "highest score on the split valid"'
        )
    return stated


def _evaluated_model(folder: Path) -> Mapping[str, str] | None:
    """The checkpoint of an evaluation of tasks, as settings of a run; None if it was not recorded."""
    try:
        settings = read_toml(folder / SETTINGS)
    except (OSError, DataError):
        return None
    if settings.get("endpoint"):
        return {"endpoint": "given"}
    model = settings.get("model") or {}
    start = Path(str(model.get("initial_checkpoint") or model.get("name")))
    if newest := _checkpoints(start)[-1:]:  # a run directory stands for its newest checkpoint
        start = newest[0]
    is_checkpoint = bool(model.get("initial_checkpoint")) or start.parent.name == "checkpoints"
    return {"train.num_steps": "0", "model.initial_checkpoint": str(start) if is_checkpoint else "none"}


def make_pack(
    paths: Sequence[Path],
    out: Path,
    *,
    commands: Sequence[str] = (),
    weights: bool = False,
    checkpoint_rule: str | None = None,
) -> Manifest:
    """Pack run folders of ``outrider train`` and ``outrider eval``, and folders or files of exact results.

    ``commands`` are the commands that produced them, for documentation. With ``weights``, the pack includes
    the newest checkpoint of each training and the checkpoints from which other runs of the pack start.
    ``checkpoint_rule`` states how checkpoints were chosen that were evaluated and are not the last ones of
    their trainings. Raises ConfigError if ``out`` exists or a rule is missing, DataError for other folders,
    and PackError for inconsistent results.
    """
    if out.exists():
        raise ConfigError(f"{out} exists: a pack is never overwritten")
    exact, folders = _classify_paths(paths)
    names = [pack_name(name) for name in run_names(folders)] if folders else []
    if len(set(names)) < len(names):
        raise ConfigError(f"two of these runs would have one name in the pack: {', '.join(sorted(names))}")
    folders_by_name = dict(sorted(zip(names, folders, strict=True)))
    with replacing_folder(out) as pack:
        runs = _write_runs(pack, folders_by_name, checkpoint_rule)
        if weights:
            copy_checkpoints(pack, folders_by_name)
        if exact:
            rows = (json.dumps(result.model_dump(mode="json"), sort_keys=True) for result in exact)
            (pack / EXACT).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        processor = read_processor()
        packed_on = {
            "processor": processor.model,
            "instruction sets": " ".join(sorted(processor.instruction_sets)) or "unknown",
        }
        manifest = Manifest(
            format=FORMAT, outrider=__version__, files={}, runs=runs, packed_on=packed_on,
            commands=tuple(commands),
        )  # fmt: skip
        _write_json(pack / TABLES, make_tables(pack, manifest))
        manifest = Manifest.model_validate(manifest.model_dump() | {"files": _packed_files(pack)})
        _write_json(pack / MANIFEST, manifest.model_dump(mode="json"))
        (pack / CHECKSUM).write_bytes(checksum_line((pack / MANIFEST).read_bytes()))
        return manifest


def _write_runs(pack: Path, folders: Mapping[str, Path], checkpoint_rule: str | None) -> dict[str, PackedRun]:
    names_by_folder = {folder.resolve(): name for name, folder in folders.items()}
    runs: dict[str, PackedRun] = {}
    for name, folder in folders.items():
        target = pack / "runs" / name
        target.mkdir(parents=True)
        if (folder / RESULTS).exists():
            write_eval_tasks_run(folder, target)
            runs[name] = PackedRun(kind="panel", command="outrider eval --tasks", versions={}, inputs={})
        else:
            runs[name] = write_run(folder, target, names_by_folder)
        runs[name] = runs[name].model_copy(update={"checkpoint_rule": _find_rule(folder, checkpoint_rule)})
    return runs


def _classify_paths(paths: Sequence[Path]) -> tuple[list[ExactResult], list[Path]]:
    """Exact results, and run folders. Raises DataError for a path that is neither."""
    exact: dict[str, ExactResult] = {}
    folders: list[Path] = []
    for path in paths:
        if (path / "config.toml").is_file() or ((path / RESULTS).is_file() and (path / SUMMARY).is_file()):
            folders.append(path)
            continue
        files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        if not files or not path.exists():
            raise DataError(
                f"{path} is no run: it has no config.toml, no finished evaluation "
                "of tasks, and no exact results"
            )
        for file in files:
            result = parse_exact_result(file.read_bytes(), str(file))
            if result.name in exact:
                raise DataError(f"{file}: {result.name} is given twice")
            exact[result.name] = result
    return sorted(exact.values(), key=lambda item: (item.toy, item.method, item.seed)), folders


def _packed_files(pack: Path) -> dict[str, PackedFile]:
    paths = {path.relative_to(pack).as_posix(): path for path in sorted(pack.rglob("*")) if path.is_file()}
    return {
        name: PackedFile(num_bytes=path.stat().st_size, sha256=file_sha256(path))
        for name, path in paths.items()
    }


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
