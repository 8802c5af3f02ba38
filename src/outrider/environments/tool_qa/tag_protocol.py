r"""The papers' tag protocol: think, call a tool, read its result and answer, all inside one assistant
message.

The policy writes ``<think>..</think><search>query</search>`` and stops; the environment continues the message
with one constant form of result, in training and in evaluation. Source: ARPO (arXiv 2507.19849) section 3.2
and appendix. Everything here works on the policy's own turns. Results stay apart from them, so nothing that a
tool returns can pass for the policy's text or break its format.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from outrider.environments.grading.answers import last_boxed

ANSWER = "answer"
_LOOK_ALIKE = re.compile(r"<(?=[/|\uff5c]?[A-Za-z_][\w|\uff5c\u2581.-]*\s*>|[|\uff5c])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The policy asks for a tool; ``argument`` is stripped and not empty."""

    tool: str
    argument: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The policy answers; ``text`` is the inside of the answer tag."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """A tag was closed that cannot be read; ``reason`` is told to the policy."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAction:
    """The turn ended without closing any tool or answer tag."""


Action: TypeAlias = Call | Answer | Malformed | NoAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One policy turn and what the environment did with it. ``executed_tool`` names a tool that really ran;
    ``result`` is what was inserted after the turn (a refusal or complaint too), None where nothing was.
    """

    text: str
    executed_tool: str | None = None
    result: str | None = None


def stop_strings(tools: Sequence[str]) -> tuple[str, ...]:
    """The strings that end a policy turn, kept in its text."""
    return tuple(f"</{name}>" for name in (*tools, ANSWER))


def parse_action(text: str, tools: Sequence[str]) -> Action:
    """Read one turn. The first closing tag decides; its opening tag is the last one before it.

    Behind the closing tag only what one token can add (blanks, punctuation) may follow.
    """
    ends = [(position, name) for name in (*tools, ANSWER) if (position := text.find(f"</{name}>")) >= 0]
    if not ends:
        return NoAction()
    position, name = min(ends)
    if re.search(r"[\w<]", text[position + len(f"</{name}>") :]):
        return Malformed(reason=f"Nothing may follow </{name}>.")
    _, opening, inside = text[:position].rpartition(f"<{name}>")
    if not opening:
        return Malformed(reason=f"</{name}> without <{name}>.")
    if name == ANSWER:
        return Answer(text=inside.strip())
    if not inside.strip():
        return Malformed(reason=f"<{name}> is empty.")
    return Call(tool=name, argument=inside.strip())


def neutralise(text: str) -> str:
    """Tool output in which nothing reads as a tag or as a chat template's special token: their ``<`` becomes
    ``&lt;``.
    """
    return _LOOK_ALIKE.sub("&lt;", text)


def render_result(text: str) -> str:
    """The one form in which a result continues the message."""
    return f"\n<result>\n{neutralise(text).strip()}\n</result>\n"


def format_fault(
    turns: Sequence[Turn], tools: Sequence[str], *, require_think: bool, require_boxed: bool
) -> str | None:
    """Why the episode's format is bad, or None when it is good (ARPO eq. 8).

    Good means: think tags open and close in turn (at least once where required), no result tag in the
    policy's text, tool tags paired and each call followed by a result, exactly one answer, in the last turn,
    with a closed box where required.
    """
    text = "".join(turn.text for turn in turns)
    if (fault := _think_fault(text, required=require_think)) is not None:
        return fault
    if re.search(r"</?(?:result|retrieve)>", text):
        return "the policy wrote a result tag"
    for tool in tools:
        if not _is_alternating(text, tool):
            return f"<{tool}> and </{tool}> are not paired"
    # A turn ends at its call, so one turn has one call and one result.
    if any(
        turn.result is None or sum(turn.text.count(f"</{tool}>") for tool in tools) > 1 for turn in turns[:-1]
    ):
        return "a tool call without a result"
    if text.count(f"<{ANSWER}>") != 1 or text.count(f"</{ANSWER}>") != 1:
        return "not exactly one <answer> and one </answer>"
    action = parse_action(turns[-1].text, tools)
    if not isinstance(action, Answer):
        return "the last turn does not answer"
    if require_boxed and last_boxed(action.text) is None:
        return "no closed \\boxed{} in the answer"
    return None


def _think_fault(text: str, *, required: bool) -> str | None:
    if required and "<think>" not in text:
        return "no <think>"
    return None if _is_alternating(text, "think") else "<think> and </think> are not paired"


def _is_alternating(text: str, name: str) -> bool:
    """Whether opening and closing tags come strictly in turn and end closed."""
    tags = re.findall(rf"</?{re.escape(name)}>", text)
    return len(tags) % 2 == 0 and all(
        tag == f"<{'/' if index % 2 else ''}{name}>" for index, tag in enumerate(tags)
    )
