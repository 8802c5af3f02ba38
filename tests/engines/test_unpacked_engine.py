"""The engine of the unpacked path: batches, forks, second turns, caches of every kind."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from docsite.models import ARCHITECTURES
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma4TextConfig,
    PreTrainedConfig,
    RecurrentGemmaConfig,
)

from outrider.engines.base import FinishReason, Generation, Request
from outrider.engines.local import model as model_module
from outrider.engines.local.engine import UnpackedEngine, describe_path
from outrider.engines.local.model import LanguageModel, load_model
from outrider.engines.local.unpacked import CacheUse, examine
from outrider.errors import EngineFault, ModelError
from outrider.smoke import character_tokenizer
from tests.tiny import tiny_model

Ids = tuple[int, ...]


def loaded(root: Path, title: str) -> tuple[Path, LanguageModel]:
    [one] = [one for one in ARCHITECTURES if one.title == title]
    folder = root / one.model_type
    one.save(folder)
    model = load_model(str(folder), precision="float32", forward=one.forward)
    # no end before the tokens that a test asks for
    return folder, replace(model, eos_token_ids=frozenset())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Convolutions with a state, in front of attention."""
    return loaded(tmp_path_factory.mktemp("models"), "LFM2")[1]


def ask(contexts: Sequence[Ids], *, num: int = 6, first: int = 0) -> list[Request]:
    return [
        Request(
            request_id=str(i), token_ids=ids, max_tokens=num, seed=100 + i, cache_key=f"r{i}"
        )
        for i, ids in enumerate(contexts, start=first)
    ]  # fmt: skip


CONTEXTS: list[Ids] = [(5, 6, 7), (40, 41, 42, 43, 44, 45), (5, 6, 7), (9,)]


def test_the_batch_of_a_request_changes_nothing_but_rounding(model: LanguageModel) -> None:
    together = UnpackedEngine(model).generate(ask(CONTEXTS))
    assert together == UnpackedEngine(model).generate(ask(CONTEXTS))
    check_same(UnpackedEngine(model).generate(ask(CONTEXTS)[::-1])[::-1], together)
    check_same([UnpackedEngine(model).generate([one])[0] for one in ask(CONTEXTS)], together)
    for max_rows in (1, 3):
        rows = UnpackedEngine(model, max_rows=max_rows).generate(ask(CONTEXTS))
        check_same(rows, together)
        # a common context once
        assert [one.num_prefilled_tokens for one in rows] == [3, 6, 0, 1]
    assert together[0].token_ids != together[2].token_ids  # each request has its own seed


def test_all_rows_share_a_decoding_step_and_ended_ones_leave(model: LanguageModel) -> None:
    requests = [replace(one, max_tokens=2 + i) for i, one in enumerate(ask(CONTEXTS))]
    steps: list[int] = []
    engine = UnpackedEngine(model, max_rows=3, on_tokens=steps.append)
    assert [len(one.token_ids) for one in engine.generate(requests)] == [2, 3, 4, 5]
    assert steps == [3, 3, 2, 1, *[1] * 5]


def test_batches_that_change_the_numbers_are_found_at_the_start(
    model: LanguageModel,
) -> None:
    """A layer that mixes the rows of a batch, as some routers and norms do."""
    layer = model.model.get_submodule("model.layers.0")

    def mix(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output + output.mean(dim=0, keepdim=True)

    handle = layer.register_forward_hook(mix)
    try:
        unpacked = examine(model.model, why="a test needs it")
    finally:
        handle.remove()
    assert not unpacked.batches_generation and not unpacked.batches_scoring
    description = describe_path(replace(model, unpacked=unpacked), "m")
    assert "; generation and the update one sequence at a time, because batches change" in description
    assert "one sequence at a time" not in describe_path(model, "m")
    steps: list[int] = []
    UnpackedEngine(replace(model, unpacked=unpacked), on_tokens=steps.append).generate(ask(CONTEXTS))
    assert set(steps) == {1}


def test_a_fork_equals_a_fresh_run(model: LanguageModel) -> None:
    engine = UnpackedEngine(model)
    (parent,) = engine.generate(ask([(5, 6, 7)]))
    ids = (5, 6, 7, *parent.token_ids)
    forks = ask([ids, ids[:-2], ids[:-3]], first=1)
    fresh = UnpackedEngine(model).generate(forks)
    check_same(engine.generate(forks), fresh)
    assert [one.num_prefilled_tokens for one in fresh] == [9, 7, 6]


def test_a_second_turn_computes_the_new_tokens_alone_and_equals_a_fresh_run(model: LanguageModel) -> None:
    engine = UnpackedEngine(model)
    first = engine.generate(ask(CONTEXTS))
    turn = [(*ids, *one.token_ids, 50, 51) for ids, one in zip(CONTEXTS, first, strict=True)]
    kept, fresh = engine.generate(ask(turn)), UnpackedEngine(model).generate(ask(turn))
    check_same(kept, fresh)
    assert [one.num_prefilled_tokens for one in kept] == [3] * 4  # what was written last, and what was seen
    engine.release(["r1"])
    engine.generate(ask(turn[1:2], first=1))
    again = ask([(*ids, *one.token_ids, 52) for ids, one in zip(turn, kept, strict=True)])
    engine.load(3)
    after = engine.generate(again)
    assert [one.num_prefilled_tokens for one in after] == [len(one.token_ids) for one in again]
    assert {one.weight_version for one in after} == {3}


def check_same(ours: Sequence[Generation], theirs: Sequence[Generation]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.entropies == pytest.approx(other.entropies, abs=1e-5)


@pytest.mark.parametrize(("use", "num"), [("stepped", 11), ("none", 11)])
def test_a_limited_cache_gives_the_same_tokens(model: LanguageModel, use: CacheUse, num: int) -> None:
    assert model.unpacked is not None and model.unpacked.cache == "extended"
    lesser = UnpackedEngine(replace(model, unpacked=replace(model.unpacked, cache=use)))
    engine = UnpackedEngine(model)
    check_same(lesser.generate(ask(CONTEXTS)), engine.generate(ask(CONTEXTS)))
    turn = ask([(*CONTEXTS[0], 50, 51, 52, 53, 54, 55, 56, 57)])
    [one], [other] = lesser.generate(turn), engine.generate(turn)
    check_same([one], [other])
    assert one.num_prefilled_tokens == num


def test_longrope_goes_on_with_other_factors_behind_the_original_length(tmp_path: Path) -> None:
    """Sixteen tokens with one rotation, then all of them with the other, whatever was cached."""
    folder, model = loaded(tmp_path, "Phi-3.5 behind its original length")
    assert model.unpacked is not None and model.unpacked.turns == (16,) and model.context_length == 64
    (one,) = UnpackedEngine(model).generate(ask([tuple(range(5, 16))], num=12))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = (*range(5, 16), *one.token_ids)
    with torch.no_grad():
        for place, (token, logprob) in enumerate(zip(one.token_ids, one.logprobs, strict=True), start=11):
            logits = plain(input_ids=torch.tensor([ids[:place]]), use_cache=False).logits[0, -1]
            assert float(torch.log_softmax(logits, dim=-1)[token]) == pytest.approx(logprob, abs=1e-3)


def test_ends_stops_and_room_are_those_of_the_other_path(model: LanguageModel) -> None:
    (free,) = UnpackedEngine(model).generate(ask([(5, 6)], num=12))
    third = free.token_ids[2]
    place = free.token_ids.index(third) + 1
    (ended,) = UnpackedEngine(replace(model, eos_token_ids=frozenset({third}))).generate(
        ask([(5, 6)], num=12)
    )
    assert ended.finish_reason is FinishReason.EOS and ended.token_ids == free.token_ids[:place]
    text = model.tokenizer.decode([third])
    stopping = replace(ask([(5, 6)], num=12)[0], stop=(text,))
    (stopped,) = UnpackedEngine(model).generate([stopping])
    assert stopped.finish_reason is FinishReason.STOP and stopped.token_ids == ended.token_ids
    (cut,) = UnpackedEngine(model, context_length=10).generate(ask([(5,) * 8], num=12))
    assert cut.finish_reason is FinishReason.LENGTH and len(cut.token_ids) == 2
    with pytest.raises(EngineFault, match="request 0: 10 tokens do not fit a context of 10"):
        UnpackedEngine(model, context_length=10).generate(ask([(5,) * 10]))


def test_each_path_has_its_engine_and_its_line(model: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="runs packed"):
        UnpackedEngine(tiny_model())
    description = describe_path(model, "m")
    assert (
        "unpacked" in description and "recurrent or convolution" in description and "64 tokens" in description
    )
    assert describe_path(tiny_model(), "m") == "model 'm' runs packed; contexts of up to 512 tokens"
    _, windowed = loaded(tmp_path, "Gemma 3")
    assert "contexts end at 16 of 64 positions" in describe_path(windowed, "m")
    assert model.unpacked is not None
    slow = replace(model, unpacked=replace(model.unpacked, cache="none"))
    assert "every token is computed from the first one" in describe_path(slow, "m")


def _saved(config: PreTrainedConfig, folder: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)


_SIZES = {"vocab_size": 98, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENDS = {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 64}


def test_state_in_the_modules_is_no_cache(tmp_path: Path) -> None:
    config = RecurrentGemmaConfig(
        **_SIZES, **_ENDS, intermediate_size=48, num_key_value_heads=1, head_dim=8, lru_width=32,
        attention_window_size=64, block_types=["recurrent", "attention"],
    )  # fmt: skip
    model = load_model(_saved(config, tmp_path), precision="float32")
    assert model.unpacked is not None and model.unpacked.cache == "none"


def test_small_logits_do_not_hide_their_cap(tmp_path: Path) -> None:
    config = Gemma4TextConfig(
        **_SIZES, **_ENDS, intermediate_size=48, num_key_value_heads=2, head_dim=8, global_head_dim=16,
        sliding_window=64, num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0, final_logit_softcapping=30.0,
    )  # fmt: skip
    model = load_model(_saved(config, tmp_path), precision="float32")
    assert model.unpacked is not None and "changes its logits" in model.unpacked.why


@pytest.mark.parametrize("name", ["bloom", "gptj"])
def test_an_architecture_with_its_own_attention_runs_unpacked(name: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[name](
        vocab_size=98, hidden_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4,
        max_position_embeddings=64, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    folder = _saved(config, tmp_path)
    model = load_model(folder, precision="float32")
    assert model.unpacked is not None and model.unpacked.why == "its attention cannot be replaced"
    with pytest.raises(ModelError):
        load_model(folder, precision="float32", forward="packed")


def test_an_error_of_reading_does_not_change_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _saved(CONFIG_MAPPING["llama"](**_SIZES, **_ENDS, intermediate_size=48), tmp_path)
    reads = []

    def fails(*args: object, **kwargs: object) -> object:
        reads.append(args)
        raise OSError("no connection")

    monkeypatch.setattr(model_module, "_FROM_PRETRAINED", fails)
    with pytest.raises(ModelError, match="no connection"):
        load_model(folder, precision="float32")
    assert len(reads) == 1
