"""Training the last layers alone: their gradients are those of full training, and nothing below them
moves.
"""

from pathlib import Path

import pytest
import torch

from outrider.config import validate
from outrider.engines.local.attention import Segment, TreePlan
from outrider.errors import ConfigError, ModelError
from outrider.tokens import ChatRenderer
from outrider.training.adapters import choose_trained
from outrider.training.checkpoint import load_checkpoint, save_checkpoint
from outrider.training.policy import Policy
from outrider.training.settings import LoraSettings, OptimizerSettings, RunSettings
from outrider.training.setup import note_unlearnable_tokens
from tests.tiny import tiny_model


def _policy(trained_layers: int | None) -> Policy:
    model = tiny_model(dtype=torch.float64, num_layers=3)
    return Policy(
        model, OptimizerSettings(learning_rate=1e-2, max_grad_norm=1e9), trained_layers=trained_layers
    )


def _backward(policy: Policy) -> None:
    ids = torch.arange(3, 15)
    lm = policy.language_model
    hidden = lm.hidden(ids[None], torch.arange(12)[None], TreePlan(segments=(Segment(length=12),)))[0]
    lm.head(hidden).log_softmax(-1)[:, 7].sum().backward()


@pytest.mark.parametrize("trained_layers", [1, 2])
def test_gradients_are_those_of_full_training(trained_layers: int) -> None:
    whole, part = _policy(None), _policy(trained_layers)
    _backward(whole)
    _backward(part)
    first = 3 - trained_layers
    expected = {
        n
        for n in whole.masters
        if n.startswith("model.norm") or (".layers." in n and int(n.split(".")[2]) >= first)
    }
    assert set(part.masters) == expected and expected < set(whole.masters)
    for name, master in part.masters.items():
        assert master.grad is not None and whole.masters[name].grad is not None
        torch.testing.assert_close(master.grad, whole.masters[name].grad, rtol=1e-12, atol=1e-14)


def test_a_step_moves_the_last_layers_and_nothing_else() -> None:
    policy = _policy(1)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    _backward(policy)
    policy.step()
    moved = {name for name, p in policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(policy.masters)


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    policy, other = _policy(2), _policy(2)
    _backward(policy)
    policy.step()
    save_checkpoint(tmp_path / "step-000001", policy, {"step": 1})
    load_checkpoint(tmp_path / "step-000001", other)
    assert all(torch.equal(policy.masters[name], other.masters[name]) for name in policy.masters)


def test_more_layers_than_there_are_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"model\.trained_layers = 4, but the model has 3 layers"):
        _policy(4)


def test_adapters_and_trained_layers_exclude_each_other() -> None:
    tree = {
        "environment": {"type": "factbook"}, "algorithm": {"type": "grpo"},
        "model": {"lora": {"rank": 2}, "trained_layers": 2},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="exclude each other"):
        validate(RunSettings, tree)


def test_tokens_that_a_frozen_projection_cannot_tell_apart_are_reported() -> None:
    model = tiny_model()
    model.tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<tool_call>", "<unused>", "</tool_call>"]}
    )
    open_id, unused, close = model.tokenizer.convert_tokens_to_ids(
        ["<tool_call>", "<unused>", "</tool_call>"]
    )
    model.model.resize_token_embeddings(close + 1, mean_resizing=False)
    with torch.no_grad():
        model.head.weight[open_id:] = torch.arange(3.0)[:, None]
    renderer = ChatRenderer(model.tokenizer, call_format="hermes", observations=("tool",))
    notes: list[str] = []
    note_unlearnable_tokens(model, renderer, note=notes.append)
    assert not notes
    with torch.no_grad():
        model.head.weight[unused] = model.head.weight[open_id]
    note_unlearnable_tokens(model, renderer, note=notes.append)
    assert len(notes) == 1 and notes[0].startswith("ALARM: the policy cannot learn to write '<tool_call>'")
    assert "equal to 1 other;" in notes[0]
    notes.clear()
    note_unlearnable_tokens(model, ChatRenderer(model.tokenizer), note=notes.append)
    assert not notes  # without calls, nothing needs the token
    choose_trained(model.model, lora=LoraSettings(target_modules=("lm_head",)), trained_layers=None)
    note_unlearnable_tokens(model, renderer, note=notes.append)
    assert not notes  # an adapter trains the projection


def test_thinking_markers_that_the_template_writes_are_reported() -> None:
    model = tiny_model()
    model.tokenizer.add_tokens(["<think>", "</think>", "<unused94>"])  # added tokens, not special ones
    first, *_, last = model.tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<unused94>"])
    model.model.resize_token_embeddings(last + 1, mean_resizing=False)
    with torch.no_grad():
        model.head.weight[first:] = 1
    model.tokenizer.chat_template += "{# <think> and </think> #}"
    notes: list[str] = []
    note_unlearnable_tokens(model, ChatRenderer(model.tokenizer), note=notes.append)
    assert [note.split("'")[1] for note in notes] == ["<think>", "</think>"]
