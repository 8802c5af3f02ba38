"""Plan: counts beside transformers' own models, the design's two claims, and what more GPUs or a
longer context can do.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.cli import main
from outrider.config import validate
from outrider.errors import ModelError
from outrider.planning.change import smallest
from outrider.planning.fit import Layout, fit
from outrider.planning.memory import Training, rank_bytes
from outrider.planning.read_shape import find_shape, known_models, shape_of
from outrider.planning.workload import Workload, workload_of
from outrider.train.settings import RunSettings

MEMORY = 80e9
WORK = Workload(
    training=Training(max_tokens=4096, checkpointed=True, has_reference=True),
    context=4096, episodes=512, shares_weights=False, extra_forwards=1,
)  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")


def counted(config: object) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_real_model(family: str, is_tied: bool, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, **SMALL, tie_word_embeddings=is_tied)
    config.save_pretrained(tmp_path)
    assert find_shape(str(tmp_path)).num_parameters == counted(config)


@pytest.mark.parametrize("name", known_models())
def test_known_models_are_counted(name: str) -> None:
    values = dict(known_models()[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    assert shape_of(known_models()[name], name=name).num_parameters == counted(config)


def test_contexts_that_begin_anew_are_tokens_of_an_update_and_not_of_the_engine() -> None:
    base = {
        "algorithm": {"type": "grpo"},
        "environment": {"type": "webshop"},
        "rollout": {"max_turns": 5, "max_response_tokens": 2000},
    }
    kept, stripped = (
        workload_of(
            validate(RunSettings, base | {"model": {"history_thinking": history}}), prompt_tokens=1000
        )
        for history in ("keep", "strip")
    )
    assert stripped.context == kept.context == kept.episode_tokens == 3000
    assert stripped.episode_tokens == stripped.training.max_tokens == 15_000
    assert stripped.step_tokens == 5 * kept.step_tokens


def test_a_family_that_is_not_counted_is_refused() -> None:
    with pytest.raises(ModelError, match="mamba"):
        shape_of({"model_type": "mamba"}, name="x")


def test_states_are_sixteen_bytes_per_parameter() -> None:
    shape = find_shape("Qwen/Qwen2.5-7B-Instruct")
    rank = rank_bytes(shape, Training(ranks=8, max_tokens=4096))
    assert sum(rank[name] for name in ("masters", "moments", "gradients")) == 2 * shape.num_parameters


def test_seven_billion_fit_eight_gpus_and_thirty_two_need_sixteen() -> None:
    seven, large = (find_shape(f"Qwen/Qwen2.5-{size}-Instruct") for size in ("7B", "32B"))
    layout = Layout(placement="colocate", trainers=8, engines=8)
    assert fit(seven, WORK, layout, gpu_memory=MEMORY).fits
    assert not fit(seven, WORK, Layout(), gpu_memory=MEMORY).fits
    found = smallest(large, WORK, "colocate", gpu_memory=MEMORY, gpus_per_node=8)
    assert found is not None and found.layout.num_gpus == 16


@given(st.sampled_from(sorted(known_models())), st.integers(2, 64), st.booleans())
def test_more_ranks_never_need_more_memory(name: str, ranks: int, checkpointed: bool) -> None:
    shape, training = find_shape_of(name), Training(ranks=ranks, max_tokens=2048, checkpointed=checkpointed)
    more = rank_bytes(shape, replace(training, ranks=ranks + 1))
    assert sum(more.values()) <= sum(rank_bytes(shape, training).values())


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_longer_context_never_fits_more_episodes(context: int, more: int) -> None:
    layout, shape = Layout(placement="disaggregate", trainers=8), find_shape_of("Qwen/Qwen3-8B")
    short, long = (
        fit(shape, replace(WORK, context=length), layout, gpu_memory=MEMORY).episodes
        for length in (context, context + more)
    )
    assert long <= short


def find_shape_of(name: str):  # type: ignore[no-untyped-def]
    return shape_of(known_models()[name], name=name)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(Path(__file__).parents[2] / "recipes" / "tool-reasoning.toml")
    assert main(["plan", recipe, "--json", "--model", "Qwen/Qwen2.5-7B-Instruct"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["fits"] and told["fewest"][0]["fits"]
    assert main(["plan", recipe, "--gpus", "8", "--model", "Qwen/Qwen2.5-7B-Instruct"]) == 0
    out = capsys.readouterr().out
    assert "7,615,616,512" in out and "(colocate)" in out
    assert main(["plan", recipe, "--gpus", "8", "--tensor-parallel", "3"]) == 2
