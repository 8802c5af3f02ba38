"""Combinations of settings that a run on several processes cannot have are refused when they are read."""

from typing import Any

import pytest

from outrider.config import validate
from outrider.errors import ConfigError
from outrider.training.settings import RunSettings

CPU: dict[str, Any] = {"environment": {"type": "factbook"}, "algorithm": {"type": "grpo"}}
GPU: dict[str, Any] = {**CPU, "engine": {"type": "vllm"}, "model": {"device": "cuda"}}
PLAYERS: dict[str, Any] = {**CPU, "cluster": {"num_rollout_workers": 2}}
ONE_PROGRAM = {"type": "agent", "command": ["true"], "max_programs": 1}
COUNTED = {"type": "factbook", "max_batch_calls": 9}


def test_the_recipes_without_the_changes_are_accepted() -> None:
    for recipe in (CPU, GPU | {"cluster": {"num_engines": 2}}, PLAYERS):
        validate(RunSettings, recipe)


@pytest.mark.parametrize(
    ("recipe", "cluster", "changed", "message"),
    [
        (CPU, {"num_trainers": 0}, {}, "greater than or equal to 1"),
        (CPU, {"placement": "colocate", "max_staleness": 1}, {}, "engines sleep"),
        (CPU, {"max_staleness": 2}, {}, "needs in_flight"),
        (CPU, {"in_flight": True}, {}, "in_flight needs max_staleness of at least 1"),
        (CPU, {"tensor_parallel": 2}, {}, "tensor_parallel needs engines in processes of their own"),
        (CPU, {"tensor_parallel": 2, "weights": "store"}, {}, "needs engine.type = vllm"),
        (CPU, {"batching": "stream"}, {}, "batching = stream needs engines in processes of their own"),
        (CPU, {"batching": "stream", "weights": "store"}, {"environment": COUNTED},
         "which environment.max_batch_calls counts"),
        (CPU, {"num_trainers": 2}, {"model": {"device": "cuda:1"}}, "Ray assigns the GPUs"),
        (CPU, {"num_trainers": 8}, {"model": {"device": "cuda"}}, "needs engines of their own"),
        (GPU, {"num_trainers": 2}, {}, "cluster.placement=colocate cluster.num_engines=2"),
        (PLAYERS, {}, {"model": {"device": "cuda:1"}}, "Ray assigns the GPUs"),
        (PLAYERS, {}, {"train": {"tasks_per_step": 1}}, "workers 2 exceeds train.tasks_per_step 1"),
        (PLAYERS, {}, {"train": {"max_concurrent": 1}}, "workers 2 exceeds the 1 episodes at a time"),
        (PLAYERS, {}, {"environment": ONE_PROGRAM}, "workers 2 exceeds the 1 episodes at a time"),
        (PLAYERS, {"weights": "nccl"}, {}, "nccl needs engine.type = vllm and model.device = cuda"),
        (GPU, {"placement": "colocate", "num_engines": 2}, {}, "an engine on the GPU of each trainer"),
        (GPU, {"placement": "colocate", "tensor_parallel": 2}, {}, "an engine on the GPU of each trainer"),
        (GPU, {"placement": "colocate", "weights": "nccl"}, {}, "from one GPU to another"),
        (GPU, {"weights": "ipc"}, {}, "within a GPU"),
        (GPU, {"weights": "nccl"}, {"model": {"device": "cpu"}}, "needs engine.type = vllm and model"),
        (GPU, {"weights": "nccl"}, {"engine": {"type": "local"}}, "needs engine.type = vllm and model"),
        (GPU, {"num_engines": 2}, {"model": {"device": "cuda:1"}}, "Ray assigns the GPUs"),
        (GPU, {}, {"update": {"attention": "flex"}, "model": {"device": "cpu"}}, "no backward pass on a CPU"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_together_are_refused(
    recipe: dict[str, Any], cluster: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    merged = {**recipe, **changed, "cluster": recipe.get("cluster", {}) | cluster}
    with pytest.raises(ConfigError, match=message):
        validate(RunSettings, merged)
