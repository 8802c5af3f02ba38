"""Agents whose policy calls tools in ways that fit no schema, and that ask what cannot be answered."""

import json
import urllib.error
import urllib.request
from typing import Any

from tests.environments.agents.clients import WEATHER
from tests.environments.agents.programs import chat, post

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def _streamed(messages: list[Any], tools: list[Any]) -> dict[str, Any]:
    from openai import OpenAI

    with OpenAI(max_retries=0).chat.completions.stream(model="p", messages=messages, tools=tools) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    return choice.message.model_dump(exclude_none=True)


def recovering(task: Any) -> dict[str, Any]:
    """Answers each call with an error until one fits, and goes on with its history. The task says how it
    asks.
    """
    ask, expected = task.answers[0], json.loads(task.answers[1])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "weather?"}]
    found: list[list[str]] = []
    while True:
        if ask == "stream":
            said = _streamed(messages, [WEATHER]) if not found else chat(messages, tools=[WEATHER])
        else:
            said = chat(messages, tools=[WEATHER])
        calls = said.get("tool_calls") or []
        if not calls:
            break
        messages.append({key: said[key] for key in ("role", "content", "tool_calls") if key in said})
        for call in calls:
            found.append([call["function"]["name"], call["function"]["arguments"]])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "error: no"})
    if found != expected:
        raise ValueError(f"{found} is not {expected}")
    return {"reward": float(said["content"] == "done")}


def recovering_items(task: Any) -> float:
    """The same by ``/v1/responses``, where what came out goes back as it is."""
    tool: dict[str, Any] = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
    items: list[Any] = [{"role": "user", "content": "weather?"}]
    found: list[list[str]] = []
    while True:
        out = post("/responses", {"input": items, "tools": [tool]})["output"]
        items += out
        calls = [one for one in out if one["type"] == "function_call"]
        if not calls:
            break
        for call in calls:
            found.append([call["name"], call["arguments"]])
            items.append({"type": "function_call_output", "call_id": call["call_id"],
                          "output": [{"type": "input_text", "text": "error: no"}]})  # fmt: skip
    expected = json.loads(task.answers[1])
    if found != expected:
        raise ValueError(f"{found} is not {expected}")
    return float(out[-1]["content"][0]["text"] == "done")


def defaulting(task: Any) -> float:
    """OpenAI's Agents SDK with a function whose argument has a default, which the policy leaves out."""
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    @function_tool
    def weather(city: str, days: int = 1) -> str:
        """The weather of a city."""
        return f"sunny for {days}"

    agent = Agent(name="Forecaster", instructions="Be brief.", tools=[weather], model="policy")
    return float(Runner.run_sync(agent, task.question, max_turns=4).final_output == "It is sunny.")


def status_of(messages: list[dict[str, Any]], **fields: Any) -> tuple[int, dict[str, Any]]:
    try:
        return 200, chat(messages, **fields)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def refused_then_asking(task: Any) -> float:
    """Asks in roles that the task names, which must be refused, in front of a turn and behind one."""
    roles, reason = json.loads(task.answers[0]), task.answers[1]
    odd = [{"role": role, "content": role} for role in roles]
    hello = [{"role": "user", "content": "hello"}]
    for begun in ([], hello):
        messages = [*begun, *([chat(begun)] if begun else [])]
        status, told = status_of([*messages, *odd] if begun else odd)
        assert status == 400 and reason in told["message"], (status, told)
        assert (told["type"], told["param"]) == ("invalid_request_error", "messages"), told
    chat([*messages, {"role": "user", "content": "well?"}])
    return 1.0


def always_refused(task: Any) -> float:
    """Asks nothing that can be answered, and pays itself."""
    status, _ = status_of([{"role": "assistant", "content": "a"}, {"role": "system", "content": "b"}])
    status, _ = status_of([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])
    return float(status == 400)


def always_malformed(task: Any) -> float:
    """Sends the fields of the task twice, and pays itself."""
    body = {"messages": [{"role": "user", "content": "a"}], **json.loads(task.answers[0])}
    for _ in range(2):
        try:
            post("/chat/completions", body)
        except urllib.error.HTTPError as error:
            assert error.code == 400
    return 1.0


def outgrowing(task: Any) -> float:
    """A history that grows beyond the context. The task says what it does then: shorten it, fail, or pay."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    while True:
        status, told = status_of(messages)
        if status != 200:
            assert (status, told["code"]) == (400, "context_length_exceeded"), (status, told)
            break
        messages += [told, {"role": "user", "content": "x" * 300}]
    if task.answers[0] == "fails":
        raise RuntimeError("too long")
    if task.answers[0] == "pays":
        return 0.5
    if task.answers[0] == "insists":
        while True:
            status_of(messages)
    assert status_of([{"role": "user", "content": "a summary"}])[0] == 200
    return 1.0


def too_long_at_once(task: Any) -> float:
    """Its first question fits no context."""
    if status_of([{"role": "user", "content": "x" * 9000}])[0] == 400 and task.answers[0] == "shortens":
        chat([{"role": "user", "content": "short"}])
        return 1.0
    raise RuntimeError("too long")


def log_probs(task: Any) -> float:
    """Puts an answer together of the bytes of its tokens."""
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "n": 2}
    for choice in post("/chat/completions", body)["choices"]:
        tokens = choice["logprobs"]["content"]
        joined = bytes(byte for one in tokens for byte in one["bytes"])
        text = choice["message"]["content"]
        assert joined.startswith(text.encode()) and "\\xf0" in [one["token"] for one in tokens], tokens
    return 1.0


def refused_behind_an_endpoint(task: Any) -> float:
    """Its second question is refused, and its third is not."""
    chat([{"role": "user", "content": "hello"}])
    status, told = status_of([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])
    assert status == 400 and "must be at the beginning" in told["message"], (status, told)
    chat([{"role": "user", "content": "well?"}])
    return 1.0
