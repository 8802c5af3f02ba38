"""The loop of one rollout: the prompt, alternating turns of policy and environment, then the leaf.

:class:`EpisodeRunner` runs a rollout of an ordinary environment. :mod:`outrider.rollout.external_agent`
overrides the methods that differ if an external program manages the conversation. The functions below the
class truncate observations, insert tips, request reflections and replay recorded texts without a model.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from operator import eq
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from outrider.engines.base import FinishReason, Generation, Request
from outrider.environments.base import (
    Env,
    EnvironmentFactory,
    Episode,
    EpisodeResult,
    StepResult,
    failed_calls,
    open_episode,
)
from outrider.errors import ConfigError, EngineFault, EnvironmentFault, InvalidResult, ToolFault
from outrider.rollout.branching import Fork, GroupScheduler, make_fork
from outrider.rollout.faults import cancelled_leaf, locate_invalid_result, run_guarded, run_timed
from outrider.rollout.hooks import (
    Attempt,
    Demonstration,
    EpisodeState,
    Hook,
    RolloutStatus,
    Splice,
    to_message,
)
from outrider.rollout.settings import Limits
from outrider.seeding import reset_seed, stream_seed
from outrider.tokens import ChatRenderer
from outrider.tokens.tool_calls import without_thoughts
from outrider.trace import (
    BODY,
    DESCRIBED_TOOLS,
    EARLIER_RETURN,
    EPISODE,
    NUM_NEW,
    REFLECTION,
    Leaf,
    Node,
    Trace,
)
from outrider.types import Message, Origin, Outcome, Step, Task, ToolSchema

if TYPE_CHECKING:
    from outrider.rollout.scheduler import RoundBatcher, StreamBatcher

ResultT = TypeVar("ResultT")
StateT = TypeVar("StateT", bound=EpisodeState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of the policy's turns. Temperature 0 is greedy decoding, as evaluations may use.
    Only evaluations set ``top_p`` and ``top_k``.
    """

    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True, kw_only=True)
class EpisodeRunner:
    """Runs rollouts of one scheduler run. All of them share these fields."""

    batcher: "RoundBatcher | StreamBatcher"
    renderer: ChatRenderer
    limits: Limits
    sampling: Sampling
    hooks: Sequence[Hook]
    run_seed: int
    training_step: int
    rollout_status: RolloutStatus
    scheduler: GroupScheduler
    marks_observations: bool = False  # record which tokens of an observation are its text (trace.BODY)

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
        renew: Callable[[], Awaitable[Env]] | None = None,
    ) -> Leaf:
        """Run one rollout and append its nodes to ``trace``.

        Args:
            task: the task of the group.
            trace: the tree of the group.
            environment: a new environment, or a copy if ``fork`` has one.
            rollout: the number of the rollout in its group.
            mode: the mode of the rollout, see :mod:`outrider.rollout.hooks`.
            fork: where the rollout starts; None: at the prompt.
            is_late: checked before every turn. If it returns True, the rollout is cancelled.
            renew: closes the environment and returns a new one; None: the rollout has one episode.

        Raises:
            ToolFault, EnvironmentFault, EngineFault: if infrastructure fails. The caller retries the rollout
                or records the fault.
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
            if outcome is None:
                continue
            self._set_status(state, "the environment's result")
            result = await self._run_guarded(state.episode.result)
            if renew is not None and (hook := self._next_episode_hook(state, result)) is not None:
                await self._start_next_episode(state, hook, result, renew)
                outcome = None
        reflection, num_reflection_tokens, detail = await self._reflect(state, result)
        return Leaf(
            node_id=state.last_node.node_id,
            rollout=rollout,
            outcome=outcome,
            episode_return=result.episode_return,
            success=result.success,
            metrics=dict(result.metrics),
            detail=detail,
            reflection=reflection,
            num_reflection_tokens=num_reflection_tokens,
            grade=result.to_grade(),
        )

    # 1. The prompt

    async def _open(
        self, task: Task, trace: Trace, episode: Episode, rollout: int, mode: str
    ) -> EpisodeState:
        """Create the state of a rollout after its environment was reset."""
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
        # All rollouts of a group share one prompt node, so that engines and packing reuse the prefix. If a
        # simulator ignores the seed, prompts may differ; each distinct prompt then has its own node.
        root = next(
            (node for node in trace.nodes if node.parent is None and node.token_ids == token_ids), None
        )
        if root is None:
            root = _append_prompt(trace, None, episode, tools, token_ids)
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
        """Create the state of a forked rollout.

        If the fork has no copy of the environment, replay the parent's actions in the new one.
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

    def _next_episode_hook(self, state: EpisodeState, result: EpisodeResult) -> Hook | None:
        """Return the hook that requests another episode. None if this one succeeded, was the last, or had a
        prompt without room for a turn, which the next one would have, too.
        """
        if result.success or state.turn == state.first_turn:
            return None
        num_finished = len(state.reflections) + 1
        return next((hook for hook in self.hooks if hook.num_episodes > num_finished), None)

    async def _start_next_episode(
        self, state: EpisodeState, hook: Hook, result: EpisodeResult, renew: Callable[[], Awaitable[Env]]
    ) -> None:
        """Append the policy's reflection as a turn, then start the next episode in a new context.

        Its environment is a new one with the same seed. The limits apply to every episode. Turns are numbered
        over the whole rollout, because their numbers select the random streams.
        """
        reflection = await self._reflection_turn(state, hook, result)
        episode = open_episode(await renew())
        await self._run_guarded(episode.start, reset_seed(self.run_seed, self.training_step, state.task.key))
        number = len(state.reflections) + 1
        state.last_node = _append_prompt(
            state.trace, state.last_node, episode, episode.tools,
            self.renderer.prompt(episode.prompt, episode.tools),
            {EPISODE: number, EARLIER_RETURN: result.episode_return, "rollout": state.rollout},
        )  # fmt: skip
        state.episode, state.conversation, state.steps, state.last_result = episode, episode.prompt, [], None
        state.num_response_tokens, state.first_turn = 0, state.turn
        state.reflections = (*state.reflections, reflection)

    async def _reflection_turn(self, state: EpisodeState, hook: Hook, result: EpisodeResult) -> str:
        """Append the request of a hook and the policy's reflection. Returns the reflection without thoughts;
        empty, and nothing is appended, if the hook requests none or the context has no room.
        """
        request = _reflection_prompt(
            state, hook, result,
            renderer=self.renderer,
            room=self._context_length - hook.max_reflection_tokens,
            max_ending_tokens=self.limits.max_observation_tokens,
        )  # fmt: skip
        if request is None or len(request[1]) > self._context_length - hook.max_reflection_tokens:
            return ""
        message, token_ids = request
        num_before = len(state.trace.token_ids(state.last_node.node_id))
        state.last_node = state.trace.append(
            parent=state.last_node.node_id, origin=Origin.ENVIRONMENT, token_ids=token_ids[num_before:],
            message=message,
            metadata={REFLECTION: True, "num_tokens_cut": 0, "rollout": state.rollout},
        )  # fmt: skip
        _, text = await self._generate(state, max_tokens=hook.max_reflection_tokens, stop=())
        state.last_node.metadata[REFLECTION] = True
        state.turn += 1
        return without_thoughts(text).strip()

    # 2. One turn

    async def _turn(self, state: EpisodeState) -> Outcome | None:
        """Run the hooks and one policy turn. Returns the outcome, or None if the episode continues."""
        if state.turn - state.first_turn >= self.limits.max_turns:
            return Outcome.TRUNCATED_TURNS
        if self._num_tokens_left(state) <= 0:
            return Outcome.TRUNCATED_TOKENS
        # In the first turn of a fork, skip the hooks and the branching decision: both already took place in
        # the parent rollout before this turn.
        was_forked, state.is_forked = state.is_forked, False
        for hook in () if was_forked else self.hooks:
            for intervention in hook.before_turn(state):
                if isinstance(intervention, Splice):
                    self._splice(state, intervention, room=self.limits.max_turn_tokens)
                    continue
                if isinstance(intervention, Demonstration):
                    turn_ids = self._demonstrated_turn(state, intervention.text)
                    if len(turn_ids[0]) > self.limits.max_turn_tokens:
                        break  # truncated, it would be another action: the policy continues before it
                    ended = await self._demonstrate(state, *turn_ids)
                else:
                    ended = await self._attempt(state, intervention)
                if ended is not None:
                    return ended
        context = state.last_node
        max_tokens, stop = self._turn_limits(state)
        finish, text = await self._generate(state, max_tokens=max_tokens, stop=stop)
        turn = state.episode.read(text)
        # A fork starts before the turn that was just sampled and does not share its tokens. The copy must be
        # made before the environment steps, so that it has the state in which this turn was sampled.
        fork: Fork | None = None
        if self.scheduler.should_fork(state, is_known=was_forked):
            self._set_status(state, "a copy of its environment")
            fork = await make_fork(state, context, timeout_s=self.limits.step_timeout_s)
        self.scheduler.on_turn_end(state, fork)
        outcome = await self._step(state, text, turn, finish)
        for hook in self.hooks:
            hook.after_turn(state)
        return outcome

    async def _step(
        self, state: EpisodeState, text: str, turn: Message, finish: FinishReason
    ) -> Outcome | None:
        """Step the environment with the turn of the last node, and append the observation."""
        try:
            result = await self._act(state, text, turn)
        except (ToolFault, EnvironmentFault) as fault:
            _record_failed_calls(state, turn, fault)
            raise
        state.last_result = result
        state.last_node.reward = result.reward
        state.last_node.metadata |= {
            "num_tool_calls": result.num_tool_calls,
            "tools": list(result.tools),
            "invalid": result.invalid,
        }
        state.steps.append(Step(text=text, observation=result.text, is_terminal=result.done))
        if not result.done:
            outcome = self._observe(state, result, finish)
        else:
            is_cut = finish is FinishReason.LENGTH
            outcome = episode_outcome(result, is_cut=is_cut, is_answer=state.episode.ends_with_answer)
        state.last_node.tool_calls = result.tool_calls  # the observation; the turn if none was appended
        state.turn += 1
        return outcome

    async def _generate(
        self, state: EpisodeState, *, max_tokens: int, stop: tuple[str, ...]
    ) -> tuple[FinishReason, str]:
        """Sample a turn and append its node. Returns the finish reason and the text."""
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
                **({"num_tips_dropped": state.num_tips_dropped} if state.num_tips_dropped else {}),
            },
        )
        state.num_splices_dropped = state.num_tips_dropped = 0
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
                # Zero-padded because batches are sorted by this string.
                request_id=f"{state.task.key}/{state.rollout:04d}/{state.turn:03d}",
                token_ids=context,
                max_tokens=max_tokens,
                seed=stream_seed(self.run_seed, "sample", self.training_step, *key),
                temperature=self.sampling.temperature,
                top_p=self.sampling.top_p,
                top_k=self.sampling.top_k,
                stop=stop,
                cache_key=f"{state.task.key}/{state.rollout}",
            )
        )
        is_closed = generation.finish_reason is FinishReason.EOS
        return generation, self.renderer.turn_text(generation.token_ids, context=context, is_closed=is_closed)

    def _turn_limits(self, state: EpisodeState) -> tuple[int, tuple[str, ...]]:
        """Maximum number of tokens of the turn, and its stop strings."""
        return min(self.limits.max_turn_tokens, self._num_tokens_left(state)), self.sampling.stop

    async def _act(self, state: EpisodeState, text: str, turn: Message | None = None) -> StepResult:
        """Step the environment in a thread with the step time limit."""
        self._set_status(state, "an environment's step")
        return await self._run_guarded(state.episode.act, text, turn)

    def _observe(self, state: EpisodeState, result: StepResult, finish: FinishReason) -> Outcome | None:
        """Append the observation. Returns an outcome if the rollout ends here, otherwise None."""
        observations = result.observations
        if not observations:
            raise EnvironmentFault("the environment neither answered nor ended the episode")
        if finish is FinishReason.EOS and observations[0].role == "inline":
            return Outcome.INVALID  # inline protocols have one assistant message, and the policy closed it
        limit = self.limits.max_observation_tokens
        if self.renderer.history_thinking == "strip":
            appended = self._append_rerendered(state, observations, limit)
        else:
            appended = self._append(state, Origin.ENVIRONMENT, observations, limit, {})
        return None if appended else Outcome.TRUNCATED_TOKENS

    # 3. Interventions of hooks

    async def _attempt(self, state: EpisodeState, attempt: Attempt) -> Outcome | None:
        """Execute a hook's action in the environment.

        The environment's state changes even if the text of the splice does not fit into the context.
        """
        turn_ids = None
        if attempt.as_turn and not (state.last_result and _is_inline(state.last_result)):
            turn_ids = self._demonstrated_turn(state, attempt.action)
        if turn_ids and len(turn_ids[0]) > min(
            self.limits.max_splice_tokens, self._num_tokens_left(state) - 1
        ):
            state.num_splices_dropped += 1
            return None
        before = state.last_node
        action = state.episode.convert(attempt.action)
        try:
            result = await self._act(state, action)
        except (ToolFault, EnvironmentFault) as fault:
            _record_failed_calls(state, state.episode.read(action), fault)
            raise
        splice = attempt.then(result)
        if not result.observations or _is_inline(result):
            turn_ids = None
        if splice is not None and turn_ids:
            self._append_turn(state, splice, *turn_ids)
        elif splice is not None:
            self._splice(state, splice, room=1)
        if state.last_node is not before:
            state.last_node.reward = result.reward
            state.last_node.tool_calls = result.tool_calls
            state.last_node.metadata |= {"action": action, "observation": result.text}
        else:
            # The context does not contain the action, so record it in the metadata.
            before.metadata.setdefault("attempted", []).append(action)
            if splice is not None and not result.done:
                return Outcome.TRUNCATED_TOKENS  # the state changed, but the policy cannot see how
        if result.done:
            return episode_outcome(result)
        if splice is None or not turn_ids:
            return None
        outcome = self._observe(state, result, FinishReason.EOS)
        state.last_node.metadata.pop(BODY, None)  # no observation of the policy's own action
        return outcome

    def _append_turn(self, state: EpisodeState, splice: Splice, ids: Sequence[int], is_closed: bool) -> None:
        """Append a hook's action as a turn of its own."""
        require_no_rerendering(self.renderer)
        context = state.trace.token_ids(state.last_node.node_id)
        text = self.renderer.turn_text(ids, context=context, is_closed=is_closed)
        state.last_node = state.trace.append(
            parent=state.last_node.node_id,
            origin=splice.origin,
            token_ids=tuple(ids),
            message=Message(role="assistant", content=text),
            metadata=dict(splice.metadata) | {"num_tokens_cut": 0, "rollout": state.rollout},
        )
        state.num_response_tokens += len(ids)
        if splice.step is not None:
            state.steps.append(splice.step)

    def _demonstrated_turn(self, state: EpisodeState, text: str) -> tuple[Sequence[int], bool]:
        """Return the ids that a rollout of the demonstrator would have, and whether they end the message."""
        context = state.trace.token_ids(state.last_node.node_id)
        text = self.renderer.demonstration(state.episode.convert(text), context)
        return self.renderer.recorded_turn(text, context, stop=self.sampling.stop)

    async def _demonstrate(self, state: EpisodeState, ids: Sequence[int], is_closed: bool) -> Outcome | None:
        """Execute a demonstrator's turn."""
        context = state.trace.token_ids(state.last_node.node_id)
        finish = FinishReason.EOS if is_closed else FinishReason.STOP
        max_tokens, _ = self._turn_limits(state)
        if len(ids) > max_tokens:
            ids, finish = ids[:max_tokens], FinishReason.LENGTH
        text = self.renderer.turn_text(ids, context=context, is_closed=finish is FinishReason.EOS)
        turn_node = state.trace.append(
            parent=state.last_node.node_id,
            origin=Origin.DEMONSTRATION,
            token_ids=tuple(ids),
            message=Message(role="assistant", content=text),
            metadata={"finish": finish.value},
        )
        state.last_node = turn_node = share_prefix(state.trace, turn_node)
        state.num_response_tokens += len(ids)
        outcome = await self._step(state, text, state.episode.read(text), finish)
        if state.last_node is not turn_node:
            state.last_node = share_prefix(state.trace, state.last_node)
        if outcome is None and state.turn >= self.limits.max_turns:
            return Outcome.TRUNCATED_TURNS
        return outcome

    def _splice(self, state: EpisodeState, splice: Splice, *, room: int) -> None:
        """Insert a hook's text, unless fewer than ``room`` tokens would remain for the policy.

        A dropped splice is counted and does not end the episode.
        """
        require_no_rerendering(self.renderer)
        if splice.origin is Origin.MEMORY:
            reserve = self.limits.max_response_tokens - state.num_response_tokens
            length = self._context_length
            is_shown = show_tip(state, splice, renderer=self.renderer, context_length=length, reserve=reserve)
            state.num_tips_dropped += not is_shown
            return
        limit = self.limits.max_splice_tokens
        metadata = dict(splice.metadata)
        if not self._append(state, splice.origin, [to_message(splice)], limit, metadata, room=room):
            state.num_splices_dropped += 1
        elif splice.step is not None:
            state.steps.append(splice.step)

    async def _reflect(self, state: EpisodeState, result: EpisodeResult) -> tuple[str, int, str]:
        """Generate the first reflection that a hook requests. Returns its text, its number of tokens, and the
        fault of an engine that failed: a missing reflection does not fail the rollout.
        """
        for hook in self.hooks:
            if hook.max_reflection_tokens and hook.num_episodes == 1:
                self._set_status(state, "the wait for a reflection")
                key = (state.task.key, state.rollout)
                try:
                    reflection = await request_reflection(
                        state,
                        hook,
                        result,
                        batcher=self.batcher,
                        renderer=self.renderer,
                        max_ending_tokens=self.limits.max_observation_tokens,
                        # The stream is still called "remark": another name would change the draws of earlier
                        # versions.
                        seed=stream_seed(self.run_seed, "remark", self.training_step, *key),
                    )
                except EngineFault as fault:
                    return "", 0, f"no reflection: {fault}"
                if reflection is not None:
                    return *reflection, ""
        return "", 0, ""

    # 4. The context. These methods leave room for at least one token of the policy. If there is none, they
    # append nothing and return False.

    @property
    def _context_length(self) -> int:
        return self.batcher.engine.context_length

    def _num_tokens_left(self, state: EpisodeState) -> int:
        """Number of tokens that the rollout may still add."""
        # The prompt and tips do not count towards the response budget, but they do fill the context.
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
        """Append messages that the policy did not write.

        Messages over ``limit`` tokens are truncated; the text and the node's metadata mark the cut. Returns
        False and appends nothing if fewer than ``room`` tokens would remain for the policy.
        """
        context = state.trace.token_ids(state.last_node.node_id)
        token_ids, num_cut = render_bridge(context, messages, limit, renderer=self.renderer)
        if len(token_ids) > self._num_tokens_left(state) - room:
            return False
        metadata |= {"num_tokens_cut": num_cut, "rollout": state.rollout} | message_parts(messages)
        if self.marks_observations and origin is Origin.ENVIRONMENT:
            cut = cut_messages(context, messages, limit, renderer=self.renderer)[0]
            metadata[BODY] = body_spans(token_ids, context, cut, renderer=self.renderer)
        state.last_node = state.trace.append(
            parent=state.last_node.node_id, origin=origin, token_ids=token_ids,
            message=join_messages(messages),
            metadata=metadata,
        )  # fmt: skip
        state.num_response_tokens += len(token_ids)
        return True

    def _append_rerendered(self, state: EpisodeState, observations: Sequence[Message], limit: int) -> bool:
        """Append observations by rendering the whole conversation again (``history_thinking = "strip"``).

        Inference servers do the same: the template removes the thinking of earlier turns. If the new
        rendering starts with the current context, only the new tokens are appended. Otherwise the context
        restarts, and the rollout yields one more training sample.
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
        """Append an observation as a continuation of the context or, if ``restarts``, as a new context.

        ``num_new`` is the number of tokens that count towards ``max_response_tokens``: a restart repeats
        earlier tokens, which were counted before. Returns False if there is no room.
        """
        context = 0 if restarts else len(state.trace.token_ids(state.last_node.node_id))
        remaining = self.limits.max_response_tokens - state.num_response_tokens - num_new
        if min(remaining, self._context_length - context - len(token_ids)) < 1:
            return False
        metadata = {"num_tokens_cut": num_cut, "rollout": state.rollout} | message_parts(observations)
        state.last_node = state.trace.append(
            parent=state.last_node.node_id, origin=Origin.ENVIRONMENT, token_ids=token_ids,
            message=join_messages(observations), restarts=restarts,
            metadata=metadata | ({"restarts": True, NUM_NEW: num_new} if restarts else {}),
        )  # fmt: skip
        state.num_response_tokens += num_new
        return True

    def _set_status(self, state: EpisodeState, location: str) -> None:
        self.rollout_status.set(f"{state.task.key}/{state.rollout}", location)

    async def _run_guarded(self, call: Callable[..., ResultT], *arguments: object) -> ResultT:
        return await run_guarded(call, *arguments, timeout_s=self.limits.step_timeout_s)


def _record_failed_calls(state: EpisodeState, turn: Message, fault: ToolFault | EnvironmentFault) -> None:
    """Record the calls of a step that a fault ended at the last node, unless other rollouts share it, as
    they may a prompt or a demonstrator's turn.
    """
    node = state.last_node
    if node.metadata.get("rollout") == state.rollout:
        node.tool_calls = (*node.tool_calls, *(fault.tool_calls or failed_calls(turn, fault)))


def _append_prompt(
    trace: Trace,
    parent: Node | None,
    episode: Episode,
    tools: Sequence[ToolSchema],
    token_ids: tuple[int, ...],
    metadata: Mapping[str, object] = MappingProxyType({}),
) -> Node:
    """Append the prompt of an episode: the root, or below ``parent`` the start of a new context."""
    # The message contains only the environment's text; the token ids also contain the tool schemas.
    described = {DESCRIBED_TOOLS: [str(tool["name"]) for tool in tools]} if tools else {}
    return trace.append(
        parent=None if parent is None else parent.node_id, origin=Origin.PROMPT, token_ids=token_ids,
        metadata=described | dict(metadata), message=Message(role="user", content=episode.opening),
        restarts=parent is not None,
    )  # fmt: skip


def episode_outcome(result: StepResult, *, is_cut: bool = False, is_answer: bool = False) -> Outcome:
    """Return the outcome of an episode that the environment ended (``done``).

    Args:
        result: the last step.
        is_cut: whether the token limit truncated the last turn. If the turn is invalid, truncation is the
            reason, so the outcome is ``TRUNCATED_TOKENS`` and not ``INVALID``.
        is_answer: whether the whole last turn is the answer. A truncated answer is not the one that the
            policy was writing, so it also counts as ``TRUNCATED_TOKENS``.
    """
    if is_cut and (result.invalid or is_answer):
        return Outcome.TRUNCATED_TOKENS
    if result.truncated:
        return Outcome.TRUNCATED_TURNS
    return Outcome.INVALID if result.invalid else Outcome.FINISHED


def share_prefix(trace: Trace, node: Node) -> Node:
    """Return the node of a sibling that equals ``node``, the newest of the trace, which is removed then.

    No rollout owns the node: which one comes first depends on the speed of tools. Observations of a prefix
    are context only, also for ``observation_nll``.
    """
    node.metadata.pop("rollout", None)
    node.metadata.pop(BODY, None)
    node.metadata["is_prefix"] = True
    for other in trace.nodes[:-1]:
        if (other.parent, other.origin, other.token_ids) == (node.parent, node.origin, node.token_ids):
            assert trace.nodes.pop() is node
            return other
    return node


# Truncation: texts over the budget lose their middle and receive a mark there. The end stays because it
# closes the tags and messages that the start opens.


CUT_MARK = " [...] "
_NUM_END_TOKENS = 24  # tokens that close tags and messages and open the assistant's turn


def render_bridge(
    context: Sequence[int], messages: Sequence[Message], limit: int, *, renderer: ChatRenderer
) -> tuple[tuple[int, ...], int]:
    """Render messages after the context with at most ``limit`` token ids.

    Several messages are truncated one by one, so that the template's text between them stays complete.

    Returns:
        The token ids and the number of tokens that were cut.
    """
    if len(messages) > 1:
        messages, num_lost = cut_messages(context, messages, limit, renderer=renderer)
    else:
        num_lost = 0
    token_ids, num_cut = truncate_ids(renderer.bridge(context, messages), limit, renderer=renderer)
    return token_ids, num_lost + num_cut


_OTHER_TEXTS = ("0", "x")  # no text begins or ends like both of them


def body_spans(
    token_ids: Sequence[int], context: Sequence[int], messages: Sequence[Message], *, renderer: ChatRenderer
) -> list[list[int]]:
    """Find the tokens of each message's text among its rendered ``token_ids``, as ``[start, end)``.

    The tokens that stay if the text is replaced belong to the template. A token that contains parts of both
    belongs to the text.
    """
    spans: list[list[int]] = []
    for number, message in enumerate(messages):
        others = [
            renderer.bridge(
                context, [*messages[:number], replace(message, content=text), *messages[number + 1 :]]
            )
            for text in _OTHER_TEXTS
        ]
        start = min(_num_equal(token_ids, other) for other in others)
        end = len(token_ids) - min(_num_equal(token_ids[::-1], other[::-1]) for other in others)
        if message.content and start < end:
            spans.append([start, end])
    return spans


def _num_equal(ids: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(bool, map(eq, ids, other)))


def cut_messages(
    context: Sequence[int], messages: Sequence[Message], limit: int, *, renderer: ChatRenderer
) -> tuple[Sequence[Message], int]:
    """Truncate the texts of messages so that they render to at most ``limit`` token ids after the context.

    All messages have equal shares of the budget.

    Returns:
        The messages and the number of tokens that were cut.
    """
    ids = renderer.bridge(context, messages)
    if len(ids) <= limit:
        return messages, 0
    lengths = [len(renderer.bridge((), [Message(role="inline", content=m.content)])) for m in messages]
    share = max(0, limit - (len(ids) - sum(lengths))) // len(messages)
    cut = [replace(m, content=truncate_text(m.content, share, renderer=renderer)) for m in messages]
    return cut, sum(max(0, length - share) for length in lengths)


def truncate_ids(ids: tuple[int, ...], limit: int, *, renderer: ChatRenderer) -> tuple[tuple[int, ...], int]:
    """Cut the middle of ``ids`` to at most ``limit`` ids.

    Returns the ids and the number of ids that were cut.
    """
    if len(ids) <= limit:
        return ids, 0
    num_end = min(_NUM_END_TOKENS, limit // 2)
    mark = renderer.bridge((), [Message(role="inline", content=CUT_MARK)])
    if num_end + len(mark) >= limit:
        # The mark does not fit; only the node's metadata records the cut.
        mark = ()
    num_start = limit - num_end - len(mark)
    return (*ids[:num_start], *mark, *ids[len(ids) - num_end :]), len(ids) - num_start - num_end


def truncate_text(text: str, limit: int, *, renderer: ChatRenderer) -> str:
    """Truncate a text to at most ``limit`` token ids; a text that fits is returned unchanged."""
    token_ids, num_cut = truncate_ids(
        renderer.bridge((), [Message(role="inline", content=text)]), limit, renderer=renderer
    )
    return renderer.template.continuation.decode(token_ids) if num_cut else text


def require_no_rerendering(renderer: ChatRenderer) -> None:
    """Check that a hook may insert text that is not a message of its own.

    Raises:
        ConfigError: if every observation renders the conversation again, which would remove such text.
    """
    if renderer.history_thinking == "strip":
        raise ConfigError(
            "model.history_thinking = strip removes the text that a hook inserts between messages: use keep"
        )


def message_parts(messages: Sequence[Message]) -> dict[str, object]:
    """Return node metadata that :func:`join_messages` drops.

    For each message: its role, its number of characters and the id of the tool call that it answers. Empty
    for a single message without a call id.
    """
    if len(messages) == 1 and not messages[0].tool_call_id:
        return {}
    parts = [
        {"role": message.role, "num_chars": len(message.content), "call_id": message.tool_call_id}
        for message in messages
    ]
    return {"messages": parts}


def join_messages(messages: Sequence[Message]) -> Message:
    """Join messages into the one message that a node stores. The role is that of the first message."""
    text = "\n".join(message.content for message in messages)
    return Message(role=messages[0].role, content=text)


# Support for memories (EMPO²): tips inside the newest user message, and a reflection after the episode.


def show_tip(
    state: EpisodeState, splice: Splice, *, renderer: ChatRenderer, context_length: int, reserve: int
) -> bool:
    """Insert a tip at the end of the newest user message, or inside the assistant message if that is open.

    The node of the message is split: the tokens that the template writes after the text move to a node after
    the tip. Without its memory nodes, the path is therefore token for token that of a rollout without tips.

    Args:
        state: the rollout.
        splice: the tip.
        renderer: renders the tip.
        context_length: the engine's context length in tokens.
        reserve: number of tokens that the rollout may still add. A tip that would leave fewer is not shown.
            Tips count towards no other budget, so no episode ends because of a tip.

    Returns:
        Whether the tip was inserted.
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
    """Return the newest message's node without its last ``length`` ids.

    An observation belongs to this rollout alone and is shortened in place. The prompt is shared, so the group
    has a second, shortened prompt node for rollouts with tips.
    """
    node, trace = state.last_node, state.trace
    token_ids = node.token_ids[:-length]
    if node.parent is not None:
        node.token_ids = token_ids  # it was appended for this turn and has no children yet
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
    """Generate the policy's reflection on a finished episode.

    Returns:
        The text and its number of tokens, or None if the hook requests no reflection. ("", 0) if the context
        is full.

    Raises:
        EngineFault: if the engine failed.
    """
    room = batcher.engine.context_length - hook.max_reflection_tokens
    prompt = _reflection_prompt(
        state, hook, result, renderer=renderer, room=room, max_ending_tokens=max_ending_tokens
    )
    if prompt is None or len(prompt[1]) > room:
        return None if prompt is None else ("", 0)
    prompt_ids = prompt[1]
    request = Request(
        request_id=f"{state.task.key}/{state.rollout:04d}/{state.turn:03d}/reflection",
        token_ids=prompt_ids,
        max_tokens=hook.max_reflection_tokens,
        seed=seed,
        temperature=1.0,
        cache_key=f"{state.task.key}/{state.rollout}",
    )
    generation = await batcher.generate(request)
    # turn_text includes a thinking block that the template opened, so that truncated thinking is not mistaken
    # for a reflection.
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
) -> tuple[Message, tuple[int, ...]] | None:
    """Return the hook's request, and the token ids of the episode followed by it; None without a request.

    The environment's last message, which the hook may quote, is truncated to the budget of an observation and
    to the remaining ``room``. It is dropped if the request only fits without it.
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
            return message, ids
        # Render again: tokenization is not additive, so the cut may save fewer tokens than intended.
        limit = max(0, num_ending_tokens - (len(ids) - room))


def _with_ending(state: EpisodeState, limit: int, *, renderer: ChatRenderer) -> tuple[EpisodeState, int]:
    """Truncate the environment's last message to ``limit`` tokens.

    Returns the changed state and the number of tokens that remain of the message.
    """
    last = state.last_result
    if last is None or not last.done or not last.observations:
        return state, 0
    text = truncate_text(last.text, limit, renderer=renderer)
    message = replace(last.observations[0], content=text) if text else None
    num_ending_tokens = min(limit, len(renderer.bridge((), [Message(role="inline", content=text)])))
    return replace(state, last_result=replace(last, message=message, messages=())), num_ending_tokens


def _is_inline(result: StepResult) -> bool:
    """Whether the environment answers inside the assistant's message."""
    return bool(result.observations) and result.observations[0].role == "inline"


# Episodes of recorded texts, without a model and without tokens.


def play_texts(
    factory: EnvironmentFactory, task: Task, texts: Sequence[str], *, seed: int, timeout_s: float
) -> tuple[Episode, EpisodeResult]:
    """Step an environment with recorded turns until the texts or the episode end.

    Tool calls in the Hermes format, as in imported chats, are converted to the environment's format.

    Args:
        factory: makes the environment.
        task: the task of the episode.
        texts: the policy's turns.
        seed: the seed of the reset.
        timeout_s: time limit of every call of the environment, in seconds.

    Raises:
        ToolFault, EnvironmentFault: if infrastructure fails or a call times out.
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
    """Close the environment of a finished episode and ignore failures, which do not affect its result."""
    with suppress(ToolFault, EnvironmentFault):
        run_timed(environment.close, timeout_s=timeout_s)
