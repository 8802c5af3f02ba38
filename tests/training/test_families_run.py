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
from tests.tokens.family_templates import FAMILIES, tokenizer_of

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
tools = ["tests.training.test_families_run:double"]
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


WORLDS = {
    "text world with a cold start": (HOUSE + REST + COLD, EXPERTS),
    "results inside the answer": (FACTBOOK + REST + COLD, ("rollout.max_turn_tokens=100",)),
    "native calls": (NATIVE + REST, ()),
}
# These are long, the others slow.
LONG = {("mistral v3", "text world with a cold start"), ("glm4.5", "native calls")}


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, marks=pytest.mark.long if (name, world) in LONG else pytest.mark.slow)
        for world in WORLDS
        for name in FAMILIES
    ],
)
def test_a_family_trains_or_is_refused_in_one_line(name: str, world: str, tmp_path: Path) -> None:
    recipe, overrides = WORLDS[world]
    data = tmp_path / "questions.jsonl"
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = recipe.replace("FORM", FAMILIES[name].call_format).replace("DATA", str(data))
    try:
        run = train(name, recipe, tmp_path, *overrides)
    except ModelError as error:
        assert "\n" not in str(error) and "chat template" in str(error)
        pytest.skip(str(error)[:200])
    assert (run / "checkpoints" / "step-000001").exists()
