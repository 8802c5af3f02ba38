"""One rollout, in order: prompt, then turns of policy and environment, then the leaf.

:class:`EpisodeRunner` plays a rollout for an ordinary environment; :mod:`outrider.rollout.external_agent`
overrides the places where an external program keeps the conversation. What follows the class are its helpers:
truncation, tips, reflections, and episodes of known texts without a model.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from outrider.engines.base import FinishReason, Generation, Request
from outrider.environments.base import (
    Env,
    EnvironmentFactory,
    Episode,
    EpisodeResult,
    StepResult,
    open_episode,
)
from outrider.errors import ConfigError, EngineFault, EnvironmentFault, InvalidResult, ToolFault
from outrider.rollout.branching import Fork, GroupScheduler, make_fork
from outrider.rollout.faults import cancelled_leaf, locate_invalid_result, run_guarded, run_timed
from outrider.rollout.hooks import Attempt, EpisodeState, Hook, RolloutStatus, Splice, to_message
from outrider.rollout.settings import Limits
from outrider.seeding import reset_seed, stream_seed
from outrider.tokens import ChatRenderer
from outrider.trace import DESCRIBED_TOOLS, Leaf, Node, Trace
from outrider.types import Message, Origin, Outcome, Step, Task, ToolSchema

if TYPE_CHECKING:
    from outrider.rollout.scheduler import RoundBatcher, StreamBatcher

ResultT = TypeVar("ResultT")
StateT = TypeVar("StateT", bound=EpisodeState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the policy's turns are sampled; evaluation may be greedy (temperature 0)."""

    temperature: float = 1.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EpisodeRunner:
    """Plays rollouts of one scheduler run, which share these fields."""

    batcher: "RoundBatcher | StreamBatcher"
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
        """Play one rollout into ``trace``, from the prompt or from ``fork`` on. If ``is_late`` becomes true,
        it is cancelled before its next turn.

        Raises ToolFault, EnvironmentFault or EngineFault when infrastructure broke; the caller retries or
        records it.
        """
        self.rollout_status.set(f"{task.key}/{rollout}", "the start of its environment")
        episode = open_episode(environment)
        if fork is None:
            await self._run_guarded(episode.start, reset_seed(self.run_seed, self.training_step, task.key))
            state = await self._open(task, trace, episode, rollout, mode)
        else:
            state = await self._continue(fork, episode, rollout, mode)
        outcome = None
        while outcome is None:
            if is_late():
                return cancelled_leaf(rollout)
            outcome = await self._turn(state)
        self._set_status(state, "the environment's result")
        result = await self._run_guarded(episode.result)
        reflection, num_reflection_tokens = await self._reflect(state, result)
        return Leaf(
            node_id=state.last_node.node_id,
            rollout=rollout,
            outcome=outcome,
            episode_return=result.episode_return,
            success=result.success,
            metrics=dict(result.metrics),
            reflection=reflection,
            num_reflection_tokens=num_reflection_tokens,
        )

    # 1. The prompt

    async def _open(
        self, task: Task, trace: Trace, episode: Episode, rollout: int, mode: str
    ) -> EpisodeState:
        """The state of a rollout whose environment has started."""
        token_ids = self.renderer.prompt(episode.prompt, episode.tools)
        return self._new_state(EpisodeState, task, trace, episode, rollout, mode, token_ids, episode.tools)

    def _new_state(
        self,
        state_class: type[StateT],
        task: Task,
        trace: Trace,
        episode: Episode,
        rollout: int,
        mode: str,
        token_ids: tuple[int, ...],
        tools: Sequence[ToolSchema],
    ) -> StateT:
        # The group shares its prompt node; a simulator without a seed may open differently and then gets its
        # own.
        root = next(
            (node for node in trace.nodes if node.parent is None and node.token_ids == token_ids), None
        )
        if root is None:
            text = "\n".join(message.content for message in episode.prompt)
            # The message has the words of the environment alone; the ids also describe the tools.
            metadata = {DESCRIBED_TOOLS: [str(tool["name"]) for tool in tools]} if tools else {}
            root = trace.append(
                parent=None, origin=Origin.PROMPT, token_ids=token_ids, metadata=metadata,
                message=Message(role="user", content=text),
            )  # fmt: skip
        return state_class(
            task=task,
            trace=trace,
            episode=episode,
            run_seed=self.run_seed,
            training_step=self.training_step,
            rollout=rollout,
            mode=mode,
            last_node=root,
            conversation=episode.prompt,
        )

    async def _continue(self, fork: Fork, episode: Episode, rollout: int, mode: str) -> EpisodeState:
        """The state of a rollout that leaves another one: its environment is a copy, or the steps are
        replayed.
        """
        state = fork.state.snapshot()
        if fork.environment is None:
            seed = reset_seed(self.run_seed, self.training_step, state.task.key)
            for call in episode.replay(state.episode, seed):
                await self._run_guarded(call)
        else:
            episode.resume(state.episode)
        state.episode, state.rollout, state.mode = episode, rollout, mode
        return state

    # 2. One turn

    async def _turn(self, state: EpisodeState) -> Outcome | None:
        """One policy turn with what hooks put before it; None while the episode goes on."""
        if state.turn >= self.limits.max_turns:
            return Outcome.TRUNCATED_TURNS
        if self._num_tokens_left(state) <= 0:
            return Outcome.TRUNCATED_TOKENS
        # Where a fork begins, hooks have acted and its point was decided about in the rollout that it left.
        was_forked, state.is_forked = state.is_forked, False
        for hook in () if was_forked else self.hooks:
            for intervention in hook.before_turn(state):
                if isinstance(intervention, Splice):
                    self._splice(state, intervention, room=self.limits.max_turn_tokens)
                elif (outcome := await self._attempt(state, intervention)) is not None:
                    return outcome
        context = state.last_node
        finish, text = await self._generate(state)
        turn = state.episode.read(text)
        # Rollouts may fork before the turn that was just written, now or later; its own tokens stay with this
        # rollout. Before the environment acts: a copy has to be of the state that this turn was written in.
        fork: Fork | None = None
        if self.scheduler.on_turn_start(state, is_known=was_forked):
            self._set_status(state, "a copy of its environment")
            fork = await make_fork(state, context, timeout_s=self.limits.step_timeout_s)
        self.scheduler.on_turn_end(state, fork)
        result = await self._act(state, text, turn)
        state.last_result = result
        state.last_node.reward = result.reward
        state.last_node.metadata |= {
            "num_tool_calls": result.num_tool_calls,
            "tools": list(result.tools),
            "invalid": result.invalid,
        }
        state.steps.append(Step(text=text, observation=result.text, is_terminal=result.done))
        if result.done:
            is_cut = finish is FinishReason.LENGTH
            outcome = episode_outcome(result, is_cut=is_cut, is_answer=state.episode.ends_with_answer)
        else:
            outcome = self._observe(state, result, finish)
        state.turn += 1
        for hook in self.hooks:
            hook.after_turn(state)
        return outcome

    async def _generate(self, state: EpisodeState) -> tuple[FinishReason, str]:
        """Sample the turn and append its node; the text, and why it ended."""
        max_tokens, stop = self._turn_limits(state)
        generation, text = await self._sample(state, max_tokens=max_tokens, stop=stop)
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
        return generation.finish_reason, text

    async def _sample(
        self, state: EpisodeState, *, max_tokens: int, stop: tuple[str, ...]
    ) -> tuple[Generation, str]:
        self._set_status(state, "the wait for a batch")
        context = state.trace.token_ids(state.last_node.node_id)
        key = (state.task.key, state.rollout, state.turn)
        generation = await self.batcher.generate(
            Request(
                # Padded: batches are ordered by this text.
                request_id=f"{state.task.key}/{state.rollout:04d}/{state.turn:03d}",
                token_ids=context,
                max_tokens=max_tokens,
                seed=stream_seed(self.run_seed, "sample", self.training_step, *key),
                temperature=self.sampling.temperature,
                stop=stop,
                cache_key=f"{state.task.key}/{state.rollout}",
            )
        )
        is_closed = generation.finish_reason is FinishReason.EOS
        return generation, self.renderer.turn_text(generation.token_ids, context=context, is_closed=is_closed)

    def _turn_limits(self, state: EpisodeState) -> tuple[int, tuple[str, ...]]:
        """The most tokens of the turn, and its stop strings."""
        return min(self.limits.max_turn_tokens, self._num_tokens_left(state)), self.sampling.stop

    async def _act(self, state: EpisodeState, text: str, turn: Message | None = None) -> StepResult:
        """Step the environment."""
        self._set_status(state, "an environment's step")
        return await self._run_guarded(state.episode.act, text, turn)

    def _observe(self, state: EpisodeState, result: StepResult, finish: FinishReason) -> Outcome | None:
        """Append the observation; an outcome if the rollout ends here."""
        observations = result.observations
        if not observations:
            raise EnvironmentFault("the environment neither answered nor ended the episode")
        if finish is FinishReason.EOS and observations[0].role == "inline":
            return Outcome.INVALID  # the policy closed the one assistant message that the protocol has
        limit = self.limits.max_observation_tokens
        if self.renderer.history_thinking == "strip":
            appended = self._append_rerendered(state, observations, limit)
        else:
            appended = self._append(state, Origin.ENVIRONMENT, observations, limit, {})
        return None if appended else Outcome.TRUNCATED_TOKENS

    # 3. Interventions of hooks

    async def _attempt(self, state: EpisodeState, attempt: Attempt) -> Outcome | None:
        """Do a hook's action in the environment; the action counts also where its text finds no room."""
        before = state.last_node
        action = state.episode.convert(attempt.action)
        result = await self._act(state, action)
        splice = attempt.then(result)
        if splice is not None:
            self._splice(state, splice, room=1)
        if state.last_node is not before:
            state.last_node.reward = result.reward
            state.last_node.metadata |= {"action": action, "observation": result.text}
        else:
            # no text shows it, so the record does
            before.metadata.setdefault("attempted", []).append(action)
            if splice is not None and not result.done:
                return Outcome.TRUNCATED_TOKENS  # the state has changed and the policy could not see it
        return episode_outcome(result) if result.done else None

    def _splice(self, state: EpisodeState, splice: Splice, *, room: int) -> None:
        """Insert a hook's text, unless it would leave the policy less than ``room`` tokens: a step must not
        end the episode.
        """
        require_no_rerendering(self.renderer)
        if splice.origin is Origin.MEMORY:
            reserve = self.limits.max_response_tokens - state.num_response_tokens
            length = self._context_length
            is_shown = show_tip(state, splice, renderer=self.renderer, context_length=length, reserve=reserve)
            state.num_splices_dropped += not is_shown
            return
        limit = self.limits.max_splice_tokens
        metadata = dict(splice.metadata)
        if not self._append(state, splice.origin, [to_message(splice)], limit, metadata, room=room):
            state.num_splices_dropped += 1
        elif splice.step is not None:
            state.steps.append(splice.step)

    async def _reflect(self, state: EpisodeState, result: EpisodeResult) -> tuple[str, int]:
        """The first reflection that a hook requests, and its number of tokens."""
        for hook in self.hooks:
            if hook.max_reflection_tokens:
                self._set_status(state, "the wait for a reflection")
                key = (state.task.key, state.rollout)
                reflection = await request_reflection(
                    state,
                    hook,
                    result,
                    batcher=self.batcher,
                    renderer=self.renderer,
                    max_ending_tokens=self.limits.max_observation_tokens,
                    # "remark" is the name of the stream: another one is another draw
                    seed=stream_seed(self.run_seed, "remark", self.training_step, *key),
                )
                if reflection is not None:
                    return reflection
        return "", 0

    # 4. The context. What is appended must leave the policy room for a token; else nothing is appended and
    # the methods return False.

    @property
    def _context_length(self) -> int:
        return self.batcher.engine.context_length

    def _num_tokens_left(self, state: EpisodeState) -> int:
        """Tokens that the rollout may still add."""
        # The prompt and tips count here: the context holds them, whatever the budget of the response says.
        used = len(state.trace.token_ids(state.last_node.node_id))
        return min(self.limits.max_response_tokens - state.num_response_tokens, self._context_length - used)

    def _append(
        self,
        state: EpisodeState,
        origin: Origin,
        messages: Sequence[Message],
        limit: int,
        metadata: dict[str, object],
        *,
        room: int = 1,
    ) -> bool:
        """Append tokens that the policy did not write; False if they would leave it less than ``room``
        tokens.

        A cut at the limit is marked in the text and on the node; it is never silent.
        """
        context = state.trace.token_ids(state.last_node.node_id)
        token_ids, num_cut = render_bridge(context, messages, limit, renderer=self.renderer)
        if len(token_ids) > self._num_tokens_left(state) - room:
            return False
        metadata |= {"num_tokens_cut": num_cut, "rollout": state.rollout} | message_parts(messages)
        state.last_node = state.trace.append(
            parent=state.last_node.node_id, origin=origin, token_ids=token_ids,
            message=join_messages(messages),
            metadata=metadata,
        )  # fmt: skip
        state.num_response_tokens += len(token_ids)
        return True

    def _append_rerendered(self, state: EpisodeState, observations: Sequence[Message], limit: int) -> bool:
        """As :meth:`_append`, with the whole conversation rendered again before every turn, as servers do
        (``history_thinking = "strip"``): earlier turns lose their thinking.

        If the new rendering begins with the context so far, it continues it; else the context begins anew and
        the rollout becomes one sample more.
        """
        context = state.trace.token_ids(state.last_node.node_id)
        tools = state.episode.tools
        cut, num_cut = cut_messages(context, observations, limit, renderer=self.renderer)
        turn = self.renderer.parse_message(state.last_node.message.content, tools)
        conversation = (*state.conversation, turn, *cut)
        token_ids = self.renderer.prompt(conversation, tools)
        restarts = token_ids[: len(context)] != tuple(context)
        num_new = len(self.renderer.bridge(context, cut))
        new_ids = token_ids if restarts else token_ids[len(context) :]
        if not self._append_seen(state, new_ids, observations, restarts, num_new, num_cut=num_cut):
            return False
        state.conversation = conversation
        return True

    def _append_seen(
        self,
        state: EpisodeState,
        token_ids: tuple[int, ...],
        observations: Sequence[Message],
        restarts: bool,
        num_new: int,
        *,
        num_cut: int = 0,
    ) -> bool:
        """Append an observation, after the context or as a new one; ``num_new`` tokens count as new."""
        context = 0 if restarts else len(state.trace.token_ids(state.last_node.node_id))
        remaining = self.limits.max_response_tokens - state.num_response_tokens - num_new
        if min(remaining, self._context_length - context - len(token_ids)) < 1:
            return False
        metadata = {"num_tokens_cut": num_cut, "rollout": state.rollout} | message_parts(observations)
        state.last_node = state.trace.append(
            parent=state.last_node.node_id, origin=Origin.ENVIRONMENT, token_ids=token_ids,
            message=join_messages(observations), restarts=restarts,
            metadata=metadata | ({"restarts": True} if restarts else {}),
        )  # fmt: skip
        state.num_response_tokens += num_new
        return True

    def _set_status(self, state: EpisodeState, location: str) -> None:
        self.rollout_status.set(f"{state.task.key}/{state.rollout}", location)

    async def _run_guarded(self, call: Callable[..., ResultT], *arguments: object) -> ResultT:
        return await run_guarded(call, *arguments, timeout_s=self.limits.step_timeout_s)


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


# A text that is longer than its budget loses its middle, because the end closes what the start opens. The
# cut is marked.


CUT_MARK = " [...] "
_NUM_END_TOKENS = 24  # tokens: they close tags and messages and open the assistant's turn


def render_bridge(
    context: Sequence[int], messages: Sequence[Message], limit: int, *, renderer: ChatRenderer
) -> tuple[tuple[int, ...], int]:
    """At most ``limit`` ids that put the messages behind the context, and how many were cut.

    Of several messages each loses its own middle, so that the template's words between them stay.
    """
    if len(messages) > 1:
        messages, num_lost = cut_messages(context, messages, limit, renderer=renderer)
    else:
        num_lost = 0
    token_ids, num_cut = truncate_ids(renderer.bridge(context, messages), limit, renderer=renderer)
    return token_ids, num_lost + num_cut


def cut_messages(
    context: Sequence[int], messages: Sequence[Message], limit: int, *, renderer: ChatRenderer
) -> tuple[Sequence[Message], int]:
    """The messages with texts so short that at most ``limit`` ids put them behind the context, and how many
    tokens they lost. Every one has an equal share of what there is.
    """
    ids = renderer.bridge(context, messages)
    if len(ids) <= limit:
        return messages, 0
    lengths = [len(renderer.bridge((), [Message(role="inline", content=m.content)])) for m in messages]
    share = max(0, limit - (len(ids) - sum(lengths))) // len(messages)
    cut = [replace(m, content=truncate_text(m.content, share, renderer=renderer)) for m in messages]
    return cut, sum(max(0, length - share) for length in lengths)


def truncate_ids(ids: tuple[int, ...], limit: int, *, renderer: ChatRenderer) -> tuple[tuple[int, ...], int]:
    """At most ``limit`` ids, and how many were cut."""
    if len(ids) <= limit:
        return ids, 0
    num_end = min(_NUM_END_TOKENS, limit // 2)
    mark = renderer.bridge((), [Message(role="inline", content=CUT_MARK)])
    if num_end + len(mark) >= limit:
        # A budget too small for the mark: the node's count alone tells of the cut.
        mark = ()
    num_start = limit - num_end - len(mark)
    return (*ids[:num_start], *mark, *ids[len(ids) - num_end :]), len(ids) - num_start - num_end


def truncate_text(text: str, limit: int, *, renderer: ChatRenderer) -> str:
    """The text of at most ``limit`` ids; as it is where it fits."""
    token_ids, num_cut = truncate_ids(
        renderer.bridge((), [Message(role="inline", content=text)]), limit, renderer=renderer
    )
    return renderer.template.continuation.decode(token_ids) if num_cut else text


def require_no_rerendering(renderer: ChatRenderer) -> None:
    """For text of a hook, which is no message. Raises ConfigError where conversations are rendered again: it
    would be gone with the next observation.
    """
    if renderer.history_thinking == "strip":
        raise ConfigError(
            "model.history_thinking = strip leaves out what a hook puts between messages: use keep"
        )


def message_parts(messages: Sequence[Message]) -> dict[str, object]:
    """What :func:`join_messages` loses, for the node's metadata: where each message of several ends, whose it
    is, and the id of the call that it answers.
    """
    if len(messages) == 1 and not messages[0].tool_call_id:
        return {}
    parts = [
        {"role": message.role, "num_chars": len(message.content), "call_id": message.tool_call_id}
        for message in messages
    ]
    return {"messages": parts}


def join_messages(messages: Sequence[Message]) -> Message:
    """Several messages as their node holds them."""
    text = "\n".join(message.content for message in messages)
    return Message(role=messages[0].role, content=text)


# Two things that a memory needs from the loop: tips inside the newest user message, and a reflection after
# the end (EMPO²).


def show_tip(
    state: EpisodeState, splice: Splice, *, renderer: ChatRenderer, context_length: int, reserve: int
) -> bool:
    """Put a tip at the end of the newest user message, or inside the assistant's where that goes on; False
    without room.

    The message's node is split there: what the template writes behind the text becomes a node behind the tip.
    So the path without its memory nodes is, token by token, what a rollout without tips has. ``reserve`` are
    the tokens that the rollout may still add: a tip that would leave fewer is not shown, and tips count in no
    other budget, so that no episode ends because of them.
    """
    ids = renderer.bridge((), [Message(role="inline", content=splice.text)])
    newest, trace = state.last_node, state.trace
    if len(trace.token_ids(newest.node_id)) + len(ids) + reserve > context_length:
        return False
    parent = newest
    rest: tuple[int, ...] = ()
    opening = renderer.opening
    if (
        newest.origin in (Origin.PROMPT, Origin.ENVIRONMENT)
        and opening
        and newest.token_ids[-len(opening) :] == opening
    ):
        parent, rest = _without_end(state, len(opening)), opening
    metadata = dict(splice.metadata) | {"rollout": state.rollout, "num_tokens_cut": 0}
    message = Message(role="user" if rest else "inline", content=splice.text)
    state.last_node = trace.append(
        parent=parent.node_id, origin=Origin.MEMORY, token_ids=ids, message=message, metadata=metadata
    )
    if rest:
        state.last_node = trace.append(
            parent=state.last_node.node_id,
            origin=parent.origin,
            token_ids=rest,
            message=Message(role="user", content=""),
            metadata={"rollout": state.rollout},
        )
    return True


def _without_end(state: EpisodeState, length: int) -> Node:
    """The newest message's node without its last ids: shortened where it is this rollout's own, a shared one
    of the group if the prompt.
    """
    node, trace = state.last_node, state.trace
    token_ids = node.token_ids[:-length]
    if node.parent is not None:
        node.token_ids = token_ids  # it was appended for this turn: nothing hangs under it yet
        return node
    for other in trace.nodes:
        if other.parent is None and other.token_ids == token_ids:
            return other
    return trace.append(parent=None, origin=node.origin, token_ids=token_ids, message=node.message)


async def request_reflection(
    state: EpisodeState,
    hook: Hook,
    result: EpisodeResult,
    *,
    batcher: "RoundBatcher | StreamBatcher",
    renderer: ChatRenderer,
    max_ending_tokens: int,
    seed: int,
) -> tuple[str, int] | None:
    """The policy's reflection and its number of tokens; None where the hook asks nothing.

    ("", 0) where that cannot be: a reflection is never worth an episode, so an engine's fault or a full
    context leaves the rollout as it is.
    """
    room = batcher.engine.context_length - hook.max_reflection_tokens
    prompt_ids = _reflection_prompt(
        state, hook, result, renderer=renderer, room=room, max_ending_tokens=max_ending_tokens
    )
    if prompt_ids is None or len(prompt_ids) > room:
        return None if prompt_ids is None else ("", 0)
    request = Request(
        request_id=f"{state.task.key}/{state.rollout:04d}/{state.turn:03d}/reflection",
        token_ids=prompt_ids,
        max_tokens=hook.max_reflection_tokens,
        seed=seed,
        temperature=1.0,
        cache_key=f"{state.task.key}/{state.rollout}",
    )
    try:
        generation = await batcher.generate(request)
    except EngineFault:
        return "", 0
    # with the block of thinking that the template has opened: of one that was cut, nothing is a reflection
    is_closed = generation.finish_reason is FinishReason.EOS
    text = renderer.turn_text(generation.token_ids, context=prompt_ids, is_closed=is_closed)
    return text, len(generation.token_ids)


def _reflection_prompt(
    state: EpisodeState,
    hook: Hook,
    result: EpisodeResult,
    *,
    renderer: ChatRenderer,
    room: int,
    max_ending_tokens: int,
) -> tuple[int, ...] | None:
    """Ids of the episode and of what the hook asks; None where it asks nothing.

    The hook sees the environment's last message within the budget of an observation, and within what ``room``
    leaves: it loses its middle and at last goes, so that it costs no reflection that there is room for
    without it.
    """
    context = state.trace.token_ids(state.last_node.node_id)
    limit = max_ending_tokens
    while True:
        state_with_ending, num_ending_tokens = _with_ending(state, limit, renderer=renderer)
        message = hook.closing_message(state_with_ending, result)
        if message is None:
            return None
        ids = (*context, *renderer.bridge(context, [message]))
        if len(ids) <= room or num_ending_tokens == 0:
            return ids
        # And measured again: a shorter text need not have as many tokens fewer as were cut.
        limit = max(0, num_ending_tokens - (len(ids) - room))


def _with_ending(state: EpisodeState, limit: int, *, renderer: ChatRenderer) -> tuple[EpisodeState, int]:
    """The state with at most ``limit`` tokens of the environment's last message, and how many are left of
    it.
    """
    last = state.last_result
    if last is None or not last.done or not last.observations:
        return state, 0
    text = truncate_text(last.text, limit, renderer=renderer)
    message = replace(last.observations[0], content=text) if text else None
    num_ending_tokens = min(limit, len(renderer.bridge((), [Message(role="inline", content=text)])))
    return replace(state, last_result=replace(last, message=message, messages=())), num_ending_tokens


# Episodes of known texts, without a model and without tokens.


def play_texts(
    factory: EnvironmentFactory, task: Task, texts: Sequence[str], *, seed: int, timeout_s: float
) -> tuple[Episode, EpisodeResult]:
    """Play until the texts or the episode end, with at most ``timeout_s`` seconds for every call. Tool calls
    in the Hermes form, as imported chats have them, are converted to the environment's own.

    Raises ToolFault or EnvironmentFault when infrastructure broke or hangs.
    """
    environment = run_timed(factory, task, timeout_s=timeout_s)
    episode = open_episode(environment)
    try:
        run_timed(episode.start, seed, timeout_s=timeout_s)
        for text in texts:
            turn = episode.read(episode.convert(text))
            if run_timed(partial(episode.act, text, turn), timeout_s=timeout_s).done:
                break
        return episode, run_timed(episode.result, timeout_s=timeout_s)
    except InvalidResult as error:
        raise locate_invalid_result(environment, task.key, error) from error
    finally:
        close_quietly(environment, timeout_s=timeout_s)


def close_quietly(environment: Env, *, timeout_s: float) -> None:
    """Close an environment whose episode is over; a close that fails or hangs changes nothing of it."""
    with suppress(ToolFault, EnvironmentFault):
        run_timed(environment.close, timeout_s=timeout_s)
