"""A combination lock that on-policy exploration does not open, and a tabular policy that runs in the real
loop.

Everything that decides about learning is the library's own: Scheduler, RetrievalHook with a StepTraceBuffer,
Grpo and Rapo, update and Policy. Only the network is replaced: one row of logits for every room, so that a
run takes seconds and the expected return is known exactly. Shape letters: N packed tokens, S rooms of all
locks, A actions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.exploration import Rapo, RapoSettings
from outrider.algorithms.grpo import Grpo, GrpoSettings
from outrider.algorithms.loss_settings import ClipLoss
from outrider.algorithms.retrieval import RetrievalSettings
from outrider.engines.base import FinishReason, Generation, Request
from outrider.engines.local.attention import TreePlan
from outrider.engines.local.model import LanguageModel
from outrider.engines.local.sampling import request_stream, sample
from outrider.environments.base import Env, EnvironmentFactory, EpisodeResult, StepResult
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.rollout.episode import Sampling
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.seeding import stream
from outrider.tokens import ChatRenderer, Tokenizer
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import update
from outrider.types import Message, Step, Task, Trajectory
from tests.tiny import tiny_tokenizer
from tests.toy_result import Result

LEARNING_RATE = 0.2
MAX_POLICY_TOKENS = 6000
_SHARED = ObjectiveSettings(
    group_size=12, loss=ClipLoss(clip_low=0.28, clip_high=0.28), aggregation="sequence_mean_token_mean"
).model_dump()

# no word characters: the retrieval key is made of what was seen, not of what was tried
ACTIONS = "!\"#$%&'()*+,-./:;=?@"
# the newest of these letters in a context is the room, hence the policy's state
ROOMS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """``num_locks`` locks of ``depth`` rooms; one of twenty actions opens a room's door.

    The others do nothing, or end the episode (``is_strict``). ``chance`` is that of the untrained policy to
    take the right one in each room, None one in twenty. The return is 1 for opening every door within
    ``num_turns`` policy turns and else 0, so the optimum is 1.
    """

    seed: int
    num_locks: int = 1
    depth: int = 4
    num_turns: int = 6
    is_strict: bool = False
    chance: float | None = None

    @property
    def longest(self) -> int:
        """Policy tokens of the longest rollout."""
        return self.num_turns

    def tasks(self) -> list[Task]:
        """One task a lock; the combination is metadata, which the policy never sees."""
        draws = stream(self.seed, "combinations").integers(len(ACTIONS), size=(self.num_locks, self.depth))
        return [
            Task(
                key=f"lock-{lock}", question=f"lock {lock} room {ROOMS[lock * self.depth]}",
                metadata={"combination": "".join(ACTIONS[i] for i in draws[lock]),
                          "rooms": ROOMS[lock * self.depth : (lock + 1) * self.depth],
                          "is_strict": self.is_strict},
            )
            for lock in range(self.num_locks)
        ]  # fmt: skip


class LockEnvironment:
    """One episode: a policy message is the action that it tries."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._combination, self._rooms = str(task.metadata["combination"]), str(task.metadata["rooms"])
        self._is_strict = bool(task.metadata.get("is_strict"))
        self._room = 0

    def reset(self, seed: int) -> Sequence[Message]:
        """Into the first room."""
        self._room = 0
        return (Message(role="user", content=self._task.question),)

    def step(self, message: Message) -> StepResult:
        """Try the action on the door of the room."""
        opened = message.content == self._combination[self._room]
        self._room += opened
        if self._room == len(self._combination):
            return StepResult(message=None, reward=1.0, done=True)
        if self._is_strict and not opened:
            return StepResult(message=None, done=True)
        return StepResult(
            message=Message(
                role="inline", content=f" {'now' if opened else 'still'} {self._rooms[self._room]}\n"
            )
        )

    def result(self) -> EpisodeResult:
        """1 when every door is open."""
        done = self._room == len(self._combination)
        return EpisodeResult(episode_return=float(done), success=done)

    def close(self) -> None:
        """Nothing to release."""


class LockFactory:
    """Makes environments; nothing is shared."""

    def __call__(self, task: Task) -> LockEnvironment:
        return LockEnvironment(task)

    def close(self) -> None:
        """Nothing to release."""


def expert_trajectory(task: Task, environment: Env | None = None) -> Trajectory:
    """The combination, step by step, as the environment answers it (None: a lock)."""
    environment = environment or LockEnvironment(task)
    environment.reset(0)
    steps = []
    for action in str(task.metadata["combination"]):
        result = environment.step(Message(role="assistant", content=action))
        steps.append(
            Step(
                text=action,
                observation=result.message.content if result.message else "",
                is_terminal=result.done,
            )
        )
    return Trajectory(
        trajectory_id=f"expert/{task.key}",
        task_key=task.key,
        agent="expert",
        prompt=(),
        steps=tuple(steps),
        reward=1.0,
    )


class TabularModel(nn.Module):
    """A softmax over the actions for every room, with the interface of a language model that Policy
    scores.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int, *, actions: str = ACTIONS) -> None:
        super().__init__()
        self.table = nn.Embedding(len(ROOMS), len(actions))
        nn.init.zeros_(self.table.weight)
        self.action_ids = tokenizer.encode(actions, add_special_tokens=False)
        self.room_of = np.full(vocabulary_size, -1)
        self.room_of[tokenizer.encode(ROOMS, add_special_tokens=False)] = np.arange(len(ROOMS))

    def get_input_embeddings(self) -> nn.Embedding:
        """The only parameters."""
        return self.table

    def get_output_embeddings(self) -> "TabularModel":
        """Calling the model itself spreads action logits over the vocabulary."""
        return self

    def forward(self, logits_NA: Tensor) -> Tensor:
        """[N, V]; what is no action has probability 0."""
        logits_NV = logits_NA.new_full((len(logits_NA), len(self.room_of)), -1e4)
        logits_NV[:, self.action_ids] = logits_NA
        return logits_NV

    def base_model(
        self, *, input_ids: Tensor, position_ids: Tensor, use_cache: bool, plan: TreePlan
    ) -> SimpleNamespace:
        """Logits of the room that each packed token's own branch saw last."""
        rooms = self.room_of[input_ids[0].numpy()]
        start = 0
        last_of: list[int] = []
        for segment in plan.segments:
            piece = rooms[start : start + segment.length]
            before = last_of[segment.ancestors[-1]] if segment.ancestors else 0
            newest = np.maximum.accumulate(np.where(piece >= 0, np.arange(1, segment.length + 1), 0))
            rooms[start : start + segment.length] = np.where(newest > 0, piece[newest - 1], before)
            start += segment.length
            last_of.append(int(rooms[start - 1]))
        return SimpleNamespace(last_hidden_state=self.table(torch.from_numpy(rooms))[None])


def set_chance(model: TabularModel, tasks: Sequence[Task], chance: float) -> None:
    """Give the right action of every room this probability, and all others the same share of the rest."""
    odds = chance / (1 - chance) * (len(ACTIONS) - 1)
    with torch.no_grad():
        for task in tasks:
            for room, action in zip(
                str(task.metadata["rooms"]), str(task.metadata["combination"]), strict=True
            ):
                model.table.weight[ROOMS.index(room), ACTIONS.index(action)] = float(np.log(odds))


class TabularEngine:
    """One action a request, drawn from its room's row with the request's own stream."""

    context_length = 4096

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.weight_version = 0
        self._model = model

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """See :class:`outrider.engines.base.Engine`."""
        rooms = [
            next(room for i in reversed(r.token_ids) if (room := self._model.room_of[i]) >= 0)
            for r in requests
        ]
        logits = self._model(self._model.table(torch.tensor(rooms)))
        streams = [request_stream(request.seed) for request in requests]
        chosen, logprobs, entropies = sample(logits, [request.temperature for request in requests], streams)
        return [
            Generation(
                request_id=request.request_id, token_ids=(token,), logprobs=(logprob,), entropies=(entropy,),
                finish_reason=FinishReason.LENGTH, weight_version=self.weight_version,
            )
            for request, token, logprob, entropy in zip(requests, chosen, logprobs, entropies, strict=True)
        ]  # fmt: skip

    def drawn(self, request: Request, logits_1A: Tensor) -> Generation:
        """One action from these logits."""
        stream_ = [request_stream(request.seed)]
        [token], [logprob], [entropy] = sample(self._model(logits_1A), [request.temperature], stream_)
        return Generation(
            request_id=request.request_id, token_ids=(token,), logprobs=(logprob,), entropies=(entropy,),
            finish_reason=FinishReason.LENGTH, weight_version=self.weight_version,
        )  # fmt: skip

    def release(self, cache_keys: Sequence[str]) -> None:
        """Nothing is kept."""

    def free_cache(self) -> None:
        """Nothing is kept."""

    def load(self, version: int) -> None:
        """The table is shared with the trainer; only the version moves."""
        self.weight_version = version


class ToyRun:
    """One algorithm on one toy, up to a number of policy tokens."""

    factory: EnvironmentFactory = LockFactory()
    learning_rate = LEARNING_RATE
    model_type: Any = TabularModel
    engine_type: Any = TabularEngine

    def __init__(self, toy: Toy, settings: GrpoSettings | RapoSettings, *, folder: Path) -> None:
        self.toy = toy
        self.tasks = toy.tasks()
        tokenizer = tiny_tokenizer()
        self.model = self.model_type(tokenizer, len(tokenizer))
        if toy.chance is not None:
            set_chance(self.model, self.tasks, toy.chance)
        language_model = LanguageModel(
            model=cast(Any, self.model),
            tokenizer=tokenizer,
            context_length=4096,
            eos_token_ids=frozenset({1}),
        )
        self.policy = Policy(
            language_model, OptimizerSettings(learning_rate=self.learning_rate), seed=toy.seed
        )
        self.engine = self.engine_type(self.model, tokenizer)
        self.renderer = ChatRenderer(tokenizer)
        self.buffer = StepTraceBuffer(folder / "buffer.sqlite", load_embedder("hash"), mode="write")
        self.buffer.add_trajectories(
            [self.demonstrated(t) for t in self.tasks],
            questions={t.key: t.question for t in self.tasks},
        )
        self.algorithm = self._algorithm(settings)

    def demonstrated(self, task: Task) -> Trajectory:
        """What the buffer knows of a task."""
        return expert_trajectory(task, self.factory(task))

    def _algorithm(self, settings: GrpoSettings | RapoSettings) -> Grpo | Rapo:
        """As the trainer builds it; the retrieval probability is constant, so the number of steps is not
        used.
        """
        if isinstance(settings, RapoSettings):
            return Rapo(settings, buffer=self.buffer, num_training_steps=1)
        return Grpo(settings)

    def scheduler(self, *, training: bool) -> Scheduler:
        """Evaluation has no hooks, hence no retrieval."""
        return Scheduler(
            engine=self.engine, renderer=self.renderer, factory=self.factory, run_seed=self.toy.seed,
            sampling=Sampling(), limits=Limits(max_turns=self.toy.num_turns, max_turn_tokens=1),
            hooks=self.algorithm.hooks if training else (),
        )  # fmt: skip

    def train(self, *, max_policy_tokens: int, max_steps: int | None = None) -> Result:
        """Rollout, credit, update, until the policy has written its tokens or done its steps."""
        num_tokens = num_rollouts = num_steps = 0
        rewards = {False: 0, True: 0}
        while num_tokens < max_policy_tokens and num_steps != max_steps:
            modes = partial(self.algorithm.modes_of, num_steps)
            traces = (
                self.scheduler(training=True).run(self.tasks, modes=modes, training_step=num_steps).traces
            )
            for trace in traces:
                self.algorithm.assign_advantages(trace)
                written = {id(node): node for _, path in trace.rollouts() for node in path if node.trainable}
                # a shared node was written once
                num_tokens += sum(len(node.token_ids) for node in written.values())
                for leaf, path in trace.rollouts():
                    num_rollouts += 1
                    num_tokens += leaf.num_reflection_tokens
                    rewards[any(node.origin == "buffer" for node in path)] += leaf.success
            update(
                self.policy, traces, objective=self.algorithm.objective,
                settings=UpdateSettings(max_tokens=100_000), reference=None,
            )  # fmt: skip
            self.engine.load(self.engine.weight_version + 1)
            num_steps += 1
        return Result(
            expected_return=self.expected_return(), sampled_return=self.sampled_return(),
            num_policy_tokens=num_tokens, num_rollouts=num_rollouts, num_steps=num_steps,
            num_on_policy_rewards=rewards[False], num_hybrid_rewards=rewards[True],
        )  # fmt: skip

    def expected_return(self) -> float:
        """Exact: the chance that the doors, each open with its own probability a turn, are all open in
        time.
        """
        probabilities = torch.softmax(self.model.table.weight.detach().double(), dim=-1).numpy()
        chances = []
        for task in self.tasks:
            rooms, combination = str(task.metadata["rooms"]), str(task.metadata["combination"])
            right = np.array(
                [
                    probabilities[ROOMS.index(r), ACTIONS.index(a)]
                    for r, a in zip(rooms, combination, strict=True)
                ]
            )
            stays = 0.0 if self.toy.is_strict else 1.0 - right
            # distribution over the number of open doors; an ended episode is in none
            at = np.eye(len(right) + 1)[0]
            for _ in range(self.toy.num_turns):
                at = np.append(at[:-1] * stays, at[-1]) + np.insert(at[:-1] * right, 0, 0.0)
            chances.append(float(at[-1]))
        return float(np.mean(chances))

    def sampled_return(self, num_samples: int = 32) -> float:
        """The same quantity through the real evaluation loop: streams of step -1, no hooks."""
        report = self.scheduler(training=False).run(
            self.tasks, modes=("evaluation",) * num_samples, training_step=-1
        )
        return float(
            np.mean([leaf.episode_return or 0.0 for trace in report.traces for leaf, _ in trace.rollouts()])
        )


def grpo() -> GrpoSettings:
    """GRPO with the objective that both algorithms share."""
    return GrpoSettings(**_SHARED)


def rapo(
    *, num_hybrid: int = 9, advantage_weight: float = 0.2, ratio_weight: float = 0.05, noise: float = 0.0
) -> RapoSettings:
    """RAPO with the same objective. A lock has state, so a retrieved step is executed and not only shown."""
    retrieval = RetrievalSettings(mode="execute", noise=noise)
    return RapoSettings(
        **_SHARED,
        num_hybrid=num_hybrid,
        advantage_weight=advantage_weight,
        ratio_weight=ratio_weight,
        retrieval=retrieval,
    )


def play(
    settings: GrpoSettings | RapoSettings,
    *,
    seed: int,
    max_policy_tokens: int = MAX_POLICY_TOKENS,
    toy: Toy | None = None,
) -> Result:
    """One run in a folder of its own, on ``toy`` or else on the lock of four doors with this seed."""
    with TemporaryDirectory() as folder:
        run = ToyRun(toy or Toy(seed=seed), settings, folder=Path(folder))
        try:
            return run.train(max_policy_tokens=max_policy_tokens)
        finally:
            run.buffer.close()


def table_row(name: str, results: Sequence[Result]) -> str:
    """Mean over the seeds, every seed, and what was spent."""
    mean = np.mean([result.expected_return for result in results])
    each = " ".join(f"{result.expected_return:.3f}" for result in results)
    tokens = sum(result.num_policy_tokens for result in results) // len(results)
    found = (
        sum(result.num_on_policy_rewards for result in results),
        sum(result.num_hybrid_rewards for result in results),
    )
    return f"{name:28} {mean:6.3f} {tokens:7d} {found[0]:10d} {found[1]:8d}   {each}"


TABLE_HEAD = (
    f"{'algorithm':28} {'mean':>6} {'tokens':>7} {'on-policy':>10} {'hybrid':>8}   expected "
    "return of each seed (optimum 1.000)"
)
