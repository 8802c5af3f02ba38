"""Tips (EMPO², arXiv 2602.23008): which groups act with tips, which of those are trained without them, the
value of a new state, and the hook that shows, requests and stores tips.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from outrider.algorithms.base import AdvantageKind, group_advantages
from outrider.config import Settings
from outrider.environments.base import EpisodeResult
from outrider.memory.embedders import Embedder
from outrider.memory.novelty import DistillationSettings, NoveltyStore, RandomDistillation
from outrider.memory.tips import Eviction, Key, Rank, Tip, TipHit, TipMemory
from outrider.plugins.registry import EmbedderName
from outrider.rollout.hooks import EpisodeState, Hook, Splice, has_part
from outrider.seeding import stream
from outrider.tokens.tool_calls import without_thoughts
from outrider.trace import Leaf, Node, Trace, policy_turns
from outrider.types import Message, Origin, Task

TipMode = Literal["plain", "tips_on", "tips_off"]
PLAIN: Final[TipMode] = "plain"
TIPS_ON: Final[TipMode] = "tips_on"
TIPS_OFF: Final[TipMode] = "tips_off"

MODES: Final[tuple[TipMode, ...]] = (PLAIN, TIPS_ON, TIPS_OFF)

_WINDOW: Final = 24  # groups whose modes are shuffled together


def tip_mode(mode: str) -> TipMode:
    """The part of a rollout's mode that concerns tips; plain without one."""
    return next((candidate for candidate in MODES if has_part(mode, candidate)), PLAIN)


class ModeSchedule:
    """The mode of every group of a run, by its number: exact proportions, not their expectation.

    Of the first n groups, n a multiple of the window, p n act with tips and p q n of those are trained
    without, each rounded to the nearest whole number. The order inside a window is drawn from the run's seed.
    It is a function of the number: there is no state to save.
    """

    def __init__(self, *, memory_probability: float, off_policy_probability: float, seed: int) -> None:
        self._memory = memory_probability
        self._off_policy = off_policy_probability
        self._seed = seed

    def mode(self, group: int) -> TipMode:
        """The mode of group number ``group``, counted from 0 over the whole run."""
        window, position = divmod(group, _WINDOW)
        # differences of rounded totals, so that rounding does not add up over windows
        before, after = (_rounded(n * _WINDOW * self._memory) for n in (window, window + 1))
        with_tips = after - before
        without = _rounded(after * self._off_policy) - _rounded(before * self._off_policy)
        modes: list[TipMode] = (
            [TIPS_OFF] * without + [TIPS_ON] * (with_tips - without) + [PLAIN] * (_WINDOW - with_tips)
        )
        return modes[int(stream(self._seed, "tip modes", window).permutation(_WINDOW)[position])]


def _rounded(value: float) -> int:
    # Python's round takes halves to the even side, which would depend on the window.
    return math.floor(value + 0.5)


def answered_actions(path: Sequence[Node], ending: str) -> list[tuple[str, str]]:
    """The policy's text and the environment's answer for every action of an episode (``memory.writer =
    "environment"``: the answers are the tips, and no model writes any).

    Text that is no valid action is left out. ``ending`` is the environment's last message, which is in no
    node; if the loop cut the episode after an answer, that answer is the path's last node.
    """
    # a retrieved step that was done is nobody's action here, nor the answer to one
    turns = policy_turns([node for node in path if node.origin is not Origin.BUFFER])
    answers = [turn.observation for turn in turns[1:]]
    last = path[-1] if path else None
    answers.append(last.message.content if last is not None and last.origin is Origin.ENVIRONMENT else ending)
    return [
        (turn.node.message.content, answer)
        for turn, answer in zip(turns, answers, strict=True) if not turn.node.metadata.get("invalid")
    ]  # fmt: skip


def environment_tip(action: str, answer: str, *, max_tokens: int, num_tokens: Callable[[str], int]) -> str:
    """``action: answer`` within ``max_tokens``; the answer's first line with text, whose last words go first.
    Empty without an answer.
    """
    line = next((line.strip() for line in answer.splitlines() if line.strip()), "")
    words = line.split()
    while words:
        text = f"{action}: {' '.join(words)}"
        if num_tokens(text) <= max_tokens:
            return text
        words.pop()
    return ""


REQUEST = (
    "The episode is over, with a score of {score:.3g}. Write a tip for the next attempt at this task: one "
    "sentence of fewer than {words} words that says what was learned and how far the task was "
    "from complete. Write only the tip."
)
HEADING = "Notes from earlier attempts:"
_TAGGED = re.compile(r"<(?!think\b)(\w+)>(.*?)</\1>", re.DOTALL)


class MemorySettings(Settings):
    """Which tips are stored, and which are shown.

    ``writer``: after every episode the ``policy`` writes a tip (the paper), or each answer of the
    ``environment`` to an action is a tip, stored under its own words. ``scope``: a buffer per task, per
    ``world`` (named by the task's metadata; a task without one has its own), or one for all. ``state_key``:
    the policy's tips are stored and looked up by the observation at which it acted, by the whole chat
    (released code) or by the task's question. A turn shows up to ``num_shown`` tips above ``min_similarity``,
    ranked by ``rank``, in at most ``max_shown_tokens`` tokens; an episode shows at most
    ``max_prompt_tokens``. A tip has at most ``max_tip_tokens`` tokens, and a buffer ``capacity`` tips.
    """

    embedder: EmbedderName = "minilm"
    writer: Literal["policy", "environment"] = "policy"
    scope: Literal["task", "world", "all"] = "task"
    state_key: Literal["observation", "chat", "question"] = "observation"
    num_shown: int = Field(10, ge=1)
    min_similarity: float = Field(0.5, ge=-1, le=1)
    rank: Rank = "score"
    max_shown_tokens: int = Field(256, ge=1)
    max_prompt_tokens: int = Field(1024, ge=1)
    max_tip_tokens: int = Field(64, ge=1)
    capacity: int = Field(1000, ge=1)
    eviction: Eviction = "fifo"


class TipHook(Hook):
    """Shows tips before turns, requests them after episodes and stores them after groups (section 4.1).

    ``num_tokens`` counts the tokens of a text; ``counts`` is for metrics.
    """

    retries_failures = False  # another trial plays all tasks again

    def __init__(
        self, settings: MemorySettings, *, embedder: Embedder, num_tokens: Callable[[str], int], seed: int
    ) -> None:
        self.settings = settings
        self.memory = TipMemory(
            capacity=settings.capacity,
            eviction=settings.eviction,
            per_state=settings.state_key == "observation",
            seed=seed,
        )
        self.embedder = embedder
        self.max_reflection_tokens = settings.max_tip_tokens
        self.counts: Counter[str] = Counter()
        self._num_tokens = num_tokens
        self._training_step = 0
        self._endings: dict[tuple[str, int], str] = {}  # what ended an episode, which no node holds

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        """Tips for the present state, in modes that act with them."""
        if tip_mode(state.mode) == PLAIN:
            return ()
        settings = self.settings
        path = state.trace.path(state.last_node.node_id)
        hits = self.memory.query(
            self.task_key(state.task),
            self.embedder.embed([self._state_text(path, state.task)])[0],
            k=settings.num_shown,
            min_similarity=settings.min_similarity,
            rank=settings.rank,
        )
        spent = sum(len(node.token_ids) for node in path if node.origin is Origin.MEMORY)
        shown, text = self._within(hits, min(settings.max_shown_tokens, settings.max_prompt_tokens - spent))
        self.counts["dropped"] += len(hits) - len(shown)
        self.counts["without_tips"] += not shown
        if not shown:
            return ()
        metadata = {
            "tip_ids": [hit.tip.tip_id for hit in shown],
            "similarities": [hit.similarity for hit in shown],
            "scores": [hit.tip.score for hit in shown],
            "writers": [f"{hit.tip.policy_version}:{hit.tip.rollout_id}" for hit in shown],
            "memory_version": self.memory.num_added(self.task_key(state.task)),
        }
        return [Splice(origin=Origin.MEMORY, text=text, metadata=metadata)]

    def _within(self, hits: list[TipHit], budget: int) -> tuple[list[TipHit], str]:
        """The tips that fit into ``budget`` tokens, and their text; the oldest are dropped first."""
        fitting = [hit for hit in hits if self._num_tokens(render_tips([hit.tip])) <= budget]
        while fitting:
            text = render_tips([hit.tip for hit in fitting])
            if self._num_tokens(text) <= budget:
                return fitting, text
            fitting.remove(min(fitting, key=lambda hit: hit.tip.tip_id))
        return [], ""

    def task_key(self, task: Task) -> str:
        """The buffer of a task."""
        if self.settings.scope == "world":
            return str(task.metadata.get("world", task.key))
        return task.key if self.settings.scope == "task" else "all"

    def _state_text(self, path: Sequence[Node], task: Task) -> str:
        """The key of the present state: the newest observation, the chat without tips, or the question."""
        if self.settings.state_key == "question":
            return task.question
        if self.settings.state_key == "chat":
            return chat_text(path)
        return next((node.message.content for node in reversed(path) if node.is_observation), "")

    def after_turn(self, state: EpisodeState) -> None:
        """Keep the message with which the environment ended the episode, if its answers are tips."""
        if self.settings.writer == "environment":
            self._training_step = state.training_step
            last = state.last_result
            self._endings[state.task.key, state.rollout] = last.text if last is not None and last.done else ""

    def closing_message(self, state: EpisodeState, result: EpisodeResult) -> Message | None:
        """Request a tip after every training episode, in all modes: tip ~ pi(. | s_T, u). None if the
        environment's answers are the tips.
        """
        if self.settings.writer == "environment":
            return None
        self._training_step = state.training_step
        # Fewer words than tokens: a tip at its limit is cut in the middle of a sentence.
        words = max(5, self.settings.max_tip_tokens * 2 // 3)
        return Message(
            role="user", content=last_words(state) + REQUEST.format(words=words, score=result.episode_return)
        )

    def after_group(self, trace: Trace) -> None:
        """Store a record for every different action of the episodes, in the order of rollouts and turns."""
        for leaf, path in trace.rollouts():
            # Also for a rollout that is skipped below: endings must not pile up over a run.
            ending = self._endings.pop((trace.task.key, leaf.rollout), "")
            if leaf.episode_return is None:
                continue
            if self.settings.writer == "environment":
                self._store_answers(trace, leaf, path, ending)
                continue
            tip = clean_reflection(leaf.reflection)
            self.counts["empty" if not tip else "written"] += 1
            if tip:
                self._store(trace, leaf, path, tip)

    def _store(self, trace: Trace, leaf: Leaf, path: Sequence[Node], tip: str) -> None:
        """Store the policy's tip at every state of its episode."""
        turns = policy_turns(path)
        uses_observations = self.settings.state_key == "observation"
        whole = trace.task.question if self.settings.state_key == "question" else chat_text(path)
        keys = self.embedder.embed([turn.observation for turn in turns] if uses_observations else [whole])
        for number, turn in enumerate(turns):
            key = keys[number if uses_observations else 0]
            self._add(
                trace,
                leaf,
                key,
                record_text(tip, action=turn.node.message.content, score=leaf.episode_return or 0.0),
            )

    def _store_answers(self, trace: Trace, leaf: Leaf, path: Sequence[Node], ending: str) -> None:
        """Store the environment's answers under their own words."""
        tips = [
            environment_tip(
                action_text(text),
                answer,
                max_tokens=self.settings.max_tip_tokens,
                num_tokens=self._num_tokens,
            )
            for text, answer in answered_actions(path, ending)
        ]
        written = [tip for tip in tips if tip]
        self.counts["empty"] += len(tips) - len(written)
        self.counts["written"] += len(written)
        for tip, key in zip(written, self.embedder.embed(written), strict=True):
            self._add(trace, leaf, key, tip)

    def _add(self, trace: Trace, leaf: Leaf, key: Key, text: str) -> None:
        added = self.memory.add(
            self.task_key(trace.task),
            key,
            text,
            leaf.episode_return or 0.0,
            policy_version=self._training_step,
            rollout_id=f"{trace.task.key}/{leaf.rollout}",
        )
        self.counts["stored" if added else "duplicates"] += 1

    def snapshot(self) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
        """The memory."""
        return self.memory.snapshot()

    def restore(self, snapshot: tuple[Mapping[str, Any], Mapping[str, NDArray[np.float32]]]) -> None:
        """Replace the memory, and reset the counts."""
        self.memory.restore(*snapshot)
        self.counts = Counter()
        self._endings = {}

    def discard_step(self) -> None:
        """Forget the counts and endings of rollouts that no step has measured."""
        self.counts = Counter()
        self._endings = {}

    def gathered(self) -> dict[str, Any]:
        """The counts, and what :meth:`after_group` needs and no trace contains."""
        return {"counts": dict(self.counts), "endings": dict(self._endings), "step": self._training_step}

    def absorb(self, gathered: Mapping[str, Any]) -> None:
        """Add the counts and the endings of a copy."""
        self.counts.update(gathered["counts"])
        self._endings |= gathered["endings"]
        self._training_step = max(self._training_step, gathered["step"])


def last_words(state: EpisodeState) -> str:
    """The environment's last message and an empty line; empty if it did not end the episode or sent no text.

    Its earlier messages are in the chat.
    """
    last = state.last_result
    return f"{last.text}\n\n" if last and last.done and last.text else ""


def render_tips(tips: Sequence[Tip]) -> str:
    """The block that a turn shows."""
    return "\n\n<tip>\n" + "\n".join([HEADING, *(f"- {tip.text}" for tip in tips)]) + "\n</tip>"


def record_text(tip: str, *, action: str, score: float) -> str:
    """Text of one record: the tip, the action taken at its state, and how the episode ended (paper, appendix
    E).
    """
    return f"{tip} Here: {action_text(action)}; final score {score:.3g}."


def action_text(text: str) -> str:
    """The action in a turn: its last tagged part (such as ``<action>``, ``<search>`` or ``<answer>``), or the
    whole text without one.
    """
    tagged = _TAGGED.findall(text)
    return " ".join((tagged[-1][1] if tagged else text).split())


def clean_reflection(reflection: str) -> str:
    """The first line with text after a reasoning model's thoughts; empty if those were cut."""
    lines = without_thoughts(reflection).splitlines()
    return next((line.strip() for line in lines if line.strip()), "")


def chat_text(path: Sequence[Node]) -> str:
    """All turns and observations, without tips and without retrieved steps that were only shown."""
    return "\n".join(node.message.content for node in path if node.trainable or node.is_observation)


def tip_metrics(traces: Sequence[Trace], hook: TipHook) -> dict[str, float]:
    """Metrics of a step's tips (docs/metrics.md). Resets the hook's counts."""
    counts, hook.counts = hook.counts, type(hook.counts)()
    nodes = {id(node): node for trace in traces for _, path in trace.rollouts() for node in path}.values()
    shown = [node for node in nodes if node.origin is Origin.MEMORY]
    leaves = [
        (tip_mode(trace.modes[leaf.rollout]), leaf) for trace in traces for leaf, _ in trace.scored_rollouts()
    ]
    metrics = {
        f"tips/num_groups_{mode}": float(sum(tip_mode(trace.modes[0]) == mode for trace in traces))
        for mode in MODES
    }
    metrics |= {
        "tips/num_shown": float(sum(len(node.metadata["tip_ids"]) for node in shown)),
        "tips/num_dropped": float(counts["dropped"]),
        "tips/num_turns_without": float(counts["without_tips"]),
        "tips/num_no_room": float(sum(node.metadata.get("num_splices_dropped", 0) for node in nodes)),
        "tips/num_written": float(counts["written"]),
        "tips/num_empty": float(counts["empty"]),
        "tips/num_stored": float(counts["stored"]),
        "tips/num_duplicates": float(counts["duplicates"]),
        "tips/memory_size": float(len(hook.memory)),
        "tips/fraction_tied": fmean(
            len({leaf.episode_return for leaf, _ in trace.scored_rollouts()}) < 2 for trace in traces
        ),
        "tokens/remarks": float(sum(leaf.num_reflection_tokens for _, leaf in leaves)),
    }
    for mode in MODES:
        returns = [leaf.episode_return or 0.0 for own, leaf in leaves if own == mode]
        if returns:
            metrics[f"tips/return_{mode}"] = fmean(returns)
    if shown:
        similarities = [value for node in shown for value in node.metadata["similarities"]]
        metrics["tips/similarity_mean"] = fmean(similarities)
        metrics["tips/similarity_min"] = min(similarities)
        distinct = {  # a tip's number counts the records of its buffer
            (hook.task_key(trace.task), tip)
            for trace in traces
            for _, path in trace.rollouts()
            for node in path
            if node.origin is Origin.MEMORY
            for tip in node.metadata["tip_ids"]
        }
        metrics["tips/num_distinct_shown"] = float(len(distinct))
        metrics["tips/tokens_a_turn"] = fmean(len(node.token_ids) for node in shown)
    return metrics


class TipSettings(Settings):
    """``memory_probability`` p of the groups act with tips; ``off_policy_probability`` q of those are trained
    without them.

    ``intrinsic_coefficient`` c: a state visited n times adds c / n to the return before the advantage (0:
    off); a state is new if its cosine with all states of its task is below ``novelty_threshold``. ``novelty
    = rnd`` adds c times the scaled error of a predictor that learns the states of all tasks, by the section
    ``rnd`` (random network distillation: appendix F). ``intrinsic_where_tied``: also if the returns of a
    group tie, so that novelty alone makes the advantage (the paper); False leaves such a group without a
    signal and counts its states.
    """

    memory_probability: float = Field(0.25, ge=0, le=1)
    off_policy_probability: float = Field(2 / 3, ge=0, le=1)
    intrinsic_coefficient: float = Field(0.01, ge=0)
    intrinsic_where_tied: bool = True
    novelty: Literal["count", "rnd"] = "count"
    novelty_threshold: float = Field(0.9, ge=-1, le=1)
    rnd: DistillationSettings = DistillationSettings()
    memory: MemorySettings = MemorySettings()


def reward_novelty(
    trace: Trace,
    settings: TipSettings,
    novelty: NoveltyStore | RandomDistillation,
    embedder: Embedder,
    *,
    advantage: AdvantageKind,
) -> list[float]:
    """Write the intrinsic return of every rollout of a group; return the measurement of each visited state.

    All states of the group count as visited at the same time, so that rollouts that visit the same states get
    the same reward. Visits are counted per task, whatever the scope of the tips.
    """
    if not settings.intrinsic_coefficient:
        return []
    rollouts = [(leaf, visited_states(path)) for leaf, path in trace.scored_rollouts()]
    texts = [text for _, states in rollouts for text in states]
    if not texts:
        return []
    is_paid = (
        settings.intrinsic_where_tied
        or group_advantages([leaf.episode_return for leaf, _ in rollouts], advantage).has_signal
    )
    # count visits even if nothing is paid: these states are not new the next time
    bonuses, measured = novelty.visit(trace.task.key, list(embedder.embed(texts)))
    rest = iter(bonuses)
    for leaf, states in rollouts:
        total = sum(next(rest) for _ in states)
        leaf.intrinsic = settings.intrinsic_coefficient * total if is_paid else 0.0
    return measured


def never_shows_a_tip(settings: TipSettings, *, num_groups: int, num_tasks: int) -> bool:
    """Whether a run of ``num_groups`` groups on ``num_tasks`` tasks acts with tips and can show none.

    An epoch plays every task at most once, and a buffer per task has the tips of earlier groups of that task.
    """
    return settings.memory_probability > 0 and settings.memory.scope == "task" and 0 < num_groups <= num_tasks


def visited_states(path: Sequence[Node]) -> list[str]:
    """The observation that each turn of an episode acted on (section 4.2: a step's reward is its state's).

    An observation after the last turn is no state: it is in the path only if the loop cut the episode, and
    would pay the episode for being cut.
    """
    return [turn.observation for turn in policy_turns(path)]
