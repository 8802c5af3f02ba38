"""Checkpoints, run folders, buffers and kept answers of an earlier version are read, and rightly, or refused
in one line that says what to do.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import outrider
from outrider.errors import DataError
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.training.policy import Policy
from outrider.training.run_dir import recorded_settings
from outrider.training.setup import load_weights, make_policy
from outrider.types import Origin
from outrider.viewer.records import TraceReader
from tests.compat.commands import LAST, Said, done, refused


def _policy(checkpoint: str) -> Policy:
    """With nothing but zeros before the weights are read."""
    policy = make_policy(outrider.load_run("rapo").settings)
    for master in policy.masters.values():
        master.zero_()
    load_weights(policy, Path(checkpoint))
    return policy


def test_weights_are_read() -> None:
    written = load_file(Path("rapo", LAST, "masters.safetensors"))
    assert all(torch.equal(master, written[name]) for name, master in _policy(f"rapo/{LAST}").masters.items())


def test_weights_reproduce_the_recorded_logprobs() -> None:
    policy = _policy("rapo/checkpoints/step-000000")
    model, tokenizer = AutoModelForCausalLM.from_pretrained("model"), policy.language_model.tokenizer
    model.load_state_dict(policy.model.state_dict())
    rows = TraceReader(Path("rapo/traces")).read(1)
    prompts = {row.trace_id: row.text for row in rows if row.origin is Origin.PROMPT}
    first = [row for row in rows if row.origin is Origin.POLICY and row.parent_id == 0]
    assert len(first) >= 4
    for row in first:
        chat = [{"role": "user", "content": prompts[row.trace_id]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        tokens = tokenizer.convert_tokens_to_ids(list(row.tokens))  # of this model a token is its text
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        scored = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        np.testing.assert_allclose(scored.numpy(), row.logprobs, atol=1e-4)


def test_a_run_is_loaded_reported_and_compared(capsys: Said) -> None:
    for name in ("rapo", "empo2"):
        run = outrider.load_run(name)
        assert run.settings.algorithm.type == run.config["algorithm"]["type"] == name
        records = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
        train = [record for record in records if record["kind"] == "train"]
        for row, record in zip(run.metrics().to_pylist(), train, strict=True):
            assert {key: value for key, value in row.items() if value is not None} == {
                key: value for key, value in record.items() if value is not None
            }
        assert run.evaluations()["label"].to_pylist() == ["before training", f"after {name.upper()}"]
        assert run.steps() == (1, 2)
        rows = TraceReader(run.path / "traces").read(2)
        assert run.traces(2)["text"].to_pylist() == [row.text for row in rows]
        with pytest.raises(DataError, match="the file is missing"):
            run.evaluation_traces(0)
        done(capsys, "report", name)
        assert f"after {name.upper()}" in Path(name, "report.html").read_text()
        assert "different" in done(capsys, "replay", name, "--step", "2")
    done(capsys, "compare", "rapo", "empo2", "--markdown", "both.md")
    assert {"rapo", "empo2"} <= set(Path("both.md").read_text().lower().replace("|", " ").split())


@pytest.mark.parametrize("run", ["rapo", "empo2"])
def test_a_recorded_step_is_replayed_without_a_difference(run: str, capsys: Said) -> None:
    counts = [
        line.split() for line in done(capsys, "replay", run, "--step", "2").replace("│", " ").splitlines()
    ]
    assert ["same", "8"] in counts and ["different", "0"] in counts


def test_a_buffer_of_the_old_format_is_refused_and_unchanged(capsys: Said) -> None:
    before = Path("buffer.sqlite").read_bytes()
    told = "format_version is 1, this version of Outrider reads 2: build or import the buffer again"
    with pytest.raises(DataError, match=told):
        StepTraceBuffer(Path("buffer.sqlite"), load_embedder("hash"), mode="read")
    assert told in refused(capsys, "train", "recipe.toml", "train.num_steps=1", "--run", "more")
    assert Path("buffer.sqlite").read_bytes() == before


def test_a_new_run_starts_from_old_weights(capsys: Said) -> None:
    start = f"model.initial_checkpoint=rapo/{LAST}"
    said = done(
        capsys, "train", "recipe.toml", start, "train.num_steps=0", "--run", "new", "--progress", "plain"
    )
    assert f"of rapo/{LAST}" in said
    settings = recorded_settings(Path("new", "config.toml"))
    model = settings.model.model_copy(update={"initial_checkpoint": "new/checkpoints/step-000000"})
    begun = make_policy(settings.model_copy(update={"model": model})).masters
    written = load_file(Path("rapo", LAST, "masters.safetensors"))
    assert begun.keys() == written.keys() and all(torch.equal(begun[name], written[name]) for name in begun)


def test_an_evaluation_of_an_old_checkpoint(capsys: Said) -> None:
    done(capsys, "eval", "plain.toml", "--checkpoint", f"rapo/{LAST}", "--run", "shown", "--progress", "none")
    (one,) = outrider.load_run("shown").evaluations().to_pylist()
    assert (one["label"], one["num_tasks"], one["num_faults"]) == (f"of rapo/{LAST}", 3, 0)


def test_stored_answers_are_reused_for_the_same_weights_only(capsys: Said) -> None:
    before = Path("panel/results.jsonl").read_bytes()
    done(capsys, "eval", "--tasks", "tasks.jsonl", "--model", "rapo", "--run", "panel", "--progress", "none")
    assert Path("panel/results.jsonl").read_bytes() == before
    first = "rapo/checkpoints/step-000000"
    line = refused(
        capsys, "eval", "--tasks", "tasks.jsonl", "--model", first, "--run", "panel", "--progress", "none"
    )
    assert "weights" in line and "--run" in line
    assert "evaluate again, with --tasks and a new --run" in refused(capsys, "eval", "--regrade", "panel")


def test_an_invalid_checkpoint_error_names_the_valid_ones(capsys: Said) -> None:
    def tried(*given: str) -> str:
        return refused(capsys, "train", "plain.toml", *given, "--run", "new", "--progress", "none")

    run = tried("model.initial_checkpoint=rapo")
    assert (
        run
        == f"rapo is no checkpoint: it is a run directory, name one of its checkpoints, such as rapo/{LAST}"
    )
    assert tried("model.initial_checkpoint=model").endswith("name a folder RUN/checkpoints/step-NNNNNN")
    other = tried(f"model.initial_checkpoint=rapo/{LAST}", "model.lora.rank=2")
    assert other.endswith(
        "set model.name, model.lora and model.trained_layers as in the config.toml of its run"
    )
    assert not Path("new").exists()
    shutil.rmtree("rapo/checkpoints")
    assert "put its folder checkpoints back" in refused(
        capsys, "train", "--resume", "rapo", "--progress", "none"
    )


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("loss=clip", "loss.type"),
        ("clip_low=0.1", "loss.clip_low"),
        ("dual_clip=3.0", "loss.dual_clip"),
        ("sampler_correction=2.0", "sampler_correction.upper"),
        ("sampler_floor=0.5", "sampler_correction.lower"),
        ("sampler_level=token", "sampler_correction.level"),
    ],
)
def test_a_recipe_with_an_old_key_is_refused_with_the_new_name(key: str, new: str, capsys: Said) -> None:
    assert new in refused(capsys, "train", "plain.toml", f"algorithm.{key}", "--run", "new")
