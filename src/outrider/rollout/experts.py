"""Rollouts of experts in the ordinary rollout loop.

Expert steps therefore have the same token ids, observations and returns as the same steps of a policy.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from outrider.engines.base import Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import EnvironmentFactory, StepResult
from outrider.memory.step_store import TokenCounter
from outrider.printing import plural
from outrider.rollout.episode import Sampling
from outrider.rollout.faults import fault_line
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

_LOG = logging.getLogger(__name__)
ExpertSource = Callable[[Task], Sequence[Step] | None]


@dataclass(slots=True, kw_only=True)
class ExpertPlayer(Hook):
    """Plays an expert: as a script, it writes the next step; as a hook, it inserts some as retrieved steps.

    In a share ``retrieve_share`` of the tasks, selected by their random streams, one middle step appears
    inside ``<retrieve>``. The step is executed in the environment and shown with the real observation, so
    that the state matches the text.
    """

    expert: ExpertSource
    run_seed: int
    retrieve_share: float = 0.0
    _steps: dict[str, Sequence[Step]] = field(default_factory=dict)
    _states: dict[str, EpisodeState] = field(default_factory=dict)

    def before_turn(self, state: EpisodeState) -> Sequence[Attempt]:
        """Store the state, and execute the next step as a retrieved one if it was selected."""
        key = state.task.key
        self._states[key] = state
        if state.turn == 0:
            self._steps[key] = self.expert(state.task) or ()
        # The stream does not depend on the turn: every turn draws the same decision, so none is stored.
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
        """Return the expert's next step, or an empty text after the last one."""
        key = request.request_id.rsplit("/", 2)[0]
        state = self._states[key]
        steps, position = self._steps[key], len(state.steps)
        return state.episode.convert(steps[position].text) if position < len(steps) else ""


def _to_splice(action: str, result: StepResult) -> Splice | None:
    """Return the executed step, or None if the environment did not execute it: the script then writes it."""
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
    """Run one expert rollout of every task. Returns their traces in the order of the tasks.

    ``training_step`` selects the initial states, as for a policy's rollouts. ``renderer`` is the policy's
    (None: a plain one of the tokenizer). ``hooks`` act before the expert in rollouts of ``mode``; for
    example, a memory may show tips. ``on_finished(done, total)`` is called after every rollout. A warning
    names the faults of repeated tries.
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
    report = scheduler.run(tasks, modes=(mode,), training_step=training_step)
    if report.num_retries or report.faults["close"]:
        _LOG.warning(
            "rollouts of experts: %s, %s repeated: %s", plural(len(report.fault_reasons), "fault"),
            plural(report.num_retries, "try was", "tries were"), fault_line(report.fault_reasons),
        )  # fmt: skip
    return report.traces


def to_trajectory(
    trace: Trace, rollout: int, *, agent: str, trajectory_id: str, count_tokens: TokenCounter | None = None
) -> Trajectory | None:
    """Convert a finished rollout into a trajectory for the step-trace buffer.

    Returns None after a fault, if the last action is not part of the text, and if a retrieved step was only
    shown: without it, the steps would not lead to each other, and because it is no token of the policy, the
    rollout would displace the complete trajectory that the step is from. Executed steps belong to the
    episode, and ``count_tokens`` counts their tokens; without it, the length of such a trajectory is 0
    (unknown).
    """
    leaf = trace.leaves[rollout]
    if (
        leaf.episode_return is None
        or leaf.node_id is None
        or "attempted" in trace.nodes[leaf.node_id].metadata
    ):
        return None
    path = trace.path(leaf.node_id)
    if any(node.origin is Origin.BUFFER and "action" not in node.metadata for node in path):
        return None
    steps: list[Step] = []
    actions: list[str] = []  # executed retrieved steps
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


# Demonstrations as members of the policy's group.


DEMONSTRATION: Final = "demonstration"


def join_demonstration(trace: Trace, demonstration: Trace) -> None:
    """Add the rollout of ``demonstration`` to the group ``trace`` under the next rollout number.

    Its turns become ``Origin.DEMONSTRATION`` nodes, without log-probs and entropies because the
    demonstrator's are unknown. It shares the group's prompt node if the prompts are equal. Its return or
    fault is unchanged.

    Raises:
        ValueError: unless ``demonstration`` has exactly one rollout.
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
        tool_calls=node.tool_calls,
        metadata=node.metadata | ({"rollout": rollout} if parent is not None else {}),
    )
