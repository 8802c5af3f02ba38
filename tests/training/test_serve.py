"""``outrider serve``: the policy of a run over a real socket."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

import httpx2  # noqa: E402
import torch  # noqa: E402

from outrider.cli import main  # noqa: E402
from outrider.engines.base import FinishReason, Generation, Request  # noqa: E402
from outrider.engines.local.engine import make_engine  # noqa: E402
from outrider.environments.agent.server import (
    Gateway,  # noqa: E402
    Session,  # noqa: E402
)
from outrider.errors import EngineFault  # noqa: E402
from outrider.runs import Run  # noqa: E402
from outrider.training.export import (  # noqa: E402
    ConversationDefaults,
    export_run,
    find_checkpoint,
    read_defaults,
)
from outrider.training.run_dir import RECORD, recorded_settings  # noqa: E402
from outrider.training.serve import PolicyServer, load_server, open_session  # noqa: E402
from outrider.training.setup import make_renderer  # noqa: E402
from outrider.viewer.server import bind  # noqa: E402
from tests.tiny import tiny_model  # noqa: E402
from tests.training.short_runs import train  # noqa: E402
from tests.training.tool_run import start_outrider, write_tool_run  # noqa: E402

SYSTEM = "Search, then answer."
QUESTION = {"role": "user", "content": "Where is the lamp?"}
WEATHER = {"name": "weather", "description": "The weather.", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = write_tool_run(tmp_path_factory.mktemp("serve"))
    return train(
        recipe, "run", "train.num_steps=1", "evaluation.num_tasks=1", "evaluation.at_start=false",
        f"environment.system_prompt={SYSTEM}", "evaluation.temperature=0",
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(run: Path) -> PolicyServer:
    return load_server(find_checkpoint(run, None), recorded_settings(run / RECORD), note=pytest.fail)


@contextmanager
def serving_session(
    server: PolicyServer, api_key: str | None = None
) -> Iterator[tuple[Gateway, Session, httpx2.Client]]:
    gateway = Gateway(bind("127.0.0.1", 0))
    session = open_session(gateway, server, host="127.0.0.1", api_key=api_key)
    thread = threading.Thread(target=server.serve, args=(session,))
    thread.start()
    try:
        with httpx2.Client(base_url=gateway.url, timeout=30) as client:
            yield gateway, session, client
    finally:
        gateway.close()
        thread.join(10)
    assert not thread.is_alive()


@contextmanager
def serving(server: PolicyServer, api_key: str | None = None) -> Iterator[httpx2.Client]:
    with serving_session(server, api_key) as (_, _, client):
        yield client


@pytest.fixture(scope="module")
def client(server: PolicyServer) -> Iterator[httpx2.Client]:
    with serving(server) as opened:
        yield opened


def complete(client: httpx2.Client, **fields: Any) -> Any:
    response = client.post("/chat/completions", json={"model": "any", "messages": [QUESTION], **fields})
    assert response.status_code == 200, response.text
    return response.json()


def text(client: httpx2.Client, **fields: Any) -> str:
    return str(complete(client, **fields)["choices"][0]["message"]["content"])


def test_a_turn_is_that_of_the_evaluation(run: Path, server: PolicyServer, client: httpx2.Client) -> None:
    """The run's prompt, stop strings and temperature are used."""
    assert server.defaults.system_prompt == SYSTEM and "</search>" in server.defaults.stop
    nodes = Run.from_path(run).evaluation_traces(0).to_pylist()
    assert [node["origin"] for node in nodes[:2]] == ["prompt", "policy"]
    assert text(client) == nodes[1]["text"]


def test_a_message_of_the_assistant_is_continued(server: PolicyServer, client: httpx2.Client) -> None:
    """Tags, results and the answer are in one message."""
    written = "<search>lamp</search>\n<result>\nlamp: hill\n</result>\n"
    continued = complete(client, messages=[QUESTION, {"role": "assistant", "content": written}])
    num_tokens = len(server.renderer.tokenizer.encode(written, add_special_tokens=False))
    assert continued["usage"]["prompt_tokens"] == complete(client)["usage"]["prompt_tokens"] + num_tokens
    assert continued["choices"][0]["message"]["content"].startswith("<")


def test_thinking_stays_in_a_text_that_is_continued(server: PolicyServer) -> None:
    """The context of the continuation is that of training."""
    turn = "<think>Look it up.</think><search>lamp</search>"
    seen: list[tuple[int, ...]] = []

    class Thinking:
        context_length = 4096

        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            seen.append(tuple(requests[0].token_ids))
            ids = tuple(server.renderer.tokenizer.encode(turn, add_special_tokens=False))
            logprobs = (0.0,) * len(ids)
            return [
                Generation(
                    request_id=request.request_id,
                    token_ids=ids,
                    logprobs=logprobs,
                    entropies=logprobs,
                    finish_reason=FinishReason.STOP,
                    weight_version=0,
                )
                for request in requests
            ]

    thinking = replace(server, engine=Thinking())
    with serving(thinking) as client:
        assert text(client) == turn
        result = "\n<result>\nlamp: hill\n</result>\n"
        complete(client, messages=[QUESTION, {"role": "assistant", "content": turn + result}])
    assert server.renderer.tokenizer.decode(seen[1][len(seen[0]) :]) == turn + result


def test_fields_of_a_request(client: httpx2.Client) -> None:
    system = {"role": "system", "content": "Be brief."}
    num_context = complete(client)["usage"]["prompt_tokens"]
    own = complete(client, messages=[system, QUESTION])["usage"]["prompt_tokens"]
    assert num_context - own == len(SYSTEM) - len("Be brief.")
    short = complete(client, max_tokens=1)
    assert short["usage"]["completion_tokens"] == 1 and short["choices"][0]["finish_reason"] == "length"
    whole = text(client)
    assert whole.endswith((">",)) and text(client, stop="<") == ""
    hot = {"temperature": 1.5, "n": 4, "max_tokens": 24}
    drawn = [
        [choice["message"]["content"] for choice in complete(client, **hot, seed=seed)["choices"]]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) > 1
    assert complete(client, **hot)["choices"] != complete(client, **hot)["choices"]
    events = client.post("/chat/completions", json={"messages": [QUESTION], "stream": True}).text
    assert events.endswith("data: [DONE]\n\n") and json.dumps(whole)[1:-1] in events


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "a number from 0"),
        ({"temperature": "hot"}, "temperature", "a number from 0"),
        ({"seed": 0.5}, "seed", "whole number"),
        ({"tools": [{"type": "function", "function": WEATHER}]}, "tools", "without native tool calls"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not constrained"),
        ({"logit_bias": {"1": 2}}, "logit_bias", "not constrained"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "messages", "maximum context length"),
    ],
)
def test_a_refused_request_is_an_error_object(
    client: httpx2.Client, fields: dict[str, Any], param: str, words: str
) -> None:
    response = client.post("/chat/completions", json={"messages": [QUESTION], **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert words in error["message"] and "environment." not in error["message"]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (EngineFault("the GPU is lost"), "the GPU is lost"),
        (
            torch.OutOfMemoryError("CUDA out of memory.\n\x1b[2J"),
            "OutOfMemoryError: CUDA out of memory.  [2J",
        ),
        (AssertionError(), "AssertionError: "),
    ],
)
def test_a_failed_generation_is_a_server_error_and_the_server_continues(
    server: PolicyServer,
    failure: Exception,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    freed: list[str] = []

    class Failing:
        context_length = server.engine.context_length

        def generate(self, requests: list[Request]) -> list[Generation]:
            if len(requests) == 4:
                raise failure
            return server.engine.generate(requests)

        def free_cache(self) -> None:
            freed.append("engine")

    monkeypatch.setattr("torch.cuda.empty_cache", lambda: freed.append("cuda"))
    with serving(replace(server, engine=Failing())) as client:  # type: ignore[arg-type]
        response = client.post("/chat/completions", json={"messages": [QUESTION], "n": 4})
        assert text(client)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["message"]) == (500, "server_error", message)
    assert capsys.readouterr().err == f"a request failed: {message}\n"
    assert freed == (["engine", "cuda"] if isinstance(failure, torch.OutOfMemoryError) else ["engine"])


class Blocked:
    """An engine whose generations wait for ``may_continue``."""

    def __init__(self, server: PolicyServer) -> None:
        self.context_length = server.engine.context_length
        self.may_continue = threading.Event()
        self.num_generations = 0
        self._engine = server.engine

    def generate(self, requests: list[Request]) -> list[Generation]:
        self.num_generations += 1
        assert self.may_continue.wait(30)
        return self._engine.generate(requests)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_requests_of_clients_that_are_gone_are_skipped(
    server: PolicyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They also leave the queue to others."""
    monkeypatch.setattr("outrider.environments.agent.server.MAX_WAITING", 4)
    engine, body = Blocked(server), {"messages": [QUESTION]}
    headers = {"content-type": "application/json"}
    with serving_session(replace(server, engine=engine)) as (_, session, client):  # type: ignore[arg-type]
        try:
            for number in range(1, 5):
                leaving = HTTPConnection("127.0.0.1", client.base_url.port)
                leaving.request("POST", "/v1/chat/completions", json.dumps(body), headers)
                wait_until(lambda number=number: session.num_requests == number)  # type: ignore[misc]
                wait_until(lambda: engine.num_generations == 1)
                leaving.close()
            wait_until(lambda: all(pending.is_abandoned for pending in session._pending))
            threading.Timer(0.05, engine.may_continue.set).start()
            assert client.post("/chat/completions", json=body).status_code == 200
        finally:
            engine.may_continue.set()
    assert engine.num_generations == 2


def test_a_full_queue_and_the_end_of_the_server_are_no_mistakes_of_clients(
    server: PolicyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients retry after the status 429 and 503."""
    monkeypatch.setattr("outrider.environments.agent.server.MAX_WAITING", 1)
    engine, body, responses = Blocked(server), {"messages": [QUESTION]}, []
    with serving_session(replace(server, engine=engine)) as (gateway, session, client):  # type: ignore[arg-type]
        waiting = threading.Thread(
            target=lambda: responses.append(
                httpx2.post(f"{gateway.url}/chat/completions", json=body, timeout=30)
            )
        )
        waiting.start()
        try:
            wait_until(lambda: session.num_requests == 1)
            assert client.post("/chat/completions", json=body).status_code == 429
            gateway.close()
            waiting.join(30)
        finally:
            engine.may_continue.set()
    error = responses[0].json()["error"]
    assert (responses[0].status_code, error["message"]) == (503, "the server is stopping")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": ""}, 415),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"content-type": "Application/JSON; charset=utf-8", "origin": "OWN"}, 200),
    ],
)
def test_a_web_page_cannot_start_generations(
    client: httpx2.Client, headers: dict[str, str], status: int
) -> None:
    own = str(client.base_url).removesuffix("/v1/")
    headers = {name: value.replace("OWN", own) for name, value in headers.items()}
    content = json.dumps({"messages": [QUESTION], "max_tokens": 1})
    response = client.post(
        "/chat/completions", content=content, headers={"content-type": "application/json"} | headers
    )
    assert response.status_code == status, response.text


def test_a_page_under_another_name_is_refused_and_models_are_listed(client: httpx2.Client) -> None:
    assert [model["id"] for model in client.get("/models").json()["data"]] == ["policy"]
    response = client.get("/models", headers={"host": "evil.example"})
    assert response.status_code == 403 and "Host" in response.json()["error"]["message"]


def test_a_key_is_checked(server: PolicyServer) -> None:
    with serving(server, api_key="sesame") as client:
        assert client.get("/models").json()["error"]["code"] == "invalid_api_key"
        key = {"authorization": "Bearer sesame", "host": "gpu.example"}
        assert client.get("/models", headers=key).status_code == 200


def test_tools_of_the_run_and_the_client_of_openai(server: PolicyServer) -> None:
    openai = pytest.importorskip("openai", reason="needs the package openai")
    environment = server.settings.environment.model_copy(update={"protocol": "hermes"})
    settings = server.settings.model_copy(update={"environment": environment})
    assert settings.environment.call_format == "hermes"
    language_model = tiny_model(context=4096)
    defaults = ConversationDefaults(system_prompt=SYSTEM, tools=(WEATHER,))
    native = PolicyServer(
        settings=settings,
        engine=make_engine(language_model),
        renderer=make_renderer(language_model.tokenizer, settings.model, settings.environment),
        defaults=defaults,
    )
    written = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'

    class Calling:
        context_length = 4096

        def generate(self, requests: list[Request]) -> list[Generation]:
            prompt = language_model.tokenizer.decode(requests[0].token_ids)
            ids = tuple(language_model.tokenizer.encode(written if '"weather"' in prompt else "no tools"))
            zeros = (0.0,) * len(ids)
            return [
                Generation(
                    request_id="", token_ids=ids, logprobs=zeros, entropies=zeros,
                    finish_reason=FinishReason.LENGTH, weight_version=0,
                )
            ]  # fmt: skip

    native.engine = Calling()  # type: ignore[assignment]
    with serving(native) as client:
        caller = openai.OpenAI(base_url=str(client.base_url), api_key="any", max_retries=0)
        answer = caller.chat.completions.create(model="policy", messages=[QUESTION])
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", "{}")
        plain = caller.chat.completions.create(model="policy", messages=[QUESTION], tool_choice="none")
        assert plain.choices[0].message.content == "no tools"
        with pytest.raises(openai.BadRequestError, match="at most 16"):
            caller.chat.completions.create(model="policy", messages=[QUESTION], n=99)


def test_the_export_has_prompt_and_stop_strings(run: Path, server: PolicyServer, tmp_path: Path) -> None:
    export_run(run, tmp_path / "out", note=pytest.fail)
    written = json.loads((tmp_path / "out" / "outrider.json").read_text())
    assert written["system_prompt"] == SYSTEM and tuple(written["stop"]) == server.defaults.stop
    config = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert "stop_strings" not in config  # generate() would need the tokenizer as an argument
    export_run(run, tmp_path / "shared", with_prompt=False)
    assert "system_prompt" not in json.loads((tmp_path / "shared" / "outrider.json").read_text())


def test_an_environment_that_is_missing_is_reported(run: Path, tmp_path: Path) -> None:
    settings = recorded_settings(run / RECORD, [f"environment.corpus={tmp_path}/none.jsonl"])
    notes: list[str] = []
    defaults = read_defaults(settings, note=notes.append, starts_slowly=True)
    assert defaults.system_prompt == "" and "</search>" in defaults.stop
    (line,) = notes
    assert line.startswith("the system prompt and the tools of the run are unknown: ")


def test_the_key_has_no_white_space(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    monkeypatch.setenv("SERVE_KEY", " sesame\n")
    monkeypatch.setattr("outrider.training.serve.serve_run", lambda *_, api_key, **__: keys.append(api_key))
    assert main(["serve", str(run), "--api-key-env", "SERVE_KEY"]) == 0 and keys == ["sesame"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "--api-key-env NAME"),
        (["--api-key-env", "UNSET_KEY"], "UNSET_KEY: the environment variable is not set"),
        (["--api-key-env", "EMPTY_KEY"], "EMPTY_KEY: the environment variable is empty"),
        (["--port", "70000"], "0 to 65535"),
    ],
)
def test_addresses_of_others_need_a_key(
    run: Path,
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EMPTY_KEY", "\n")
    assert main(["serve", str(run), *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line


def test_a_checkpoint_that_does_not_exist_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(run), "--step", "7"]) == 1
    assert "no checkpoint of step 7 (of steps: 0, 1)" in capsys.readouterr().err


@pytest.mark.long
def test_the_command_prints_its_address_and_ends_with_ctrl_c(run: Path) -> None:
    process = start_outrider("serve", run, "--port", "0")
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(4)]
    url = lines[0].split(" at ")[1].split()[0]
    assert lines[1] == f"system prompt: {SYSTEM}\n" and lines[3] == "tools: none\n"
    with httpx2.Client(base_url=url, timeout=30) as client:
        assert text(client)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and "Traceback" not in errors
