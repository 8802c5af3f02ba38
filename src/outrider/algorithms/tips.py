"""Tips (EMPO², arXiv 2602.23008): the schedule of rollouts with tips and of updates without them, the novelty
reward, and the hook that shows, requests and stores tips.
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

from outrider.algorithms.advantages import has_spread
from outrider.algorithms.base import AdvantageKind, outcome_advantages
from outrider.config import Settings
from outrider.environments.base import EpisodeResult
from outrider.memory.embedders import Embedder
from outrider.memory.novelty import DistillationSettings, NoveltyStore, RandomDistillation
from outrider.memory.tips import Eviction, Key, Rank, TipHit, TipMemory
from outrider.plugins.registry import EmbedderName
from outrider.rollout.hooks import EpisodeState, Hook, Splice, has_part
from outrider.seeding import stream
from outrider.tokens.tool_calls import without_thoughts
from outrider.trace import Leaf, Node, Trace, policy_turns, without_retrieved
from outrider.types import Message, Origin, Task

TipMode = Literal["plain", "tips_on", "tips_off"]
PLAIN: Final[TipMode] = "plain"
TIPS_ON: Final[TipMode] = "tips_on"
TIPS_OFF: Final[TipMode] = "tips_off"

MODES: Final[tuple[TipMode, ...]] = (PLAIN, TIPS_ON, TIPS_OFF)

_WINDOW: Final = 24  # groups whose modes are shuffled together


def tip_mode(mode: str) -> TipMode:
    """Return the part of a rollout's mode that concerns tips; plain if there is none."""
    return next((candidate for candidate in MODES if has_part(mode, candidate)), PLAIN)


class ModeSchedule:
    """The mode of every group of a run by its number, with exact instead of expected proportions.

    Of the first n groups, n a multiple of the window, p n are sampled with tips and p q n of those are
    trained without, each rounded to the nearest integer. The order inside a window is drawn from the run's
    seed. The mode is a pure function of the number, so checkpoints need no state.
    """

    def __init__(
        self,
        *,
        memory_probability: float,
        off_policy_probability: float,
        seed: int,
        groups_per_step: int = 1,
        first_group: Callable[[int], int] | None = None,
    ) -> None:
        self._first_group = first_group or groups_per_step.__mul__
        self._memory = memory_probability
        self._off_policy = off_policy_probability
        self._seed = seed

    def mode_of(self, step: int, group: int) -> TipMode:
        """Return the mode of group number ``group`` of a training step."""
        return self.mode(self._first_group(step) + group)

    def mode(self, group: int) -> TipMode:
        """Return the mode of group number ``group``, counted from 0 over the whole run."""
        window, position = divmod(group, _WINDOW)
        # differences of rounded totals, so that rounding errors do not accumulate over windows
        before, after = (_rounded(n * _WINDOW * self._memory) for n in (window, window + 1))
        with_tips = after - before
        without = _rounded(after * self._off_policy) - _rounded(before * self._off_policy)
        modes: list[TipMode] = (
            [TIPS_OFF] * without + [TIPS_ON] * (with_tips - without) + [PLAIN] * (_WINDOW - with_tips)
        )
        return modes[int(stream(self._seed, "tip modes", window).permutation(_WINDOW)[position])]


def _rounded(value: float) -> int:
    # Python's round() rounds halves to even, so the result would depend on the window.
    return math.floor(value + 0.5)


def answered_turns(path: Sequence[Node], ending: str) -> list[tuple[Node, str]]:
    """Return every turn of the policy with the environment's response.

    ``ending`` is the environment's last message, which no node contains. If the loop cut the episode after a
    response, the path ends with that response.
    """
    # An executed retrieved step is neither an action of the policy nor the response to one.
    own = without_retrieved(path)
    turns = policy_turns(own)
    answers = [turn.observation for turn in turns[1:]]
    last = own[-1] if own else None
    answers.append(last.message.content if last is not None and last.origin is Origin.ENVIRONMENT else ending)
    return [(turn.node, answer) for turn, answer in zip(turns, answers, strict=True)] if turns else []


def answered_actions(path: Sequence[Node], ending: str) -> list[tuple[str, str]]:
    """Return the policy's text and the environment's response for every action of an episode.

    Used with ``memory.writer = "environment"``, which stores the responses as tips instead of prompting the
    model for one. Text that is no valid action is skipped.
    """
    return [
        (node.message.content, answer)
        for node, answer in answered_turns(path, ending)
        if not node.metadata.get("invalid")
    ]


def environment_tip(action: str, answer: str, *, max_tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Return ``action: answer`` within ``max_tokens`` tokens; empty without an answer.

    The answer is its first line with text. If it is too long, its last words are dropped first.
    """
    line = next((line.strip() for line in answer.splitlines() if line.strip()), "")
    words = line.split()
    while words:
        text = f"{action}: {' '.join(words)}"
        if count_tokens(text) <= max_tokens:
            return text
        words.pop()
    return ""


REQUEST = (
    "The episode is over, with a score of {score:.3g}. Write a tip for the next attempt at this task: one "
    "sentence of fewer than {words} words that says what was learned and how far the task was "
    "from complete. Write only the tip."
)
HEADING = "Notes from earlier attempts:"
_PREAMBLE = re.compile(r"```.*|#+ .*|</?\w+>|(?!\d+[.)]|[-*] )[^:：]{0,60}[:：][*_\"'\s]*")
_TAGGED = re.compile(r"<(?!think\b)(\w+)>(.*?)</\1>", re.DOTALL)


class MemorySettings(Settings):
    """Which tips are stored, and which are shown.

    ``writer``: ``policy`` samples a tip after every episode (the paper); ``environment`` stores each response
    to an action as a tip, with its own text as the key. ``scope``: one buffer per task, per ``world`` (from
    the metadata of the task; a task without one has its own buffer), or one for all. ``state_key``: key under
    which the policy's tips are stored and looked up: the observation at which it acted, the whole chat
    (released code) or the question of the task.
    """

    embedder: EmbedderName = "minilm"
    """Embedder of states and tips."""
    writer: Literal["policy", "environment"] = "policy"
    scope: Literal["task", "world", "all"] = "task"
    state_key: Literal["observation", "chat", "question"] = "observation"
    num_shown: int = Field(10, ge=1)
    """Most tips that a turn shows."""
    min_similarity: float = Field(0.5, ge=-1, le=1)
    """A turn shows only tips whose similarity to its state is higher."""
    rank: Rank = "score"
    """Order in which a turn selects tips."""
    max_shown_tokens: int = Field(256, ge=1)
    """Most tokens of the tips that a turn shows."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Most tokens of the tips that an episode shows."""
    max_tip_tokens: int = Field(64, ge=1)
    """Most tokens of a tip."""
    capacity: int = Field(1000, ge=1)
    """Most tips of a buffer."""
    eviction: Eviction = "fifo"
    """Tip to remove from a full buffer: the oldest (``fifo``), the one with the lowest score, or a random
    one (``reservoir``).
    """


class TipHook(Hook):
    """Shows tips before turns, requests them after episodes and stores them after groups (section 4.1).

    ``count_tokens`` counts the tokens of a text; ``counts`` are the counters of the metrics.
    """

    retries_failures = False  # another trial samples all tasks again, not only those that failed

    def __init__(
        self, settings: MemorySettings, *, embedder: Embedder, count_tokens: Callable[[str], int], seed: int
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
        self._count_tokens = count_tokens
        self._training_step = 0
        # the message that ended an episode, by task key and rollout; no node contains it
        self._endings: dict[tuple[str, int], str] = {}

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        """Return tips for the current state, in modes with tips."""
        if tip_mode(state.mode) == PLAIN:
            return ()
        path = state.trace.path(state.last_node.node_id)
        spent = sum(len(node.token_ids) for node in path if node.origin is Origin.MEMORY)
        hits, shown, text = self.select(path, state.task, budget=self.settings.max_prompt_tokens - spent)
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

    def select(
        self, path: Sequence[Node], task: Task, *, budget: int
    ) -> tuple[list[TipHit], list[TipHit], str]:
        """Return the tips for the state at the end of a path, those of them that fit into ``budget`` tokens,
        and the text of these.
        """
        settings = self.settings
        hits = self.memory.query(
            self.task_key(task),
            self.embedder.embed([self._state_text(path, task)])[0],
            k=settings.num_shown,
            min_similarity=settings.min_similarity,
            rank=settings.rank,
        )
        return hits, *self._within(hits, min(settings.max_shown_tokens, budget))

    def _within(self, hits: list[TipHit], budget: int) -> tuple[list[TipHit], str]:
        """Return the tips that fit into ``budget`` tokens, and their text; the oldest are dropped first."""
        fitting = [hit for hit in hits if self._count_tokens(render_tips([hit.tip.text])) <= budget]
        while fitting:
            text = render_tips([hit.tip.text for hit in fitting])
            if self._count_tokens(text) <= budget:
                return fitting, text
            fitting.remove(min(fitting, key=lambda hit: hit.tip.tip_id))
        return [], ""

    def task_key(self, task: Task) -> str:
        """Return the key of the buffer that a task uses, by ``memory.scope``."""
        if self.settings.scope == "world":
            return str(task.metadata.get("world", task.key))
        return task.key if self.settings.scope == "task" else "all"

    def _state_text(self, path: Sequence[Node], task: Task) -> str:
        """Return the key text of the current state: newest observation, chat without tips, or question."""
        if self.settings.state_key == "question":
            return task.question
        if self.settings.state_key == "chat":
            return chat_text(path)
        return next((node.message.content for node in reversed(path) if node.is_observation), "")

    def after_turn(self, state: EpisodeState) -> None:
        """Store the message with which the environment ended the episode, if its responses are tips."""
        if self.settings.writer == "environment":
            self._training_step = state.training_step
            last = state.last_result
            self._endings[state.task.key, state.rollout] = last.text if last is not None and last.done else ""

    def closing_message(self, state: EpisodeState, result: EpisodeResult) -> Message | None:
        """Request a tip after every training episode, in all modes: tip ~ pi(. | s_T, u).

        Returns None if the environment's responses are the tips.
        """
        if self.settings.writer == "environment":
            return None
        self._training_step = state.training_step
        # Request fewer words than tokens, because a tip at the token limit ends in the middle of a sentence.
        words = max(5, self.settings.max_tip_tokens * 2 // 3)
        return Message(
            role="user", content=last_words(state) + REQUEST.format(words=words, score=result.episode_return)
        )

    def after_group(self, trace: Trace) -> None:
        """Store a record for every different action of the episodes, in the order of rollouts and turns."""
        for leaf, path in trace.rollouts():
            # Also pop for rollouts that are skipped below, or endings would accumulate over a run.
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
        """Store the environment's responses, each with its own text as the key."""
        tips = [
            environment_tip(
                action_text(text),
                answer,
                max_tokens=self.settings.max_tip_tokens,
                count_tokens=self._count_tokens,
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
        """Return a snapshot of the memory."""
        return self.memory.snapshot()

    def restore(self, snapshot: tuple[Mapping[str, Any], Mapping[str, NDArray[np.float32]]]) -> None:
        """Restore the memory, and reset the counts."""
        self.memory.restore(*snapshot)
        self.discard_step()

    def discard_step(self) -> None:
        """Forget the counts and endings of rollouts that no step has measured."""
        self.counts = Counter()
        self._endings = {}

    def gathered(self) -> dict[str, Any]:
        """Return the counts, and the inputs of :meth:`after_group` that traces do not contain."""
        return {"counts": dict(self.counts), "endings": dict(self._endings), "step": self._training_step}

    def absorb(self, gathered: Mapping[str, Any]) -> None:
        """Add the counts and the endings of a copy."""
        self.counts.update(gathered["counts"])
        self._endings |= gathered["endings"]
        self._training_step = max(self._training_step, gathered["step"])


def last_words(state: EpisodeState) -> str:
    """Return the environment's last message and an empty line.

    Empty if it did not end the episode or sent no text. The chat already contains earlier messages.
    """
    last = state.last_result
    return f"{last.text}\n\n" if last and last.done and last.text else ""


def render_tips(texts: Sequence[str]) -> str:
    """Format the texts of tips as the block that is inserted before a turn."""
    return "\n\n<tip>\n" + "\n".join([HEADING, *(f"- {text}" for text in texts)]) + "\n</tip>"


def record_text(tip: str, *, action: str, score: float) -> str:
    """Format one record: the tip, the action taken at its state, and the outcome of the episode (paper,
    appendix E).
    """
    return f"{tip} Here: {action_text(action)}; final score {score:.3g}."


def action_text(text: str) -> str:
    """Return the action in a turn: its last tagged part (for example ``<action>`` or ``<answer>``), or the
    whole text if there is none.
    """
    tagged = _TAGGED.findall(text)
    return " ".join((tagged[-1][1] if tagged else text).split())


def clean_reflection(reflection: str) -> str:
    """Return the first line with text after a reasoning model's thoughts; empty if those were cut. Fences,
    headings, tags, and lines such as ``Here is a tip:`` are not taken if another line follows.
    """
    lines = [line.strip() for line in without_thoughts(reflection).splitlines() if line.strip()]
    return next((line for line in lines if not _PREAMBLE.fullmatch(line)), lines[0] if lines else "")


def chat_text(path: Sequence[Node]) -> str:
    """Return all turns and observations, without tips and retrieved steps that were not executed."""
    return "\n".join(node.message.content for node in path if node.trainable or node.is_observation)


def tip_metrics(traces: Sequence[Trace], hook: TipHook) -> dict[str, float]:
    """Compute the metrics of a step's tips (docs/metrics.md) and reset the hook's counts."""
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
        "tips/num_no_room": float(sum(node.metadata.get("num_tips_dropped", 0) for node in nodes)),
        "tips/num_written": float(counts["written"]),
        "tips/num_empty": float(counts["empty"]),
        "tips/num_stored": float(counts["stored"]),
        "tips/num_duplicates": float(counts["duplicates"]),
        "tips/memory_size": float(len(hook.memory)),
        "tips/fraction_tied": fmean(
            not has_spread(np.array([leaf.episode_return for leaf, _ in trace.scored_rollouts()]))
            for trace in traces
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
        distinct = {  # tip ids are numbered per buffer
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
    """``memory_probability`` p: share of groups sampled with tips. ``off_policy_probability`` q: share of
    those that are trained without them.

    ``intrinsic_coefficient`` c: visiting a state that was visited n times adds c / n to the return before
    advantages are computed (0: off). A state is new if its cosine to all states of its task is below
    ``novelty_threshold``. ``novelty = rnd`` instead adds c times the scaled error of a predictor that learns
    the states of all tasks, configured by the section ``rnd`` (random network distillation, appendix F).
    ``intrinsic_where_tied``: add the intrinsic return even if all returns of a group are equal, so that
    novelty alone determines the advantage (the paper). If False, such a group has no signal, but its visits
    are still counted.
    """

    memory_probability: float = Field(0.25, ge=0, le=1)
    off_policy_probability: float = Field(2 / 3, ge=0, le=1)
    intrinsic_coefficient: float = Field(0.01, ge=0)
    intrinsic_where_tied: bool = True
    novelty: Literal["count", "rnd"] = "count"
    """How the novelty of a state is measured: by counting visits, or by random network distillation."""
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
    """Write the intrinsic return of every rollout of a group, and return the measurement of each visited
    state.

    All states of the group count as visited at the same time, so that rollouts that visit the same states get
    the same reward. Visits are counted per task, independent of the scope of the tips.
    """
    if not settings.intrinsic_coefficient:
        return []
    rollouts = [(leaf, visited_states(path)) for leaf, path in trace.scored_rollouts()]
    texts = [text for _, states in rollouts for text in states]
    if not texts:
        return []
    is_paid = settings.intrinsic_where_tied or outcome_advantages(trace, advantage).has_signal
    # Count visits even if they are not rewarded: these states are not new the next time.
    bonuses, measured = novelty.visit(trace.task.key, list(embedder.embed(texts)))
    rest = iter(bonuses)
    for leaf, states in rollouts:
        total = sum(next(rest) for _ in states)
        leaf.intrinsic = settings.intrinsic_coefficient * total if is_paid else 0.0
    return measured


def never_shows_a_tip(
    settings: TipSettings, *, num_groups: int, num_tasks: int, has_teacher: bool = False
) -> bool:
    """Return whether a run of ``num_groups`` groups on ``num_tasks`` tasks acts with tips, or has a teacher
    that reads them, but can show none.

    An epoch samples every task at most once, and with a buffer per task only earlier groups of the same task
    provide tips.
    """
    is_read = settings.memory_probability > 0 or has_teacher
    return is_read and settings.memory.scope == "task" and 0 < num_groups <= num_tasks


def visited_states(path: Sequence[Node]) -> list[str]:
    """Return the observation that each turn of an episode acted on (section 4.2: the reward of a step is that
    of its state).

    An observation after the last turn is excluded: the path contains one only if the loop cut the episode,
    and truncated episodes must not be rewarded for it.
    """
    return [turn.observation for turn in policy_turns(path)]
