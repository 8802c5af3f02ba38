"""One episode on a borrowed ScienceWorld simulator."""

import threading
from collections.abc import Sequence
from typing import Final

from outrider.environments.base import EpisodeResult, StepResult
from outrider.environments.scienceworld import text as scienceworld_text
from outrider.environments.scienceworld.gateway import Simulator
from outrider.environments.scienceworld.pool import Loan, SimulatorPool
from outrider.environments.scienceworld.settings import ScienceWorldConfig
from outrider.errors import ConfigError, EnvironmentFault
from outrider.types import Message, Task

FULL_SCORE: Final = 100


class ScienceWorldEnvironment:
    """One episode on a borrowed simulator. Chat protocol: the action in ``<action>...</action>``, the
    observation as a user message.
    """

    def __init__(self, *, task: Task, config: ScienceWorldConfig, pool: SimulatorPool) -> None:
        """Nothing is borrowed before :meth:`reset`. Raises :class:`ConfigError` for a task of another
        family.
        """
        self._task_name, self._variation = identity(task)
        self._config = config
        self._pool = pool
        self._loan: Loan | None = None
        # close() may come from another thread than step(); a loan must go back exactly once.
        self._lock = threading.Lock()
        self._closed = False
        self._is_busy = False
        self._start_record()

    def reset(self, seed: int) -> Sequence[Message]:
        """Borrow a simulator and start the episode.

        ``seed`` changes nothing: the simulator draws from the task's variation alone, so all rollouts of a
        task start equal (exactly so when the config is deterministic, up to the order of listed objects
        otherwise).
        """
        self._return_loan()
        self._start_record()
        self._loan = loan = self._pool.borrow()
        if self._closed:  # the loop gave this reset up: nobody else would return the simulator
            self._return_loan()
            raise EnvironmentFault("the ScienceWorld environment was closed while it waited for a simulator")
        self._is_busy = True
        try:
            opening = loan.simulator.load(
                task_name=self._task_name,
                variation=self._variation,
                simplification=self._config.simplification,
            )
            observation = opening.observation + self._listing(loan.simulator)
        except EnvironmentFault:
            self._return_loan()
            raise
        finally:
            self._is_busy = False
        prompt = scienceworld_text.render_prompt(
            task_text=opening.task_text, observation=observation, action_templates=opening.action_templates
        )
        return (Message(role="user", content=prompt),)

    def step(self, message: Message) -> StepResult:
        """Perform the one action of the message; unreadable text changes nothing and is answered in words."""
        if self._done:
            raise RuntimeError("the ScienceWorld episode has ended")
        loan = self._loan
        if loan is None:
            raise EnvironmentFault(
                "the ScienceWorld environment holds no simulator (never reset, closed, or its simulator died)"
            )
        self._num_turns += 1
        parsed = scienceworld_text.parse_action(message.content)
        if parsed.problem:
            self._num_invalid += 1
            return StepResult(message=Message(role="user", content=parsed.problem), invalid=True)
        self._is_busy = True
        try:
            return self._act(loan.simulator, parsed.action)
        except EnvironmentFault:
            self._return_loan()
            raise
        finally:
            self._is_busy = False

    def result(self) -> EpisodeResult:
        """The simulator's own score as the return; ``score`` in the metrics is neither clipped nor scaled."""
        return EpisodeResult(
            episode_return=self._record(self._score),
            success=self._score >= FULL_SCORE,
            metrics={
                "score": float(self._score),
                "num_moves": float(self._num_moves),
                "num_turns": float(self._num_turns),
                "num_invalid": float(self._num_invalid),
                "num_ambiguous": float(self._num_ambiguous),
                "num_corrected": float(self._num_corrected),
                "wrong_focus": float(self._score < 0),
                "cut_by_moves": float(self._cut_by_moves),
            },
        )

    def close(self) -> None:
        """Give the simulator back, for good; may be called twice.

        While another thread is inside a call (the loop gave it up), the simulator is killed first: what that
        thread still asks must not reach the next episode.
        """
        self._closed = True
        loan = self._pop_loan()
        if loan is not None:
            if self._is_busy:
                loan.simulator.close()
            self._pool.release(loan)

    def _return_loan(self) -> None:
        loan = self._pop_loan()
        if loan is not None:
            self._pool.release(loan)

    def _pop_loan(self) -> Loan | None:
        with self._lock:
            loan, self._loan = self._loan, None
        return loan

    def _start_record(self) -> None:
        self._score = 0
        self._num_moves = 0
        self._num_turns = 0
        self._num_invalid = 0
        self._num_ambiguous = 0
        self._num_corrected = 0
        self._done = False
        self._cut_by_moves = False
        self._is_ambiguous = False

    def _act(self, simulator: Simulator, action: str) -> StepResult:
        reply = simulator.act(self._corrected(simulator, action))
        unreadable = scienceworld_text.is_unreadable(reply.observation)
        self._is_ambiguous = scienceworld_text.is_ambiguous(reply.observation)
        self._num_invalid += unreadable
        self._num_ambiguous += self._is_ambiguous
        reward = self._record(reply.score) - self._record(self._score)
        self._score, self._num_moves = reply.score, reply.num_moves
        over = reply.completed or reply.score < 0
        self._cut_by_moves = not over and reply.num_moves >= self._config.max_moves
        self._done = over or self._cut_by_moves
        observation = reply.observation.strip()
        if self._done:
            self._return_loan()
        else:
            observation += self._listing(simulator)
        return StepResult(
            message=Message(role="user", content=observation),
            reward=reward,
            done=self._done,
            invalid=unreadable,
            refused=scienceworld_text.is_refused(reply.observation),
            truncated=self._cut_by_moves,
        )

    def _corrected(self, simulator: Simulator, action: str) -> str:
        # A number that answers the simulator's question is no command of the list.
        if not self._config.correct_actions or (self._is_ambiguous and action.isdigit()):
            return action
        nearest = scienceworld_text.nearest_action(action, simulator.valid_actions())
        if nearest is None or nearest == action:
            return action
        self._num_corrected += 1
        return nearest

    def _listing(self, simulator: Simulator) -> str:
        if not self._config.show_valid_actions:
            return ""
        return "\n\n" + scienceworld_text.render_valid_actions(
            simulator.valid_actions(), self._config.num_shown_actions
        )

    def _record(self, score: int) -> float:
        return (max(score, 0) if self._config.clip_negative else score) * self._config.reward_scale


def identity(task: Task) -> tuple[str, int]:
    """Name and variation of a task. Raises ConfigError for one of another family."""
    name, variation = task.metadata.get("task_name"), task.metadata.get("variation")
    if not isinstance(name, str) or not isinstance(variation, int):
        raise ConfigError(f"{task.key} is not a ScienceWorld task")
    return name, variation
