"""The files that a reader needs for one training step of the demo, in reading order.

    python -m benchmarks.reading_path

Runs ``outrider train recipes/demo.toml`` with a tiny model in this process and records which modules of
``outrider`` execute a function between the entry point and the first ``optimizer.step()`` of the training.
Imports, class bodies and generated functions do not count. The modules are printed in the order of their
first execution with their numbers of lines, once without and once with the rollouts. Those that the rules
below leave out follow under their reason.

The cold start is not part of the step and is switched off. The tiny model is taught beforehand: with random
weights all returns of a group are equal and nothing is trained.
"""

import inspect
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from tests.training.tool_run import write_tool_run

import outrider
from outrider.cli import main as command_line

# Reasons to leave a module out, and the modules, as patterns of what follows "outrider.". The first match
# decides. The names include those of the planned layout.
LEFT_OUT: Final[Mapping[str, str]] = {
    "model internals: forward pass, attention, sampling, kernels": r"engines\.local\.",
    "logging and display: metrics of finished steps, progress, trackers, reports": (
        r"(watch|viewer|train\.metrics|train\.machine)\.|(metrics(\..*)?|printing|terminal|records)$"
        r"|training\.step_metrics$"
    ),
    "checkpoints, state and resuming, and how their files are written": (
        r"train\.state\.|training\.(checkpoint|run_dir|resume)|(atomic_io|file_lock|json_lines|files|runs)$"
    ),
    "configuration: parsing, settings and their validation, names of plug-ins": (
        r"(config\w*|resolved|near)$|plugins(\.|$)|(.*[._])?(settings|presets)$"
    ),
    "checks that run once when a model is loaded": r"tokens\.template_check$",
}
# Counted only with the rollouts.
ROLLOUT: Final = (
    r"(rollout|environments|tools|tokens|memory|engines)(\.|$)|algorithms\..*(hook|retrieval|branching)$"
)
DEMO: Final = Path(__file__).parents[1] / "recipes" / "demo.toml"
# What differs from the demo's recipe: sizes, and a search tool over six passages in place of Factbook.
TINY: Final = (
    "num_threads=1", "model.trained_layers=none", "cold_start.num_examples=0", "train.num_steps=1",
    "train.checkpoint_every=1", "update.max_logprob_gap=1000000000.0", "evaluation.num_tasks=1",
    "rollout.max_turn_tokens=16", "rollout.max_response_tokens=300",
    "algorithm.retrieval.min_similarity=none",
    'environment={{type="tools", tools=["search"], corpus="{root}/corpus.jsonl", prompt="none",'
    "max_invalid=4,"
    "search={{top_k=1}}, reward={{require_think=false, require_boxed=false}},"
    'train={{path="{root}/tasks.jsonl"}}, test={{path="{root}/tasks.jsonl", limit=3}}}}',
    'buffer={{embedder="hash", path="{root}/buffer.sqlite"}}',
)  # fmt: skip


class Recorder:
    """Records the files of a package in the order in which they first execute a function, in all threads,
    until a function is called for which ``ends`` is true.
    """

    def __init__(self, package: Path, ends: Callable[[CodeType], bool]) -> None:
        self.files: list[Path] = []
        self.has_ended = False
        self._seen: set[str] = set()
        self._package = f"{package}/"
        self._ends = ends

    def record(self, function: Callable[[], Any]) -> None:
        """Call the function under the recorder."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            function()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or self.has_ended:
            return
        code = frame.f_code
        if self._ends(code):
            self.has_ended = True
        elif (
            code.co_filename not in self._seen
            and code.co_filename.startswith(self._package)
            and code.co_flags & inspect.CO_OPTIMIZED  # a module or the body of a class is not
            and not self._is_import(frame)
        ):
            self._seen.add(code.co_filename)
            self.files.append(Path(code.co_filename))

    def _is_import(self, frame: FrameType | None) -> bool:
        """Whether a module that is being imported called the function."""
        while frame is not None and frame.f_code is not Recorder.record.__code__:
            if frame.f_code.co_name == "<module>":
                return True
            frame = frame.f_back
        return False


def is_optimizer_step(code: CodeType) -> bool:
    """Whether a function is the step of one of torch's optimizers."""
    return code.co_name == "step" and "/torch/optim/" in code.co_filename


def module_name(path: Path, package: Path) -> str:
    """The name of a module without that of the package; that of a package is its directory's."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def reason_left_out(module: str) -> str | None:
    """The first rule that matches a module."""
    return next((reason for reason, rule in LEFT_OUT.items() if re.match(rule, module)), None)


def executed_files() -> list[Path]:
    """The files of one training step of the demo, in the order of their first execution."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "inputs")
        write_tool_run(root)
        changes = [change.format(root=root) for change in TINY]
        arguments = ["train", str(DEMO), *changes, "--model", str(root / "model"), "--run", f"{scratch}/run"]
        recorder = Recorder(Path(outrider.__file__).parent, is_optimizer_step)
        recorder.record(lambda: command(*arguments, "--progress", "none"))
    if not recorder.has_ended:
        raise SystemExit("the run made no optimizer step")
    return recorder.files


def command(*arguments: str) -> None:
    if (status := command_line(list(arguments))) != 0:
        raise SystemExit(status)


def table(title: str, files: Sequence[Path], package: Path) -> str:
    """The files with their numbers of lines, below a title with the totals."""
    lines = {path: len(path.read_text().splitlines()) for path in files}
    rows = [f"{lines[path]:6,}  {path.relative_to(package)}" for path in files]
    return "\n".join([f"{title}: {len(files)} files, {sum(lines.values()):,} lines", *rows, ""])


def main() -> None:
    """Print the tables."""
    package, files = Path(outrider.__file__).parent, executed_files()
    reasons = {path: reason_left_out(module_name(path, package)) for path in files}
    counted = [path for path in files if reasons[path] is None]
    short = [path for path in counted if not re.match(ROLLOUT, module_name(path, package))]
    print(table("One training step without its rollouts", short, package))
    print(table("One training step with its rollouts", counted, package))
    for reason in LEFT_OUT:
        print(table(f"Left out, {reason}", [path for path in files if reasons[path] == reason], package))


if __name__ == "__main__":
    main()
