"""What of a run's settings determines the trained policy, and the name of what trained it.

A configuration is flat (dotted keys), with values as text (:class:`~outrider.viewer.run_reader.RunData`).
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Final

_SAME_TRAINING: Final = frozenset((
    "seed", "num_threads", "trackers", "train.checkpoint_every", "train.keep_checkpoints",
    "train.max_concurrent", "train.max_retries", "train.expert_timeout_s", "train.watchdog_s",
    "protocol", "protocol_sha256",
))  # fmt: skip
# differ between seeds: only whether they are set counts
STARTS: Final = frozenset(("model.initial_checkpoint", "buffer.path"))
_BUDGET: Final = (
    "train.max_policy_tokens"  # depends on the cost of another run: only whether it is set counts
)
_ADAPTATION: Final = frozenset(("evaluation.num_trials", "evaluation.memory"))
# settings added in later versions, with the value that matches the behaviour of earlier versions
_ADDED: Final = frozenset(
    (
        ("train.stages", "[]"),
        ("environment.response_format", "refuse"),
        ("environment.ignored_fields", "[]"),
        ("environment.result_tag", "result"),
        ("environment.context", "chat"),
        ("environment.max_answers", "1"),
        ("environment.actions", "templates"),
        ("environment.success_at", "full"),
        ("environment.reward", "score"),
        ("algorithm.invalid_penalty", "0.0"),
        ("algorithm.statistics", "rollouts"),
        ("algorithm.bonus", "none"),
        ("algorithm.distill.place", "first"),
        ("update.mini_batch_samples", "none"),
    )
)


def is_trained(config: Mapping[str, str]) -> bool:
    """Whether the run trained weights, in training steps or a cold start."""
    return config.get("train.num_steps") != "0" or config.get("cold_start.num_examples", "0") != "0"


def algorithm_name(config: Mapping[str, str]) -> str:
    """The preset, or the algorithm; empty if the configuration has none."""
    name = config.get("algorithm.type", "")
    if name == "rapo" and config.get("algorithm.num_hybrid") == "0":
        return "grpo"  # the same, bit for bit
    return config.get("algorithm.preset", name)


def comparable(config: Mapping[str, str]) -> dict[str, str]:
    """The settings that determine the trained policy."""
    # without training, the path of the weights is a setting that matters
    presence_keys = {_BUDGET, *(STARTS if is_trained(config) else ())}
    unread = ["tracking."]
    # These have no effect beside others, and earlier versions did not record them.
    if config.get("environment.context", "chat") == "chat":
        unread.append("environment.window.")
    if older := config.get("algorithm.episode_statistics"):  # the name in runs of earlier versions
        config = {**config, "algorithm.statistics": older.replace("turns", "samples")}
        unread.append("algorithm.episode_statistics")
    return {
        key: ("none" if value == "none" else "given") if key in presence_keys else value
        for key, value in {_BUDGET: "none", **config}.items()
        if key not in _SAME_TRAINING
        and not key.startswith(tuple(unread))
        and (key, value) not in _ADDED
        and (not key.startswith("evaluation.") or key in _ADAPTATION)
    }


def digest(settings: Mapping[str, str]) -> str:
    """A hash of settings, in any order."""
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode()).hexdigest()
