"""A run with adapters on a mixture of experts from end to end: it trains, says what has no adapter, is
exported, evaluated and resumed.
"""

import json
import stat
from pathlib import Path

import pytest
import torch
from docsite.models import ARCHITECTURES, Architecture
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from outrider import cli
from outrider.training.export import export_run
from outrider.training.policy import _logits
from outrider.training.run_dir import recorded_settings
from outrider.training.setup import make_policy
from tests.tiny import CHARACTERS

RECIPE = """
num_threads = 1
model = {{ name = "{model}", precision = "float32", lora = {{ rank = 2 }} }}
environment = {{ type = "factbook", hops = [1], passages = "facts" }}
algorithm = {{ type = "grpo", group_size = 2 }}
rollout = {{ max_turns = 1, max_turn_tokens = 8, max_response_tokens = 16 }}
cold_start = {{ num_examples = 0 }}
optimizer = {{ learning_rate = 0.1 }}
train = {{ num_steps = 1, tasks_per_step = 1 }}
evaluation = {{ num_tasks = 1, at_start = false }}
"""


def folder_of(model_type: str, folder: Path) -> Path:
    known = next(one for one in ARCHITECTURES if one.model_type == model_type)
    more = {"vocab_size": 3 + len(CHARACTERS), "max_position_embeddings": 4096}
    Architecture(
        title=known.title, model_type=model_type, without=known.without, settings={**known.settings, **more}
    ).save(folder)
    return folder


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        pytest.param("qwen3_moe", None, marks=pytest.mark.long),
        pytest.param("phi3", "self_attn.qkv_proj", marks=pytest.mark.slow),
    ],
)
def test_train_export_evaluate_resume(
    model_type: str, reason: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run, recipe = folder_of(model_type, tmp_path / "model"), tmp_path / "run", tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(model=model), encoding="utf-8")
    assert cli.main(["train", str(recipe), "--run", str(run), "--progress", "plain"]) == 0
    notes = [json.loads(line)["text"] for line in (run / "notes.jsonl").read_text().splitlines()]
    lora = [note for note in notes if note.startswith("model.lora: ")]
    assert len(lora) == (reason is not None)
    assert reason is None or f"none on {reason}" in lora[0]

    assert cli.main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    checkpoint = export_run(run, tmp_path / "again")
    given = {"initial_checkpoint": str(checkpoint)}
    settings = recorded_settings(run / "config.toml")
    policy = make_policy(settings.model_copy(update={"model": settings.model.model_copy(update=given)}))
    ids = torch.arange(5, 15)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids[None]).logits[0]
        torch.testing.assert_close(_logits(policy.language_model, ids), theirs, rtol=1e-4, atol=1e-4)
    for folder in (tmp_path / "out", tmp_path / "again", checkpoint):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {stat.S_IMODE(recipe.stat().st_mode)}
    names = []
    for folder in (tmp_path / "out", model):
        with safe_open(folder / "model.safetensors", "pt") as file:
            names.append(set(file.keys()))
    assert names[0] == names[1]

    assert cli.main(["train", "--resume", str(run), "train.num_steps=2", "--progress", "plain"]) == 0
    again = ["eval", str(recipe), "--run", str(tmp_path / "eval"), "--checkpoint", str(checkpoint)]
    assert cli.main(again) == 0
