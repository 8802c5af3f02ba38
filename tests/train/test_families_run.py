"""Whole runs with tiny models of many families, whose tokenizers and chat templates are their own: a cold
start on experts, a step and an evaluation; or a refusal in one line.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.config import load_settings
from outrider.errors import ModelError
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import run_training
from tests.templates_of_families import FAMILIES, tokenizer_of

HOUSE = """
[environment]
type = "house"
num_train = 2
max_moves = 4
"""
FACTBOOK = """
[environment]
type = "factbook"
hops = [1]
passages = "facts"
expert_thinks = false
num_train = 2
search = {top_k = 1, max_chars = 60}
"""
NATIVE = """
[environment]
type = "tools"
protocol = "FORM"
tools = ["tests.train.test_families_run:double"]
train = {path = "DATA"}
test = {path = "DATA"}
"""
REST = """
[algorithm]
type = "grpo"
group_size = 2

[rollout]
max_turns = 2
max_turn_tokens = 12
max_response_tokens = 4000
max_observation_tokens = 64

[train]
num_steps = 1
tasks_per_step = 1

[evaluation]
num_tasks = 1
every = 0
at_start = false
"""
COLD = """
[cold_start]
num_examples = 1
batch_size = 1
"""
EXPERTS = ("rollout.max_turn_tokens=44", "rollout.max_turns=4")


def double(number: int) -> int:
    """Double a number.

    Args:
        number: What to double.
    """
    return 2 * number


def save_model(name: str, folder: Path) -> Path:
    tokenizer = tokenizer_of(FAMILIES[name])
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16_000,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(name: str, recipe: str, folder: Path, *overrides: str) -> Path:
    model = save_model(name, folder / "model")
    file = folder / "recipe.toml"
    file.write_text(recipe, encoding="utf-8")
    kwargs = [f"model.template_kwargs.{key}={json.dumps(v)}" for key, v in FAMILIES[name].variables.items()]
    given = [f"model.name={model}", "model.precision=float32", *kwargs, *overrides]
    settings = load_settings(RunSettings, file=file, overrides=given)
    run = folder / "run"
    run_training((RunDirectory.create(run, settings), settings), progress="none", on_start=lambda stop: None)
    return run


def check(name: str, recipe: str, folder: Path, *overrides: str) -> None:
    """It trains, or it is refused in one line."""
    try:
        run = train(name, recipe, folder, *overrides)
    except ModelError as error:
        assert "\n" not in str(error) and "chat template" in str(error)
        pytest.skip(str(error)[:200])
    assert (run / "checkpoints" / "step-000001").exists()


FEW = ("glm4.5", "llama2", "mistral v3", "command-r")
# These are long, the others slow.
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in FEW]
EACH = [*(pytest.param(name, marks=pytest.mark.long) for name in FEW), *OTHERS]


@pytest.mark.parametrize("name", EACH)
def test_a_run_with_a_cold_start_in_a_text_world(name: str, tmp_path: Path) -> None:
    check(name, HOUSE + REST + COLD, tmp_path, *EXPERTS)


@pytest.mark.parametrize("name", EACH)
def test_a_run_of_every_family_with_results_inside_the_answer(name: str, tmp_path: Path) -> None:
    check(name, FACTBOOK + REST + COLD, tmp_path, "rollout.max_turn_tokens=100")


@pytest.mark.parametrize("name", EACH)
def test_a_run_of_every_family_with_native_calls(name: str, tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    native = NATIVE.replace("FORM", FAMILIES[name].call_format).replace("DATA", str(data))
    check(name, native + REST, tmp_path)
