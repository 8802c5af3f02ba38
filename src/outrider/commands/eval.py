"""``outrider eval``: on a recipe's held-out panel, on named task sets, and grading of stored replies."""

import argparse
from pathlib import Path
from typing import Final

from outrider.commands import add_progress, describe, positive
from outrider.commands.train import add_smoke, print_settings, recipe_changes, smoke
from outrider.config import load_settings
from outrider.errors import ConfigError

_TASK_FLAGS: Final = {  # of `eval`: what each is short for
    "tasks": "tasks", "model": "model.name", "checkpoint": "model.initial_checkpoint",
    "endpoint": "endpoint.base_url", "endpoint_model": "endpoint.model", "limit": "limit",
    "samples": "num_samples", "temperature": "temperature", "tools": "tools",
    "corpus": "environment.corpus", "rules": "rules", "judge": "judge.endpoint.base_url",
    "judge_model": "judge.endpoint.model", "seed": "seed",
}  # fmt: skip
_ONLY_WITH_TASKS: Final = tuple(name for name in _TASK_FLAGS if name not in ("tasks", "model", "checkpoint"))


def add_eval(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    describe(
        parser,
        "Evaluate a model on the held-out tasks of a recipe, on a task set (gsm8k, aime24, ...), on "
        "a file of questions, or in an environment. --regrade grades stored replies again.",
        "outrider eval recipes/demo.toml --run runs/base",
        "outrider eval recipes/demo.toml --smoke --run runs/smoke-eval",
        "outrider eval --tasks gsm8k --model runs/demo --run runs/demo-gsm8k",
        "outrider eval --regrade runs/demo-gsm8k",
    )
    parser.add_argument("recipe", nargs="?", help="TOML file; none with --tasks")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--run", type=Path, help="new run directory; with --tasks also one to continue")
    add_smoke(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--checkpoint", type=Path, help="weights of a training run")
    parser.add_argument(
        "--set",
        dest="sets",
        metavar="NAME",
        action="append",
        help="evaluate only this set of evaluation.panels; repeat it for several",
    )
    parser.add_argument(
        "--adapt", type=positive, metavar="K", help="K trials with a memory and no change of weights"
    )
    parser.add_argument(
        "--method",
        choices=("tips", "reflexion"),
        default="tips",
        help="what the memory of --adapt stores (default: tips)",
    )
    parser.add_argument(
        "--model", help="short for model.name=...; with --tasks also a run directory or a checkpoint in one"
    )
    add_progress(parser)
    tasks = parser.add_argument_group("task sets", "see docs/evaluation.md")
    tasks.add_argument("--tasks", metavar="NAME[=FILE]", help="task set, file of questions, or environment")
    tasks.add_argument(
        "--regrade",
        type=Path,
        metavar="RUN",
        help="grade the stored replies of this directory again, without a model",
    )
    tasks.add_argument("--endpoint", metavar="URL", help="OpenAI-compatible base URL, in place of --model")
    tasks.add_argument("--endpoint-model", metavar="NAME", help="its name on the server (default: the first)")
    tasks.add_argument("--limit", type=positive, metavar="N", help="only the first N tasks")
    tasks.add_argument("--samples", type=positive, metavar="K", help="samples per task, for pass@k and avg@k")
    tasks.add_argument("--temperature", type=float, metavar="T", help="sampling temperature; 0 is greedy")
    tasks.add_argument(
        "--tools",
        choices=("on", "off"),
        help="tools in the prompt (default: off for questions, on for environments)",
    )
    tasks.add_argument("--corpus", type=Path, metavar="FILE", help="passages for the tool `search`")
    tasks.add_argument(
        "--rules",
        choices=("default", "arpo-train", "arpo-eval", "squad"),
        help="how answers are extracted and normalised",
    )
    tasks.add_argument("--judge", metavar="URL", help="OpenAI-compatible base URL of a judge")
    tasks.add_argument("--judge-model", metavar="NAME", help="its name on the server (default: the first)")
    tasks.add_argument("--seed", type=int, help="seed of samples and environments")
    parser.set_defaults(command=_evaluate)


def _evaluate(parsed: argparse.Namespace) -> int:
    is_without_recipe = parsed.tasks is not None or parsed.regrade is not None
    if is_without_recipe and "=" in (parsed.recipe or ""):  # argparse took the first override for the recipe
        parsed.recipe, parsed.overrides = None, [parsed.recipe, *parsed.overrides]
    task_options = [name for name in _ONLY_WITH_TASKS if vars(parsed)[name] is not None]
    if parsed.smoke and is_without_recipe:
        raise ConfigError("--smoke needs a recipe; use --limit N with --tasks")
    if parsed.regrade is not None:
        return _regrade(parsed)
    if parsed.tasks is not None:
        return _evaluate_tasks(parsed)
    if task_options:
        raise ConfigError(
            f"--{task_options[0].replace('_', '-')} needs --tasks NAME; a recipe has its own settings"
        )
    if parsed.recipe is None:
        raise ConfigError("give a recipe, or --tasks NAME")
    return _evaluate_recipe(parsed)


def _evaluate_tasks(parsed: argparse.Namespace) -> int:
    from outrider.evaluation.tasks import EvalTasksSettings, environment_names, find_benchmark, is_environment

    if parsed.recipe is not None or parsed.adapt is not None:
        raise ConfigError("--tasks cannot be combined with a recipe or --adapt")
    settings = load_settings(
        EvalTasksSettings, file=None, overrides=[*parsed.overrides, *_flag_overrides(parsed)]
    )
    if not is_environment(settings.tasks):
        find_benchmark(settings.tasks, others=environment_names())
    if parsed.dry_run:
        return print_settings(settings, None, [*parsed.overrides, *_flag_overrides(parsed)])
    from outrider import api

    parsed.interrupted = "; the same command continues"
    return api.evaluate_tasks(settings, run=parsed.run, progress=parsed.progress)


def _flag_overrides(parsed: argparse.Namespace) -> list[str]:
    return [
        f"{key}={vars(parsed)[name]}" for name, key in _TASK_FLAGS.items() if vars(parsed)[name] is not None
    ]


def _regrade(parsed: argparse.Namespace) -> int:
    from outrider.evaluation.regrade import regrade_replies

    if parsed.recipe is not None or parsed.adapt is not None or parsed.run is not None or parsed.dry_run:
        raise ConfigError("--regrade RUN cannot be combined with a recipe, --run, --adapt or --dry-run")
    return regrade_replies(parsed.regrade, [*parsed.overrides, *_flag_overrides(parsed)])


def _evaluate_recipe(parsed: argparse.Namespace) -> int:
    from outrider import api

    if parsed.method != "tips" and parsed.adapt is None:
        raise ConfigError("--method needs --adapt K")
    recipe_overrides = recipe_changes(parsed)
    options = {
        "checkpoint": parsed.checkpoint, "num_trials": parsed.adapt, "method": parsed.method,
        "sets": parsed.sets,
    }  # fmt: skip
    with smoke(
        lambda values: api.evaluation_settings(parsed.recipe, overrides=values, **options),
        recipe_overrides,
        enabled=parsed.smoke,
        dry_run=parsed.dry_run,
    ) as more:
        if parsed.smoke:  # what the options set is among them
            options = {"checkpoint": None, "num_trials": None, "method": "tips", "sets": parsed.sets}
            more = [*_option_overrides(parsed), *more]
        if parsed.dry_run:
            settings = api.evaluation_settings(parsed.recipe, overrides=[*recipe_overrides, *more], **options)
            return print_settings(
                settings, Path(parsed.recipe), recipe_overrides, others="command", smoke=more
            )
        api.evaluate(
            parsed.recipe,
            run=parsed.run,
            progress=parsed.progress,
            overrides=[*recipe_overrides, *more],
            **options,
        )
    return 0


def _option_overrides(parsed: argparse.Namespace) -> list[str]:
    """Return the overrides that options abbreviate; ``--smoke`` takes precedence over them."""
    trials = (
        []
        if parsed.adapt is None
        else [f"evaluation.num_trials={parsed.adapt}", f"evaluation.memory={parsed.method}"]
    )
    return [
        *([f"model.initial_checkpoint={parsed.checkpoint}"] if parsed.checkpoint is not None else []),
        *trials,
    ]
