"""The vLLM engine: its own logic against a stand-in for the package, and the contract with the real one
(`make test-vllm`).
"""

import importlib.util
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.base import FinishReason, Generation, Request, VllmSettings
from outrider.engines.local.engine import LocalEngine
from outrider.engines.local.model import LanguageModel, load_model
from outrider.engines.vllm.engine import Requests, VllmEngine, entropy_bound
from outrider.errors import EngineFault, ModelError
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings
from tests.tiny import tiny_model

TOP_K = 5


class StandIn:
    """As much of vLLM as the engine uses, one token of every request a step; the text comes from the local
    engine.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.calls: list[str] = []
        self.salts: list[str] = []
        self.waiting: dict[str, tuple[Generation, int]] = {}
        self.llm_engine = self
        self.breaks = False

    def collective_rpc(self, name: str) -> None:
        self.calls.append(name)

    def apply_model(self, function: Any) -> None:
        self.calls.append("apply_model")
        function(self.model.model)

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return True

    def add_request(self, name: str, prompt: dict[str, Any], params: SimpleNamespace) -> None:
        self.salts.append(prompt["cache_salt"])
        request = Request(
            request_id=name, token_ids=tuple(prompt["prompt_token_ids"]), max_tokens=params.max_tokens,
            seed=params.seed, temperature=params.temperature, stop=tuple(params.stop),
        )  # fmt: skip
        self.stop = request.stop
        self.waiting[name] = (LocalEngine(self.model).generate([request])[0], 0)

    def stopped_by(self, whole: Generation) -> str | None:
        """The string at which vLLM says it stopped."""
        text = self.model.tokenizer.decode(whole.token_ids, skip_special_tokens=False)
        return next((one for one in self.stop if text.endswith(one)), None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.waiting[name]

    def step(self) -> list[SimpleNamespace]:
        if self.breaks:
            raise RuntimeError("the executor\nis gone")
        return [self._advance(name) for name in list(self.waiting)]

    def _advance(self, name: str) -> SimpleNamespace:
        whole, num = self.waiting[name]
        num += 1
        self.waiting[name] = (whole, num)
        finished = num == len(whole.token_ids)
        if finished:
            del self.waiting[name]
        reason = {
            FinishReason.LENGTH: ("length", None),
            FinishReason.STOP: ("stop", self.stopped_by(whole)),
            FinishReason.EOS: ("stop", 1),
        }
        rows = [
            {token: SimpleNamespace(logprob=value)}
            for token, value in zip(whole.token_ids[:num], whole.logprobs[:num], strict=True)
        ]
        ended, why = reason[whole.finish_reason] if finished else (None, None)
        output = SimpleNamespace(
            token_ids=list(whole.token_ids[:num]), logprobs=rows, finish_reason=ended, stop_reason=why
        )
        return SimpleNamespace(request_id=name, finished=finished, outputs=[output])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    fake = StandIn(tiny_model())
    module = ModuleType("vllm")
    module.LLM = lambda **options: fake  # type: ignore[attr-defined]
    module.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    yield fake


def made(
    model: LanguageModel, folder: Path, *, exported: list[Path] | None = None, **options: Any
) -> VllmEngine:
    def export(target: Path) -> None:
        if exported is not None:
            exported.append(target)

    chosen = {"device": "cpu", "settings": VllmSettings(top_k=TOP_K)} | options
    return VllmEngine(
        folder=folder, export=export, tokenizer=model.tokenizer, eos_token_ids=model.eos_token_ids,
        eos_texts=model.eos_texts, context_length=128, precision="float32", **chosen,
    )  # fmt: skip


def asked(model: LanguageModel, *texts: str, **options: Any) -> list[Request]:
    settings = {"max_tokens": 12, "temperature": 1.0} | options
    return [
        Request(request_id=f"r{i}", token_ids=tuple(model.tokenizer.encode(text)), seed=i, **settings)
        for i, text in enumerate(texts)
    ]


def test_ids_logprobs_and_reasons_come_back_in_the_order_asked(stand_in: StandIn, tmp_path: Path) -> None:
    requests = asked(stand_in.model, "abc", "the second", "3", stop=("e",))
    ours = made(stand_in.model, tmp_path).generate(requests)
    theirs = [LocalEngine(stand_in.model).generate([request])[0] for request in requests]
    assert [(g.request_id, g.token_ids, g.logprobs, g.finish_reason) for g in ours] == [
        (g.request_id, g.token_ids, g.logprobs, g.finish_reason) for g in theirs
    ]
    assert all(g.entropies_are_bounds and len(g.entropies) == len(g.token_ids) for g in ours)


def test_a_turn_that_the_template_closes_in_ordinary_tokens_ends_as_one_that_an_eos_ends(
    stand_in: StandIn, tmp_path: Path
) -> None:
    """vLLM is asked to stop at the template's text too, and what it stopped at tells a closed turn from a
    stop string.
    """
    one, other = asked(stand_in.model, "abc", "the second")
    free = LocalEngine(replace(stand_in.model, eos_token_ids=frozenset())).generate([one, other])
    first, second = (stand_in.model.tokenizer.decode(g.token_ids, skip_special_tokens=False) for g in free)
    stop = next(character for character in second if character not in first[:4])
    closing = replace(stand_in.model, eos_token_ids=frozenset(), eos_texts=(first[3],))
    requests = [replace(request, stop=(stop,)) for request in (one, other)]
    ours = made(closing, tmp_path).generate(requests)
    theirs = [LocalEngine(closing).generate([request])[0] for request in requests]
    assert [(g.token_ids, g.finish_reason) for g in ours] == [(g.token_ids, g.finish_reason) for g in theirs]
    assert [g.finish_reason for g in ours] == [FinishReason.EOS, FinishReason.STOP]
    closed = closing.tokenizer.decode(ours[0].token_ids, skip_special_tokens=False)
    assert closed == first[: first.index(first[3]) + 1]


def test_new_weights_are_read_once_before_the_next_batch_and_no_cached_block_survives(
    stand_in: StandIn, tmp_path: Path
) -> None:
    exported: list[Path] = []
    engine = made(stand_in.model, tmp_path, exported=exported)
    engine.generate(asked(stand_in.model, "a"))
    engine.load(engine.weight_version + 1)
    engine.load(engine.weight_version + 1)
    assert len(exported) == 1 and stand_in.calls == []
    assert engine.generate(asked(stand_in.model, "a"))[0].weight_version == 2
    engine.generate(asked(stand_in.model, "a"))
    assert len(exported) == 2 and stand_in.calls == ["reload_weights", "apply_model", "reset_prefix_cache"]
    assert stand_in.salts == ["0", "2", "2"]


def test_progress_and_a_broken_executor(stand_in: StandIn, tmp_path: Path) -> None:
    counts: list[int] = []
    engine = made(stand_in.model, tmp_path, on_tokens=counts.append)
    requests = asked(stand_in.model, "abc", "def")
    whole = engine.generate(requests)
    assert sum(counts) == sum(len(g.token_ids) for g in whole)
    stand_in.breaks = True
    with pytest.raises(EngineFault, match="RuntimeError: the executor is gone"):
        engine.generate(requests)
    with pytest.raises(EngineFault, match="do not fit"):
        engine.generate(asked(stand_in.model, "a" * 200))


def test_what_a_broken_batch_left_does_not_answer_the_next(stand_in: StandIn, tmp_path: Path) -> None:
    engine = made(stand_in.model, tmp_path)
    stand_in.breaks = True
    with pytest.raises(EngineFault):
        engine.generate(asked(stand_in.model, "abc", "def"))
    assert not stand_in.waiting
    stand_in.breaks = False
    requests = asked(stand_in.model, "xyz")
    assert (
        engine.generate(requests)[0].token_ids == LocalEngine(stand_in.model).generate(requests)[0].token_ids
    )


@pytest.mark.parametrize(("device", "memory"), [("cuda:1", None), ("cuda", 2.0)])
def test_a_gpu_that_cannot_be_had_is_refused(
    stand_in: StandIn, tmp_path: Path, device: str, memory: float | None
) -> None:
    with pytest.raises(ModelError):
        made(stand_in.model, tmp_path, device=device, settings=VllmSettings(memory=memory))


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModelError, match="pip install"):
        made(tiny_model(), tmp_path)


@given(st.lists(st.floats(-12, 12), min_size=TOP_K + 1, max_size=40), st.data())
def test_the_bound_never_exceeds_the_entropy(logits: list[float], data: st.DataObject) -> None:
    logprobs = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), dim=0).tolist()
    entropy = -math.fsum(value * math.exp(value) for value in logprobs)
    order = sorted(range(len(logits)), key=lambda i: -logprobs[i])
    sampled = data.draw(st.integers(0, len(logits) - 1))
    known = {i: logprobs[i] for i in {*order[:TOP_K], sampled}}
    bound = entropy_bound(known, top_k=TOP_K)
    assert 0 <= bound <= entropy + 1e-5
    assert bound >= -math.fsum(value * math.exp(value) for value in known.values()) - 1e-9


def test_the_bound_is_the_entropy_where_everything_is_known() -> None:
    assert entropy_bound({0: math.log(0.75), 1: math.log(0.25)}, top_k=TOP_K) == pytest.approx(0.5623351446)


@pytest.mark.vllm
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; run `make test-vllm`"
)
def test_the_contract_with_the_real_package_and_model(tmp_path: Path) -> None:
    """Same prompt, same seed: same ids, also in a fork and in company; log-probs are the trainer's; changed
    weights move them; stop strings are kept.
    """
    lm = load_model("smollm2-135m-instruct", precision="float32")
    policy = Policy(lm, OptimizerSettings(learning_rate=1e-3))
    engine = VllmEngine(
        folder=tmp_path / "engine", export=policy.export, tokenizer=lm.tokenizer,
        eos_token_ids=lm.eos_token_ids, eos_texts=lm.eos_texts, context_length=512, precision="float32",
        device="cpu", settings=VllmSettings(),
    )  # fmt: skip
    ids = tuple(lm.tokenizer.encode("The capital of France is Paris. The capital of Italy is"))
    requests = [
        Request(request_id="a", token_ids=ids, max_tokens=24, seed=1),
        Request(request_id="b", token_ids=ids, max_tokens=24, seed=1),
        Request(request_id="c", token_ids=ids, max_tokens=24, seed=2, temperature=0.0, stop=(".",)),
    ]
    first, twin, stopped = engine.generate(requests)
    assert first.token_ids == twin.token_ids
    draw = torch.Generator().manual_seed(0)
    # more than a step's tokens
    many = [tuple(torch.randint(100, 9000, (200,), generator=draw).tolist()) for _ in range(40)]
    asked_many = [
        Request(request_id=str(i), token_ids=one, max_tokens=3, seed=i) for i, one in enumerate(many)
    ]
    assert [len(one.token_ids) > 0 for one in engine.generate(asked_many)] == [True] * 40
    assert stopped.finish_reason is FinishReason.STOP
    assert lm.tokenizer.decode(stopped.token_ids).endswith(".")
    for generation in (first, stopped):
        gap = max(
            abs(a - b)
            for a, b in zip(generation.logprobs, exact_logprobs(lm, ids, generation.token_ids), strict=True)
        )
        assert gap < 1e-2, gap
    check_forks_and_company(engine, ids * 20)  # longer than a block of the prefix cache
    version = engine.weight_version
    with torch.no_grad():
        for parameter in lm.model.parameters():
            parameter.mul_(1.02)
    engine.load(engine.weight_version + 1)
    moved = engine.generate(requests[2:])[0]
    assert moved.weight_version == version + 1 and moved.logprobs[0] != stopped.logprobs[0]
    assert moved.logprobs[0] == pytest.approx(exact_logprobs(lm, ids, moved.token_ids)[0], abs=1e-2)


def check_forks_and_company(engine: VllmEngine, prompt: tuple[int, ...]) -> None:
    """A fork of a cached context equals a fresh run, alone and among strangers, up to rounding in float32."""
    (parent,) = engine.generate([Request(request_id="parent", token_ids=prompt, max_tokens=16, seed=7)])
    context = (*prompt, *parent.token_ids)
    forks = [Request(request_id=f"fork {i}", token_ids=context, max_tokens=12, seed=i) for i in range(3)]
    strangers = [
        Request(request_id=f"other {i}", token_ids=prompt[5 * i + 1 :], max_tokens=4 * i + 3, seed=i)
        for i in range(5)
    ]
    forked = engine.generate(forks)
    in_company = engine.generate([*strangers[:3], *forks, *strangers[3:]])[3:6]
    for fork, one, among in zip(forks, forked, in_company, strict=True):
        engine.load(engine.weight_version + 1)  # the weights are the same: only what is cached is forgotten
        (fresh,) = engine.generate([fork])
        assert fresh.token_ids == one.token_ids == among.token_ids
        assert one.logprobs == pytest.approx(fresh.logprobs, abs=1e-3)
        assert among.logprobs == pytest.approx(fresh.logprobs, abs=1e-3)


def exact_logprobs(lm: LanguageModel, context: tuple[int, ...], ids: tuple[int, ...]) -> list[float]:
    from outrider.engines.local.attention import Segment, TreePlan

    whole = torch.tensor([[*context, *ids]])
    plan = TreePlan(segments=(Segment(length=whole.shape[1]),))
    with torch.no_grad():
        states = lm.hidden(whole, torch.arange(whole.shape[1])[None], plan)[0, len(context) - 1 : -1]
        logprobs = torch.log_softmax(lm.head(states).float(), dim=-1)
    return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def test_top_p_and_top_k_are_passed_and_excluded_tokens_have_no_part_in_the_entropy() -> None:
    requests = Requests(eos_token_ids=frozenset({1}), eos_texts=(), context_length=99, top_k=3)
    request = Request(request_id="a", token_ids=(2,), max_tokens=4, seed=1, temperature=0.6)
    assert not {"top_p", "top_k"} & requests.sampling(request).keys()
    truncated = replace(request, top_p=0.95, top_k=20)
    assert requests.sampling(truncated) == {**requests.sampling(request), "top_p": 0.95, "top_k": 20}
    logprobs = {5: math.log(0.5), 6: math.log(0.5), 7: -math.inf}
    rows = [{token: SimpleNamespace(logprob=value) for token, value in logprobs.items()}]
    output = SimpleNamespace(token_ids=[5], logprobs=rows, finish_reason="length", stop_reason=None)
    generation = requests.generation(truncated, output, version=0)
    assert generation.entropies == pytest.approx((math.log(2),))
