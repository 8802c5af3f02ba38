"""One episode as a coroutine: prompt, then turns of policy and environment, until exactly one outcome."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from outrider.engines.base import FinishReason, Request
from outrider.environments.base import Environment, EpisodeResult, StepResult, is_answer, turn_message
from outrider.environments.conversing import Conversation, OwnConversations, SampledTurn
from outrider.errors import EnvironmentFault
from outrider.rollout.batcher import RoundBatcher
from outrider.rollout.blocking import guarded
from outrider.rollout.branch import Book, Fork, prompt_text, take_fork
from outrider.rollout.context import Context
from outrider.rollout.conversing import Exchange, asked_of, opening_ids, tell_sampled
from outrider.rollout.faults import given_up
from outrider.rollout.hooks import Attempt, EpisodeState, Hook, Reflector, Splice, message_of
from outrider.rollout.limits import Limits
from outrider.rollout.rerendering import require_kept
from outrider.rollout.scripted_play import outcome_of
from outrider.rollout.stream_batcher import StreamBatcher
from outrider.rollout.tip_splice import ask_for_reflection, show_tip
from outrider.rollout.whereabouts import Whereabouts
from outrider.seeding import reset_seed, stream_seed
from outrider.tokens import ChatRenderer
from outrider.trace import Leaf, Node, Trace
from outrider.types import Message, Origin, Outcome, Step, Task

ResultT = TypeVar("ResultT")


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
    whereabouts: Whereabouts
    book: Book

    async def run(
        self,
        *,
        task: Task,
        trace: Trace,
        environment: Environment,
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
        self.whereabouts.at(f"{task.key}/{rollout}", "the start of its environment")
        last_node, opening = await self._begin(task, trace, environment, fork)
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
        )
        if fork is not None:
            fork.continue_in(state)
        outcome = None
        while outcome is None:
            if is_late():
                return given_up(rollout)
            outcome = await self._turn(state)
        return await self._leaf(state, outcome)

    async def _leaf(self, state: EpisodeState, outcome: Outcome) -> Leaf:
        """What the environment says of an episode that has ended."""
        self._at(state, "the environment's result")
        result = await self._guarded(state.environment.result)
        # A fault and no number: NaN would pass for a rollout that nobody could score.
        if not math.isfinite(result.episode_return):
            raise EnvironmentFault(f"the environment recorded a return of {result.episode_return}")
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
        self, task: Task, trace: Trace, environment: Environment, fork: Fork | None
    ) -> tuple[Node, tuple[Message, ...]]:
        """Bring the environment to where the rollout begins; the node of its first context, and the
        conversation that it is of.
        """
        seed = reset_seed(self.run_seed, self.training_step, task.key)
        if fork is None:
            messages = await self._guarded(environment.reset, seed)
            ids = opening_ids(environment, messages, self.renderer)
            return _root(trace, ids, messages), tuple(messages)
        await fork.restore(environment, reset_seed=seed, timeout_s=self.limits.step_timeout_s)
        return fork.last_node, fork.conversation

    async def _reflect(self, state: EpisodeState, result: EpisodeResult) -> tuple[str, int]:
        for hook in self.hooks:
            if isinstance(hook, Reflector):
                self._at(state, "the wait for a reflection")
                reflection = await ask_for_reflection(
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
        if self._context.left(state) <= 0:
            return Outcome.TRUNCATED_TOKENS
        # hooks have acted, and this point was decided about, in the rollout that it left
        here = state.is_forked
        state.is_forked = False
        if not here and (outcome := await self._before_turn(state)) is not None:
            return outcome
        before = state.last_node
        question = asked_of(state.environment)
        finish, text, sampled = await self._generate(state, question)
        said = turn_message(state.environment, text)
        # In front of the step: a program that has ended asks nothing.
        answers = is_answer(state.environment, said)
        # Before the environment acts: a copy has to be of the state that this turn was written in.
        await self._pass(state, before, is_known=here)
        result = await self._act(state, text)
        state.last_result = result
        state.last_node.reward = result.reward
        state.last_node.metadata |= {
            "num_tool_calls": result.num_tool_calls,
            "tools": list(result.tools),
            "invalid": result.invalid,
        }
        observation = result.text
        state.steps.append(Step(text=text, observation=observation, is_terminal=result.done))
        if question is not None and sampled is not None:
            whole = finish is not FinishReason.STOP
            state.exchanges.append(
                Exchange(
                    asked=question,
                    said=said,
                    context=before,
                    turn=state.last_node,
                    is_whole=whole,
                    sampled=sampled,
                )
            )
        outcome = self._observe(state, result, finish, question, is_answer=answers)
        state.turn += 1
        for hook in self.hooks:
            hook.after_turn(state)
        return outcome

    async def _before_turn(self, state: EpisodeState) -> Outcome | None:
        for hook in self.hooks:
            for wanted in hook.before_turn(state):
                if isinstance(wanted, Splice):
                    self._splice(state, wanted, room=self.limits.max_turn_tokens)
                elif (outcome := await self._attempt(state, wanted)) is not None:
                    return outcome
        return None

    async def _pass(self, state: EpisodeState, before: Node, *, is_known: bool) -> None:
        """Rollouts may leave in front of the turn that was just written, now or later; its own tokens stay
        with this rollout.
        """
        fork: Fork | None = None
        if self.book.arrived(state, is_known=is_known):
            self._at(state, "a copy of its environment")
            fork = await take_fork(state, before, timeout_s=self.limits.step_timeout_s)
        self.book.passed(state, fork)

    async def _act(self, state: EpisodeState, action: str) -> StepResult:
        self._at(state, "an environment's step")
        result = await self._guarded(state.environment.step, turn_message(state.environment, action))
        if not math.isfinite(result.reward):
            raise EnvironmentFault(f"the environment gave a step reward of {result.reward}")
        state.actions.append(action)
        state.results.append(result)
        return result

    async def _generate(
        self, state: EpisodeState, question: Conversation | None
    ) -> tuple[FinishReason, str, SampledTurn | None]:
        self._at(state, "the wait for a batch")
        context = state.trace.token_ids(state.last_node.node_id)
        room = min(self.limits.max_turn_tokens, self._context.left(state))
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
        sampled = tell_sampled(state.environment, generation, context, self.renderer)
        return generation.finish_reason, text, sampled

    def _observe(
        self,
        state: EpisodeState,
        result: StepResult,
        finish: FinishReason,
        question: Conversation | None,
        *,
        is_answer: bool,
    ) -> Outcome | None:
        """Append the observation and decide whether the episode is over."""
        if result.done:
            num_tokens = len(state.last_node.token_ids)
            # a program's own limit cuts nothing that it did not want cut
            is_own_limit = question is not None and num_tokens == question.max_tokens
            cut = finish is FinishReason.LENGTH and not is_own_limit
            return outcome_of(result, is_cut=cut, is_answer=is_answer)
        if isinstance(state.environment, OwnConversations):
            appended = self._context.append_asked(state, state.environment, result)
            return None if appended else Outcome.TRUNCATED_TOKENS
        observations = result.observations
        if not observations:
            raise EnvironmentFault("the environment neither answered nor ended the episode")
        if finish is FinishReason.EOS and observations[0].role == "inline":
            return Outcome.INVALID  # the policy closed the one assistant message that the protocol has
        limit = self.limits.max_observation_tokens
        if self.renderer.history_thinking == "strip":
            appended = self._context.append_again(state, observations, limit)
        else:
            appended = self._context.append(state, Origin.ENVIRONMENT, observations, limit, {})
        return None if appended else Outcome.TRUNCATED_TOKENS

    async def _attempt(self, state: EpisodeState, attempt: Attempt) -> Outcome | None:
        """Do a hook's action in the environment; the action counts also where its text finds no room."""
        before = state.last_node
        result = await self._act(state, attempt.action)
        splice = attempt.then(result)
        if splice is not None:
            self._splice(state, splice, room=1)
        if state.last_node is not before:
            state.last_node.reward = result.reward
            state.last_node.metadata |= {"action": attempt.action, "observation": result.text}
        else:
            # no text tells of it, so the record does
            before.metadata.setdefault("attempted", []).append(attempt.action)
            if splice is not None and not result.done:
                return Outcome.TRUNCATED_TOKENS  # the state has moved on and the policy could not be told
        return outcome_of(result) if result.done else None

    def _splice(self, state: EpisodeState, splice: Splice, *, room: int) -> None:
        """Put a hook's text in, unless it would leave the policy less than ``room`` tokens: a step must not
        end the episode.
        """
        require_kept(self.renderer)
        if splice.origin is Origin.MEMORY:
            reserve = self.limits.max_response_tokens - state.num_response_tokens
            length = self.batcher.engine.context_length
            shown = show_tip(state, splice, renderer=self.renderer, context_length=length, reserve=reserve)
            state.num_splices_dropped += not shown
            return
        limit = self.limits.max_splice_tokens
        if not self._context.append(
            state, splice.origin, [message_of(splice)], limit, dict(splice.metadata), room=room
        ):
            state.num_splices_dropped += 1
        elif splice.step is not None:
            state.steps.append(splice.step)

    @property
    def _context(self) -> Context:
        return Context(
            renderer=self.renderer, limits=self.limits, context_length=self.batcher.engine.context_length
        )

    def _at(self, state: EpisodeState, place: str) -> None:
        self.whereabouts.at(f"{state.task.key}/{state.rollout}", place)

    async def _guarded(self, call: Callable[..., ResultT], *arguments: object) -> ResultT:
        return await guarded(call, *arguments, timeout_s=self.limits.step_timeout_s)


def _root(trace: Trace, token_ids: tuple[int, ...], messages: Sequence[Message]) -> Node:
    """The group's shared prompt node; a simulator without a seed may open differently and then gets its
    own.
    """
    for node in trace.nodes:
        if node.parent is None and node.token_ids == token_ids:
            return node
    message = Message(role="user", content=prompt_text(messages))
    return trace.append(parent=None, origin=Origin.PROMPT, token_ids=token_ids, message=message)
