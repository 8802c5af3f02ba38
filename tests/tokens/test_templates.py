"""Chat templates that do not support every conversation: messages are adapted, or the template is refused.

The templates are short; each has one rule of the documentation of a model family.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from outrider.environments.base import StepResult
from outrider.errors import ModelError
from outrider.rollout.episode import Sampling
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer, decode_text
from outrider.tokens.template_check import check_template
from outrider.types import Message, Outcome, Role, ToolCall
from tests.conversations import TOOLS
from tests.rollout.fakes import Factory, Fake, say, scripted, tasks
from tests.tokens.test_renderer import CONTENT, byte_tokenizer

ALTERNATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{% endfor %}"
)
MISTRAL = (
    ALTERNATE + "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set rules = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set rules = '' %}{% endif %}"
    + ALTERNATE
    + "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + (rules if loop.first else '') + "
    "m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + ALTERNATE
    + "{{ bos_token }}{% for m in messages %}"
      "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | "
      "trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}"
      "{% endif %}"
)  # fmt: skip
TURNS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
SILENT = "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}" + TURNS
EOS = {
    "mistral": "</s>",
    "llama2": "</s>",
    "gemma": "<end_of_turn>",
    "phi3": "<|endoftext|>",
    "phi3 twice": "<|end|>",
    "silent": "<|end|>",
}
TEMPLATES = {
    "mistral": MISTRAL,
    "llama2": LLAMA2,
    "gemma": GEMMA,
    "phi3": TURNS,
    "phi3 twice": TURNS,
    "silent": SILENT,
}
SPECIAL = [
    "<s>", "</s>", "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>",
    "<|endoftext|>",
]  # fmt: skip
RENDERED = {
    "mistral": ("<s>[INST] rules\n\nq [/INST]", "hello</s>", "[INST] obs [/INST]"),
    "llama2": ("<s>[INST] <<SYS>>\nrules\n<</SYS>>\n\nq [/INST]", "hello</s>", "<s>[INST] obs [/INST]"),
    "gemma": (
        "<s><start_of_turn>user\nrules\n\nq<end_of_turn>\n<start_of_turn>model\n", "hello<end_of_turn>",
        "\n<start_of_turn>user\nobs<end_of_turn>\n<start_of_turn>model\n",
    ),
    "phi3": (
        "<|system|>\nrules<|end|>\n<|user|>\nq<|end|>\n<|assistant|>\n", "hello<|end|>",
        "\n<|user|>\nobs<|end|>\n<|assistant|>\n",
    ),
    "silent": ("<|user|>\nrules\n\nq<|end|>\n<|assistant|>\n", "hello<|end|>",
               "\n<|user|>\nobs<|end|>\n<|assistant|>\n"),
}  # fmt: skip
RENDERED["phi3 twice"] = RENDERED["phi3"]


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    fast = byte_tokenizer(TEMPLATES[name])
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    fast.bos_token, fast.eos_token = "<s>", EOS[name]
    return fast


RENDERERS = {name: ChatRenderer(tokenizer(name)) for name in TEMPLATES}


def ids(name: str, text: str) -> tuple[int, ...]:
    return tuple(RENDERERS[name].tokenizer.encode(text, add_special_tokens=False))


def message(role: Role, content: str) -> Message:
    return Message(role=role, content=content)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_conversation_with_a_system_message_an_answer_and_an_observation(name: str) -> None:
    """The policy ends its turn itself, with the one marker that its family ends turns with."""
    renderer = RENDERERS[name]
    prompt, answer, observation = RENDERED[name]
    rendered = renderer.prompt([message("system", "rules"), message("user", "q")])
    assert rendered == ids(name, prompt)
    assert renderer.bridge((*rendered, *ids(name, answer)), [message("user", "obs")]) == ids(
        name, observation
    )
    unclosed = (*rendered, *ids(name, "hello"))
    assert (*unclosed, *renderer.bridge(unclosed, [message("user", "obs")])) == (
        *rendered, *ids(name, answer.replace("hello", "hello " if name == "llama2" else "hello")
                        + observation)
    )  # fmt: skip


@given(answer=CONTENT, written=st.sampled_from(["", " ", "</s>", " </s>"]))
def test_an_end_token_after_a_space_occurs_once(answer: str, written: str) -> None:
    """Llama 2's template writes a space before the marker; a policy closes with or without it."""
    [end] = ids("llama2", "</s>")
    turn = (*ids("llama2", answer), *ids("llama2", written))
    whole = (*turn, *RENDERERS["llama2"].bridge(turn, [message("user", "obs")]))
    assert whole.count(end) == 1
    assert whole == ids("llama2", f"{answer}{written if '</s>' in written else ' </s>'}<s>[INST] obs [/INST]")


def test_templates_that_support_a_system_message() -> None:
    assert {name for name, renderer in RENDERERS.items() if renderer.supports_system} == {
        "llama2",
        "phi3",
        "phi3 twice",
    }


@pytest.mark.parametrize("name", ["gemma", "mistral", "llama2"])
def test_neighbours_of_one_role_are_joined_if_roles_must_alternate(name: str) -> None:
    renderer = RENDERERS[name]
    messages = [message("system", "rules"), message("user", "one"), message("user", "two")]
    assert renderer.prompt(messages) == renderer.prompt(
        [message("system", "rules"), message("user", "one\n\ntwo")]
    )
    turn = ids(name, "hello")
    assert renderer.bridge(turn, messages[1:]) == renderer.bridge(turn, [message("user", "one\n\ntwo")])


def test_a_system_message_alone_becomes_a_user_message() -> None:
    assert RENDERERS["mistral"].prompt([message("system", "rules")]) == ids(
        "mistral", "<s>[INST] rules [/INST]"
    )


def test_joined_texts_form_no_marker() -> None:
    joined = RENDERERS["silent"].prompt([message("system", "<|en"), message("user", "d|>")])
    assert joined == ids("silent", "<|user|>\n<|en\n\nd|><|end|>\n<|assistant|>\n")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (MISTRAL.replace("bos_token", "nothing.at.all"),
         "no usable chat template: it refuses user, assistant: "),
        ("{% if messages | length > 2 %}{{ raise_exception('one turn\nonly') }}{% endif %}" + TURNS,
         "it refuses user, assistant, user: one turn only"),
        ("{{ messages[0]['content'] }}", "drops assistant messages"),
        (TURNS.replace("m['content']", "(m['content'] if m['role'] == 'assistant' else '')"),
         "drops user messages"),
        (TURNS.replace("m['content']", "(m['content'] if loop.last else '')"),
         "drops an observation after an answer"),
        (TURNS.replace("'<|end|>\n'", "('<|end|>\n' if not loop.last else '<|endoftext|>')"),
         "closes the last assistant"),
    ],
)  # fmt: skip
def test_templates_that_cannot_render_are_errors_at_load(template: str, reason: str) -> None:
    fast = tokenizer("phi3")
    fast.chat_template = template
    with pytest.raises(ModelError) as error:
        ChatRenderer(fast)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_role_that_the_template_refuses_later_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="refuses user, assistant, tool: "):
        RENDERERS["mistral"].bridge(ids("mistral", "hello"), [message("tool", "obs")])


# Turns with calls and thinking

CALLS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}THINKING{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<call>' + c['function'] | tojson }}ID{{ '</call>' }}{% endfor %}"
    "{{ END }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
CALL = ToolCall(name="lookup", arguments={"key": "c"}, call_id="call00000")
RESULT = Message(role="tool", content="found", tool_call_id="call00000", tool_name="lookup")


def calling_renderer(role: Role, *, thinking: str = "", call_id: str = "", end: str = "") -> ChatRenderer:
    fast = tokenizer("phi3 twice")
    fast.chat_template = (
        CALLS.replace("THINKING", thinking).replace("ID", call_id).replace("END", end or "'\n<|end|>\n'")
    )
    return ChatRenderer(fast, call_format="hermes", observations=(role,))


@pytest.mark.parametrize(
    "renderer",
    [
        calling_renderer("tool", end="'<|end|>\n\n' if loop.last and m['tool_calls'] else '\n<|end|>\n'"),
        calling_renderer("tool", call_id="{{ '' if m == messages[-1] else c['id'] }}"),
    ],
    ids=["another end of the last turn", "ids of earlier calls"],
)
def test_a_call_that_is_rendered_differently_at_the_end_of_a_conversation(renderer: ChatRenderer) -> None:
    check_template(renderer, ("tool",))
    encode, call = renderer.template.encode, "<call>...</call>"
    ids = [*renderer.prompt([message("user", "q")], TOOLS), *encode(call)]
    for written in ("", "\n<|end|>"):
        turn = [*ids, *encode(written)]
        whole = [*ids, *encode("\n<|end|>\n<|tool|>\nfound\n<|end|>\n<|assistant|>\n")]
        assert [*turn, *renderer.bridge(turn, [RESULT])] == whole


def test_an_end_after_the_result_is_not_that_of_the_call() -> None:
    end = "'</s>' if loop.last and m['tool_calls'] else '' if m['tool_calls'] else '\n<|end|>\n'"
    with pytest.raises(ModelError, match=r"a call, then its result\): it drops its text"):
        check_template(calling_renderer("tool", end=end), ("tool",))


def test_thinking_that_is_rendered_only_with_calls_has_a_key() -> None:
    """Kimi K2's template does so at the end of a conversation."""
    thinking = (
        "{% if m['role'] == 'assistant' %}"
        "{{ '<think>' + ((m['reasoning_content'] or '') if m['tool_calls'] else '') + '</think>' }}"
        "{% endif %}"
    )
    renderer = calling_renderer("tool", thinking=thinking)
    turn = Message(role="assistant", content="", reasoning="because", tool_calls=(CALL,))
    text = renderer.whole_text([message("user", "q"), turn, RESULT], TOOLS)
    assert "<|assistant|>\n<think>because</think><call>" in text and text.count("because") == 1


@pytest.mark.parametrize(("role", "answer"), [("user", "an answer"), ("tool", "another call")])
def test_thinking_that_is_dropped_after_a_further_turn_is_reported(role: Role, answer: str) -> None:
    """LFM2.5 keeps the thinking of the last turn, wherever that is."""
    thinking = (
        "{% set last = messages | selectattr('role', 'equalto', 'assistant') | list | last %}"
        "{% if m['role'] == 'assistant' and m['reasoning_content'] and m == last %}"
        "{{ '<think>' + m['reasoning_content'] + '</think>' }}{% endif %}"
    )
    differs = check_template(calling_renderer(role, thinking=thinking), (role,)).differs
    assert any(order.startswith("thinking") and answer in order for order in differs)


@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_a_rollout_with_a_system_message_and_observations_finishes(name: str) -> None:
    class Ruled(Fake):
        def reset(self, seed: int) -> tuple[Message, ...]:
            return (message("system", "rules"), message("user", self.question))

    factory = Factory(
        lambda task, number: Ruled(
            on_step=lambda n, t: say("obs", "user") if n < 2 else StepResult(message=None, done=True)
        )
    )
    engine = scripted(lambda request, context: "go.")
    engine.tokenizer = RENDERERS[name].tokenizer
    runs = Scheduler(
        engine=engine,
        renderer=RENDERERS[name],
        factory=factory,
        limits=Limits(step_timeout_s=60),
        sampling=Sampling(stop=(".",)),
        run_seed=0,
    )
    [trace] = runs.run(tasks(1), modes=("m",), training_step=0).traces
    assert trace.leaves[0].outcome is Outcome.FINISHED
    shown = decode_text(
        engine.tokenizer, trace.token_ids(trace.leaves[0].node_id or 0), skip_special_tokens=False
    )
    assert shown.count("rules") == 1 and shown.count("obs") == 2
