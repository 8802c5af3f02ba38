"""What becomes of every field of a request: done, refused with status 400, or ignored and counted.

One table for the code, the documentation (``python -m outrider.environments.agent.request_fields`` prints it)
and the tests. A field that is in no row is ignored and counted.
"""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from outrider.environments.agent.fields import BadRequest

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
