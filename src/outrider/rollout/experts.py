"""Experts played through the real loop: their steps get the ids, observations and returns that a policy's
would get.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from outrider.engines.base import Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import EnvironmentFactory, StepResult
from outrider.memory.step_store import TokenCounter
from outrider.rollout.episode import Sampling
from outrider.rollout.hooks import (
    Attempt,
    EpisodeState,
    Hook,
    RolloutStatus,
    Splice,
    format_retrieved,
    join_observation,
)
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.seeding import stream
from outrider.tokens import ChatRenderer, Tokenizer
from outrider.trace import Node, Trace
from outrider.types import Message, Origin, Step, Task, Trajectory

ExpertSource = Callable[[Task], Sequence[Step] | None]


@dataclass(slots=True, kw_only=True)
class ExpertPlayer(Hook):
    """Script and hook in one: says the expert's next step, and shows some steps inside ``<retrieve>``
    instead.

    ``retrieve_share`` of the tasks (by their own random stream) get one middle step shown. It is done in the
    environment and shown with the real observation, so that what follows it goes on from the state that the
    text tells of.
    """

    expert: ExpertSource
    run_seed: int
    retrieve_share: float = 0.0
    _steps: dict[str, Sequence[Step]] = field(default_factory=dict)
    _states: dict[str, EpisodeState] = field(default_factory=dict)

    def before_turn(self, state: EpisodeState) -> Sequence[Attempt]:
        """Remember the episode; maybe do and show the next step instead of letting it be said."""
        key = state.task.key
        self._states[key] = state
        if state.turn == 0:
            self._steps[key] = self.expert(state.task) or ()
        # Keyed without the turn: every turn draws the same decision, so none has to be remembered.
        random = stream(self.run_seed, "expert retrieve", key)
        shown_index = 1 + int(random.integers(max(1, len(self._steps[key]) - 2)))
        if (
            random.random() >= self.retrieve_share
            or len(state.steps) != shown_index
            or shown_index >= len(self._steps[key]) - 1
        ):
            return ()
        action = state.episode.convert(self._steps[key][shown_index].text)
        return [Attempt(action=action, then=partial(_to_splice, action))]

    def next_text(self, request: Request, context: str) -> str:
        """The expert's next step; nothing once its path is over."""
        key = request.request_id.rsplit("/", 2)[0]
        state = self._states[key]
        steps, position = self._steps[key], len(state.steps)
        return state.episode.convert(steps[position].text) if position < len(steps) else ""


def _to_splice(action: str, result: StepResult) -> Splice | None:
    """The step as it was answered; nothing where the environment did not do it: then the expert says it."""
    if not result.carried_out:
        return None
    step = Step(text=action, observation=result.text, is_terminal=result.done)
    metadata = {"step_ids": [], "agent": "expert", "similarity": 1.0}
    return Splice(
        origin=Origin.BUFFER,
        text=format_retrieved(join_observation(action, step.observation)),
        step=step,
        metadata=metadata,
    )


def play_experts(
    *,
    tasks: Sequence[Task],
    expert: ExpertSource,
    factory: EnvironmentFactory,
    tokenizer: Tokenizer,
    renderer: ChatRenderer | None = None,
    limits: Limits,
    stop: tuple[str, ...],
    run_seed: int,
    context_length: int,
    retrieve_share: float = 0.0,
    max_concurrent: int = 64,
    max_retries: int = 2,
    training_step: int = 0,
    rollout_status: RolloutStatus | None = None,
    hooks: Sequence[Hook] = (),
    mode: str = "expert",
    on_finished: Callable[[int, int], None] | None = None,
) -> list[Trace]:
    """One expert rollout of every task, in order; ``training_step`` chooses the initial states, as it does
    for a policy's rollouts.

    ``renderer`` is the policy's (None: the tokenizer's plain one). ``hooks`` act before the expert does, in
    rollouts of ``mode``: a memory may show it tips.
    ``on_finished(done, total)`` is called after every rollout.
    """
    player = ExpertPlayer(expert=expert, run_seed=run_seed, retrieve_share=retrieve_share)
    renderer = renderer or ChatRenderer(tokenizer)

    def script(request: Request, context: str) -> str:
        return renderer.demonstration(player.next_text(request, context), request.token_ids)

    engine = ScriptedEngine(
        tokenizer=tokenizer, script=script, context_length=context_length, renderer=renderer
    )
    scheduler = Scheduler(
        engine=engine,
        renderer=renderer,
        factory=factory,
        limits=limits,
        sampling=Sampling(temperature=0.0, stop=stop),
        run_seed=run_seed,
        max_retries=max_retries,
        hooks=(*hooks, player),
        max_concurrent=max_concurrent,
        rollout_status=rollout_status or RolloutStatus(),
        on_finished=on_finished,
    )
    return scheduler.run(tasks, modes=(mode,), training_step=training_step).traces


def to_trajectory(
    trace: Trace, rollout: int, *, agent: str, trajectory_id: str, count_tokens: TokenCounter | None = None
) -> Trajectory | None:
    """A finished rollout as a trajectory for the step-trace buffer; None after a fault, and where its last
    action has no text.

    Retrieved steps that were only shown are left out: a buffer must not feed on itself. Those that were done
    belong to the episode, and are counted by ``count_tokens``; without it the length of such a trajectory is
    unknown.
    """
    leaf = trace.leaves[rollout]
    if (
        leaf.episode_return is None
        or leaf.node_id is None
        or "attempted" in trace.nodes[leaf.node_id].metadata
    ):
        return None
    path = trace.path(leaf.node_id)
    steps: list[Step] = []
    actions: list[str] = []  # by others
    for index, node in enumerate(path):
        if node.origin is Origin.BUFFER and "action" in node.metadata:
            actions.append(node.metadata["action"])
            steps.append(
                Step(text=actions[-1], observation=node.metadata["observation"], is_terminal=node is path[-1])
            )
        elif node.trainable:
            next_node: Node | None = path[index + 1] if index + 1 < len(path) else None
            observed = next_node is not None and next_node.origin is Origin.ENVIRONMENT
            observation = next_node.message.content if observed and next_node is not None else ""
            steps.append(
                Step(
                    text=node.message.content,
                    observation=observation,
                    is_terminal=not observed and next_node is None,
                )
            )
    num_tokens = sum(len(node.token_ids) for node in path if node.trainable)
    if actions:
        num_tokens = num_tokens + sum(map(count_tokens, actions)) if count_tokens else 0
    return Trajectory(
        trajectory_id=trajectory_id,
        task_key=trace.task.key,
        agent=agent,
        prompt=(Message(role="user", content=trace.task.question),),
        steps=tuple(steps),
        reward=leaf.episode_return,
        num_tokens=num_tokens,
    )


# A demonstrator's rollout as a member of the policy's group: in the same tree, with its own mark on rollout
# and tokens.


DEMONSTRATION: Final = "demonstration"


def join_demonstration(trace: Trace, demonstration: Trace) -> None:
    """Add the one rollout of ``demonstration`` to the group ``trace`` under the next number.

    Its turns become ``Origin.DEMONSTRATION`` nodes, without log-probs and entropies: nobody measured the
    demonstrator's. It begins at the group's prompt where that is the same. Its return, or its fault, stays
    what it was. Raises ValueError unless ``demonstration`` holds exactly one rollout.
    """
    [(leaf, path)] = demonstration.rollouts()
    rollout = len(trace.modes)
    trace.modes = (*trace.modes, DEMONSTRATION)
    last_node: Node | None = None
    for node in path:
        last_node = _add_node(trace, last_node, node, rollout)
    trace.finish(
        replace(
            leaf,
            node_id=None if last_node is None else last_node.node_id,
            rollout=rollout,
            is_demonstration=True,
        )
    )


def _add_node(trace: Trace, parent: Node | None, node: Node, rollout: int) -> Node:
    if parent is None:
        for root in trace.nodes:
            if root.parent is None and root.token_ids == node.token_ids:
                return root
    return trace.append(
        parent=None if parent is None else parent.node_id,
        origin=Origin.DEMONSTRATION if node.trainable else node.origin,
        token_ids=node.token_ids,
        message=node.message,
        reward=node.reward,
        restarts=node.restarts,
        metadata=node.metadata | ({"rollout": rollout} if parent is not None else {}),
    )
