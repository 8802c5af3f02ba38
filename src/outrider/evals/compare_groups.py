"""Which runs are seeds of one training, what their group is called, and in which settings groups differ."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Final

from outrider.evals.compare_runs import Incomparable, Run

_SAME_TRAINING: Final = frozenset((  # the token budget follows what another run spent
    "seed", "num_threads", "trackers", "train.max_policy_tokens", "train.checkpoint_every", "train.keep_checkpoints",
    "train.max_concurrent", "train.max_retries",
))  # fmt: skip
_PATHS: Final = frozenset(("model.initial_checkpoint", "buffer.path"))  # whether there is one counts, not where
_ADAPTATION: Final = frozenset(("evaluation.num_trials", "evaluation.memory"))


def is_trained(config: Mapping[str, str]) -> bool:
    return config.get("train.num_steps") != "0" or config.get("cold_start.num_examples", "0") != "0"


def _comparable(config: Mapping[str, str]) -> dict[str, str]:
    """The settings that decide what was trained."""
    trained = is_trained(config)  # else the weights are those of the path
    return {
        key: ("none" if value == "none" else "given") if key in _PATHS and trained else value
        for key, value in config.items()
        if key not in _SAME_TRAINING and (not key.startswith("evaluation.") or key in _ADAPTATION)
    }


def grouped(runs: Sequence[Run]) -> dict[str, tuple[Run, ...]]:
    """Runs by label, in the order of labels: the algorithm, and the start of the settings' hash where one is not enough."""
    by_key: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        settings = json.dumps(_comparable(run.config), sort_keys=True).encode()
        by_key.setdefault((_algorithm(run.config), hashlib.blake2b(settings).hexdigest()), []).append(run)
    algorithms = [algorithm for algorithm, _ in by_key]
    groups: dict[str, tuple[Run, ...]] = {}
    for (algorithm, digest), members in sorted(by_key.items(), key=lambda one: one[0]):
        seeds = [run.config["seed"] for run in members]
        if len(members) > 1 and not is_trained(members[0].config):
            names = f"{members[0].name} and {members[1].name}"
            raise Incomparable(f"{names} evaluate the same weights: seeds of an evaluation are no trainings of their own")
        for number, run in enumerate(members):
            if run.config["seed"] in seeds[:number]:
                twin = members[seeds.index(run.config["seed"])]
                raise Incomparable(f"{twin.name} and {run.name} have one configuration and one seed: leave one of them out")
        groups[algorithm if algorithms.count(algorithm) == 1 else f"{algorithm} {digest[:6]}"] = tuple(members)
    return groups


def _algorithm(config: Mapping[str, str]) -> str:
    name = config["algorithm.type"]
    if name == "rapo" and config.get("algorithm.num_hybrid") == "0":
        return "grpo"  # the same, bit for bit
    return config.get("algorithm.preset", name)


def differing(groups: Mapping[str, Sequence[Run]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    configs = [_comparable(members[0].config) for members in groups.values()]
    rows = [(key, tuple(config.get(key, "not set") for config in configs)) for key in sorted({k for c in configs for k in c})]
    return tuple((key, values) for key, values in rows if len(set(values)) > 1)
