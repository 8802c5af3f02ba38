"""The local engine against plain transformers, and the engine contract."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from outrider.engines.attention import SlotCache
from outrider.engines.base import FinishReason, Generation, Request
from outrider.engines.local import LocalEngine
from outrider.engines.model import LanguageModel
from outrider.errors import EngineFault
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_model()


def ids_of(model: LanguageModel, text: str) -> tuple[int, ...]:
    return tuple(model.tokenizer.encode(text, add_special_tokens=False))


def ask(model: LanguageModel, texts: Sequence[str], *, max_tokens: int = 12, **options: object) -> list[Request]:
    return [
        Request(
            request_id=str(i),
            token_ids=ids_of(model, text),
            max_tokens=max_tokens,
            seed=100 + i,
            cache_key=f"rollout {i}",
            **options,
        )
        for i, text in enumerate(texts)
    ]


def reference(model: LanguageModel) -> LlamaForCausalLM:
    """The same weights run by transformers' own attention in float64."""
    config = model.model.config.__class__.from_dict(model.model.config.to_dict())
    config._attn_implementation = "eager"
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(model.model.state_dict())
    return plain.double().eval()


def check_against_reference(model: LanguageModel, request: Request, generation: Generation) -> None:
    with torch.no_grad():
        logits = reference(model)(torch.tensor([[*request.token_ids, *generation.token_ids]])).logits[0].double()
    logprobs = torch.log_softmax(logits, dim=-1)
    for i, token in enumerate(generation.token_ids):
        row = logprobs[len(request.token_ids) - 1 + i]
        assert generation.logprobs[i] == pytest.approx(float(row[token]), abs=2e-5)
        assert generation.entropies[i] == pytest.approx(float(-(row.exp() * row).sum()), abs=2e-5)


def test_logprobs_and_entropies_are_those_of_the_full_forward(model: LanguageModel) -> None:
    engine = LocalEngine(model)
    requests = ask(model, ["abc", "a longer prompt than the first", "abc", "zz"])
    for request, generation in zip(requests, engine.generate(requests), strict=True):
        check_against_reference(model, request, generation)


def test_second_turn_prefills_only_the_new_tokens_and_equals_a_fresh_run(model: LanguageModel) -> None:
    engine = LocalEngine(model)
    first = engine.generate(ask(model, ["abc", "other text", "third"]))
    texts = [
        (*ids_of(model, t), *g.token_ids, *ids_of(model, " obs!"))
        for t, g in zip(["abc", "other text", "third"], first, strict=True)
    ]
    turn = [
        Request(request_id=str(i), token_ids=ids, max_tokens=8, seed=i, cache_key=f"rollout {i}") for i, ids in enumerate(texts)
    ]
    cached = engine.generate([turn[2], turn[0], turn[1]])  # another order: slots are found by key
    fresh = LocalEngine(model).generate(turn)
    assert [g.token_ids for g in cached] == [fresh[i].token_ids for i in (2, 0, 1)]
    assert all(g.num_prefilled_tokens <= 6 for g in cached)
    for request, generation in zip([turn[2], turn[0], turn[1]], cached, strict=True):
        check_against_reference(model, request, generation)


def test_common_prompt_is_computed_once(model: LanguageModel) -> None:
    prompt = "the same long prompt for the whole group"
    generations = LocalEngine(model).generate(ask(model, [prompt] * 4))
    assert sorted(g.num_prefilled_tokens for g in generations) == [0, 0, 0, len(prompt)]
    assert len({g.token_ids for g in generations}) > 1  # each request has its own seed


def test_a_fork_equals_a_fresh_run(model: LanguageModel) -> None:
    engine = LocalEngine(model)
    parent = engine.generate(ask(model, ["root prompt"]))[0]
    ids = (*ids_of(model, "root prompt"), *parent.token_ids)
    fork = Request(request_id="f", token_ids=ids, max_tokens=10, seed=5, cache_key="child")
    forked = engine.generate([fork])[0]
    assert forked.num_prefilled_tokens <= 2
    assert forked.token_ids == LocalEngine(model).generate([fork])[0].token_ids


def test_changed_weights_move_logprobs_and_drop_the_cache() -> None:
    model = tiny_model(seed=3)
    engine = LocalEngine(model)
    before = engine.generate(ask(model, ["abc"]))[0]
    with torch.no_grad():
        model.model.get_input_embeddings().weight.mul_(0.7)
    engine.weights_changed()
    request = ask(model, ["abc"])[0]
    after = engine.generate([request])[0]
    assert after.weight_version == before.weight_version + 1
    assert after.num_prefilled_tokens == 3
    assert after.logprobs[0] != before.logprobs[0]
    check_against_reference(model, request, after)


def test_same_seed_same_bits_and_batch_composition_does_not_change_the_sequence(model: LanguageModel) -> None:
    texts = ["abc", "some prompt", "x", "yet another prompt"]
    together = LocalEngine(model).generate(ask(model, texts))
    again = LocalEngine(model).generate(ask(model, texts))
    assert together == again
    alone = [LocalEngine(model).generate([request])[0] for request in ask(model, texts)]
    assert [g.token_ids for g in alone] == [g.token_ids for g in together]


def test_stop_strings_end_inside_the_text_and_are_kept(model: LanguageModel) -> None:
    request = ask(model, ["q"], max_tokens=200)[0]
    free = LocalEngine(model).generate([request])[0]
    text = model.tokenizer.decode(free.token_ids, skip_special_tokens=False)
    stop = text[3:5]
    stopped = LocalEngine(model).generate(
        [Request(request_id="0", token_ids=request.token_ids, max_tokens=200, seed=100, stop=(stop,))]
    )[0]
    out = model.tokenizer.decode(stopped.token_ids, skip_special_tokens=False)
    assert stopped.finish_reason is FinishReason.STOP
    assert out == text[: text.index(stop) + len(stop)]


def test_greedy_takes_the_likeliest_token(model: LanguageModel) -> None:
    request = ask(model, ["greedy"], temperature=0.0)[0]
    generation = LocalEngine(model).generate([request])[0]
    with torch.no_grad():
        logits = reference(model)(torch.tensor([[*request.token_ids, *generation.token_ids]])).logits[0]
    expected = logits[len(request.token_ids) - 1 : -1].argmax(dim=-1).tolist()
    assert list(generation.token_ids) == expected


@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_more_requests_than_rows_join_as_others_finish(model: LanguageModel, max_rows: int) -> None:
    """Two turns with contexts and lengths of their own: the sequences of an engine without a limit, each computed once."""
    texts = ["abc", "some prompt", "x", "abc", "yet another prompt", "a", "some more"]
    small, large = LocalEngine(model, max_rows=max_rows), LocalEngine(model)
    batches: list[int] = []
    small = LocalEngine(model, max_rows=max_rows, on_tokens=batches.append)
    requests = [replace(request, max_tokens=3 + 5 * (i % 3)) for i, request in enumerate(ask(model, texts))]
    for _ in range(2):
        ours, theirs = small.generate(requests), large.generate(requests)
        assert [g.token_ids for g in ours] == [g.token_ids for g in theirs]
        assert [g.finish_reason for g in ours] == [g.finish_reason for g in theirs]
        requests = [
            replace(request, token_ids=(*request.token_ids, *g.token_ids, *ids_of(model, " obs")), seed=request.seed + 50)
            for request, g in zip(requests, ours, strict=True)
        ]
    assert max(batches) <= max_rows
    assert sum(g.num_prefilled_tokens for g in ours) <= 6 * len(texts)
    for request, generation in zip(requests, small.generate(requests), strict=True):
        check_against_reference(model, request, generation)


def test_freeing_the_cache_changes_nothing_but_what_is_computed(model: LanguageModel) -> None:
    engine = LocalEngine(model)
    requests = ask(model, ["abc", "other text"])
    before = engine.generate(requests)
    engine.free_cache()
    after = engine.generate(requests)
    assert [g.token_ids for g in after] == [g.token_ids for g in before]
    assert [g.num_prefilled_tokens for g in after] == [3, 10]
    assert all(g.weight_version == 0 for g in after)


def test_temperature_one_samples_the_model_distribution(model: LanguageModel) -> None:
    """4,000 first tokens against the exact probabilities; a chi-square bound that a wrong sampler misses by far."""
    engine = LocalEngine(model)
    prompt = ids_of(model, "p")
    draws = []
    for start in range(0, 4000, 200):
        draws += engine.generate(
            [Request(request_id=str(i), token_ids=prompt, max_tokens=1, seed=i) for i in range(start, start + 200)]
        )
    with torch.no_grad():
        probs = torch.softmax(reference(model)(torch.tensor([list(prompt)])).logits[0, -1], dim=-1)
    counts = torch.bincount(torch.tensor([g.token_ids[0] for g in draws]), minlength=len(probs)).double()
    expected = probs * 4000
    big = expected > 5
    chi2 = float(((counts - expected)[big] ** 2 / expected[big]).sum())
    assert chi2 < int(big.sum()) + 4 * (2 * int(big.sum())) ** 0.5


def test_cancel_and_impossible_requests(model: LanguageModel) -> None:
    engine = LocalEngine(model, on_tokens=lambda _: engine.cancel("1"))
    requests = ask(model, ["abc", "def"])
    kept, cancelled = engine.generate(requests)
    assert cancelled.finish_reason is FinishReason.CANCELLED and len(cancelled.token_ids) == 1
    engine = LocalEngine(model)
    engine.cancel("1")  # not running: a later request of the same name is another one
    assert FinishReason.CANCELLED not in {one.finish_reason for one in engine.generate(requests)}
    assert kept.finish_reason is not FinishReason.CANCELLED
    with pytest.raises(EngineFault, match="do not fit"):
        engine.generate([Request(request_id="x", token_ids=(), max_tokens=4, seed=0)])
    with pytest.raises(EngineFault, match="do not fit"):
        engine.generate([Request(request_id="x", token_ids=tuple([5] * 512), max_tokens=4, seed=0)])


def test_every_group_s_prompt_is_computed_once_also_when_groups_begin_alike(model: LanguageModel) -> None:
    texts = [f"the common system prompt. question {group * 7}: " for group in range(3) for _ in range(4)]
    requests = [
        Request(request_id=str(i), token_ids=ids_of(model, text), max_tokens=2, seed=i, cache_key=str(i))
        for i, text in enumerate(texts)
    ]
    computed = [one.num_prefilled_tokens for one in LocalEngine(model).generate(requests)]
    assert [sorted(computed[i : i + 4])[:3] for i in (0, 4, 8)] == [[0, 0, 0]] * 3


def test_a_cache_that_grows_keeps_what_is_stored_and_nothing_else() -> None:
    cache = SlotCache(dtype=torch.float32, device=torch.device("cpu"))
    cache.reserve(2, 100)
    keys, values = cache.layer(0, torch.zeros(1, 3, 1, 4))
    keys[:], values[:] = torch.randn(keys.shape), torch.randn(values.shape)
    cache.reserve(5, 200, stored=[128, 7])
    for old, new in zip((keys, values), cache.layer(0, keys), strict=True):
        assert new.shape == (5, 3, 256, 4)
        torch.testing.assert_close(new[0, :, :128], old[0], rtol=0, atol=0)
        torch.testing.assert_close(new[1, :, :7], old[1, :, :7], rtol=0, atol=0)
        assert not new[0, :, 128:].any() and not new[1, :, 7:].any() and not new[2:].any()
