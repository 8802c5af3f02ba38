"""Fields of a request's body, or what is wrong with them in words."""

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from outrider.environments.conversations import Conversation, SampledTurn, ServedTurn
from outrider.tokens.call_formats import sanitize_call
from outrider.tokens.tool_calls import call_from_arguments
from outrider.types import Message, Role, ToolCall, ToolSchema, is_text


class BadRequest(Exception):
    """A request that cannot be served; the text tells the program why. ``param`` is the field, ``code`` what
    OpenAI's clients know such an error by.
    """

    def __init__(self, text: str, *, param: str | None = None, code: str = "invalid_request_error") -> None:
        super().__init__(text)
        self.param = param
        self.code = code


def mapping(value: Any, label: str, *, param: str | None = None) -> dict[str, Any]:
    """A JSON object. Raises BadRequest."""
    if not isinstance(value, dict):
        raise BadRequest(f"{label} must be a JSON object", param=param)
    return value


def count(fields: Mapping[str, Any], name: str) -> int | None:
    """A number of at least one, where it is given. Raises BadRequest."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadRequest(f"{name} must be a whole number of at least 1", param=name)
    return value


def flag(fields: Mapping[str, Any], name: str) -> bool:
    """True or false; false where it is not given. Raises BadRequest."""
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise BadRequest(f"{name} is true or false", param=name)
    return bool(value)


# The tools of a request, and what it wants of the calls. Nothing asked for is left out in silence.


_MAX_DEPTH: Final = 64  # of a schema; templates write it, and readers walk through it


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """``choice`` is as the request has it; ``single_call``: a turn may hold one call at most. ``ignored``:
    fields that change nothing.
    """

    tools: tuple[ToolSchema, ...]
    choice: Any
    single_call: bool
    ignored: tuple[str, ...] = ()


def read_tools(fields: Mapping[str, Any], *, takes_tools: bool) -> ToolRequest:
    """The tools of a request, in the nested form or the flat one of ``/v1/responses``. Raises BadRequest."""
    tools = fields.get("tools") or []
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    if tools and not takes_tools:
        raise BadRequest(
            "tools: name the form of the policy's calls in the recipe (environment.tool_calls = hermes, say)",
            param="tools",
        )
    ignored: list[str] = []
    read = tuple(_tool(tool, ignored) for tool in tools)
    choice = fields.get("tool_choice") or "auto"
    _require_choice(choice, [str(tool["name"]) for tool in read])
    if choice not in ("auto", "none"):
        ignored.append("tool_choice")
    return ToolRequest(
        tools=() if choice == "none" else read,
        choice=choice,
        single_call=fields.get("parallel_tool_calls") is not None and not flag(fields, "parallel_tool_calls"),
        ignored=tuple(ignored),
    )


def _require_choice(choice: Any, names: list[str]) -> None:
    if choice in ("auto", "none") or (choice == "required" and names):
        return
    if not isinstance(choice, dict):
        words = "no tools are sent" if choice == "required" else "known are auto, none, required, a function"
        raise BadRequest(f"tool_choice {choice!r}: {words}", param="tool_choice")
    if choice.get("type") != "function":
        raise BadRequest(
            f"a tool_choice of the type {choice.get('type')!r}: only a function can be named",
            param="tool_choice",
        )
    function = mapping(choice.get("function", choice), "tool_choice's function", param="tool_choice")
    name = function.get("name")
    if name not in names:
        raise BadRequest(
            f"tool_choice names {name!r}; the tools are {', '.join(names) or 'none'}", param="tool_choice"
        )


def _tool(value: Any, ignored: list[str]) -> ToolSchema:
    tool = mapping(value, "a tool", param="tools")
    if tool.get("type") != "function":
        raise BadRequest(f"a tool of type {tool.get('type')!r}: only functions can be called", param="tools")
    function = mapping(tool.get("function", tool), "a tool's function", param="tools")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRequest("a tool's function has no name", param="tools")
    name = function["name"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    _require_schema(mapping(parameters, f"the parameters of {name}", param="tools"), name)
    known = ("type", "function", "name", "description", "parameters")
    ignored += [f"tools.{key}" for key, value in (tool | function).items() if value and key not in known]
    return {"name": name, "description": str(function.get("description") or ""), "parameters": parameters}


def _require_schema(schema: Mapping[str, Any], name: str) -> None:
    """The form of what reads calls and of what templates write; a schema may say more than that."""
    location = f"the schema of {name}'s parameters"
    pending: list[tuple[Any, int]] = [(schema, 0)]  # no recursion: how deep it goes, the program decides
    while pending:
        node, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise BadRequest(f"{location} has more than {_MAX_DEPTH} levels", param="tools")
        if isinstance(node, bool):
            continue  # anything, or nothing
        if not isinstance(node, dict):
            raise BadRequest(f"{location} holds {node!r:.40}, which is no schema", param="tools")
        for key, is_right in _FORMS.items():
            if node.get(key) is not None and not is_right(node[key]):
                raise BadRequest(f"{location}: {key} cannot be {node[key]!r:.40}", param="tools")
        pending += [(inner, depth + 1) for inner in _inner(node)]


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_FORMS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "type": lambda value: isinstance(value, str) or _is_text_list(value),
    "required": _is_text_list,
    "enum": lambda value: isinstance(value, list),
    "properties": lambda value: isinstance(value, dict),
    "description": lambda value: isinstance(value, str),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), lambda value: isinstance(value, list)),
}


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    yield from (schema.get("properties") or {}).values()
    for key in ("anyOf", "oneOf", "allOf"):
        yield from schema.get(key) or []
    for key in ("items", "additionalProperties"):
        inner = schema.get(key)
        if key == "items" and isinstance(inner, list):  # a tuple's, up to draft 7
            yield from inner
        elif inner is not None:
            yield inner


# What becomes of every field of a request: done, refused with status 400, or ignored and counted.
#
# One table for the code, the documentation (``python -m outrider.environments.agent.requests`` prints it)
# and the tests. A field that is in no row is ignored and counted.


RequestPath: TypeAlias = Literal["chat/completions", "responses"]
Use: TypeAlias = Literal["done", "ignored", "refused", "elsewhere"]
"""``elsewhere``: a field of the other path alone, which is refused on this one."""
CHAT: Final[RequestPath] = "chat/completions"
RESPONSES: Final[RequestPath] = "responses"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestField:
    """One field. ``defaults`` are the values that ask for nothing, null beside them. ``reason`` says why it
    is not done, or how. ``is_ignorable``: ``environment.ignored_fields`` may name it, so that requests with
    it are answered.
    """

    name: str
    chat: Use
    responses: Use
    defaults: tuple[Any, ...] = ()
    reason: str = ""
    is_ignorable: bool = False

    def use(self, path: RequestPath) -> Use:
        """What becomes of it on a path."""
        return self.chat if path == CHAT else self.responses

    def is_default(self, value: Any) -> bool:
        """Whether the value is the default of OpenAI's or vLLM's servers."""
        return value is None or any(
            value == default and isinstance(value, bool) == isinstance(default, bool)
            for default in self.defaults
        )


def _done(*names: str, chat: bool = True, responses: bool = True, reason: str = "") -> list[RequestField]:
    uses: tuple[Use, Use] = ("done" if chat else "elsewhere", "done" if responses else "elsewhere")
    return [
        RequestField(
            name=name,
            chat=uses[0],
            responses=uses[1],
            defaults=(1,) if name == "n" else ([], {}, "", False),
            reason=reason,
        )
        for name in names
    ]


def _ignored(reason: str, **defaults: tuple[Any, ...]) -> list[RequestField]:
    return [
        RequestField(name=name, chat="ignored", responses="ignored", defaults=values, reason=reason)
        for name, values in defaults.items()
    ]


def _refused(reason: str, *, is_ignorable: bool = True, **defaults: tuple[Any, ...]) -> list[RequestField]:
    return [
        RequestField(
            name=name,
            chat="refused",
            responses="refused",
            defaults=values,
            reason=reason,
            is_ignorable=is_ignorable,
        )
        for name, values in defaults.items()
    ]


_OWN_SAMPLING: Final = "sampling is the run's own (algorithm and evaluation settings)"
_HINT: Final = "a hint to OpenAI's models, which changes no policy"
_ACCOUNTING: Final = "for the books of a hosted service"
_FREE: Final = "a policy in training writes freely"
_FORM: Final = f"{_FREE}: nothing holds its answer to a form"
_PROMPT: Final = "the prompt is rendered by the run's own template and variables (model.template_kwargs)"
_TOKENS: Final = "requests and answers are text"
_STATELESS: Final = "nothing is kept between requests: send the whole input each time"

FIELDS: Final[tuple[RequestField, ...]] = (
    *_done("model", reason="a model of any name is the policy"),
    *_done("messages", responses=False),
    *_done("input", "instructions", chat=False),
    *_done("tools", reason="functions; `strict` is ignored, other types are refused"),
    *_done("tool_choice", reason="`required` and a named function are ignored: nothing forces a call"),
    *_done("parallel_tool_calls"),
    *_done("max_tokens", "max_completion_tokens", "stop", "n", "logprobs", responses=False),
    *_done("response_format", responses=False, reason="JSON by `environment.response_format` alone"),
    *_done("text", chat=False, reason="as `response_format`; `verbosity` is ignored"),
    *_done("max_output_tokens", chat=False),
    *_done("include", chat=False, reason="log-probs are refused here, all else is ignored"),
    *_done("stream"),
    *_done("stream_options", reason="`include_usage` in chat completions; all else is ignored"),
    *_ignored(
        _OWN_SAMPLING,
        temperature=(1,), top_p=(1,), top_k=(-1, 0), min_p=(0,), typical_p=(1,), top_a=(0,), seed=(),
        presence_penalty=(0,), frequency_penalty=(0,), repetition_penalty=(1,), length_penalty=(1,),
    ),
    *_ignored(_HINT, reasoning_effort=(), reasoning=({},), verbosity=("medium",), prediction=()),
    *_ignored("a limit of OpenAI's own tools, which are not here", max_tool_calls=()),
    *_ignored("too long conversations are refused, not shortened", truncation=("disabled",)),
    *_ignored(
        _ACCOUNTING,
        user=("",), safety_identifier=("",), metadata=({},), store=(False,), request_id=(),
        service_tier=("auto", "default"), prompt_cache_key=("",), prompt_cache_retention=(),
        prompt_cache_options=(), cache_salt=(), priority=(0,), moderation=(),
        access_programs=(), background_options=(),
    ),
    *_ignored(
        "of no effect here", spaces_between_special_tokens=(True,), guided_decoding_backend=(),
        guided_whitespace_pattern=(), mm_processor_kwargs=({},), media_io_kwargs=({},), image=({},),
        add_special_tokens=(False,), kv_transfer_params=({},),
    ),
    *_refused(
        "only the log-probs of the drawn tokens are known", top_logprobs=(0,), prompt_logprobs=(False,),
    ),
    *_refused(
        f"{_FREE}: nothing changes its probabilities",
        logit_bias=({},), bad_words=([],), allowed_token_ids=(), logits_processors=([],), custom_params=({},),
        vllm_xargs=({},), no_repeat_ngram_size=(0,),
    ),
    *_refused(
        "the policy's own end token, stop and the token limits end its turns",
        min_tokens=(0,), stop_token_ids=([],), ignore_eos=(False,), include_stop_str_in_output=(False,),
        no_stop_trim=(False,), stop_regex=([], ""),
    ),
    *_refused("one turn is sampled for each answer", best_of=(1,), use_beam_search=(False,)),
    *_refused(
        _FORM,
        structured_outputs=({},), guided_json=(), guided_regex=(), guided_choice=(), guided_grammar=(),
        structural_tag=(), json_schema=(), regex=(), ebnf=(), grammar=(),
    ),
    *_refused(
        _PROMPT,
        chat_template=(), chat_template_kwargs=({},), documents=([],), add_generation_prompt=(True,),
        continue_final_message=(False,), echo=(False,), truncate_prompt_tokens=(),
        enable_thinking=(), thinking=(), thinking_budget=(), thinking_token_budget=(),
    ),
    *_refused(
        "special tokens are left out, and thinking is given apart",
        skip_special_tokens=(True,), include_reasoning=(True,), separate_reasoning=(True,),
    ),
    *_refused(
        _TOKENS,
        return_token_ids=(False,), return_tokens_as_token_ids=(False,), return_hidden_states=(False,),
    ),
    *_refused("the policy writes text", modalities=(["text"], []), audio=()),
    *_refused("there are no tools but those that are sent", web_search_options=()),
    *_refused("send tools and tool_choice, which have taken its place", is_ignorable=False,
              functions=([],), function_call=()),
    *_refused(_STATELESS, is_ignorable=False, previous_response_id=("",), conversation=(),
              context_management=([],), previous_input_messages=([],)),
    *_refused("no prompts are stored here", is_ignorable=False, prompt=()),
    *_refused("an answer comes with its request", is_ignorable=False, background=(False,)),
)  # fmt: skip

_FIELDS_BY_NAME: Final[Mapping[str, RequestField]] = {one.name: one for one in FIELDS}
IGNORABLE: Final = frozenset(one.name for one in FIELDS if one.is_ignorable)


def ignored_fields(
    body: Mapping[str, Any], path: RequestPath, *, accepted: Collection[str] = ()
) -> tuple[str, ...]:
    """The fields of a request that are not done, sorted. ``accepted`` are those that the recipe wants
    ignored.

    Raises BadRequest for a field that is refused.
    """
    ignored: list[str] = []
    for name, value in sorted(body.items()):
        field = _FIELDS_BY_NAME.get(name)
        if field is None:
            ignored += [name] if value is not None else []
            continue
        use = field.use(path)
        if use == "done" or field.is_default(value):
            continue
        if use == "elsewhere":
            raise BadRequest(f"{name}: /v1/{path} has no such field", param=name)
        if use == "refused" and name not in accepted:
            hint = (
                f'; with environment.ignored_fields = ["{name}"] the request is answered without it'
                if field.is_ignorable
                else ""
            )
            raise BadRequest(f"{name}: {field.reason}{hint}", param=name, code="unsupported_parameter")
        ignored.append(name)
    return tuple(ignored)


def fields_table() -> str:
    """The table of the documentation."""
    names = {CHAT: "chat completions", RESPONSES: "responses"}
    rows: dict[tuple[str, str, str], list[str]] = {}
    for field in FIELDS:
        uses = {path: "refused" if field.use(path) == "elsewhere" else field.use(path) for path in names}
        key = (uses[CHAT], uses[RESPONSES], _reason_text(field))
        rows.setdefault(key, []).append(f"`{field.name}`")
    lines = [f"| fields | {names[CHAT]} | {names[RESPONSES]} | |", "| --- | --- | --- | --- |"]
    lines += [f"| {', '.join(group)} | {key[0]} | {key[1]} | {key[2]} |" for key, group in rows.items()]
    lines.append("| all others | ignored | ignored | |")
    return "\n".join(lines) + "\n"


def _reason_text(field: RequestField) -> str:
    if "refused" in (field.chat, field.responses) and not field.is_ignorable:
        return f"{field.reason} (always refused)"
    return field.reason


if __name__ == "__main__":
    sys.stdout.write(fields_table())


# Chat completions as OpenAI's clients write and read them: requests to conversations, turns to answers.
#
# :mod:`outrider.environments.agent.requests` says what becomes of every field. Sampling is the run's, so
# ``temperature`` and its like are ignored and counted. What else would change the text that the program gets,
# and cannot be done, is refused in words.


MODEL: Final = "policy"
"""The name of the one model that is served; requests may name any."""
MAX_ANSWERS: Final = 16
_ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRequest:
    """A request read: the conversation, how many answers, and how they are wanted. ``ignored`` are the fields
    that change nothing; ``ignores_format``: it wanted JSON, which nobody holds the policy to.
    """

    conversation: Conversation
    num_answers: int = 1
    streams: bool = False
    include_logprobs: bool = False
    include_usage: bool = False
    tool_choice: Any = "auto"
    ignores_format: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn of the policy as the program gets it, with what is known of it; of an expert's nothing is."""

    message: Message
    turn: SampledTurn | ServedTurn | None

    @property
    def finish(self) -> str | None:
        """OpenAI's word for why it ended; None where the endpoint that plays the policy does not say."""
        if self.turn is not None and self.turn.kind == "served":
            return self._served(self.turn.finish)
        if self.message.tool_calls:
            return "tool_calls"
        return "length" if self.turn is not None and self.turn.finish == "length" else "stop"

    def _served(self, finish: str | None) -> str | None:
        """The server's word. Whether a turn calls may have been found out here."""
        if finish == "length":
            return finish
        if self.message.tool_calls:
            return "tool_calls"
        return "stop" if finish in ("stop", "tool_calls") else None


def read_chat(
    body: Any, *, takes_tools: bool, ignores_formats: bool = False, ignores: Collection[str] = ()
) -> PolicyRequest:
    """A body of ``/v1/chat/completions``; ``ignores`` are fields that the recipe wants ignored. Raises
    BadRequest.
    """
    fields = mapping(body, "the body")
    ignored = [*ignored_fields(fields, CHAT, accepted=ignores)]
    tool_request = read_tools(fields, takes_tools=takes_tools)
    is_json = read_format(fields.get("response_format"), "response_format", ignores=ignores_formats)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", param="messages")
    conversation = Conversation(
        messages=checked(with_tool_names([_message(message, ignored) for message in messages]), "messages"),
        tools=tool_request.tools,
        single_call=tool_request.single_call,
        max_tokens=count(fields, "max_completion_tokens") or count(fields, "max_tokens"),
        stop=_stop(fields.get("stop")),
    )
    num_answers = count(fields, "n") or 1
    if num_answers > MAX_ANSWERS:
        raise BadRequest(f"n is at most {MAX_ANSWERS}", param="n")
    options = mapping(fields.get("stream_options") or {}, "stream_options", param="stream_options")
    ignored += [
        f"stream_options.{name}" for name, value in options.items() if value and name != "include_usage"
    ]
    ignored += ["response_format"] if is_json else []
    return PolicyRequest(
        conversation=conversation,
        num_answers=num_answers,
        streams=flag(fields, "stream"),
        include_logprobs=flag(fields, "logprobs"),
        include_usage=flag(options, "include_usage"),
        tool_choice=tool_request.choice,
        ignores_format=is_json,
        ignored=tuple(sorted({*ignored, *tool_request.ignored})),
    )


def read_format(value: Any, name: str, *, ignores: bool) -> bool:
    """Whether the answer should be JSON, which nothing enforces. Raises BadRequest, also where that is not
    to be ignored.
    """
    kind = mapping(value or {"type": "text"}, name, param=name).get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise BadRequest(f"{name} {kind!r}: known are text, json_object and json_schema", param=name)
    if kind != "text" and not ignores:
        raise BadRequest(
            f"{name} {kind!r}: a policy in training writes freely; with environment.response_format = ignore "
            "the request is answered, and the policy has to learn it",
            param=name,
            code="unsupported_parameter",
        )
    return bool(kind != "text")


def checked(messages: tuple[Message, ...], param: str) -> tuple[Message, ...]:
    """The messages, of which the policy can only answer the last. Raises BadRequest."""
    if messages[-1].role == "assistant":
        raise BadRequest(
            "the last message is the assistant's: a turn cannot be begun for the policy", param=param
        )
    return messages


def with_tool_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, those of tools with the names of their calls, which some templates write."""
    names: dict[str, str] = {}
    results: list[Message] = []
    for message in messages:
        names |= {call.call_id: call.name for call in message.tool_calls}
        name = names.get(message.tool_call_id, "") if message.role == "tool" else ""
        results.append(replace(message, tool_name=name) if name else message)
    return tuple(results)


_KNOWN: Final[Mapping[Role, frozenset[str]]] = {
    "system": frozenset({"role", "content"}),
    "user": frozenset({"role", "content"}),
    "assistant": frozenset({"role", "content", "tool_calls", "reasoning_content", "reasoning"}),
    "tool": frozenset({"role", "content", "tool_call_id", "name"}),
}
_REFUSED: Final[Mapping[str, str]] = {
    "function_call": "send tool_calls, which have taken its place",
    "audio": "the policy reads text",
    "prefix": "a turn cannot be begun for the policy",
    "partial": "a turn cannot be begun for the policy",
}
"""Of a message: what would be lost, or asks for another turn."""


def _message(value: Any, ignored: list[str]) -> Message:
    """One message; what of it changes nothing is added to ``ignored``."""
    fields = mapping(value, "a message", param="messages")
    role = _ROLES.get(str(fields.get("role")))
    if role is None:
        raise BadRequest(
            f"a message of the role {fields.get('role')!r}: known are {', '.join(_ROLES)}", param="messages"
        )
    for name, reason in _REFUSED.items():
        if fields.get(name):
            raise BadRequest(f"{name} of a message: {reason}", param=f"messages.{name}")
    content = content_text(fields.get("content"))
    known = _KNOWN[role]
    if role == "assistant" and not content and isinstance(fields.get("refusal"), str):
        content, known = fields["refusal"], known | {"refusal"}
    ignored += [f"messages.{name}" for name, value in fields.items() if value and name not in known]
    return Message(
        role=role,
        content=content,
        reasoning=str(fields.get("reasoning_content") or fields.get("reasoning") or "")
        if role == "assistant"
        else "",
        tool_calls=_calls(fields.get("tool_calls")) if role == "assistant" else (),
        tool_call_id=str(fields.get("tool_call_id") or "") if role == "tool" else "",
        tool_name=str(fields.get("name") or "") if role == "tool" else "",
    )


def _calls(value: Any) -> tuple[ToolCall, ...]:
    if not isinstance(value or [], list):
        raise BadRequest("tool_calls must be a list", param="messages.tool_calls")
    return tuple(_call(call) for call in value or [])


def _call(value: Any) -> ToolCall:
    call = mapping(value, "a tool call", param="messages.tool_calls")
    function = mapping(call.get("function"), "a call's function", param="messages.tool_calls")
    return read_call(call.get("id"), function.get("name"), function.get("arguments"))


def read_call(call_id: Any, name: Any, arguments: Any) -> ToolCall:
    """A call out of a history, whose arguments are JSON text, or what the policy wrote in the place of it.
    Raises BadRequest.
    """
    try:
        call = sanitize_call(call_from_arguments(str(name or ""), arguments, str(call_id or "")))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the arguments of a call are no JSON: {error}") from error
    if isinstance(call, str):
        raise BadRequest(call)
    return call


def read_json(data: str | bytes) -> Any:
    """JSON whose texts are all characters: no tokenizer takes half of a surrogate pair, so a question mark
    stands for it. Raises ValueError, RecursionError.
    """
    value = json.loads(data)
    text = json.dumps(value, ensure_ascii=False)
    return value if is_text(text) else json.loads(text.encode("utf-8", "replace"))


def content_text(content: Any) -> str:
    """The text of a message, whole or in parts. Raises BadRequest for anything but text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest("a message's content is text, or a list of parts", param="content")
    return "".join(_part(mapping(part, "a part of a message", param="content")) for part in content)


def _part(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "refusal":
        return str(part.get("refusal") or "")
    raise BadRequest(f"a part of the type {kind!r}: the policy reads text", param="content")


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise BadRequest("stop is a text, or a list of texts", param="stop")
    return tuple(stop for stop in stops if stop)


def written_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Tool calls as an answer has them."""
    return [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments_text},
        }
        for call in calls
    ]
