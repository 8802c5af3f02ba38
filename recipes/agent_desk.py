"""The agent of recipes/agent-desk.toml: a program with a loop of its own, which knows OpenAI's client and
nothing of Outrider. It sorts the letters of a shop by asking the model two questions about each.
"""

from typing import Any

from openai import OpenAI

DESKS = ("billing", "shipping", "returns")
HASTE = ("urgent", "normal")


def sort(task: Any) -> dict[str, Any]:
    """Half a reward for the right desk, half for the right haste; a success is both."""
    client = OpenAI(max_retries=0)
    desk, haste = task.answers[0].split()
    messages: list[Any] = [
        {"role": "system", "content": "You sort letters. Answer with one word."},
        {"role": "user", "content": f"{task.question}\nWhich desk: {', '.join(DESKS)}?"},
    ]
    chosen = ask(client, messages, DESKS)
    messages.append({"role": "user", "content": f"Is it {' or '.join(HASTE)}?"})
    marked = ask(client, messages, HASTE)
    reward = 0.5 * (chosen == desk) + 0.5 * (marked == haste)
    return {"reward": reward, "success": reward == 1}


def ask(client: OpenAI, messages: list[Any], words: tuple[str, ...]) -> str | None:
    """The first of the words in the model's answer, which joins the history."""
    done = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
    text = done.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    places = {text.lower().find(word): word for word in words}
    return min(((at, word) for at, word in places.items() if at >= 0), default=(0, None))[1]


def answer(task: Any, messages: list[dict[str, str]]) -> str:
    """What one who knows would say, for a cold start: a small model has to meet the form of the answers."""
    desk, haste = task.answers[0].split()
    return desk if "Which desk" in messages[-1]["content"] else haste
