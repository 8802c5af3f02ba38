"""Agent programs of the tests. They call the policy with urllib.

:func:`run` runs the program that a task names, so that many tests can share one launcher.
"""

import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


def run(task: Any) -> Any:
    return globals()[task.metadata["program"]](task)


def post(path: str, body: Any) -> Any:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        body if isinstance(body, bytes) else json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def chat(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"model": "any", "messages": messages, **fields}
    return post("/chat/completions", body)["choices"][0]["message"]


def guess(task: Any) -> float:
    """Halves the numbers from 1 to 50; the secret is the task's answer."""
    secret = int(task.answers[0])
    messages = [{"role": "system", "content": "Guess 1-50."}, {"role": "user", "content": "first guess?"}]
    for _ in range(7):
        said = chat(messages)
        number = int(said["content"])
        if number == secret:
            return 1.0
        hint = "high" if number > secret else "low"
        messages += [said, {"role": "user", "content": f"{number} is too {hint}"}]
    return 0.0


def rewriting(task: Any) -> float:
    """Begins another conversation."""
    chat([{"role": "user", "content": "a"}])
    chat([{"role": "user", "content": "summary of a"}])
    return 0.5


def nested(task: Any) -> float:
    """Calls another agent in the middle and then continues."""
    messages = [{"role": "user", "content": "plan"}]
    messages.append(chat(messages))
    helper = chat([{"role": "system", "content": "You help."}, {"role": "user", "content": "sub"}])
    messages.append({"role": "user", "content": f"it said {helper['content']}"})
    chat(messages)
    return 1.0


def several(task: Any) -> float:
    """Requests three answers at once."""
    body = {"model": "any", "messages": [{"role": "user", "content": "q"}], "n": 3}
    found = [one["message"]["content"] for one in post("/chat/completions", body)["choices"]]
    return float(len(found))


def silent(task: Any) -> float:
    return 1.0


def dying(task: Any) -> float:
    chat([{"role": "user", "content": "a"}])
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def raising(task: Any) -> float:
    chat([{"role": "user", "content": "a"}])
    raise RuntimeError("no idea")


def raising_group(task: Any) -> float:
    chat([{"role": "user", "content": "a"}])
    raise ExceptionGroup("unhandled errors in a TaskGroup", [LookupError("no tool")])


def hanging(task: Any) -> float:
    chat([{"role": "user", "content": "a"}])
    time.sleep(3600)
    return 1.0


def printing(task: Any) -> float:
    """Prints 10 MB."""
    said = chat([{"role": "user", "content": "a"}])
    for _ in range(2000):
        sys.stdout.write("x" * 5000)
    sys.stdout.flush()
    return float(len(said["content"]) > 0)


def endless(task: Any) -> float:
    """Never ends."""
    messages = [{"role": "user", "content": "a"}]
    while True:
        messages += [chat(messages), {"role": "user", "content": "more"}]


def garbage(task: Any) -> float:
    """Sends malformed requests and rewards, and then a valid request."""
    wrong = [
        b"{", b"[]", b"\xff\xfe", b'{"messages": 3}', b'{"messages": []}', b'{"messages": [1]}',
        b'{"messages": [{"role": "king", "content": "x"}]}', b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "n": 1000}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}',
        b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
        b'{"messages": [{"role": "assistant", "tool_calls": 5}, {"role": "user", "content": "x"}]}',
    ]  # fmt: skip
    refused = 0
    for body in wrong:
        try:
            post("/chat/completions", body)
        except urllib.error.HTTPError as error:
            refused += error.code == 400
    assert refused == len(wrong), refused
    odd = [b"{}", b'"x"', b'{"reward": "much"}', b"1e999", b'{"reward": 1, "metrics": 3}',
           b'{"reward": 1, "metrics": {"\\ud800": "x"}}']  # fmt: skip
    for body in odd:
        try:
            post("/reward", body)
        except urllib.error.HTTPError as error:
            refused += error.code == 400
    chat([{"role": "user", "content": "a"}])
    return float(refused)


def halves(task: Any) -> float:
    """Sends lone surrogates in every text of a request."""
    function = {"name": "look\ud83d", "description": "\ud83d", "arguments": '{"at": "\\ud83d"}'}
    call = {"id": "c\ud83d", "type": "function", "function": function}
    said = {"role": "assistant", "content": "", "reasoning_content": "\ud83d", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c\ud83d", "content": "\ud83d"}
    chat([{"role": "user", "content": "a"}, said, result], tools=[{"type": "function", "function": function}])
    return 1.0


def going_on(task: Any) -> float:
    """Repeats finish reason and numbers of tokens of an answer."""
    body = {"model": "any", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "logprobs": True}
    done = post("/chat/completions", body)
    [said], tokens = done["choices"], done["usage"]["completion_tokens"]
    told = f"{said['finish_reason']} {tokens} {len(said['logprobs']['content'])}"
    chat([{"role": "user", "content": told}], max_tokens=3)
    return 1.0


def telling(task: Any) -> float:
    """Repeats finish reason and usage of an answer."""
    done = post("/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [LOOK]})
    [said] = done["choices"]
    chat([{"role": "user", "content": json.dumps([said["finish_reason"], done["usage"]])}])
    return 1.0


def thinking(task: Any) -> float:
    """Repeats the reasoning of an answer to a request without tools."""
    said = chat([{"role": "user", "content": "a"}])
    chat([{"role": "user", "content": json.dumps([said["content"], said.get("reasoning_content")])}])
    return 1.0


def halting(task: Any) -> float:
    """Repeats an answer. Its stop strings are the task's answers."""
    said = chat([{"role": "user", "content": "a"}], stop=task.answers, tools=[LOOK])
    told = [said["content"], said.get("reasoning_content")]
    chat([{"role": "user", "content": json.dumps(told)}])
    return 1.0


def begun(body: Any) -> socket.socket:
    """Send a request; its answer can be read from the socket."""
    url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    data = json.dumps(body).encode()
    head = (
        f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
        f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection = socket.create_connection((str(url.hostname), int(url.port or 0)))
    connection.sendall(head.encode() + data)
    return connection


def leaving(task: Any) -> float:
    """Sends two requests and waits for the first answer; the task decides whether it closes the second."""
    first = begun({"messages": [{"role": "user", "content": "first"}]})
    second = begun({"messages": [{"role": "user", "content": "second"}]})
    if task.answers[0] == "hangs up":
        second.close()
    while first.recv(4096):
        pass
    return 1.0


def unsteady(task: Any) -> float:
    """Sends another stop string in every process."""
    chat([{"role": "user", "content": "a"}])
    chat([{"role": "user", "content": "b"}], stop=[f"end {os.getpid()}"])
    return 1.0


def bulky(task: Any) -> str:
    return "x" * 1_000_000


def renaming(task: Any) -> float:
    """Replaces the id of the policy's call."""
    messages = [{"role": "user", "content": "a"}]
    said = chat(messages, tools=[LOOK])
    [call] = said["tool_calls"]
    result = {"role": "tool", "tool_call_id": "mine", "content": "b"}
    chat([*messages, {**said, "tool_calls": [{**call, "id": "mine"}]}, result], tools=[LOOK])
    return 1.0


def ids(task: Any) -> float:
    """Returns the number of different ids of the calls."""
    said = chat([{"role": "user", "content": "a"}], tools=[LOOK])
    return float(len({call["id"] for call in said["tool_calls"] if call["id"]}))


def handing_in(task: Any) -> None:
    """Posts its reward."""
    chat([{"role": "user", "content": task.question}])
    post("/reward", {"reward": 0.25, "success": True, "metrics": {"num_words": 3}})
    time.sleep(3600)


def odd(task: Any) -> Any:
    """Returns no reward."""
    chat([{"role": "user", "content": "a"}])
    return "a text"


def words(task: Any) -> str:
    return str(chat([{"role": "user", "content": task.question}])["content"])


def score(task: Any, answer: str) -> float:
    return float(answer.strip() == task.answers[0])


def exiting(task: Any, answer: str) -> float:
    sys.stderr.close()
    sys.exit("no key")


def judged(task: Any, answer: str) -> float:
    """A judge that asks the endpoint of the environment."""
    return float("b" in chat([{"role": "user", "content": answer}])["content"])


def chatty(task: Any) -> float:
    """Two turns, a helper, and another turn; the reward depends on the answers."""
    messages = [{"role": "user", "content": task.question}]
    for word in ("and?", "so?"):
        messages += [chat(messages), {"role": "user", "content": word}]
    helper = chat([{"role": "user", "content": f"help with {task.answers[0]}"}], max_tokens=6)
    messages[-1] = {"role": "user", "content": helper["content"] or "nothing"}
    messages.append(chat(messages))
    return sum(len(one["content"]) for one in messages if one["role"] == "assistant") % 5 / 4


def halved(task: Any, messages: list[dict[str, str]]) -> str:
    """The expert of :func:`guess`."""
    low, high = 1, 50
    for message in messages:
        number, _, hint = message["content"].partition(" is too ")
        if hint:
            high, low = (int(number) - 1, low) if hint == "high" else (high, int(number) + 1)
    return str((low + high) // 2)


def cold(task: Any) -> float:
    """Sends sampling settings, and a field that is refused by default."""
    for _ in range(2):
        chat([{"role": "user", "content": "a"}], temperature=0.1, seed=7)
    try:
        chat([{"role": "user", "content": "a"}], min_tokens=3)
    except urllib.error.HTTPError as error:
        assert json.load(error)["error"]["param"] == "min_tokens"
        chat([{"role": "user", "content": "a"}], made_up=1)
        return 1.0
    return float(not chat([{"role": "user", "content": "a"}], made_up=1)["content"])


def one_call(task: Any) -> float:
    """Takes one call per turn, and requests one after a turn without calls."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    said = chat(messages, tools=[LOOK], parallel_tool_calls=False)
    if said.get("tool_calls") or said["content"].count("<tool_call>") != 2:
        raise ValueError(said)
    messages += [said, {"role": "user", "content": "one, please"}]
    said = chat(messages, tools=[LOOK], parallel_tool_calls=False)
    [call] = said["tool_calls"]
    messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "seen"}]
    return float(chat(messages, tools=[LOOK], parallel_tool_calls=False)["content"] == "done")


def json_wanted(task: Any) -> float:
    """Returns the number of answered requests for JSON."""
    found = 0
    schema = {"name": "s", "schema": {"type": "object"}}
    for wanted in ({"type": "json_object"}, {"type": "json_schema", "json_schema": schema}):
        try:
            chat([{"role": "user", "content": "a"}], response_format=wanted)
        except urllib.error.HTTPError:
            continue
        found += 1
    chat([{"role": "user", "content": "b"}], response_format={"type": "text"})
    return float(found)


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def beside_others(task: Any) -> Any:
    """Fails as the task names, or waits until all others have ended, by their pipes in a folder."""
    folder, kind = task.question, task.answers[0]
    chat([{"role": "user", "content": kind}])
    if kind != "fine":
        os.open(f"{folder}/{kind}", os.O_WRONLY)
        return BREAKS[kind]()
    for other in BREAKS:
        with open(f"{folder}/{other}") as held:  # at its end when the one that holds it is gone
            held.read()
    chat([{"role": "user", "content": "still here"}])
    return 1.0


def _deep() -> Any:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


def _silenced() -> float:
    sys.stderr.close()
    raise ValueError("unheard")


def _wordless() -> float:
    raise Wordless


def _status() -> float:
    raise SystemExit(1 << 40 | 3)


BREAKS: dict[str, Callable[[], Any]] = {
    "deep": _deep, "silenced": _silenced, "wordless": _wordless, "status": _status
}  # fmt: skip


def early(task: Any) -> float:
    raise RuntimeError("no config")


def scalar(task: Any) -> Any:
    """Returns the value of the question as a Python expression."""
    import numpy as np

    chat([{"role": "user", "content": "a"}])
    return eval(task.question, {"np": np})


def overwriting(task: Any) -> Any:
    chat([{"role": "user", "content": "a"}])
    return {"reward": 1, "metrics": {task.question: 99}}


def recovering(task: Any) -> dict[str, Any]:
    """Answers each call with an error until there is none. The task lists the expected calls."""
    expected = json.loads(task.answers[0])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "weather?"}]
    found: list[list[str]] = []
    while True:
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
    """The same with ``/v1/responses``, whose output is sent back unchanged."""
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
    expected = json.loads(task.answers[0])
    if found != expected:
        raise ValueError(f"{found} is not {expected}")
    return float(out[-1]["content"][0]["text"] == "done")


def status_of(messages: list[dict[str, Any]], **fields: Any) -> tuple[int, dict[str, Any]]:
    try:
        return 200, chat(messages, **fields)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def refused_then_asking(task: Any) -> float:
    """Sends roles that must be refused, before the first turn and after it."""
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
    """Sends only conversations that the template refuses."""
    status, _ = status_of([{"role": "assistant", "content": "a"}, {"role": "system", "content": "b"}])
    status, _ = status_of([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])
    return float(status == 400)


def always_malformed(task: Any) -> float:
    """Sends the fields of the task twice."""
    body = {"messages": [{"role": "user", "content": "a"}], **json.loads(task.answers[0])}
    for _ in range(2):
        try:
            post("/chat/completions", body)
        except urllib.error.HTTPError as error:
            assert error.code == 400
    return 1.0


def outgrowing(task: Any) -> float:
    """Fills the context. The task decides what it does then."""
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
    """Its first request does not fit into the context."""
    if status_of([{"role": "user", "content": "x" * 9000}])[0] == 400 and task.answers[0] == "shortens":
        chat([{"role": "user", "content": "short"}])
        return 1.0
    raise RuntimeError("too long")


def log_probs(task: Any) -> float:
    """Joins the bytes of the tokens of an answer."""
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "n": 2}
    for choice in post("/chat/completions", body)["choices"]:
        tokens = choice["logprobs"]["content"]
        joined = bytes(byte for one in tokens for byte in one["bytes"])
        text = choice["message"]["content"]
        assert joined.startswith(text.encode()) and "\\xf0" in [one["token"] for one in tokens], tokens
    return 1.0


def refused_behind_an_endpoint(task: Any) -> float:
    """Only its second request is refused."""
    chat([{"role": "user", "content": "hello"}])
    status, told = status_of([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])
    assert status == 400 and "must be at the beginning" in told["message"], (status, told)
    chat([{"role": "user", "content": "well?"}])
    return 1.0
