"""One group generated in milliseconds: the loop, the hooks and the tree of the examples in the documents.

The policy is a script, the environment knows three facts, and there are two hooks: one retrieves a step into
rollout 1, ARPO's forks rollouts where the entropy increases after a result.
"""

from collections.abc import Sequence
from typing import Final

from docsite.characters import CharacterTokenizer
from outrider.algorithms.base import outcome_advantages, write_advantages
from outrider.algorithms.entropy_branching import BranchHook, BranchSettings
from outrider.engines.base import Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import EpisodeResult, StepResult
from outrider.rollout.episode import Sampling
from outrider.rollout.hooks import EpisodeState, Hook, Splice, StatelessHook, format_retrieved
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.trace import Trace
from outrider.types import Message, Origin, Step, Task

TASK: Final = Task(key="example", question="Currency of San Marino's neighbour?", answers=("EUR",))
_FACTS: Final = {
    "neighbour of San Marino": "Italy",
    "currency of Italy": "EUR",
    "coins of San Marino": "gold",
}


class Lookup:
    """``<search>key</search>`` returns a fact, ``<answer>text</answer>`` ends the episode, with a
    return of 1 if it is correct.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._return = 0.0

    def reset(self, seed: int) -> Sequence[Message]:
        """The question."""
        return (Message(role="user", content=self._task.question),)

    def step(self, message: Message) -> StepResult:
        """One turn of the policy."""
        text = message.content
        if "</answer>" in text:
            self._return = float(any(f"<answer>{answer}</answer>" in text for answer in self._task.answers))
            return StepResult(message=None, done=True, reward=self._return)
        fact = next((fact for key, fact in _FACTS.items() if f"<search>{key}</search>" in text), "nothing")
        result = Message(role="inline", content=f"<result>{fact}</result>\n")
        return StepResult(message=result, num_tool_calls=1, tools=("search",))

    def result(self) -> EpisodeResult:
        """The record of the episode."""
        return EpisodeResult(episode_return=self._return, success=self._return == 1.0)

    def close(self) -> None:
        """Close nothing."""


class LookupFactory:
    """Makes environments; nothing is shared."""

    def __call__(self, task: Task) -> Lookup:
        return Lookup(task)

    def close(self) -> None:
        """Close nothing."""


class RetrieveOnce(StatelessHook):
    """Inserts a step of another agent before the second turn of every hybrid rollout, as RAPO does."""

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        """Return the text of the step."""
        if state.mode != "hybrid" or state.turn != 1:
            return ()
        step = Step(text="<search>neighbour of San Marino</search>", observation="Italy")
        return (
            Splice(origin=Origin.BUFFER, text=format_retrieved(f"{step.text} {step.observation}"), step=step),
        )


def _policy(request: Request, context: str) -> str:
    """Return the turn of the scripted policy: on even seeds, it searches twice."""
    if "EUR" in context:
        return "<answer>EUR</answer>"
    if "Italy" in context:
        return "<search>currency of Italy</search>" if request.seed % 2 else "<answer>lira</answer>"
    if "<result>" in context:
        return "<answer>gold</answer>"
    return f"<search>{'neighbour' if request.seed % 3 else 'coins'} of San Marino</search>"


def _entropy(request: Request, token: int) -> float:
    """In nats: more after a result than at the question, so that ARPO's rule has something to see."""
    return 3.0 if request.cache_key is not None and len(request.token_ids) > 90 else 0.5


def play(hooks: Sequence[Hook] | None = None, *, seed: int = 3, group_size: int = 4) -> Trace:
    """One group of rollouts, credited as ARPO does: soft attribution of group-normalised advantages."""
    tokenizer = CharacterTokenizer()
    branch = BranchSettings(
        first_wave=2, window=4, base_probability=0.5, entropy_weight=1.0, decision="threshold"
    )
    own = (RetrieveOnce(), BranchHook(branch, group_size=group_size, vocabulary_size=98))
    scheduler = Scheduler(
        engine=ScriptedEngine(tokenizer=tokenizer, script=_policy, entropy=_entropy),
        renderer=ChatRenderer(tokenizer),
        factory=LookupFactory(),
        limits=Limits(step_timeout_s=60),
        sampling=Sampling(stop=("</search>", "</answer>")),
        run_seed=seed,
        hooks=own if hooks is None else hooks,
    )
    modes = ("on_policy", "hybrid", *["on_policy"] * (group_size - 2))
    trace = scheduler.run([TASK], modes=modes, training_step=0).traces[0]
    write_advantages(trace, outcome_advantages(trace, "group_normalized"), attribution="soft")
    return trace
