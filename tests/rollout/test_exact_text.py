"""What tools, hooks, stop strings and records get is what the policy wrote, also where a tokenizer tidies its
text.

transformers 5.0 does so for every kind of tokenizer whose configuration says so, later versions for some.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from outrider.engines.base import Request
from outrider.engines.local.sampling import StopStrings
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import EpisodeResult, StepResult
from outrider.rollout.episode import CUT_MARK, truncate_text
from outrider.rollout.hooks import EpisodeState, Hook
from outrider.tokens import ChatRenderer, decode_text
from outrider.training.step_records import trace_rows
from outrider.types import Message
from tests.rollout.fakes import Factory, Fake, scheduler, tasks
from tests.tiny import CHARACTERS, tiny_tokenizer

CODE = "x = 'a' + ' ' , y .join(z) ! don 't ?"


def tidying() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    ids = tokenizer.encode(CODE, add_special_tokens=False)
    assert tokenizer.decode(ids) != CODE, (
        "this version of transformers does not tidy: the tests below say nothing"
    )
    return tokenizer


TOKENIZER = tidying()


class Asks(Hook):
    """A question after the end of every rollout."""

    max_reflection_tokens = 64

    def closing_message(self, state: EpisodeState, result: EpisodeResult) -> Message:
        return Message(role="user", content="why , then ?")


@given(st.text(st.sampled_from(" ,.?!'nstm"), max_size=30))
def test_decoded_ids_are_the_encoded_text(text: str) -> None:
    assert (
        decode_text(TOKENIZER, TOKENIZER.encode(text, add_special_tokens=False), skip_special_tokens=True)
        == text
    )


def test_environment_reflection_records_and_scripts_receive_the_exact_text() -> None:
    contexts: list[str] = []

    def script(request: Request, context: str) -> str:
        contexts.append(context)
        return CODE

    factory = Factory(
        lambda task, number: Fake(
            on_step=lambda n, t: StepResult(message=None, done=True), question="a , b ?"
        )
    )
    runs = scheduler(ScriptedEngine(tokenizer=TOKENIZER, script=script), factory, hooks=(Asks(),), stop=())
    report = runs.run(tasks(1), modes=("m",), training_step=0)
    [environment] = factory.made
    assert environment.texts == [CODE]  # type: ignore[attr-defined]
    assert all("a , b ?" in context for context in contexts) and "why , then ?" in contexts[1]
    assert report.traces[0].leaves[0].reflection == CODE
    assert trace_rows(report.traces, step=1, tokenizer=TOKENIZER).nodes[-1].text == CODE


def test_truncated_text_keeps_its_spaces() -> None:
    text = " ,.?!" * 40
    kept = truncate_text(text, 60, renderer=ChatRenderer(TOKENIZER))
    start, end = kept.split(CUT_MARK)
    assert text.startswith(start) and text.endswith(end) and len(kept) == 60


@pytest.mark.parametrize("stop", [" ,", " .", "n't", " 's"])
def test_a_stop_string_with_a_space_stops(stop: str) -> None:
    strings = StopStrings(TOKENIZER, len(CHARACTERS) + 3)
    ids = TOKENIZER.encode(f"go on{stop}", add_special_tokens=False)
    assert [strings.completed(ids[:end], (stop,)) for end in range(1, len(ids) + 1)] == [False] * (
        len(ids) - 1
    ) + [True]
