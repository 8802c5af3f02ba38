"""Resuming a run: digests of everything that decides its bits, and the state that a checkpoint saves."""

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import transformers

import outrider
from outrider.algorithms.tips import TipHook
from outrider.config import Settings
from outrider.engines.local.processor import read_processor
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import CheckpointError
from outrider.files import file_sha256, readable, whole_lines
from outrider.metrics.writer import MetricsWriter
from outrider.plugins.listing import PREFIX, plugin_digests
from outrider.printing import plural
from outrider.training.adapters import plain_weight
from outrider.training.async_rollouts import (
    QUEUE,
    QueueSnapshot,
    read_snapshot,
    write_snapshot,
)
from outrider.training.checkpoint import (
    checkpoints_newest_first,
    damaged,
    describe_weights,
    load_checkpoint,
    load_memory,
    prune_checkpoints,
    read_state,
    read_versions,
    save_checkpoint,
)
from outrider.training.components import Components
from outrider.training.run_dir import RunDirectory, check_settings, comparable_settings
from outrider.training.settings import RunSettings
from outrider.training.step_records import RecordFiles
from outrider.types import Task
from outrider.viewer.progress import Progress
from outrider.viewer.records import MEMORY, ROLLOUTS, StepFiles

if TYPE_CHECKING:
    from outrider.training.learner import Learner


BUFFER: Final = "step-trace buffer"
_HEX: Final = re.compile(r"[0-9a-f]*")
# another version of transformers may write them in another way
_COMMANDS: Final = ("command", "args")  # settings with words of a command
_VERSIONED_INPUTS: Final = {"tokenizer", "model configuration"}


def input_digests(parts: Components) -> dict[str, str]:
    """Return hex digests of a run's inputs by name.

    Files are those that the settings of environment, engine and algorithm name. Task files are left out,
    because the tasks themselves are compared, and the buffer, because its revision changes.
    """
    language_model = parts.learner.language_model
    tokenizer = language_model.tokenizer
    configuration = language_model.model.config.to_dict()
    # The model's path and its precision on disk may change.
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        configuration.pop(name, None)
    digests = {
        "chat template": _text_digest(json.dumps(tokenizer.chat_template, sort_keys=True)),
        "tokenizer": _text_digest(_tokenizer(tokenizer)),
        "model configuration": _text_digest(json.dumps(configuration, sort_keys=True, default=str)),
    }
    ends = [sorted(language_model.eos_token_ids), sorted(language_model.eos_texts)]  # generation_config.json
    digests["ends of turns"] = _text_digest(json.dumps(ends))
    if (frozen := frozen_weights(parts.learner)) is not None:
        digests["frozen weights"] = frozen
    settings = parts.settings
    sections: dict[str, Settings] = {
        "environment": settings.environment,
        "evaluation": settings.evaluation,
        "engine": settings.engine,
        "algorithm": settings.algorithm,
    }
    files = {
        f"{name}.{key}": path for name, section in sections.items() for key, path in settings_files(section)
    }
    files |= {f"environment.{key}": path for key, path in settings.environment.input_files().items()}
    if demonstrations := settings.algorithm.model_dump().get("demonstrations"):
        files["algorithm.demonstrations"] = Path(demonstrations)
    distill = settings.algorithm.distill
    if distill is not None and distill.path is not None:
        files["algorithm.distill.path"] = Path(distill.path)
    if demonstrations := settings.cold_start.demonstrations:
        files["cold_start.demonstrations"] = Path(demonstrations)
    digests |= plugin_digests(settings)
    for hook in parts.algorithm.hooks:
        if isinstance(hook, TipHook):
            digests["embedder of the tips"] = f"{hook.embedder.name}, {hook.embedder.dim} dimensions"
    for key, path in sorted(files.items()):
        if path.is_file():
            digests[key] = file_sha256(path)
    return digests


def check_inputs(
    recorded: Mapping[str, str],
    now: Mapping[str, str | None],
    *,
    other_versions: bool,
    allow_changed_plugins: bool = False,
) -> list[str]:
    """Return lines about differences that may come from other package versions, are in the files of a
    command, or are in a plug-in's code if ``allow_changed_plugins``.

    Raises CheckpointError for any other difference. Inputs that an earlier version did not record are not
    compared.
    """
    changed = [name for name, digest in now.items() if recorded.get(name, digest) != digest]
    version_changes = [name for name in changed if other_versions and name in _VERSIONED_INPUTS]
    plugin_changes = [name for name in changed if name.startswith(PREFIX)]
    # a program may also write the files that its command names
    command_changes = [name for name in changed if any(f".{key}." in name for key in _COMMANDS)]
    accepted = [*version_changes, *command_changes, *(plugin_changes if allow_changed_plugins else ())]
    if refused := [name for name in changed if name not in accepted]:
        advice = (
            "put the data back"
            if set(refused) - set(plugin_changes)
            else "put its code back, continue with --changed-plugins (changed_plugins=True in Python)"
        )
        descriptions = []
        for name in refused:
            before, after = recorded.get(name, ""), now[name] or ""
            is_digest = _HEX.fullmatch(before) or _HEX.fullmatch(after)  # else words, such as a list of tools
            descriptions.append(name if is_digest else f"{name} (was: {before}; is: {after})")
        raise CheckpointError(
            f"not what this run began with: {', '.join(descriptions)}; {advice}, "
            "or begin a new run with model.initial_checkpoint"
        )
    lines = [f"OTHER {name.upper()}, perhaps because of the other versions" for name in version_changes]
    lines += [
        f"OTHER FILE {name}; the run continues, but may not reproduce the same bits"
        for name in command_changes
    ]
    return lines + [
        f"OTHER CODE of the {name}; the run continues, but may not reproduce the same bits"
        for name in plugin_changes
    ]


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _tokenizer(tokenizer: Any) -> str:
    """Everything that maps text to ids, without padding and truncation, which every call sets."""
    # Sorted, because the order of a vocabulary's dict has no meaning.
    vocabulary = sorted(tokenizer.get_vocab().items())
    if not tokenizer.is_fast:
        return json.dumps(vocabulary)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps(
        {**content, "padding": None, "truncation": None, "vocabulary": vocabulary}, sort_keys=True
    )


def frozen_weights(learner: "Learner") -> str | None:
    """CRC-32 of the weights that do not train, which no checkpoint contains; None if all weights train."""
    value = None
    for name, parameter in learner.language_model.model.named_parameters():
        if name not in learner.trained_parameters:
            # of a 4-bit weight the values, which also depend on its scales
            content = plain_weight(parameter).contiguous().cpu().view(torch.uint8).numpy()
            # The name too, because swapped weights are different ones.
            value = zlib.crc32(content.reshape(-1).data, zlib.crc32(name.encode(), value or 0))
    return None if value is None else f"{value:08x}"


def settings_files(settings: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Path]]:
    """Yield paths in settings by dotted key, also in lists of tables, except in sections of tasks; and the
    files in a command, except compiled programs, which an update of the system may replace.
    """
    for name, value in settings:
        inner: Iterable[tuple[str, Any]] = ()
        if isinstance(value, Path):
            yield name, value
        elif name in _COMMANDS and isinstance(value, str | list | tuple):
            words = [value] if isinstance(value, str) else value
            yield from ((f"{name}.{word}", Path(word)) for word in words if _is_script(word))
        elif isinstance(value, Settings) and not getattr(value, "makes_tasks", False):
            inner = value
        elif isinstance(value, list | tuple):
            inner = ((str(number), item) for number, item in enumerate(value))
        yield from ((f"{name}.{key}", path) for key, path in settings_files(inner))


def _is_script(word: Any) -> bool:
    try:
        if not isinstance(word, str) or not Path(word).is_file():
            return False
        with Path(word).open("rb") as stream:
            return b"\0" not in stream.read(1024)
    except (OSError, ValueError):  # no possible name of a file, or no right to read it
        return False


# Packages, libraries and the processor, which determine a run's bits as its seed and settings do.
#
# Every checkpoint stores them, and a resumed run reports differences. docs/portability.md describes the
# variables.


_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "OPENBLAS_CORETYPE",
    "NPY_DISABLE_CPU_FEATURES",
)  # fmt: skip
_PACKAGES = (  # tokens, rewards of formulas, vectors, adapters, 4-bit weights and 8-bit optimizers
    "tokenizers", "math-verify", "latex2sympy2_extended", "sympy", "onnxruntime", "sentence-transformers",
    "peft", "bitsandbytes",
)  # fmt: skip
_LIBRARIES = {
    "BLAS": r"(Math Kernel Library Version .+?) for|BLAS_INFO=(\w+)",
    "oneDNN": r"(?:MKL-DNN|oneDNN) (v[\d.]+)",
}
_SETS = "instruction sets"


def versions() -> dict[str, str]:
    """Return packages, libraries, processor and variables, as a checkpoint stores them."""
    return {**_software(), **_machine()}


def differences(
    recorded: Mapping[str, str], effect: str = "the run continues, but may not reproduce the same bits"
) -> list[str]:
    """Return a line with the ``effect`` for each kind that differs; values that an earlier version did not
    record are not compared.
    """
    if "processor" in recorded:  # before products were recorded, torch computed all of them
        recorded = {"products": "torch", **recorded}
    lines = []
    for kind, current in {"VERSIONS": _software(), "PROCESSOR": _machine()}.items():
        changed = {name: now for name, now in current.items() if recorded.get(name, now) != now}
        if changed:
            descriptions = []
            for name, now in changed.items():
                was, suffix = recorded[name], now
                if name == _SETS:  # two long lists: report only their differences
                    was, suffix = (
                        " ".join(sorted(set(was.split()) - set(now.split()))) or "as now",
                        " ".join(sorted(set(now.split()) - set(was.split()))) or "without these",
                    )
                descriptions.append(f"{name} {was} (now {suffix})")
            lines.append(f"OTHER {kind}: the checkpoint was written with {', '.join(descriptions)}; {effect}")
    return lines


def weights_differences(checkpoint: Path) -> list[str]:
    """Return the lines of :func:`differences` for an evaluation of the weights in ``checkpoint``."""
    return differences(read_versions(checkpoint), "the scores may differ from those of the training")


def chosen_instructions() -> list[str]:
    """Return NAME=VALUE of the environment variables that select other kernels of torch, oneDNN, BLAS or
    numpy.
    """
    return [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]


def note_start(display: Progress, *, run: Path, source: str, num_threads: int, device: str) -> None:
    """Show the header of a log: versions, machine, and ``source``, the recipe or tasks of the run."""
    processor, num_cores = read_processor().model, os.cpu_count() or 1
    if device.startswith("cuda") and torch.cuda.is_available():
        processor += f", {torch.cuda.get_device_name(device)}"
    commit = read_commit(Path(outrider.__file__).parents[2])
    display.note(
        f"outrider {outrider.__version__}{f' (commit {commit})' if commit else ''}, "
        f"torch {torch.__version__}, host {platform.node()}, "
        f"{plural(num_threads, 'thread')} on {plural(num_cores, 'core')}, "
        f"{processor}; {source}; run {shlex.quote(str(run))}",
        event="start",
        version=outrider.__version__,
        commit=commit or None,
        torch=str(torch.__version__),
        host=platform.node(),
        threads=num_threads,
        cores=num_cores,
        processor=processor,
        device=device,
        source=source,
        run=str(run),
    )


def read_commit(root: Path) -> str:
    """The commit of a checkout, with ``-dirty`` if files have changed; empty for an installed package."""
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=8", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _software() -> dict[str, str]:
    built = torch.__config__.show()
    packages = {
        "outrider": outrider.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }
    installed = {name: text for name in _PACKAGES if (text := _installed_version(name)) is not None}
    libraries = {name: _search_version(pattern, built) for name, pattern in _LIBRARIES.items()}
    return packages | installed | libraries


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, str]:
    from outrider.engines.local.cpu_kernels import prefers_onednn  # imports transformers

    processor = read_processor()
    return {
        "processor": processor.model,
        _SETS: " ".join(sorted(processor.instruction_sets)) or "unknown",
        "torch's kernels": torch.backends.cpu.get_cpu_capability(),
        "products": "oneDNN" if prefers_onednn() else "torch",
        "threads": str(torch.get_num_threads()),
        "variables": " ".join(chosen_instructions()) or "none",
        # a run on a CPU initializes no GPU
        **({"GPU": torch.cuda.get_device_name()} if torch.cuda.is_initialized() else {}),
    }


def _search_version(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return next(group for group in match.groups() if group) if match else "none"


# Whether a run can be resumed, checked before a model is loaded and before anything is written.


def require_continuable(run: RunDirectory, settings: RunSettings) -> list[str]:
    """Return the allowed differences from the settings that the run began with.

    Raises CheckpointError for changed settings that decide the results, and for a run that has trained but
    has no checkpoint left: it would start again and overwrite its records.
    """
    checkpoints = checkpoints_newest_first(run.checkpoints)
    if not checkpoints and (done := _done_without_checkpoint(run, settings)):
        raise CheckpointError(
            f"{run.path} has {done} and no checkpoint: put its folder checkpoints back, "
            "or begin a new run elsewhere; nothing was changed"
        )
    for checkpoint in checkpoints:
        try:
            state = read_state(checkpoint)
            inputs, recorded = state["inputs"], state["settings"]
            version = state["versions"]["outrider"]
        except (KeyError, TypeError) as error:
            raise damaged(checkpoint, error) from error
        except CheckpointError:
            if checkpoint == checkpoints[-1]:
                raise
            continue  # reported when the checkpoint is loaded
        if version.startswith(("0.1.", "0.2.")):
            raise CheckpointError(
                f"{run.path} is a run of Outrider {version}: continue it with that version, or begin a new "
                f"run with model.initial_checkpoint={checkpoint}"
            )
        check_inputs(  # again when the checkpoint is loaded, which takes longer
            inputs,
            plugin_digests(settings),
            other_versions=False,
            allow_changed_plugins=run.allow_changed_plugins,
        )
        return check_settings(recorded, settings)
    return []


def _done_without_checkpoint(run: RunDirectory, settings: RunSettings) -> str:
    """Evidence that a run had written a checkpoint. The first one is written after the cold start and the
    first evaluation.
    """
    if steps := StepFiles(run.path / "traces").steps():
        return f"traces of {plural(len(steps), 'training step')}"
    metrics = run.path / "metrics.jsonl"
    # damaged lines count too
    if metrics.is_file() and (num := metrics.read_bytes().count(b'"kind": "train"')):
        return f"metrics of {plural(num, 'training step')}"
    num = sum(entry is not None for _, entry in readable(run.evaluations)) if run.evaluations.is_file() else 0
    return (
        plural(num, "evaluation")
        if num > settings.evaluation.at_start * len(settings.evaluation.sets)
        else ""
    )


# The progress of a run and its files: this code writes checkpoints and rolls a killed run back to one.


_COUNTS: Final = ("step", "num_policy_tokens", "num_metric_records", "num_evaluations", "weight_version")
_REQUIRED: Final = ("tasks", "versions", "settings", "inputs", "buffer_digest", "reference_checksum")


@dataclass(slots=True, kw_only=True)
class RunState:
    """Progress of a run. ``task_cursor`` counts the drawn tasks, ``saved_step`` is -1 before the first
    checkpoint.

    Everything that determines the following steps is here, in ``parts``, or in random streams keyed by the
    step.
    """

    run: RunDirectory
    parts: Components
    note: Callable[[str], None]
    step: int = 0
    num_policy_tokens: int = 0
    task_cursor: int = 0
    saved_step: int = -1
    # of the queue of rollouts: the snapshot of the loaded checkpoint, and a function that takes a new one
    queue_snapshot: QueueSnapshot | None = None
    snapshot_queue: Callable[[], QueueSnapshot] | None = None
    metrics: MetricsWriter = field(init=False)
    files: RecordFiles = field(init=False)
    _reference_checksum: int | None = None
    _tasks: dict[str, str] = field(init=False)
    _inputs: dict[str, str] = field(init=False)
    _buffer_seen: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        self.metrics = MetricsWriter(self.run.path / "metrics.jsonl")
        self.files = RecordFiles(self.run.path)
        self._tasks = {name: hash_tasks(tasks) for name, tasks in self._task_lists.items()}
        self._inputs = input_digests(self.parts)

    @property
    def _task_lists(self) -> dict[str, Sequence[Task]]:
        other_sets = {f"evaluation {entry.name}": entry.tasks for entry in self.parts.other_sets}
        return {"train": self.parts.train_tasks, "held-out": self.parts.test_tasks, **other_sets}

    @property
    def _reference_path(self) -> Path:
        return self.run.path / "reference.safetensors"

    def close(self) -> None:
        """Release the metrics file; may be called twice."""
        self.metrics.close()

    def begin(self) -> None:
        """Remove the records of a run that was killed before its first checkpoint."""
        self.run.cut_evaluations(0)
        self.metrics.cut(0)
        self._remove_records(after=-1)

    def _remove_records(self, *, after: int) -> None:
        """Remove the traces, rollouts and memory changes of later steps."""
        for name in ("traces", ROLLOUTS, MEMORY):
            StepFiles(self.run.path / name).resume(after)

    def freeze_reference(self) -> None:
        """Freeze the reference of the KL term, which is the policy at the start of reinforcement learning."""
        if self.parts.learner.has_reference:
            self._reference_checksum = self.parts.learner.freeze_reference(self._reference_path)

    def save(self) -> None:
        """Write the checkpoint of this step. If CheckpointError is raised, the earlier ones are unchanged."""
        buffer = self.parts.buffer
        write: Callable[[Path], None] | None = None
        if self.snapshot_queue is not None:
            # First, because it adds results to the memories that are saved below.
            snapshot = self.snapshot_queue()
            write = partial(write_snapshot, snapshot=snapshot) if snapshot.steps else None
        # Before the revision is recorded: a power failure may lose commits that were not flushed.
        if buffer is not None and self.parts.settings.buffer.evolve:
            buffer.flush()
        state: dict[str, Any] = {
            "step": self.step,
            "num_policy_tokens": self.num_policy_tokens,
            "task_cursor": self.task_cursor,
            "num_metric_records": self.metrics.num_records,
            "weight_version": self.parts.engine.weight_version,
            "num_evaluations": len(self.run.finished_evaluations()),
            "buffer_revision": buffer.revision if buffer is not None else None,
            "hook_counts": self.parts.algorithm.counts(),
            "reference_checksum": self._reference_checksum,
            "tasks": self._tasks,
            "versions": versions(),
            "settings": comparable_settings(self.parts.settings),
            "inputs": self._inputs,
            "buffer_digest": self._buffer_digest(),
        }
        arrays = None
        if self.parts.algorithm.remembers:
            state["memory"], arrays = self.parts.algorithm.state()
        folder = self.run.checkpoints / f"step-{self.step:06d}"
        initial = None
        model = self.parts.settings.model
        # Without a checkpoint to start from, adapters are in no file.
        if not self.parts.settings.trains and (model.initial_checkpoint or model.lora is None):
            initial = describe_weights(Path(model.initial_checkpoint) if model.initial_checkpoint else None)
        save_checkpoint(folder, self.parts.learner, state, arrays, write_queue=write, initial=initial)
        self.saved_step = self.step
        # Only once the new one is on disk.
        prune_checkpoints(
            self.run.checkpoints, max_checkpoints=self.parts.settings.train.keep_checkpoints, newest=self.step
        )

    def load_newest(self, checkpoints: Sequence[Path]) -> dict[str, Any]:
        """Load weights and optimizer of the newest intact checkpoint; return its state. Raises
        CheckpointError if there is none.
        """
        for checkpoint in checkpoints:
            try:
                return self._load(checkpoint)
            except CheckpointError as error:
                if checkpoint == checkpoints[-1]:
                    raise
                self.note(f"DAMAGED CHECKPOINT, going back to an older one: {error}")
        raise CheckpointError(f"{self.run.path} has no checkpoint")

    def _load(self, checkpoint: Path) -> dict[str, Any]:
        state = load_checkpoint(checkpoint, self.parts.learner)
        try:
            for name in _COUNTS:
                int(state[name])
            if missing := [name for name in _REQUIRED if name not in state]:
                raise KeyError(missing[0])
            self.step = self.saved_step = int(state["step"])
            self.num_policy_tokens = int(state["num_policy_tokens"])
            self.task_cursor = int(state["task_cursor"])
            if state["buffer_revision"] is not None:
                int(state["buffer_revision"])
            self.parts.algorithm.restore_counts(state["hook_counts"])
            if self.parts.algorithm.remembers:
                self.parts.algorithm.restore(state["memory"], load_memory(checkpoint))
            self.queue_snapshot = read_snapshot(checkpoint) if (checkpoint / QUEUE).exists() else None
        except (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise damaged(checkpoint, error) from error
        return state

    def rewind(self, state: dict[str, Any], *, last_label: str, is_done: bool = False) -> None:
        """Roll back everything that was written after the checkpoint; it is computed again with the same
        bits.

        If a finished run is extended, the evaluation at its former end (``last_label``) is retained, and if
        all steps of the run are done (``is_done``), so are the evaluations of the first evaluation sets.

        Raises CheckpointError if tasks, buffer or reference differ, or if records are missing.
        """
        for path, key in (
            (self.metrics.path, "num_metric_records"),
            (self.run.evaluations, "num_evaluations"),
        ):
            if (num_lines := len(whole_lines(path))) < int(state[key]):  # they cannot be made again
                raise CheckpointError(
                    f"{path.name} has {num_lines} lines, its checkpoint was saved at {state[key]}: put the "
                    "file back, or begin a new run with model.initial_checkpoint"
                )
        for name, tasks_hash in state["tasks"].items():
            if tasks_hash != self._tasks.get(name):
                version = state["versions"].get("outrider")
                bare = [replace(task, metadata={}) for task in self._task_lists.get(name, ())]
                if version != outrider.__version__ and tasks_hash == hash_tasks(bare):
                    raise CheckpointError(
                        f"this run began with version {version}, whose {name} tasks lack "
                        "the further columns of the data that they have now: resume it with that version, or "
                        "begin a new run with model.initial_checkpoint"
                    )
                raise CheckpointError(
                    f"the {name} tasks are not those that this run began with: put the data back, "
                    "or begin a new run with model.initial_checkpoint"
                )
        other_versions = differences(state["versions"])
        inputs = check_inputs(
            state["inputs"],
            self._inputs,
            other_versions=bool(other_versions),
            allow_changed_plugins=self.run.allow_changed_plugins,
        )
        for difference in [*other_versions, *inputs]:
            self.note(difference)
        self._reference_checksum = state["reference_checksum"]
        if self.parts.learner.has_reference:
            self.parts.learner.load_reference(self._reference_path, checksum=self._reference_checksum)
        if (buffer := self.parts.buffer) is not None and buffer.revision != state["buffer_revision"]:
            if self.parts.settings.buffer.evolve:
                buffer.rollback(int(state["buffer_revision"]))
            else:
                buffer.pin(int(state["buffer_revision"]))  # others may have added to it since
        if (began_with := state["buffer_digest"]) is not None:
            check_inputs({BUFFER: began_with}, {BUFFER: self._buffer_digest()}, other_versions=False)
        self.run.finished_evaluations()  # raises for a damaged file
        # All checks are done: from here on files are written and cut.
        self.run.commit()
        num_retained = self._retain_last_evaluation(state, last_label, is_done=is_done)
        self.metrics.cut(int(state["num_metric_records"]) + num_retained)
        self.run.cut_evaluations(int(state["num_evaluations"]) + num_retained)
        self._remove_records(after=self.step)
        # Cached keys and values belong to other weights.
        self.parts.engine.load(int(state["weight_version"]))
        self.note(f"continuing from step {self.step}")

    def _retain_last_evaluation(self, state: dict[str, Any], last_label: str, *, is_done: bool) -> int:
        """Return the number of evaluations after the checkpoint that are retained: those at the end of a
        shorter run, which are renamed to their step, or those of the first evaluation sets at the end of this
        run (``is_done``).
        """
        number, label = int(state["num_evaluations"]), f"step {self.step}"
        newer = list(
            takewhile(  # an extension may have recorded steps since
                lambda entry: entry["step"] == self.step and entry["label"] in (last_label, label),
                self.run.finished_evaluations()[number:],
            )
        )
        num_sets = len(self.parts.eval_sets)
        kinds = self.metrics.kinds[int(state["num_metric_records"]) :][: len(newer)]
        if not newer or kinds != [(self.step, "eval")] * len(newer):
            return 0
        if is_done and newer[0]["label"] == last_label:  # the run was killed between two evaluation sets
            return len(newer)
        if len(newer) != num_sets:
            return 0
        if newer[0]["label"] != label:
            for offset in range(num_sets):
                self.run.name_evaluation(number + offset, label)
            self.note(f"the evaluation {last_label!r} of the shorter run is kept as {label!r}")
        return num_sets

    def _buffer_digest(self) -> str | None:
        """Digest of the buffer, cached per revision, because most runs never change theirs."""
        if (buffer := self.parts.buffer) is None:
            return None
        if self._buffer_seen is None or self._buffer_seen[0] != buffer.revision:
            self._buffer_seen = buffer.revision, buffer.digest()
        return self._buffer_seen[1]
