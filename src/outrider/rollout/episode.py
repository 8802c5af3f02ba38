"""Playing texts that are known beforehand straight against an environment: no model, no tokens."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from outrider.engines.base import FinishReason, Request
from outrider.environments.base import (
    Env,
    EnvironmentFactory,
    EpisodeResult,
    StepResult,
    episode_result,
    is_answer,
    prompt_tools,
    recorded_turn,
    start_episode,
    take_refusal,
    take_step,
    turn_message,
)
from outrider.environments.conversations import Conversation, OwnConversations, Refusal, Refusing, SampledTurn
from outrider.errors import EnvironmentFault, InvalidResult, ToolFault
from outrider.rollout.base import Limits, RolloutStatus
from outrider.rollout.batching import RoundBatcher, StreamBatcher
from outrider.rollout.branching import Fork, GroupScheduler, make_fork, prompt_text
from outrider.rollout.context import Context, request_reflection, require_no_rerendering, show_tip
from outrider.rollout.external_agent import (
    Exchange,
    Seen,
    Unanswerable,
    opening_ids,
    pending_request,
    report_sampled_turn,
    require_room,
)
from outrider.rollout.faults import cancelled_leaf, locate_invalid_result, run_guarded, run_timed
from outrider.rollout.hooks import Attempt, EpisodeState, Hook, Splice, to_message
from outrider.seeding import reset_seed, stream_seed
from outrider.tokens import ChatRenderer
from outrider.trace import DESCRIBED_TOOLS, Leaf, Node, Trace
from outrider.types import Message, Origin, Outcome, Step, Task, ToolSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectEpisode:
    """Record of a scripted episode: the prompt, one result per text that was played, and its outcome.
    ``ends_with_answer``: the last turn was an answer as a whole.
    """

    prompt: tuple[Message, ...]
    results: tuple[StepResult, ...]
    record: EpisodeResult
    ends_with_answer: bool = False

    def steps(self, texts: Sequence[str]) -> tuple[Step, ...]:
        """The played texts with their observations; texts behind the end of the episode are left out."""
        return tuple(to_step(text, result) for text, result in zip(texts, self.results, strict=False))


def play_texts(
    factory: EnvironmentFactory, task: Task, texts: Sequence[str], *, seed: int, timeout_s: float
) -> DirectEpisode:
    """Play until the texts or the episode end, every call for at most ``timeout_s`` seconds. Calls in the
    Hermes form, as imported chats have them, are played in the environment's own.

    Raises ToolFault or EnvironmentFault when infrastructure broke or hangs.
    """
    environment = run_timed(factory, task, timeout_s=timeout_s)
    try:
        prompt = run_timed(start_episode, environment, seed, timeout_s=timeout_s)
        results: list[StepResult] = []
        answers = False
        for text in texts:
            message = turn_message(environment, recorded_turn(environment, text))
            answers = is_answer(environment, message)
            results.append(run_timed(take_step, environment, message, timeout_s=timeout_s))
            if results[-1].done:
                break
        record = run_timed(episode_result, environment, timeout_s=timeout_s)
        return DirectEpisode(prompt=prompt, results=tuple(results), record=record, ends_with_answer=answers)
    except InvalidResult as error:
        raise locate_invalid_result(environment, task.key, error) from error
    finally:
        close_quietly(environment, timeout_s=timeout_s)


def close_quietly(environment: Env, *, timeout_s: float) -> None:
    """A close that fails or hangs changes nothing of what was played."""
    with suppress(ToolFault, EnvironmentFault):
        run_timed(environment.close, timeout_s=timeout_s)


def to_step(text: str, result: StepResult) -> Step:
    """A played text as a step of a trajectory."""
    return Step(text=text, observation=result.text, is_terminal=result.done)


def episode_outcome(result: StepResult, *, is_cut: bool = False, is_answer: bool = False) -> Outcome:
    """How an episode that the environment has ended (``done``) ended.

    ``is_cut``: the token limit ended its last turn. It is unreadable for that reason then and not because it
    is wrong, and if all of it was the answer (``is_answer``), it is not the one that was being written.
    """
    if is_cut and (result.invalid or is_answer):
        return Outcome.TRUNCATED_TOKENS
    if result.truncated:
        return Outcome.TRUNCATED_TURNS
    return Outcome.INVALID if result.invalid else Outcome.FINISHED


# One episode as a coroutine: prompt, then turns of policy and environment, until exactly one outcome.


ResultT = TypeVar("ResultT")
_MAX_REFUSALS: Final = 64  # of one program: one that asks the same for ever would not end


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the policy's turns are drawn; evaluation may be greedy (temperature 0)."""

    temperature: float = 1.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """Plays the rollouts of one scheduler run, which share all of this."""

    batcher: RoundBatcher | StreamBatcher
    renderer: ChatRenderer
    limits: Limits
    sampling: Sampling
    hooks: Sequence[Hook]
    run_seed: int
    training_step: int
    rollout_status: RolloutStatus
    scheduler: GroupScheduler

    async def run(
        self,
        *,
        task: Task,
        trace: Trace,
        environment: Env,
        rollout: int,
        mode: str,
        fork: Fork | None = None,
        is_late: Callable[[], bool] = lambda: False,
    ) -> Leaf:
        """Play one rollout into ``trace``, from the prompt or from ``fork`` on. Once ``is_late`` it is given
        up in front of its next turn.

        Raises ToolFault, EnvironmentFault or EngineFault when infrastructure broke; the caller retries or
        records it.
        """
        self.rollout_status.set(f"{task.key}/{rollout}", "the start of its environment")
        refusals: list[tuple[int, Refusal]] = []
        last_node, opening = await self._begin(task, trace, environment, fork, refusals)
        state = EpisodeState(
            task=task,
            trace=trace,
            environment=environment,
            run_seed=self.run_seed,
            training_step=self.training_step,
            rollout=rollout,
            mode=mode,
            last_node=last_node,
            conversation=opening,
            refusals=refusals,
        )
        if fork is not None:
            fork.apply_to(state)
        outcome = None
        while outcome is None:
            if is_late():
                return cancelled_leaf(rollout)
            outcome = await self._turn(state)
        return await self._leaf(state, outcome)

    async def _leaf(self, state: EpisodeState, outcome: Outcome) -> Leaf:
        """What the environment says of an episode that has ended."""
        self._set_status(state, "the environment's result")
        result = await self._run_guarded(episode_result, state.environment)
        reflection, num_reflection_tokens = await self._reflect(state, result)
        return Leaf(
            node_id=state.last_node.node_id,
            rollout=state.rollout,
            outcome=outcome,
            episode_return=result.episode_return,
            success=result.success,
            metrics=dict(result.metrics),
            reflection=reflection,
            num_reflection_tokens=num_reflection_tokens,
        )

    async def _begin(
        self,
        task: Task,
        trace: Trace,
        environment: Env,
        fork: Fork | None,
        refusals: list[tuple[int, Refusal]],
    ) -> tuple[Node, tuple[Message, ...]]:
        """Bring the environment to where the rollout begins; the node of its first context, and the
        conversation that it is of. What a program was refused until then is added to ``refusals``.
        """
        seed = reset_seed(self.run_seed, self.training_step, task.key)
        if fork is None:
            opening = await self._run_guarded(start_episode, environment, seed)
            tools = prompt_tools(environment)  # a program may be over behind its first question
            ids, messages = await self._opening(environment, opening, refusals)
            return _root(trace, ids, messages, tools), tuple(messages)
        await fork.restore(environment, reset_seed=seed, timeout_s=self.limits.step_timeout_s)
        return fork.last_node, fork.conversation

    async def _opening(
        self,
        environment: Env,
        messages: Sequence[Message],
        refusals: list[tuple[int, Refusal]],
    ) -> tuple[tuple[int, ...], Sequence[Message]]:
        """The ids of a rollout's first context and its messages. A question of a program that the policy
        cannot be asked is refused, and its next one is the first.

        Raises EnvironmentFault where there is none. One that is too long, of a program that has no other, is
        the context of a rollout without a turn.
        """
        ids: tuple[int, ...] = ()
        while True:
            try:
                ids = opening_ids(environment, messages, self.renderer)
                if isinstance(environment, OwnConversations):
                    require_room(len(ids), self.batcher.engine.context_length)
            except Unanswerable as error:
                assert isinstance(environment, OwnConversations)
                result = await self._refuse(environment, error.refusal, refusals, turn=0)
                if result is not None and not result.done:
                    messages = environment.request.messages
                    continue
                if not ids:
                    raise EnvironmentFault(
                        f"the program ended without a question that can be answered; the last one: {error}"
                    ) from error
            return ids, messages

    async def _refuse(
        self,
        environment: OwnConversations,
        refusal: Refusal,
        refusals: list[tuple[int, Refusal]],
        *,
        turn: int,
    ) -> StepResult | None:
        """Refuse what a program asks in front of a turn; what comes next, None where the rollout is cut."""
        if len(refusals) == _MAX_REFUSALS or not isinstance(environment, Refusing):
            if refusal.is_too_long:
                return None
            words = f", {len(refusals)} times before" if refusals else ""
            raise EnvironmentFault(f"the program asks what cannot be answered{words}: {refusal.reason}")
        refusals.append((turn, refusal))
        return await self._run_guarded(take_refusal, environment, refusal)

    async def _next_request(self, state: EpisodeState, result: StepResult) -> tuple[StepResult, Seen | None]:
        """What a program asks next and how the policy will see it, None where the rollout is cut or over.
        What cannot be answered is refused, and the program goes on.
        """
        environment = state.environment
        while not result.done and isinstance(environment, OwnConversations):
            try:
                return result, self._context.next_request(state, environment)
            except Unanswerable as error:
                self._set_status(state, "an environment's step")
                next_result = await self._refuse(
                    environment, error.refusal, state.refusals, turn=state.turn + 1
                )
            if next_result is None:
                break
            result = next_result
        return result, None

    async def _reflect(self, state: EpisodeState, result: EpisodeResult) -> tuple[str, int]:
        for hook in self.hooks:
            if hook.max_reflection_tokens:
                self._set_status(state, "the wait for a reflection")
                reflection = await request_reflection(
                    state,
                    hook,
                    result,
                    batcher=self.batcher,
                    renderer=self.renderer,
                    max_ending_tokens=self.limits.max_observation_tokens,
                    seed=stream_seed(  # "remark" is the name of the stream: another one is another draw
                        self.run_seed, "remark", self.training_step, state.task.key, state.rollout
                    ),
                )
                if reflection is not None:
                    return reflection
        return "", 0

    async def _turn(self, state: EpisodeState) -> Outcome | None:
        """One policy turn with what hooks put before it; None while the episode goes on."""
        if state.turn >= self.limits.max_turns:
            return Outcome.TRUNCATED_TURNS
        if self._context.num_tokens_left(state) <= 0:
            return Outcome.TRUNCATED_TOKENS
        # hooks have acted, and this point was decided about, in the rollout that it left
        was_forked = state.is_forked
        state.is_forked = False
        if not was_forked and (outcome := await self._before_turn(state)) is not None:
            return outcome
        before = state.last_node
        question = pending_request(state.environment)
        finish, text, sampled = await self._generate(state, question)
        response = turn_message(state.environment, text)
        # In front of the step: a program that has ended asks nothing.
        answers = is_answer(state.environment, response)
        # Before the environment acts: a copy has to be of the state that this turn was written in.
        await self._offer_fork(state, before, is_known=was_forked)
        result = await self._act(state, text)
        if question is not None and sampled is not None:
            is_whole = finish is not FinishReason.STOP
            state.exchanges.append(
                Exchange(
                    request=question,
                    response=response,
                    context=before,
                    turn=state.last_node,
                    is_whole=is_whole,
                    sampled=sampled,
                )
            )
        result, seen = await self._next_request(state, result)
        state.last_result = result
        state.last_node.reward = result.reward
        state.last_node.metadata |= {
            "num_tool_calls": result.num_tool_calls,
            "tools": list(result.tools),
            "invalid": result.invalid,
        }
        observation = result.text
        state.steps.append(Step(text=text, observation=observation, is_terminal=result.done))
        outcome = self._observe(state, result, finish, question, seen, is_answer=answers)
        state.turn += 1
        for hook in self.hooks:
            hook.after_turn(state)
        return outcome

    async def _before_turn(self, state: EpisodeState) -> Outcome | None:
        for hook in self.hooks:
            for intervention in hook.before_turn(state):
                if isinstance(intervention, Splice):
                    self._splice(state, intervention, room=self.limits.max_turn_tokens)
                elif (outcome := await self._attempt(state, intervention)) is not None:
                    return outcome
        return None

    async def _offer_fork(self, state: EpisodeState, before: Node, *, is_known: bool) -> None:
        """Rollouts may leave in front of the turn that was just written, now or later; its own tokens stay
        with this rollout.
        """
        fork: Fork | None = None
        if self.scheduler.on_turn_start(state, is_known=is_known):
            self._set_status(state, "a copy of its environment")
            fork = await make_fork(state, before, timeout_s=self.limits.step_timeout_s)
        self.scheduler.on_turn_end(state, fork)

    async def _act(self, state: EpisodeState, action: str) -> StepResult:
        self._set_status(state, "an environment's step")
        response = turn_message(state.environment, action)
        result = await self._run_guarded(take_step, state.environment, response)
        state.actions.append(action)
        state.results.append(result)
        return result

    async def _generate(
        self, state: EpisodeState, question: Conversation | None
    ) -> tuple[FinishReason, str, SampledTurn | None]:
        self._set_status(state, "the wait for a batch")
        context = state.trace.token_ids(state.last_node.node_id)
        room = min(self.limits.max_turn_tokens, self._context.num_tokens_left(state))
        stop = self.sampling.stop
        if question is not None:
            room, stop = min(room, question.max_tokens or room), (*stop, *question.stop)
        generation = await self.batcher.generate(
            Request(
                # Padded: batches are ordered by this text.
                request_id=f"{state.task.key}/{state.rollout:04d}/{state.turn:03d}",
                token_ids=context,
                max_tokens=room,
                seed=stream_seed(
                    self.run_seed, "sample", self.training_step, state.task.key, state.rollout, state.turn
                ),
                temperature=self.sampling.temperature,
                stop=stop,
                cache_key=f"{state.task.key}/{state.rollout}",
            )
        )
        is_closed = generation.finish_reason is FinishReason.EOS
        text = self.renderer.turn_text(generation.token_ids, context=context, is_closed=is_closed)
        state.last_node = state.trace.append(
            parent=state.last_node.node_id,
            origin=Origin.POLICY,
            token_ids=generation.token_ids,
            message=Message(role="assistant", content=text),
            logprobs=generation.logprobs,
            entropies=generation.entropies,
            entropies_are_bounds=generation.entropies_are_bounds,
            weight_version=generation.weight_version,
            metadata={
                "finish": generation.finish_reason.value,
                "rollout": state.rollout,
                "num_splices_dropped": state.num_splices_dropped,
            },
        )
        state.num_splices_dropped = 0
        state.num_response_tokens += len(generation.token_ids)
        sampled = report_sampled_turn(state.environment, generation, context, self.renderer)
        return generation.finish_reason, text, sampled

    def _observe(
        self,
        state: EpisodeState,
        result: StepResult,
        finish: FinishReason,
        question: Conversation | None,
        seen: Seen | None,
        *,
        is_answer: bool,
    ) -> Outcome | None:
        """Append the observation, ``seen`` where a program asks, and decide whether the episode is over."""
        if result.done:
            return episode_outcome(result, is_cut=finish is FinishReason.LENGTH, is_answer=is_answer)
        if question is not None:
            appended = seen is not None and self._context.append_request(state, seen, result)
            return None if appended else Outcome.TRUNCATED_TOKENS
        observations = result.observations
        if not observations:
            raise EnvironmentFault("the environment neither answered nor ended the episode")
        if finish is FinishReason.EOS and observations[0].role == "inline":
            return Outcome.INVALID  # the policy closed the one assistant message that the protocol has
        limit = self.limits.max_observation_tokens
        if self.renderer.history_thinking == "strip":
            appended = self._context.append_rerendered(state, observations, limit)
        else:
            appended = self._context.append(state, Origin.ENVIRONMENT, observations, limit, {})
        return None if appended else Outcome.TRUNCATED_TOKENS

    async def _attempt(self, state: EpisodeState, attempt: Attempt) -> Outcome | None:
        """Do a hook's action in the environment; the action counts also where its text finds no room."""
        before = state.last_node
        action = recorded_turn(state.environment, attempt.action)
        result = await self._act(state, action)
        splice = attempt.then(result)
        if splice is not None:
            self._splice(state, splice, room=1)
        if state.last_node is not before:
            state.last_node.reward = result.reward
            state.last_node.metadata |= {"action": action, "observation": result.text}
        else:
            # no text tells of it, so the record does
            before.metadata.setdefault("attempted", []).append(action)
            if splice is not None and not result.done:
                return Outcome.TRUNCATED_TOKENS  # the state has moved on and the policy could not be told
        return episode_outcome(result) if result.done else None

    def _splice(self, state: EpisodeState, splice: Splice, *, room: int) -> None:
        """Put a hook's text in, unless it would leave the policy less than ``room`` tokens: a step must not
        end the episode.
        """
        require_no_rerendering(self.renderer)
        if splice.origin is Origin.MEMORY:
            reserve = self.limits.max_response_tokens - state.num_response_tokens
            length = self.batcher.engine.context_length
            is_shown = show_tip(state, splice, renderer=self.renderer, context_length=length, reserve=reserve)
            state.num_splices_dropped += not is_shown
            return
        limit = self.limits.max_splice_tokens
        if not self._context.append(
            state, splice.origin, [to_message(splice)], limit, dict(splice.metadata), room=room
        ):
            state.num_splices_dropped += 1
        elif splice.step is not None:
            state.steps.append(splice.step)

    @property
    def _context(self) -> Context:
        return Context(
            renderer=self.renderer, limits=self.limits, context_length=self.batcher.engine.context_length
        )

    def _set_status(self, state: EpisodeState, location: str) -> None:
        self.rollout_status.set(f"{state.task.key}/{state.rollout}", location)

    async def _run_guarded(self, call: Callable[..., ResultT], *arguments: object) -> ResultT:
        return await run_guarded(call, *arguments, timeout_s=self.limits.step_timeout_s)


def _root(
    trace: Trace, token_ids: tuple[int, ...], messages: Sequence[Message], tools: Sequence[ToolSchema]
) -> Node:
    """The group's shared prompt node; a simulator without a seed may open differently and then gets its
    own. Its message has the words of the environment alone; the ids also describe ``tools``, whose names are
    in the metadata.
    """
    for node in trace.nodes:
        if node.parent is None and node.token_ids == token_ids:
            return node
    message = Message(role="user", content=prompt_text(messages))
    metadata = {DESCRIBED_TOOLS: [str(tool["name"]) for tool in tools]} if tools else {}
    return trace.append(
        parent=None, origin=Origin.PROMPT, token_ids=token_ids, message=message, metadata=metadata
    )
