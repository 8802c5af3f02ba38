"""Experts played through the real loop: their steps get the ids, observations and returns that a policy's would get."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.engines.base import Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import EnvironmentFactory
from outrider.rollout.episode import Limits, Sampling
from outrider.rollout.hooks import EpisodeState, Splice
from outrider.rollout.scheduler import Scheduler
from outrider.seeding import stream
from outrider.tokens import ChatRenderer, Tokenizer
from outrider.trace import Node, Trace
from outrider.types import Message, Origin, Step, Task, Trajectory

ExpertSource = Callable[[Task], Sequence[Step] | None]


@dataclass(slots=True, kw_only=True)
class ExpertPlayer:
    """Script and hook in one: says the expert's next step, and shows some steps inside ``<retrieve>`` instead.

    ``retrieve_share`` of the tasks (by their own random stream) get one middle step shown.
    """

    expert: ExpertSource
    run_seed: int
    retrieve_share: float = 0.0
    _steps: dict[str, Sequence[Step]] = field(default_factory=dict)
    _position: dict[str, int] = field(default_factory=dict)

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        """Remember where the episode is; maybe show the next step instead of letting it be said."""
        key = state.task.key
        if state.turn == 0:
            self._steps[key] = self.expert(state.task) or ()
        position = len(state.steps)
        self._position[key] = position
        random = stream(self.run_seed, "expert retrieve", key)
        shown = 1 + int(random.integers(max(1, len(self._steps[key]) - 2)))
        if random.random() >= self.retrieve_share or position != shown or shown >= len(self._steps[key]) - 1:
            return ()
        step = self._steps[key][position]
        self._position[key] = position + 1
        text = f"<retrieve>{(step.text + step.observation).strip()}</retrieve>\n"
        return [
            Splice(origin=Origin.BUFFER, text=text, step=step, metadata={"step_ids": [], "agent": "expert", "similarity": 1.0})
        ]

    def after_turn(self, state: EpisodeState) -> None:
        """Nothing to do."""

    def after_group(self, trace: Trace) -> None:
        """Nothing to do."""

    def say(self, request: Request, context: str) -> str:
        """The expert's next step; nothing once its path is over."""
        key = request.request_id.rsplit("/", 2)[0]
        steps, position = self._steps[key], self._position[key]
        return steps[position].text if position < len(steps) else ""


def play_experts(
    *,
    tasks: Sequence[Task],
    expert: ExpertSource,
    factory: EnvironmentFactory,
    tokenizer: Tokenizer,
    limits: Limits,
    stop: tuple[str, ...],
    run_seed: int,
    context_length: int,
    retrieve_share: float = 0.0,
    max_concurrent: int = 64,
    max_retries: int = 2,
    training_step: int = 0,
) -> list[Trace]:
    """One expert rollout of every task, in order; ``training_step`` chooses the initial states, as it does for a policy's rollouts."""
    player = ExpertPlayer(expert=expert, run_seed=run_seed, retrieve_share=retrieve_share)
    engine = ScriptedEngine(tokenizer=tokenizer, script=player.say, context_length=context_length)
    scheduler = Scheduler(
        engine=engine,
        renderer=ChatRenderer(tokenizer),
        factory=factory,
        limits=limits,
        sampling=Sampling(temperature=0.0, stop=stop),
        run_seed=run_seed,
        max_retries=max_retries,
        hooks=(player,),
        max_concurrent=max_concurrent,
    )
    return scheduler.run(tasks, modes=("expert",), training_step=training_step).traces


def trajectory_of(trace: Trace, rollout: int, *, agent: str, trajectory_id: str) -> Trajectory | None:
    """A finished rollout as a trajectory for the step-trace buffer; None after a fault.

    Retrieved steps are left out: a buffer must not feed on itself.
    """
    leaf = trace.leaves[rollout]
    if leaf.episode_return is None or leaf.node_id is None:
        return None
    path = trace.path(leaf.node_id)
    steps: list[Step] = []
    for index, node in enumerate(path):
        if node.trainable:
            following: Node | None = path[index + 1] if index + 1 < len(path) else None
            observed = following is not None and following.origin is Origin.ENVIRONMENT
            observation = following.message.content if observed and following is not None else ""
            steps.append(Step(text=node.message.content, observation=observation, is_terminal=not observed and following is None))
    return Trajectory(
        trajectory_id=trajectory_id,
        task_key=trace.task.key,
        agent=agent,
        prompt=(Message(role="user", content=trace.task.question),),
        steps=tuple(steps),
        reward=leaf.episode_return,
        num_tokens=sum(len(node.token_ids) for node in path if node.trainable),
    )
