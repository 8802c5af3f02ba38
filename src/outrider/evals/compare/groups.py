"""Which runs are seeds of one training, what their group is called, and in which settings groups differ."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Final

from outrider.evals.compare.runs import Incomparable, Run, short_ends

_SAME_TRAINING: Final = frozenset((
    "seed", "num_threads", "trackers", "train.checkpoint_every", "train.keep_checkpoints",
    "train.max_concurrent", "train.max_retries", "train.expert_timeout_s", "train.watchdog_s",
))  # fmt: skip
# each seed has its own: whether there is one counts
STARTS: Final = frozenset(("model.initial_checkpoint", "buffer.path"))
_BUDGET: Final = "train.max_policy_tokens"  # it follows what another run spent: whether there is one counts
_ADAPTATION: Final = frozenset(("evaluation.num_trials", "evaluation.memory"))
# settings that came later, with the value that says what earlier versions did
_ADDED: Final = frozenset(
    (
        ("train.stages", "[]"),
        ("environment.response_format", "refuse"),
        ("environment.ignored_fields", "[]"),
    )
)
_NUM_DIGITS: Final = 6  # of a hash in a label


def group_runs(runs: Sequence[Run]) -> dict[str, tuple[Run, ...]]:
    """Runs by label, in the order of labels: the algorithm, and the start of the settings' hash where one is
    not enough.

    Whole paths tell groups apart, but go into a label only where nothing else does: it should not hang on a
    machine's folders. Raises :class:`Incomparable` where a group has one seed twice, or seeds of an
    evaluation and not of a training.
    """
    runs_by_key: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        key = (algorithm_name(run.config), _digest(comparable(run.config)), _digest(comparable(run.settings)))
        runs_by_key.setdefault(key, []).append(run)
    for members in runs_by_key.values():
        _check_seeds(members)
    labels = [_label(key, list(runs_by_key)) for key in runs_by_key]
    return {
        label: tuple(members)
        for label, members in sorted(
            zip(labels, runs_by_key.values(), strict=True), key=lambda entry: entry[0]
        )
    }


def differing(groups: Mapping[str, Sequence[Run]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(key, one value per group) of the settings in which groups differ; of paths with one name, the ends
    that differ.
    """
    displayed = [comparable(members[0].config) for members in groups.values()]
    exact = [comparable(members[0].settings) for members in groups.values()]
    rows = []
    for key in sorted({key for config in exact for key in config}):
        values, wholes = (
            [config.get(key, "not set") for config in configs] for configs in (displayed, exact)
        )
        if len(set(values)) < len(set(wholes)):
            ends = short_ends([whole.split("/") for whole in wholes])
            values = [end if end == whole else f".../{end}" for end, whole in zip(ends, wholes, strict=True)]
        if len(set(values)) > 1:
            rows.append((key, tuple(values)))
    return tuple(rows)


def is_trained(config: Mapping[str, str]) -> bool:
    """Whether the run changed weights, in steps or a cold start."""
    return config.get("train.num_steps") != "0" or config.get("cold_start.num_examples", "0") != "0"


def comparable(config: Mapping[str, str]) -> dict[str, str]:
    """The settings that decide what was trained."""
    # without training, the weights are those of the path
    presence_keys = {_BUDGET, *(STARTS if is_trained(config) else ())}
    return {
        key: ("none" if value == "none" else "given") if key in presence_keys else value
        for key, value in {_BUDGET: "none", **config}.items()
        if key not in _SAME_TRAINING
        and (key, value) not in _ADDED
        and (not key.startswith("evaluation.") or key in _ADAPTATION)
    }


def _digest(settings: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _label(key: tuple[str, str, str], keys: Sequence[tuple[str, str, str]]) -> str:
    """The first of these names that no other group has."""

    def names(group_key: tuple[str, str, str]) -> tuple[str, ...]:
        algorithm, shown, exact = group_key
        return (
            algorithm,
            f"{algorithm} {shown[:_NUM_DIGITS]}",
            f"{algorithm} {exact[:_NUM_DIGITS]}",
            f"{algorithm} {exact}",
        )

    return next(
        name
        for level, name in enumerate(names(key))
        if [names(other)[level] for other in keys].count(name) == 1
    )


def _check_seeds(members: Sequence[Run]) -> None:
    seeds = [run.config["seed"] for run in members]
    if len(members) > 1 and not is_trained(members[0].config):
        names = f"{members[0].name} and {members[1].name}"
        raise Incomparable(
            f"{names} evaluate the same weights: seeds of an evaluation are no trainings of their own"
        )
    for number, run in enumerate(members):
        if run.config["seed"] in seeds[:number]:
            twin = members[seeds.index(run.config["seed"])]
            raise Incomparable(
                f"{twin.name} and {run.name} have one configuration and one seed: leave one of them out"
            )


def algorithm_name(config: Mapping[str, str]) -> str:
    """What a training's group is called: the preset, or the algorithm."""
    name = config["algorithm.type"]
    if name == "rapo" and config.get("algorithm.num_hybrid") == "0":
        return "grpo"  # the same, bit for bit
    return config.get("algorithm.preset", name)
