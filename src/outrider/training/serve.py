"""``outrider serve``: the policy of a run behind an OpenAI-compatible endpoint, by the local engine.

The server, the parsing of requests and the responses are those of the endpoint for agent programs
(:mod:`outrider.environments.agent`).
"""

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from outrider.engines.base import Engine, FinishReason, Generation, Request
from outrider.engines.local.engine import make_engine
from outrider.environments.agent.requests import PolicyRequest, RequestError, read_request
from outrider.environments.agent.responses import Answer, read_answer
from outrider.environments.agent.server import Gateway, PendingRequest, ProgramFailure, Session
from outrider.environments.base import is_inline
from outrider.environments.conversations import Conversation
from outrider.errors import ConfigError, EngineFault
from outrider.printing import one_line, print_lines
from outrider.rollout.external_agent import Unanswerable, opening_ids, sampled_turn
from outrider.seeding import stream_seed
from outrider.tokens import ChatRenderer
from outrider.training.export import ConversationDefaults, find_checkpoint, read_defaults
from outrider.training.policy import set_threads
from outrider.training.settings import RunSettings
from outrider.training.setup import load_frozen, make_renderer
from outrider.types import Message
from outrider.viewer.server import bind, is_loopback

_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")


@dataclass(slots=True, kw_only=True)
class PolicyServer:
    """Answers requests with turns of a policy, one request after another.

    Attributes:
        settings: the settings of the run.
        engine: the engine with the policy's weights.
        renderer: renders requests as in the training.
        defaults: what is added to requests.
        num_requests: number of answered requests, which determines the random stream of the next one.
    """

    settings: RunSettings
    engine: Engine
    renderer: ChatRenderer
    defaults: ConversationDefaults
    num_requests: int = 0

    def serve(self, session: Session) -> None:
        """Answer the requests of a session until it is closed, except those whose client has disconnected.

        If a generation fails, its request is refused with status 500, and the server continues.
        """
        while not isinstance(event := session.next(None), ProgramFailure):
            if not isinstance(event, PendingRequest) or event.is_abandoned:
                continue
            problem, is_out_of_memory = None, False
            try:
                for answer in self.respond(event.request):
                    event.add_answer(answer)
            except RequestError as error:
                session.refuse(event, error)
            except Exception as error:
                name = "" if isinstance(error, EngineFault) else f"{type(error).__name__}: "
                problem = one_line(f"{name}{error}")
                is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
            if problem is not None:  # the error is gone here, and with it the tensors of its traceback
                session.refuse(event, RequestError(problem, code="server_error", status=500))
                print_lines(f"a request failed: {problem}", to_stderr=True)
                self.engine.free_cache()  # it may be half written
                if is_out_of_memory:
                    torch.cuda.empty_cache()

    def respond(self, request: PolicyRequest) -> list[Answer]:
        """Sample the answers to a request. Raises RequestError, and what the engine raises."""
        settings, conversation = self.settings, self._with_defaults(request)
        self.num_requests += 1
        try:
            context = self._context(conversation)
        except Unanswerable as error:
            raise RequestError(str(error), param="messages") from error
        room = self.engine.context_length - len(context)
        if room < 1:
            raise RequestError(
                f"the maximum context length is {self.engine.context_length} tokens, and the messages have "
                f"{len(context)} tokens: send a shorter conversation",
                param="messages",
                code="context_length_exceeded",
            )
        key = ("number", self.num_requests) if request.seed is None else ("seed", request.seed)
        temperature, evaluation = request.temperature, settings.evaluation
        truncation = evaluation.truncation if temperature is None else {}
        requests = [
            Request(
                request_id=f"{number:04d}",
                token_ids=context,
                max_tokens=min(room, conversation.max_tokens or settings.rollout.max_turn_tokens),
                seed=stream_seed(settings.seed, "serve", *key, number),
                temperature=evaluation.temperature if temperature is None else temperature,
                **truncation,
                stop=(*self.defaults.stop, *conversation.stop),
            )
            for number in range(request.num_answers)
        ]
        generations = self.engine.generate(requests)
        return [self._answer(generation, context, conversation) for generation in generations]

    def _with_defaults(self, request: PolicyRequest) -> Conversation:
        """The conversation with the run's system prompt and tools if it has none of its own."""
        conversation = request.conversation
        system = self.defaults.system_prompt
        if system and conversation.messages[0].role != "system":
            messages = (Message(role="system", content=system), *conversation.messages)
            conversation = replace(conversation, messages=messages)
        if not conversation.tools and request.tool_choice != "none":
            conversation = replace(conversation, tools=self.defaults.tools)
        return conversation

    def _context(self, conversation: Conversation) -> tuple[int, ...]:
        """The token ids before the turn. Raises Unanswerable if the chat template fails."""
        *earlier, last = conversation.messages
        if last.role != "assistant":
            return opening_ids(conversation, self.renderer)
        context = opening_ids(replace(conversation, messages=tuple(earlier)), self.renderer)
        return (*context, *self.renderer.bridge(context, [Message(role="inline", content=last.content)]))

    def _answer(self, generation: Generation, context: tuple[int, ...], conversation: Conversation) -> Answer:
        """The response to a program: without the stop string of its request, but with that of the run, which
        is part of the policy's turn (``</search>``).
        """
        is_closed = generation.finish_reason is FinishReason.EOS
        text = self.renderer.turn_text(generation.token_ids, context=context, is_closed=is_closed)
        turn = sampled_turn(generation, context, self.renderer)
        environment = self.settings.environment
        message = read_answer(
            text, conversation, environment.call_format, turn, number=self.num_requests,
            is_inline=is_inline(environment),
        )  # fmt: skip
        return Answer(message=message, turn=turn)


def serve_run(
    run: Path,
    settings: RunSettings,
    *,
    step: int | None,
    host: str,
    port: int,
    api_key: str | None,
    note: Callable[[str], None],
) -> None:
    """Load the weights of a checkpoint and serve them until Ctrl-C.

    Raises:
        ConfigError: if the address cannot be bound, or is not loopback and there is no ``api_key``.
        CheckpointError: if the checkpoint does not exist.
        ModelError: if the model cannot be loaded.
    """
    if api_key is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} is reachable from other machines: set --api-key-env NAME, the environment "
            "variable with the key that clients must send"
        )
    checkpoint = find_checkpoint(run, step)
    bound = bind(host, port)
    try:
        server = load_server(checkpoint, settings, note=note)
    except BaseException:
        bound.close()
        raise
    with closing(Gateway(bound)) as gateway:
        session = open_session(gateway, server, host=host, api_key=api_key)
        note(f"serving {checkpoint} at {gateway.url} (Ctrl-C ends it)")
        for line in server.defaults.lines():
            note(line)
        with suppress(KeyboardInterrupt):
            server.serve(session)


def load_server(checkpoint: Path, settings: RunSettings, *, note: Callable[[str], None]) -> PolicyServer:
    """Load the weights of a checkpoint. Raises ModelError and CheckpointError."""
    model = settings.model.model_copy(update={"initial_checkpoint": str(checkpoint)})
    set_threads(settings.num_threads, device=model.device)
    language_model = load_frozen(model)
    return PolicyServer(
        settings=settings,
        engine=make_engine(language_model, context_length=model.context_length),
        renderer=make_renderer(language_model.tokenizer, model, settings.environment),
        defaults=read_defaults(settings, note=note, starts_slowly=True),
    )


def open_session(gateway: Gateway, server: PolicyServer, *, host: str, api_key: str | None) -> Session:
    """Open a session for all clients that know the key, or for all clients of a loopback address."""
    takes_tools = server.settings.environment.call_format is not None
    read = partial(read_request, takes_tools=takes_tools, is_training=False)
    if api_key is None:
        return gateway.open_without_key(read, hosts=(*_LOCAL_NAMES, host))
    return gateway.open(read, key=api_key, is_training=False)
