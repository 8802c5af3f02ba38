"""The chat client against a real server on this machine that misbehaves in every known way."""

import shlex
import shutil
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from outrider.engines.chat import ChatEndpoint, ChatReply, EndpointSettings, reply_text, wire_messages
from outrider.errors import ConfigError, EngineFault, ModelError
from outrider.types import Message
from tests.chat_server import Answer, ChatServer, chat_server, completion

QUESTION = (Message(role="user", content="why?"),)
GOOD = completion("because")


def endpoint(server: ChatServer, waits: list[float] | None = None, **settings: Any) -> ChatEndpoint:
    chosen = EndpointSettings(
        **{"base_url": server.url, "model": "m", "timeout_s": 5.0, "max_retries": 2, **settings}
    )
    return ChatEndpoint(chosen, sleep=(waits if waits is not None else []).append)


def ask(chat: ChatEndpoint, messages: tuple[Message, ...] = QUESTION, **options: Any) -> ChatReply:
    return chat.complete(messages, **{"max_tokens": 9, "temperature": 0.5, "seed": 3, **options})


def test_a_request_contains_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    with chat_server([GOOD]) as server:
        reply = ask(endpoint(server, api_key_variable="MY_KEY"), stop=("</a>",), seed=2**40 + 5)
    assert reply == ChatReply(text="because", finish="stop", num_tokens=7)
    (asked,) = server.asked
    assert (asked.path, asked.authorization) == ("/v1/chat/completions", "Bearer sk-secret")
    assert asked.body == {
        "model": "m", "messages": [{"role": "user", "content": "why?"}], "max_tokens": 9, "temperature": 0.5,
        "seed": 5, "stop": ["</a>"],
    }  # fmt: skip


def test_a_request_contains_the_rendering_of_the_conversation() -> None:
    said = [
        *QUESTION,
        Message(role="assistant", content="<think>\na\n</think>\n\nlook"),
        Message(role="user", content="seen"),
        Message(role="assistant", content="b</think>take"),
        Message(role="inline", content=" it"),
    ]
    kwargs = {"enable_thinking": False}
    with chat_server([GOOD, GOOD]) as server:
        ask(endpoint(server, history_thinking="strip", template_kwargs=kwargs), tuple(said))
        ask(endpoint(server), tuple(said))
    stripped, kept = (asked.body or {} for asked in server.asked)
    assert (
        stripped["chat_template_kwargs"] == {**kwargs, "history_thinking": "strip"}
        and "chat_template_kwargs" not in kept
    )
    texts = [[message["content"] for message in body["messages"]] for body in (stripped, kept)]
    assert texts[0] == ["why?", "look", "seen", "b</think>take", " it"]
    assert texts[1][1] == said[1].content


def test_no_key_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    with chat_server([GOOD]) as server:
        ask(endpoint(server))
    assert server.asked[0].authorization is None and "stop" not in (server.asked[0].body or {})


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (Answer({"error": {"message": "slow down"}}, status=429), "status 429"),
        (Answer(b"<html>oops</html>", status=500), "status 500"),
        (Answer({}, status=503), "status 503"),
        (Answer(b"<html>not json</html>"), "garbage"),
        (Answer(b'{"choices": [{"mess'), "garbage"),
        (Answer({"choices": []}), "garbage"),
        (Answer({"choices": [{"message": {"content": 5}}]}), "garbage"),
        (Answer([1]), "garbage"),
        (Answer(b"[" * 100_000), "garbage"),
        (Answer(b"\xff\xfe"), "garbage"),
        (Answer(drop=True), "connection"),
        (completion("half an ans", finish="abort"), "aborted"),
        (completion(None, finish="error"), "aborted"),
        (completion("half an ans", finish="insufficient_system_resource"), "aborted"),
    ],
)
def test_transient_errors_are_retried_and_counted(bad: Answer, kind: str) -> None:
    waits: list[float] = []
    with chat_server([bad, bad, GOOD]) as server:
        chat = endpoint(server, waits)
        assert ask(chat).text == "because"
    assert chat.retries == {kind: 2} and len(server.asked) == 3 and len(waits) == 2


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Answer({"error": {"message": "slow\ndown"}}, status=429), "status 429 Too Many Requests: slow down"),
        (Answer(b"nope"), "the answer is no JSON: nope"),
        (Answer(b'data: {"choices": []}'), 'the answer is no JSON, it is a stream: data: {"choices": []}'),
        (Answer({"error": {"message": "busy"}}), 'the response has no completion: {"message": "busy"}'),
    ],
)
def test_after_the_last_try_one_clear_line(bad: Answer, words: str) -> None:
    with chat_server([bad]) as server, pytest.raises(EngineFault) as fault:
        ask(endpoint(server))
    assert str(fault.value) == f"{server.url}/chat/completions: gave up after 3 tries, the last: {words}"
    assert len(server.asked) == 3


def test_a_stall_is_a_timeout() -> None:
    forever = threading.Event()
    with chat_server([Answer(GOOD.body, hold=forever)]) as server:
        began = time.monotonic()
        with pytest.raises(EngineFault, match=r"gave up after 2 tries, the last: no answer within 0\.2 s"):
            ask(endpoint(server, timeout_s=0.2, max_retries=1))
        assert time.monotonic() - began < 20
        forever.set()


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        (Answer(completion("x" * 2000).body, trickle=True), r"no answer within 0\.3 s"),
        (Answer(trickle_headers=True), r"no answer within 0\.3 s"),
        (Answer(b"x" * 2000, status=500, trickle=True), "status 500"),
    ],
    ids=["body", "headers", "error"],
)
def test_a_byte_now_and_then_is_a_stall_too(slow: Answer, words: str) -> None:
    """Every single read is quick (50 ms); only the answer as a whole is late."""
    with chat_server([slow]) as server:
        began = time.monotonic()
        with pytest.raises(EngineFault, match=words):
            ask(endpoint(server, timeout_s=0.3, max_retries=0))
        assert time.monotonic() - began < 20


def test_over_tls_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer, a stall in the headers, and a certificate that nobody vouches for."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = shlex.split(
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(
        ["openssl", *made, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with chat_server([GOOD, Answer(trickle_headers=True)]) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = server.url.replace("http:", "https:")
        with pytest.raises(EngineFault, match="no connection"):
            ask(endpoint(server, base_url=url, max_retries=0))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert ask(endpoint(server, base_url=url)).text == "because"
        began = time.monotonic()
        with pytest.raises(EngineFault, match=r"no answer within 0\.5 s"):
            ask(endpoint(server, base_url=url, timeout_s=0.5, max_retries=0))
        assert time.monotonic() - began < 20


def test_a_port_without_a_listener() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        settings = EndpointSettings(base_url=f"http://127.0.0.1:{taken.getsockname()[1]}/v1", max_retries=1)
        chat = ChatEndpoint(settings, sleep=lambda seconds: None)
        with pytest.raises(EngineFault, match="gave up after 2 tries, the last: no connection"):
            ask(chat)
        assert chat.retries == {"connection": 1}


def test_waits_double_with_jitter_from_a_named_stream() -> None:
    def waits_of(seed: int, key: int) -> list[float]:
        waits: list[float] = []
        with chat_server([Answer({}, status=500)]) as server, pytest.raises(EngineFault):
            ask(
                endpoint(server, waits, seed=seed, max_retries=6, backoff_s=1.0, max_backoff_s=10.0), seed=key
            )
        return waits

    waits = waits_of(0, 1)
    assert (
        all(min(10.0, 2.0**i / 2) <= wait <= min(10.0, 2.0**i) for i, wait in enumerate(waits))
        and len(waits) == 6
    )
    assert waits == waits_of(0, 1)
    assert waits[:3] != waits_of(0, 2)[:3] and waits[:3] != waits_of(1, 1)[:3]


@pytest.mark.parametrize(("asked", "waited"), [("4", 4.0), ("9999", 30.0)])
def test_retry_after_is_heeded_up_to_the_maximum(asked: str, waited: float) -> None:
    waits: list[float] = []
    with chat_server([Answer({}, status=429, headers={"Retry-After": asked}), GOOD]) as server:
        ask(endpoint(server, waits))
    assert waits == [waited]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_hopeless_status_codes_raise_a_model_error_at_once(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "sk-secret")
    with chat_server([Answer({"error": {"message": "no: sk-secret"}}, status=status)]) as server:
        with pytest.raises(ModelError, match=f"status {status}") as error:
            ask(endpoint(server))
        assert len(server.asked) == 1
    assert "sk-secret" not in str(error.value) and "no: ***" in str(error.value)


def test_a_refused_request_and_a_redirect_are_faults_at_once() -> None:
    for answer in (
        Answer({"message": "context too long"}, status=400),
        Answer({}, status=302, headers={"Location": "/v2"}),
    ):
        with chat_server([answer]) as server:
            with pytest.raises(EngineFault, match=f"status {answer.status}"):
                ask(endpoint(server))
            assert len(server.asked) == 1


def test_an_empty_response_that_the_model_ended_is_an_empty_turn() -> None:
    odd = Answer(
        {
            "choices": [{"message": {"role": "assistant", "tool_calls": []}, "finish_reason": "tool_calls"}],
            "usage": None,
        }
    )
    with chat_server([completion(None), odd]) as server:
        assert ask(endpoint(server)).text == ""
        assert ask(endpoint(server)) == ChatReply(text="", finish="tool_calls")


@pytest.mark.parametrize(
    ("finish", "is_cut"),
    [("MAX_TOKENS", True), ("model_context_window_exceeded", True), ("STOP", False), ("eos_token", False)],
)
def test_finish_reasons_of_other_servers(finish: str, is_cut: bool) -> None:
    with chat_server([completion("half an answer", finish=finish)]) as server:
        assert ask(endpoint(server)).truncated is is_cut


@pytest.mark.parametrize(
    "nothing",
    [
        Answer({"choices": [{"message": {}}]}),
        Answer({"choices": [{"message": {"content": None}}]}),
        completion(None, finish="content_filter"),
        completion("half of it", finish="content_filter"),
    ],
)
def test_an_answer_that_the_model_did_not_end_is_a_fault_and_no_empty_turn(nothing: Answer) -> None:
    with chat_server([nothing, GOOD]) as server:
        chat = endpoint(server)
        assert ask(chat).text == "because" and chat.retries.total() == 1
    with chat_server([nothing]) as server, pytest.raises(EngineFault, match="gave up"):
        ask(endpoint(server))


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://x/v1", "127.0.0.1:80", "http://", "http://a b/v1", "http://h:99999"]
)
def test_only_http_addresses(url: str) -> None:
    with pytest.raises(ValidationError):
        EndpointSettings(base_url=url)


def test_a_key_that_cannot_be_sent_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "a\nb")
    with pytest.raises(ConfigError, match="OUTRIDER_API_KEY"):
        ChatEndpoint(EndpointSettings(base_url="http://h/v1"))


def test_discovery() -> None:
    models = Answer({"data": [{"id": "big", "owned_by": "vllm"}, {"id": "small", "owned_by": "me"}]})
    with chat_server([models]) as server:
        found = endpoint(server, model="default").discovered()
        assert (found.model, found.continues_messages) == ("big", True)
        found = endpoint(server, model="small").discovered()
        assert (found.model, found.continues_messages) == ("small", False)
        with pytest.raises(ModelError, match="serves big, small, not other"):
            endpoint(server, model="other").discovered()
    with chat_server([Answer({}, status=404)]) as server:
        chat = endpoint(server, model="default")
        assert chat.discovered() == chat.settings
    with chat_server([Answer({}, status=401)]) as server, pytest.raises(ModelError, match="valid key"):
        endpoint(server).discovered()


OPEN = (
    Message(role="system", content="s"),
    Message(role="user", content="q"),
    Message(role="assistant", content="<search>x</search>"),
    Message(role="inline", content="\n<result>r</result>\n"),
)


def test_inline_results_continue_the_message_where_the_server_can() -> None:
    with chat_server([GOOD]) as server:
        ask(endpoint(server, continues_messages=True), OPEN)
        ask(endpoint(server, continues_messages=True), OPEN[:2])
        ask(endpoint(server), OPEN)
    continued, opened, plain = (asked.body or {} for asked in server.asked)
    assert continued["messages"][2:] == [
        {"role": "assistant", "content": "<search>x</search>\n<result>r</result>\n"}
    ]
    assert (continued["continue_final_message"], continued["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in opened and "continue_final_message" not in plain
    assert [m["role"] for m in plain["messages"]] == ["system", "user", "assistant", "user"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant", "tool", "inline"]), st.text(max_size=5))
    ),
    st.booleans(),
)
def test_no_text_is_lost_on_the_wire(said: list[tuple[Any, str]], continues: bool) -> None:
    wire, _ = wire_messages([Message(role=role, content=text) for role, text in said], continues=continues)
    assert "".join(message["content"] for message in wire) == "".join(text for _, text in said)
    assert {message["role"] for message in wire} <= {"system", "user", "assistant"}


STOP = ("</search>", "</answer>")


@pytest.mark.parametrize(
    ("text", "choice", "expected"),
    [
        ("<search>x</search> and more</answer>", {}, "<search>x</search>"),
        ("<search>x", {"finish_reason": "stop"}, "<search>x</search>"),
        ("<search>x", {"finish_reason": "length"}, "<search>x"),
        ("<search>x", {"finish_reason": "stop", "stop_reason": "</search>"}, "<search>x</search>"),
        ("<search>x", {"finish_reason": "stop", "stop_reason": None}, "<search>x"),
        ("<search>x", {"finish_reason": "stop", "stop_reason": 128009}, "<search>x"),
        ("<search>x <answer>y", {"finish_reason": "stop"}, "<search>x <answer>y</answer>"),
        ("no tag at all", {"finish_reason": "stop"}, "no tag at all"),
    ],
)
def test_the_stop_string_that_a_server_leaves_out(text: str, choice: dict[str, Any], expected: str) -> None:
    assert reply_text(text, STOP, choice) == expected


def test_top_p_and_top_k_are_sent_only_if_they_are_set() -> None:
    with chat_server([completion("hi")]) as server:
        chat = ChatEndpoint(EndpointSettings(base_url=server.url))
        message = [Message(role="user", content="q")]
        chat.complete(message, max_tokens=9, temperature=0.5)
        chat.complete(message, max_tokens=9, temperature=0.5, top_p=0.95, top_k=20)
        without, truncated = [asked.body for asked in server.asked]
    assert without is not None and truncated == {**without, "top_p": 0.95, "top_k": 20}
    assert not {"top_p", "top_k"} & without.keys()


def test_a_content_in_parts_is_text_and_thinking() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
             {"type": "text", "text": "be"}, {"type": "text", "text": "cause"}]  # fmt: skip
    with chat_server([completion(parts), completion([{"type": "image_url"}])]) as server:  # type: ignore[arg-type]
        chat = endpoint(server, max_retries=0)
        reply = ask(chat)
        assert (reply.text, reply.reasoning) == ("because", "Hm.")
        with pytest.raises(EngineFault, match="a part of the type image_url"):
            ask(chat)


def test_a_server_that_requires_the_newer_name_of_the_limit_gets_it() -> None:
    text = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    refusal = Answer({"error": {"message": text}}, status=400)
    with chat_server([refusal, GOOD, GOOD, refusal]) as server:
        chat = endpoint(server)
        assert ask(chat).text == ask(chat).text == "because"
        with pytest.raises(EngineFault, match="max_completion_tokens"):
            ask(chat)
    bodies = [asked.body for asked in server.asked if asked.body is not None]
    assert [("max_tokens" in body, body.get("max_completion_tokens")) for body in bodies] == [
        (True, None), (False, 9), (False, 9), (False, 9)
    ]  # fmt: skip


def test_a_call_in_the_older_form_is_no_empty_turn() -> None:
    message = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}
    old = Answer({"choices": [{"message": message, "finish_reason": "function_call"}]})
    with chat_server([old]) as server, pytest.raises(EngineFault, match="no completion"):
        ask(endpoint(server, max_retries=0))
