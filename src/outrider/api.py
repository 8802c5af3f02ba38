"""The Python API: the functions of the command line, with objects in place of names in a recipe. torch is
imported when a run starts.

::

    run = outrider.train("recipe.toml", run="runs/first", overrides=["train.num_steps=20"])
    run = outrider.train(recipe, run="runs/mine", environment=MyWorld(MyWorld.Settings(num_tasks=8)))
    run.metrics("train").to_pandas()
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from outrider.config import Settings, format_override, load_settings, require_paths
from outrider.environments.base import Environment, settings_of
from outrider.errors import ConfigError, OutriderError
from outrider.plugins.imports import add_search_folder, search_folders
from outrider.plugins.registry import Kind, substitute
from outrider.runs import Run
from outrider.signals import stop_on_interrupt
from outrider.suggestions import did_you_mean

if TYPE_CHECKING:
    from outrider.evaluation.compare import Comparison
    from outrider.evaluation.tasks import EvalTasksSettings
    from outrider.training.run_dir import RunDirectory
    from outrider.training.settings import RunSettings

Recipe: TypeAlias = "str | Path | Mapping[str, Any] | RunSettings"
"""A TOML file, its content as a mapping, or settings."""
Progress: TypeAlias = Literal["auto", "rich", "plain", "json", "none"]
OnStart: TypeAlias = Callable[[Callable[[], bool]], None]
_KINDS: Final[Mapping[str, Kind]] = {
    "environment": "environments", "algorithm": "algorithms", "engine": "engines",
}  # fmt: skip
_EVALUATION: Final = ("train.num_steps=0", "cold_start.num_examples=0", "evaluation.at_start=true")


def train(
    recipe: "Recipe | None" = None,
    *,
    run: str | Path | None = None,
    resume: str | Path | None = None,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
    changed_plugins: bool = False,
    on_start: OnStart | None = None,
    environment: Any = None,
    algorithm: Any = None,
    engine: Any = None,
    **plugins: Any,
) -> Run:
    """Train from a recipe into the new folder ``run``, or resume the run ``resume``.

    An interruption (Ctrl-C, or a notebook's stop button) stops the run after its step: finished steps are
    saved in a checkpoint, then KeyboardInterrupt is raised with the command that resumes the run. A second
    interruption ends the run at once.

    Args:
        environment: a class, an object, a name or a table in place of the recipe's section; likewise
            ``algorithm`` and ``engine``. If the class of an object cannot be imported, pass the object again
            when you resume the run.
        progress: how to display progress (``json`` prints one object per event); None prints lines in a
            notebook and nothing in a program.
        changed_plugins: whether the code of plug-ins may differ from that of the run's start.
        on_start: called with a function that requests a stop after the current step; it replaces the handling
            of interruptions.

    Raises:
        OutriderError: with the line that the command line would print.
    """
    plugins |= {"environment": environment, "algorithm": algorithm, "engine": engine}
    progress = progress or _default_progress()
    with _plugin_sections(plugins) as sections:
        if (recipe is None) == (resume is None):
            raise ConfigError(
                "name a recipe for a new run, or a run to continue (--resume RUN; resume=RUN in Python)"
            )
        if resume is not None:
            for name, value in plugins.items():
                if isinstance(value, str | Mapping):
                    raise ConfigError(f"a resumed run keeps its {name}: only an object may be passed again")
            if run is not None:
                raise ConfigError("a resumed run keeps its model and its directory")
            opened = _open_run(Path(resume), overrides, changed_plugins, sections)
        else:
            assert recipe is not None
            settings = run_settings(recipe, overrides=overrides, sections=sections)
            folder = _validate_run(run, settings)
            from outrider.training.run_dir import RunDirectory

            opened = RunDirectory.create(folder, settings), settings
        directory, settings = opened
        with ExitStack() as cleanup:
            other_processes: dict[str, Any] = {}
            if settings.cluster.num_processes or settings.has_ranks:
                from outrider.distributed import open_cluster, starters

                cluster = cleanup.enter_context(open_cluster(settings))
                other_processes |= starters(settings, cluster)
            from outrider.training.setup import run_training  # imports torch while the fork server does

            with _stopping(directory.path, on_start) as stop:
                run_training(
                    opened, progress=progress, on_start=stop, recipe=_file_name(recipe), **other_processes
                )
    return load_run(directory.path)


def _file_name(recipe: "Recipe | None") -> str | None:
    """Return the name of the recipe's file, None if the recipe has none."""
    return str(recipe) if isinstance(recipe, str | Path) else None


def _default_progress() -> Progress:
    """Return "plain" in a notebook, which has no other output of the run, or else "none"."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    names = {base.__name__ for base in type(shell).__mro__}
    return "plain" if "ZMQInteractiveShell" in names else "none"


@contextmanager
def _stopping(folder: Path, on_start: OnStart | None) -> Iterator[OnStart]:
    """Yield the ``on_start`` of a training.

    If the caller has none, an interruption requests a stop, and KeyboardInterrupt is raised at the end of the
    stopped run.
    """
    if on_start is not None:
        yield on_start
        return
    with ExitStack() as installed:
        events: list[Event] = []
        yield lambda request_stop: events.append(installed.enter_context(stop_on_interrupt(request_stop)))
    if any(event.is_set() for event in events):
        raise KeyboardInterrupt(
            f"finished steps are in {folder}; continue with outrider.train(resume={str(folder)!r})"
        )


def _open_run(
    folder: Path, overrides: Sequence[str], changed_plugins: bool, sections: Mapping[str, Mapping[str, Any]]
) -> "tuple[RunDirectory, RunSettings]":
    """Return the run to resume and its settings; ``sections`` are those of objects that were passed again."""
    from outrider.training.run_dir import RunDirectory

    directory, settings = RunDirectory.open(folder, overrides, allow_changed_plugins=changed_plugins)
    try:
        for name, section in sections.items():
            original = getattr(settings, name).model_dump()
            for key, value in section.items():
                if not _is_same(original.get(key), value):
                    raise ConfigError(
                        f"{name}.{key} is {value!r}, but the run started with {original.get(key)!r}"
                    )
        # demonstrations and initial weights have been read, a buffer has been copied
        for name in ("environment", "engine"):
            require_paths(getattr(settings, name), search_folders(), prefix=f"{name}.")
    except OutriderError:
        directory.release()
        raise
    return directory, settings


def _is_same(recorded: Any, value: Any) -> bool:
    """Whether two values of settings are equal; a run records absolute paths."""
    if isinstance(recorded, Mapping) and isinstance(value, Mapping):
        return recorded.keys() == value.keys() and all(
            _is_same(recorded[key], value[key]) for key in recorded
        )
    if isinstance(recorded, Path) and isinstance(value, Path):
        return recorded == Path.cwd() / value.expanduser()
    return bool(recorded == value)


def evaluate(
    recipe: Recipe,
    *,
    run: str | Path | None = None,
    overrides: Sequence[str] = (),
    checkpoint: str | Path | None = None,
    num_trials: int | None = None,
    method: Literal["tips", "reflexion"] = "tips",
    sets: Sequence[str] | None = None,
    progress: Progress | None = None,
    environment: Any = None,
    algorithm: Any = None,
    engine: Any = None,
    **plugins: Any,
) -> Run:
    """Evaluate on the held-out tasks of a recipe, into the new folder ``run``.

    Args:
        checkpoint: the weights of a training run; None: the model of the recipe.
        num_trials: number of trials per task with a memory by ``method`` and fixed weights.
        sets: names of the sets in ``evaluation.panels`` to evaluate on; None: all of them.

    The other arguments and errors are those of :func:`train`.
    """
    plugins |= {"environment": environment, "algorithm": algorithm, "engine": engine}
    progress = progress or _default_progress()
    with _plugin_sections(plugins) as sections:
        settings = evaluation_settings(
            recipe,
            overrides=overrides,
            checkpoint=checkpoint,
            num_trials=num_trials,
            method=method,
            sections=sections,
            sets=sets,
        )
        folder = _validate_run(run, settings)
        from outrider.training.run_dir import RunDirectory

        if settings.evaluation.num_trials:
            from outrider.training.adaptation import adapt

            opened = RunDirectory.create(folder, settings), settings
            adapt(opened, progress=progress, recipe=_file_name(recipe))
            return load_run(folder)
        from outrider.training.setup import run_training

        opened = RunDirectory.create(folder, settings), settings
        run_training(opened, progress=progress, on_start=lambda stop: None, recipe=_file_name(recipe))
    return load_run(folder)


def evaluate_tasks(
    settings: "EvalTasksSettings", *, run: str | Path | None, progress: Progress | None = None
) -> int:
    """Evaluate on named task sets or the tasks of an environment (docs/evaluation.md).

    Returns the exit status: 1 if no sample could be scored, else 0.
    """
    from outrider.engines.base import require_known_model

    folder = _new_folder(run)
    if settings.model is not None:
        require_known_model(settings.model.name)
    from outrider.evaluation.run import evaluate_tasks as play

    return play(settings, folder, progress=progress or _default_progress())


def load_run(path: str | Path) -> Run:
    """Open a run directory to read its settings, metrics, evaluations and traces. Raises DataError for any
    other folder.
    """
    return Run.from_path(Path(path))


def compare(runs: Sequence[Run | str | Path], *, seed: int = 0) -> "Comparison":
    """Compare finished runs as ``outrider compare`` does: means and interquartile means with intervals over
    seeds, and paired tests of every two methods. ``markdown_page`` formats the result.

    Runs that differ in their seed alone are one method. ``seed`` is that of the bootstrap. Raises
    OutriderError if the runs cannot be compared.
    """
    from outrider.evaluation.compare import compare as compare_paths

    return compare_paths([run.path if isinstance(run, Run) else Path(run) for run in runs], seed=seed)


def run_settings(
    recipe: Recipe, *, overrides: Sequence[str] = (), sections: Mapping[str, Any] | None = None
) -> "RunSettings":
    """Read and validate the settings of a recipe. Raises ConfigError."""
    from outrider.algorithms.loss_settings import migrate_keys
    from outrider.training.run_dir import RECORD
    from outrider.training.settings import RunSettings

    if isinstance(recipe, str | Path):
        file = Path(recipe)
        # The config.toml of a run is also a recipe, possibly of an earlier version.
        respelled = migrate_keys if file.name == RECORD else None
        return load_settings(
            RunSettings, file=file, overrides=overrides, sections=sections, respelled=respelled
        )
    add_search_folder(Path.cwd())
    tree = recipe.model_dump() if isinstance(recipe, Settings) else dict(recipe)
    return load_settings(RunSettings, file=None, overrides=overrides, sections={**tree, **(sections or {})})


def evaluation_settings(
    recipe: Recipe,
    *,
    overrides: Sequence[str],
    checkpoint: str | Path | None,
    num_trials: int | None,
    method: str,
    sections: Mapping[str, Any] | None = None,
    sets: Sequence[str] | None = None,
) -> "RunSettings":
    """Return the settings of :func:`evaluate`: those of the recipe without training.

    Raises ConfigError for overrides that would train, and for evaluation sets that the recipe does not name.
    """
    own = dict(setting.split("=") for setting in _EVALUATION)
    for override in overrides:
        key, _, value = override.partition("=")
        if value.strip() != own.get(key.strip(), value.strip()):
            raise ConfigError(f"an evaluation requires {key}={own[key.strip()]}: remove {override!r}")
    all_overrides = [*_EVALUATION, *overrides]
    if checkpoint is not None:
        all_overrides.append(f"model.initial_checkpoint={checkpoint}")
    if sets:
        named = run_settings(recipe, overrides=all_overrides, sections=sections).evaluation.panels
        names = [entry.name for entry in named]
        if unknown := [name for name in sets if name not in names]:
            raise ConfigError(
                f"evaluation.panels has no set {unknown[0]!r}{did_you_mean(unknown[0], names)}; "
                f"it has {', '.join(names) or 'none'}"
            )
        chosen = [entry.model_dump(mode="json", exclude_unset=True) for entry in named if entry.name in sets]
        all_overrides.append(format_override("evaluation.panels", chosen))
    if num_trials is not None:
        all_overrides += [f"evaluation.num_trials={num_trials}", f"evaluation.memory={method}"]
    return run_settings(recipe, overrides=all_overrides, sections=sections)


@contextmanager
def _plugin_sections(plugins: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the sections of a recipe for objects, names and tables."""
    if unknown := [name for name in plugins if name not in _KINDS]:
        raise ConfigError(f"unknown plug-in section {unknown[0]!r}; choose from {', '.join(_KINDS)}")
    chosen = {name: value for name, value in plugins.items() if value is not None}
    objects = {
        _KINDS[name]: _task_set(value)
        for name, value in chosen.items()
        if not isinstance(value, str | Mapping)
    }
    with substitute(objects) as object_sections:
        name_sections = {name: {"type": value} for name, value in chosen.items() if isinstance(value, str)}
        tables = {name: dict(value) for name, value in chosen.items() if isinstance(value, Mapping)}
        instances = {name: object_sections[kind] for name, kind in _KINDS.items() if kind in object_sections}
        yield name_sections | tables | instances


def _task_set(plugin: Any) -> Any:
    """Return the task set of an environment's class (with its default settings) or of an instance."""
    if isinstance(plugin, Environment):
        return plugin.build(settings_of(plugin))
    if isinstance(plugin, type) and issubclass(plugin, Environment):
        return plugin.build(plugin.Settings())
    return plugin


def _validate_run(run: str | Path | None, settings: "RunSettings") -> Path:
    """Validate everything that can be validated without torch. Returns the new folder."""
    from outrider.engines.base import require_known_model
    from outrider.planning.plan import unpacked_refusal
    from outrider.training.run_dir import require_free
    from outrider.training.settings import require_experts, require_extras

    folder = _new_folder(run)
    require_free(folder)
    require_experts(settings)
    require_extras(settings)
    if refusal := unpacked_refusal(settings):
        raise ConfigError(refusal)
    require_paths(settings, search_folders())
    require_known_model(settings.model.name)
    return folder


def _new_folder(run: str | Path | None) -> Path:
    if run is None:
        raise ConfigError("a new run needs a directory (--run DIRECTORY; run=DIRECTORY in Python)")
    return Path(run).expanduser()  # the shell leaves the ~ of --run=~/runs
