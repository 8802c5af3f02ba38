"""Agents that the tests run in processes of their own. None of them knows Outrider."""

import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any


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
    """Forgets what was said."""
    chat([{"role": "user", "content": "a"}])
    chat([{"role": "user", "content": "summary of a"}])
    return 0.5


def nested(task: Any) -> float:
    """Asks another agent in the middle, and goes on where it was."""
    messages = [{"role": "user", "content": "plan"}]
    messages.append(chat(messages))
    helper = chat([{"role": "system", "content": "You help."}, {"role": "user", "content": "sub"}])
    messages.append({"role": "user", "content": f"it said {helper['content']}"})
    chat(messages)
    return 1.0


def several(task: Any) -> float:
    """Three answers to one question."""
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


def hanging(task: Any) -> float:
    chat([{"role": "user", "content": "a"}])
    time.sleep(3600)
    return 1.0


def printing(task: Any) -> float:
    """Floods its output while it works."""
    said = chat([{"role": "user", "content": "a"}])
    for _ in range(2000):
        sys.stdout.write("x" * 5000)
    sys.stdout.flush()
    return float(len(said["content"]) > 0)


def endless(task: Any) -> float:
    """Asks for ever."""
    messages = [{"role": "user", "content": "a"}]
    while True:
        messages += [chat(messages), {"role": "user", "content": "more"}]


def garbage(task: Any) -> float:
    """Sends what cannot be served, and then a proper request."""
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
    """Halves of surrogate pairs wherever a request has text."""
    function = {"name": "look\ud83d", "description": "\ud83d", "arguments": '{"at": "\\ud83d"}'}
    call = {"id": "c\ud83d", "type": "function", "function": function}
    said = {"role": "assistant", "content": "", "reasoning_content": "\ud83d", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c\ud83d", "content": "\ud83d"}
    chat([{"role": "user", "content": "a"}, said, result], tools=[{"type": "function", "function": function}])
    return 1.0


def going_on(task: Any) -> float:
    """Looks at all that an answer says of itself, before it asks again."""
    body = {"model": "any", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "logprobs": True}
    done = post("/chat/completions", body)
    [said], tokens = done["choices"], done["usage"]["completion_tokens"]
    told = f"{said['finish_reason']} {tokens} {len(said['logprobs']['content'])}"
    chat([{"role": "user", "content": told}], max_tokens=3)
    return 1.0


def telling(task: Any) -> float:
    """Repeats what an answer says of itself."""
    tool = {"type": "function", "function": {"name": "look"}}
    done = post("/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [tool]})
    [said] = done["choices"]
    chat([{"role": "user", "content": json.dumps([said["finish_reason"], done["usage"]])}])
    return 1.0


def thinking(task: Any) -> float:
    """Repeats the thinking of an answer, which it has asked without tools."""
    said = chat([{"role": "user", "content": "a"}])
    chat([{"role": "user", "content": json.dumps([said["content"], said.get("reasoning_content")])}])
    return 1.0


def halting(task: Any) -> float:
    """Repeats an answer that ended at one of its stop strings, which are the task's answers."""
    tool = {"type": "function", "function": {"name": "look"}}
    said = chat([{"role": "user", "content": "a"}], stop=task.answers, tools=[tool])
    told = [said["content"], said.get("reasoning_content")]
    chat([{"role": "user", "content": json.dumps(told)}])
    return 1.0


def begun(body: Any) -> socket.socket:
    """A request that has been sent, and whose answer somebody may read."""
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
    """Asks two questions and waits for the first answer only; whether it hangs up says the task."""
    first = begun({"messages": [{"role": "user", "content": "first"}]})
    second = begun({"messages": [{"role": "user", "content": "second"}]})
    if task.answers[0] == "hangs up":
        second.close()
    while first.recv(4096):
        pass
    return 1.0


def unsteady(task: Any) -> float:
    """Asks in the same words, and wants something else in every process."""
    chat([{"role": "user", "content": "a"}])
    chat([{"role": "user", "content": "b"}], stop=[f"end {os.getpid()}"])
    return 1.0


def bulky(task: Any) -> str:
    return "x" * 1_000_000


def renaming(task: Any) -> float:
    """Gives the policy's call an id of its own."""
    tool = {"type": "function", "function": {"name": "look"}}
    messages = [{"role": "user", "content": "a"}]
    said = chat(messages, tools=[tool])
    [call] = said["tool_calls"]
    result = {"role": "tool", "tool_call_id": "mine", "content": "b"}
    chat([*messages, {**said, "tool_calls": [{**call, "id": "mine"}]}, result], tools=[tool])
    return 1.0


def ids(task: Any) -> float:
    """How many different ids two calls have."""
    tool = {"type": "function", "function": {"name": "look"}}
    said = chat([{"role": "user", "content": "a"}], tools=[tool])
    return float(len({call["id"] for call in said["tool_calls"] if call["id"]}))


def handing_in(task: Any) -> None:
    """Says what it was worth over the wire."""
    chat([{"role": "user", "content": task.question}])
    post("/reward", {"reward": 0.25, "success": True, "metrics": {"num_words": 3}})
    time.sleep(3600)


def odd(task: Any) -> Any:
    """Comes back with something that is no reward."""
    chat([{"role": "user", "content": "a"}])
    return "a text"


def words(task: Any) -> str:
    return str(chat([{"role": "user", "content": task.question}])["content"])


def score(task: Any, answer: str) -> float:
    return float(answer.strip() == task.answers[0])


def chatty(task: Any) -> float:
    """Two turns, a helper of its own, and a turn behind both; paid by what was said."""
    messages = [{"role": "user", "content": task.question}]
    for word in ("and?", "so?"):
        messages += [chat(messages), {"role": "user", "content": word}]
    helper = chat([{"role": "user", "content": f"help with {task.answers[0]}"}], max_tokens=6)
    messages[-1] = {"role": "user", "content": helper["content"] or "nothing"}
    messages.append(chat(messages))
    return sum(len(one["content"]) for one in messages if one["role"] == "assistant") % 5 / 4


def halved(task: Any, messages: list[dict[str, str]]) -> str:
    """Knows how to play :func:`guess`."""
    low, high = 1, 50
    for message in messages:
        number, _, hint = message["content"].partition(" is too ")
        if hint:
            high, low = (int(number) - 1, low) if hint == "high" else (high, int(number) + 1)
    return str((low + high) // 2)


def one(task: Any, messages: list[dict[str, str]]) -> str:
    return "1"


def cold(task: Any) -> float:
    """Wants to choose how its answers are sampled."""
    for _ in range(2):
        chat([{"role": "user", "content": "a"}], temperature=0.1, seed=7)
    try:
        chat([{"role": "user", "content": "a"}], min_tokens=3)
    except urllib.error.HTTPError as error:
        assert json.load(error)["error"]["param"] == "min_tokens"
        chat([{"role": "user", "content": "a"}], made_up=1)
        return 1.0
    return float(not chat([{"role": "user", "content": "a"}], made_up=1)["content"])
