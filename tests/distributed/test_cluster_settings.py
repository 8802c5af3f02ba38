"""Combinations of settings that a run on several processes cannot have are refused when they are read."""

from typing import Any

import pytest

from outrider.config import validate
from outrider.errors import ConfigError
from outrider.training.settings import RunSettings

CPU: dict[str, Any] = {"environment": {"type": "factbook"}, "algorithm": {"type": "grpo"}}
GPU: dict[str, Any] = {**CPU, "engine": {"type": "vllm"}, "model": {"device": "cuda"}}
WORKERS: dict[str, Any] = {**CPU, "cluster": {"num_rollout_workers": 2}}
ONE_PROGRAM = {"type": "agent", "command": ["true"], "max_programs": 1}
COUNTED = {"type": "factbook", "max_batch_calls": 9}


def test_the_recipes_without_the_changes_are_accepted() -> None:
    for recipe in (CPU, GPU | {"cluster": {"num_engines": 2}}, WORKERS):
        validate(RunSettings, recipe)


def test_removed_settings_of_old_recipes_are_accepted_with_a_warning() -> None:
    old = {"in_flight": True, "max_staleness": 2, "weights": "disk", "turn_timeout_s": 600}
    with pytest.warns(FutureWarning, match="in_flight, weights = disk no longer exist"):
        cluster = validate(RunSettings, {**CPU, "cluster": old}).cluster
    assert (cluster.max_staleness, cluster.weights) == (2, "files")


@pytest.mark.parametrize(
    ("recipe", "cluster", "uses_nccl"),
    [
        (GPU, {"num_engines": 2}, True),
        (GPU, {"num_engines": 2, "weights": "files"}, False),
        (GPU, {"placement": "colocate"}, False),
        (CPU, {"num_engines": 2}, False),
        ({**GPU, "engine": {"type": "local"}}, {"num_engines": 2}, False),
    ],
)
def test_weights_go_from_gpu_to_gpu_unless_engines_share_the_gpus(
    recipe: dict[str, Any], cluster: dict[str, Any], uses_nccl: bool
) -> None:
    assert validate(RunSettings, {**recipe, "cluster": cluster}).uses_nccl == uses_nccl


def test_the_batches_of_a_group_depend_on_no_number_of_processes() -> None:
    """Otherwise its last bits would."""
    counts = [(1, 1), (1, 16), (2, 16), (8, 2)]
    sizes = {
        validate(
            RunSettings,
            {**CPU, "train": {"tasks_per_step": 16, "max_concurrent": 24},
             "cluster": {"num_engines": engines, "num_rollout_workers": workers, "weights": "files"}},
        ).group_concurrent
        for engines, workers in counts
    }  # fmt: skip
    assert sizes == {24}


@pytest.mark.parametrize(
    ("recipe", "cluster", "changed", "message"),
    [
        (CPU, {"num_trainers": 0}, {}, "greater than or equal to 1"),
        (CPU, {"tensor_parallel": 2}, {}, "needs engine.type = vllm"),
        (CPU, {"max_staleness": 2}, {"environment": COUNTED}, "max_batch_calls counts rounds"),
        (CPU, {"num_trainers": 2}, {"model": {"device": "cuda:1"}}, "each process gets its own GPU"),
        (CPU, {"num_trainers": 8}, {"model": {"device": "cuda"}}, "needs engines of their own"),
        (GPU, {"num_trainers": 2}, {}, "cluster.placement=colocate cluster.num_engines=2"),
        (WORKERS, {}, {"train": {"tasks_per_step": 1}}, "workers 2 exceeds train.tasks_per_step 1"),
        (WORKERS, {}, {"train": {"max_concurrent": 1}}, "workers 2 exceeds the 1 episodes at a time"),
        (WORKERS, {}, {"environment": ONE_PROGRAM}, "workers 2 exceeds the 1 episodes at a time"),
        (WORKERS, {"weights": "nccl"}, {}, "nccl needs engine.type = vllm and model.device = cuda"),
        (GPU, {"weights": "nccl"}, {"model": {"device": "cpu"}}, "needs engine.type = vllm and model"),
        (GPU, {"weights": "nccl"}, {"engine": {"type": "local"}}, "needs engine.type = vllm and model"),
        (GPU, {"placement": "colocate", "max_staleness": 1}, {}, "engines sleep"),
        (GPU, {"placement": "colocate", "num_engines": 2}, {}, "an engine on the GPU of each trainer"),
        (GPU, {"placement": "colocate", "tensor_parallel": 2}, {}, "an engine on the GPU of each trainer"),
        (GPU, {"placement": "colocate", "weights": "nccl"}, {}, "colocated engines read files"),
        (GPU, {}, {"update": {"attention": "flex"}, "model": {"device": "cpu"}}, "no backward pass on a CPU"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_together_are_refused(
    recipe: dict[str, Any], cluster: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    merged = {**recipe, **changed, "cluster": recipe.get("cluster", {}) | cluster}
    with pytest.raises(ConfigError, match=message):
        validate(RunSettings, merged)
