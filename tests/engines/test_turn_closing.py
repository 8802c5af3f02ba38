"""A turn ends where the chat template closes it, whatever the tokenizer calls its EOS, and nothing behind
it is trained on.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.engines.base import FinishReason, Request
from outrider.engines.local import engine as local
from outrider.engines.local.engine import LocalEngine
from outrider.engines.local.model import LanguageModel, load_model
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import StepResult
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer, TurnClosing
from outrider.types import Message
from tests.rollout.fakes import Factory, Fake, scheduler, tasks
from tests.tiny import TEMPLATE, tiny_config, tiny_tokenizer

UNK = 2  # what these base models call their EOS
MARKERS = {"special": "<|im_end|>", "added": "<turn_end>", "spelled": "[end]", "blank": ""}


def base_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Its EOS is another token than the one with which the template closes a turn."""
    tokenizer = tiny_tokenizer()
    if kind == "added":
        tokenizer.add_tokens(["<turn_end>"])  # not a special one: decoding shows it
    tokenizer.eos_token = "<unk>"
    tokenizer.chat_template = TEMPLATE.replace("<|im_end|>", MARKERS[kind])
    return tokenizer


@pytest.fixture(scope="module", params=MARKERS)
def base(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, LanguageModel]:
    folder, tokenizer = tmp_path_factory.mktemp(request.param), base_tokenizer(request.param)
    config = tiny_config()
    config.vocab_size, config.eos_token_id = len(tokenizer), UNK
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return request.param, load_model(str(folder), precision="float32")


def writing(ids: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model writes these ids, every turn again, and would go on with the last."""
    sample, written = local.sample, list(ids)

    def forced(logits: torch.Tensor, *rest: Sequence[object]) -> tuple[list[int], list[float], list[float]]:
        _, logprobs, entropies = sample(logits, *rest)  # type: ignore[arg-type]
        token = written.pop(0) if len(written) > 1 else written[0]
        return [token], logprobs, entropies

    monkeypatch.setattr(local, "sample", forced)


def encode(lm: LanguageModel, text: str) -> list[int]:
    return list(lm.tokenizer.encode(text, add_special_tokens=False))


def test_generation_stops_at_the_template_s_closing(
    base: tuple[str, LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, lm = base
    said = encode(lm, f"hi\n{MARKERS[kind]}")
    writing([*said, *encode(lm, "and on and on")], monkeypatch)
    (one,) = LocalEngine(lm).generate([Request(request_id="a", token_ids=(5, 6), max_tokens=12, seed=0)])
    if kind == "blank":  # a template that writes white space only closes nothing: answers hold it too
        assert one.finish_reason is FinishReason.LENGTH and len(one.token_ids) == 12
    else:
        assert (one.finish_reason, list(one.token_ids)) == (FinishReason.EOS, said)
    assert UNK in lm.eos_token_ids


def test_a_rollout_keeps_nothing_behind_the_closing_and_the_environment_does_not_see_it(
    base: tuple[str, LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, lm = base
    ending = encode(lm, MARKERS[kind]) or [UNK]
    writing([*encode(lm, "go "), *ending], monkeypatch)
    environment = Fake(on_step=lambda number, text: StepResult(message=None, done=True))
    runs = scheduler(
        LocalEngine(lm),
        Factory(lambda task, number: environment),
        stop=(),
        limits=Limits(max_turn_tokens=30, step_timeout_s=60),
    )
    trace = runs.run(tasks(1), modes=("hybrid",), training_step=0).traces[0]
    ((_, path),) = trace.rollouts()
    assert environment.texts == ["go "]
    assert list(path[-1].token_ids) == [*encode(lm, "go "), *ending] and path[-1].metadata["finish"] == "eos"


@pytest.mark.parametrize("kind", MARKERS)
def test_an_expert_s_turn_is_closed_as_the_template_does_and_only_once(kind: str) -> None:
    """A cold start that taught the EOS in front of the marker would teach two endings."""
    tokenizer = base_tokenizer(kind)
    renderer = ChatRenderer(tokenizer)
    engine = ScriptedEngine(tokenizer=tokenizer, script=lambda request, text: "ok")
    prompt = renderer.prompt([Message(role="user", content="q")])
    (turn,) = engine.generate([Request(request_id="a", token_ids=prompt, max_tokens=20, seed=0)])
    written = tokenizer.decode(turn.token_ids, skip_special_tokens=False)
    assert written == "ok" + (MARKERS[kind] or "<unk>") and turn.finish_reason is FinishReason.EOS
    bridge = renderer.bridge((*prompt, *turn.token_ids), [Message(role="user", content="r")])
    assert tokenizer.decode(bridge, skip_special_tokens=False).startswith("\n<|im_start|>user\nr")


@given(said=st.text(alphabet="[end] \n", max_size=12), behind=st.sampled_from(["", " ", "\n"]))
def test_the_closing_is_cut_once_and_only_at_the_end(said: str, behind: str) -> None:
    closing = TurnClosing(token_id=None, text="[end]")
    assert closing.cut(f"{said}[end]{behind}") == said
    assert closing.cut(f"{said}[end]x") == f"{said}[end]x"
    assert TurnClosing(token_id=1, text="").cut(said) == said
