"""The local engine against plain transformers, and the engine contract."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from outrider.engines.base import FinishReason, Generation, Request
from outrider.engines.local import cpu_kernels as onednn
from outrider.engines.local.attention import SlotCache
from outrider.engines.local.cpu_kernels import FewRows, fuse
from outrider.engines.local.engine import LocalEngine
from outrider.engines.local.model import LanguageModel
from outrider.errors import EngineFault
from outrider.trace import Trace
from outrider.training.packing import RolloutPath, pack
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings
from outrider.types import Message, Origin, Task
from tests.tiny import tiny_model

NOTHING_PACKED = ("fused, nothing packed", "fused, bfloat16, nothing packed")


@pytest.fixture(scope="module", params=["plain", "fused", "fused, bfloat16", *NOTHING_PACKED])
def model(request: pytest.FixtureRequest) -> Iterator[LanguageModel]:
    """The modules' own way, and the decoding step's own forward pass in each precision that can be packed
    here.

    "nothing packed" is a processor that can pack no weights, so that every machine tests that path too.
    """
    dtype = torch.bfloat16 if "bfloat16" in request.param else torch.float32
    lm = tiny_model(dtype=dtype)
    if "fused" in request.param:
        fuse(lm.model)
    with pytest.MonkeyPatch.context() as patch:
        if request.param in NOTHING_PACKED:
            patch.setattr(onednn, "can_pack", lambda dtype: False)
        assert FewRows(lm.model).is_supported == ("fused" in request.param and onednn.can_pack(dtype))
        yield lm


@pytest.fixture(scope="module")
def plain() -> LanguageModel:
    """Where the way through the model makes no difference."""
    return tiny_model()


def tolerance(model: LanguageModel) -> float:
    """Nats, at logits with a standard deviation of about 3; bfloat16 rounds each to 8 bits."""
    return 2e-5 if model.dtype == torch.float32 else 0.08


def check_same(model: LanguageModel, ours: Sequence[Generation], theirs: Sequence[Generation]) -> None:
    """The same sequences; in bfloat16 up to the first draw that rounding moved over a boundary, which is
    rare.
    """
    num_same = [same_tokens(one, other) for one, other in zip(ours, theirs, strict=True)]
    for num, one, other in zip(num_same, ours, theirs, strict=True):
        assert one.logprobs[:num] == pytest.approx(other.logprobs[:num], abs=tolerance(model))
        if model.dtype == torch.float32:
            assert one.token_ids == other.token_ids and one.finish_reason == other.finish_reason
    assert sum(num_same) >= 0.7 * sum(len(other.token_ids) for other in theirs)


def same_tokens(one: Generation, other: Generation) -> int:
    pairs = list(zip(one.token_ids, other.token_ids, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def ids_of(model: LanguageModel, text: str) -> tuple[int, ...]:
    return tuple(model.tokenizer.encode(text, add_special_tokens=False))


def ask(
    model: LanguageModel, texts: Sequence[str], *, max_tokens: int = 12, **options: object
) -> list[Request]:
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


_REFERENCES: list[tuple[LanguageModel, LlamaForCausalLM]] = []  # the newest one


def reference(model: LanguageModel) -> LlamaForCausalLM:
    """The same weights run by transformers' own attention in float64."""
    if _REFERENCES and _REFERENCES[0][0] is model:
        return _REFERENCES[0][1]
    config = model.model.config.__class__.from_dict(model.model.config.to_dict())
    config._attn_implementation = "eager"
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(model.model.state_dict())
    _REFERENCES[:] = [(model, plain.double().eval())]
    return _REFERENCES[0][1]


def check_against_reference(model: LanguageModel, request: Request, generation: Generation) -> None:
    with torch.no_grad():
        logits = (
            reference(model)(torch.tensor([[*request.token_ids, *generation.token_ids]])).logits[0].double()
        )
    logprobs = torch.log_softmax(logits, dim=-1)
    for i, token in enumerate(generation.token_ids):
        row = logprobs[len(request.token_ids) - 1 + i]
        assert generation.logprobs[i] == pytest.approx(float(row[token]), abs=tolerance(model))
        assert generation.entropies[i] == pytest.approx(float(-(row.exp() * row).sum()), abs=tolerance(model))


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
        Request(request_id=str(i), token_ids=ids, max_tokens=8, seed=i, cache_key=f"rollout {i}")
        for i, ids in enumerate(texts)
    ]
    cached = engine.generate([turn[2], turn[0], turn[1]])  # another order: slots are found by key
    fresh = LocalEngine(model).generate(turn)
    check_same(model, cached, [fresh[i] for i in (2, 0, 1)])
    assert all(g.num_prefilled_tokens <= 6 for g in cached)
    for request, generation in zip([turn[2], turn[0], turn[1]], cached, strict=True):
        check_against_reference(model, request, generation)


def test_common_prompt_is_computed_once(plain: LanguageModel) -> None:
    prompt = "the same long prompt for the whole group"
    generations = LocalEngine(plain).generate(ask(plain, [prompt] * 4))
    assert sorted(g.num_prefilled_tokens for g in generations) == [0, 0, 0, len(prompt)]
    assert len({g.token_ids for g in generations}) > 1  # each request has its own seed


def test_a_fork_equals_a_fresh_run(model: LanguageModel) -> None:
    engine = LocalEngine(model)
    parent = engine.generate(ask(model, ["root prompt"]))[0]
    ids = (*ids_of(model, "root prompt"), *parent.token_ids)
    forks = [
        Request(request_id=str(i), token_ids=ids[: len(ids) - i], max_tokens=10, seed=i, cache_key=f"c{i}")
        for i in range(4)
    ]
    forked = engine.generate(forks)
    assert all(one.num_prefilled_tokens <= 2 for one in forked)
    check_same(model, forked, [LocalEngine(model).generate([fork])[0] for fork in forks])


def test_changed_weights_move_logprobs_and_drop_the_cache() -> None:
    model = tiny_model(seed=3)
    engine = LocalEngine(model)
    before = engine.generate(ask(model, ["abc"]))[0]
    with torch.no_grad():
        model.model.get_input_embeddings().weight.mul_(0.7)
    engine.load(engine.weight_version + 1)
    request = ask(model, ["abc"])[0]
    after = engine.generate([request])[0]
    assert after.weight_version == before.weight_version + 1
    assert after.num_prefilled_tokens == 3
    assert after.logprobs[0] != before.logprobs[0]
    check_against_reference(model, request, after)


def test_a_model_without_probabilities_is_a_fault() -> None:
    model = tiny_model(seed=3)
    with torch.no_grad():
        model.model.get_input_embeddings().weight[5, 0] = math.nan
    with pytest.raises(EngineFault, match="log-prob of a sampled token is nan"):
        LocalEngine(model).generate(ask(model, ["abc"]))


def test_same_seed_same_bits_and_batch_composition_does_not_change_the_sequence(model: LanguageModel) -> None:
    texts = ["abc", "some prompt", "x", "yet another prompt"]
    together = LocalEngine(model).generate(ask(model, texts))
    again = LocalEngine(model).generate(ask(model, texts))
    assert together == again
    alone = [LocalEngine(model).generate([request])[0] for request in ask(model, texts)]
    check_same(model, alone, together)


def test_logprobs_are_the_trainer_s(model: LanguageModel) -> None:
    """Two turns from the cache against one packed row of the whole group, whose common beginning the trainer
    computes once.
    """
    engine, policy = LocalEngine(model), Policy(model, OptimizerSettings(learning_rate=1e-9))
    trace = Trace(task=Task(key="gap", question=""))
    message = Message(role="user", content="")
    root = trace.append(
        parent=None, origin=Origin.PROMPT, token_ids=ids_of(model, "the common prompt"), message=message
    )
    tips = [root] * 4
    for turn in range(2):
        requests = [
            Request(
                request_id=str(i),
                token_ids=trace.token_ids(tip.node_id),
                max_tokens=8,
                seed=10 * turn + i,
                cache_key=str(i),
            )
            for i, tip in enumerate(tips)
        ]
        for i, one in enumerate(engine.generate(requests)):
            node = trace.append(
                parent=tips[i].node_id, origin=Origin.POLICY, token_ids=one.token_ids, message=message,
                logprobs=one.logprobs, entropies=one.entropies,
            )  # fmt: skip
            node.credit = (1.0,) * len(one.token_ids)
            tips[i] = trace.append(
                parent=node.node_id,
                origin=Origin.ENVIRONMENT,
                token_ids=ids_of(model, f" seen {i}"),
                message=message,
            )
    paths = [RolloutPath(nodes=trace.path(tip.node_id), rollout_index=i) for i, tip in enumerate(tips)]
    (batch,) = pack(paths, max_tokens=10_000)
    with torch.no_grad():
        scores = policy.score(batch)
    assert len(batch.engine_logprobs_T) > 40
    torch.testing.assert_close(
        scores.logprobs_T.double(), batch.engine_logprobs_T, rtol=0, atol=tolerance(model)
    )


def test_stop_strings_end_inside_the_text_and_are_kept(plain: LanguageModel) -> None:
    request = ask(plain, ["q"], max_tokens=200)[0]
    free = LocalEngine(plain).generate([request])[0]
    text = plain.tokenizer.decode(free.token_ids, skip_special_tokens=False)
    stop = text[3:5]
    stopped = LocalEngine(plain).generate(
        [Request(request_id="0", token_ids=request.token_ids, max_tokens=200, seed=100, stop=(stop,))]
    )[0]
    out = plain.tokenizer.decode(stopped.token_ids, skip_special_tokens=False)
    assert stopped.finish_reason is FinishReason.STOP
    assert out == text[: text.index(stop) + len(stop)]


def test_greedy_takes_the_likeliest_token(model: LanguageModel) -> None:
    request = ask(model, ["greedy"], temperature=0.0)[0]
    generation = LocalEngine(model).generate([request])[0]
    with torch.no_grad():
        logits = reference(model)(torch.tensor([[*request.token_ids, *generation.token_ids]])).logits[0]
    logprobs = torch.log_softmax(logits[len(request.token_ids) - 1 : -1], dim=-1)
    chosen = logprobs.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
    assert float((logprobs.max(dim=-1).values - chosen).max()) <= tolerance(model)


def test_more_requests_than_rows_join_as_others_finish(model: LanguageModel) -> None:
    """Two turns with contexts and lengths of their own: the sequences of an engine without a limit, each
    computed once.
    """
    max_rows = 2
    texts = ["abc", "some prompt", "x", "abc", "yet another prompt", "a", "some more"]
    batches: list[int] = []
    small, large = LocalEngine(model, max_rows=max_rows, on_tokens=batches.append), LocalEngine(model)
    requests = [replace(request, max_tokens=3 + 5 * (i % 3)) for i, request in enumerate(ask(model, texts))]
    for _ in range(2):
        ours, theirs = small.generate(requests), large.generate(requests)
        check_same(model, ours, theirs)
        requests = [
            replace(
                request,
                token_ids=(*request.token_ids, *g.token_ids, *ids_of(model, " obs")),
                seed=request.seed + 50,
            )
            for request, g in zip(requests, ours, strict=True)
        ]
    assert max(batches) <= max_rows
    assert sum(g.num_prefilled_tokens for g in ours) <= 6 * len(texts)
    for request, generation in zip(requests, small.generate(requests), strict=True):
        check_against_reference(model, request, generation)


def test_freeing_the_cache_changes_nothing_but_what_is_computed(plain: LanguageModel) -> None:
    engine = LocalEngine(plain)
    requests = ask(plain, ["abc", "other text"])
    before = engine.generate(requests)
    engine.free_cache()
    after = engine.generate(requests)
    assert [g.token_ids for g in after] == [g.token_ids for g in before]
    assert [g.num_prefilled_tokens for g in after] == [3, 10]
    assert all(g.weight_version == 0 for g in after)


def test_temperature_one_samples_the_model_distribution(plain: LanguageModel) -> None:
    """4,000 first tokens against the exact probabilities: a wrong sampler exceeds the chi-square bound by
    far.
    """
    engine = LocalEngine(plain)
    prompt = ids_of(plain, "p")
    draws = []
    for start in range(0, 4000, 200):
        draws += engine.generate(
            [
                Request(request_id=str(i), token_ids=prompt, max_tokens=1, seed=i)
                for i in range(start, start + 200)
            ]
        )
    with torch.no_grad():
        probs = torch.softmax(reference(plain)(torch.tensor([list(prompt)])).logits[0, -1], dim=-1)
    counts = torch.bincount(torch.tensor([g.token_ids[0] for g in draws]), minlength=len(probs)).double()
    expected = probs * 4000
    big = expected > 5
    chi2 = float(((counts - expected)[big] ** 2 / expected[big]).sum())
    assert chi2 < int(big.sum()) + 4 * (2 * int(big.sum())) ** 0.5


def test_impossible_requests(plain: LanguageModel) -> None:
    engine = LocalEngine(plain)
    with pytest.raises(EngineFault, match="do not fit"):
        engine.generate([Request(request_id="x", token_ids=(), max_tokens=4, seed=0)])
    with pytest.raises(EngineFault, match="do not fit"):
        engine.generate([Request(request_id="x", token_ids=tuple([5] * 512), max_tokens=4, seed=0)])


def test_every_group_s_prompt_is_computed_once_also_when_groups_begin_alike(plain: LanguageModel) -> None:
    texts = [f"the common system prompt. question {group * 7}: " for group in range(3) for _ in range(4)]
    requests = [
        Request(request_id=str(i), token_ids=ids_of(plain, text), max_tokens=2, seed=i, cache_key=str(i))
        for i, text in enumerate(texts)
    ]
    computed = [one.num_prefilled_tokens for one in LocalEngine(plain).generate(requests)]
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
