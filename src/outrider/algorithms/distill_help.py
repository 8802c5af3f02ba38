"""Help of self-distillation: where its texts come from, and where they stand in the context.

:class:`HelpHook` collects the help of a group when all of its returns are known, and shows help at the start
of rollouts that are sampled with it. Conversations are not tokenized again: help is only inserted.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

from outrider.algorithms.base import Algorithm
from outrider.algorithms.distill import DistillSettings, HelpSource
from outrider.algorithms.gigpo import step_returns
from outrider.algorithms.retrieval import RetrievalHook
from outrider.algorithms.tips import (
    HEADING,
    PLAIN,
    TIPS_ON,
    ModeSchedule,
    TipHook,
    action_text,
    answered_turns,
    render_tips,
    tip_mode,
)
from outrider.errors import DataError
from outrider.files import readable
from outrider.printing import plural
from outrider.rollout.hooks import (
    HYBRID,
    EpisodeState,
    Hook,
    Splice,
    has_part,
    join_modes,
    join_observation,
)
from outrider.tokens import ChatRenderer
from outrider.tokens.tool_calls import without_thoughts
from outrider.trace import (
    Insertion,
    Leaf,
    Node,
    Trace,
    policy_turns,
    split_contexts,
    with_help,
    without_open_prompt,
)
from outrider.types import Message, Origin, Step, Task

HELPED: Final = "helped"
"""Part of the mode of rollouts that are sampled with help other than tips."""
LAST_WORDS: Final = "last_words"
"""Key of the last turn's metadata: the message with which the environment ended the episode."""
PAIR_WEIGHT: Final = "pair_weight"
"""Key of a policy node's metadata: its weight as a teacher of the other context (``pairs``)."""
WITHOUT_HELP: Final = "without_help"
"""Key of the last node's metadata: why the rollout has no help."""
NO_ROOM: Final = "no_room"
_REASONS: Final[Mapping[HelpSource, str]] = {
    "tips": "no_tip",
    "retrieved": "no_step",
    "sibling": "no_sibling",
    "demonstration": "no_demonstration",
    "file": "no_text",
}
_MAX_LAST_WORDS: Final = 2000  # characters
_TAG: Final = re.compile(r"</?\w+>")


# Texts.


@dataclass(frozen=True, slots=True, kw_only=True)
class FileText:
    """A line of a file of help, for the task with the key ``task`` or all tasks whose metadata ``match``."""

    text: str
    task: str | None
    match: Mapping[str, Any]

    def is_for(self, task: Task) -> bool:
        """Whether the text helps with a task."""
        if self.task is not None:
            return self.task == task.key
        return all(
            name in task.metadata and task.metadata[name] == value for name, value in self.match.items()
        )


def read_help_file(path: Path) -> list[FileText]:
    """Read JSON lines with ``text`` and either ``task``, a task key, or ``match``, values of its metadata.

    Raises DataError for a file that cannot be read, and for a line without these keys or with others.
    """
    try:
        lines = [line for line in readable(path) if line[1] != {}]
    except OSError as error:
        raise DataError(f"algorithm.distill.path: {path.name} cannot be read: {error.strerror}") from error
    texts: list[FileText] = []
    for number, line in lines:
        entry = line or {}
        text, task, match = entry.get("text"), entry.get("task"), entry.get("match")
        is_task, is_match = isinstance(task, str), isinstance(match, dict) and bool(match)
        if not isinstance(text, str) or not text.strip() or is_task == is_match:
            raise DataError(
                f'algorithm.distill.path: line {number} of {path.name} needs a "text" and either "task", '
                'a task key, or "match", values of the metadata of tasks'
            )
        if unknown := sorted(entry.keys() - {"text", "task", "match"}):
            raise DataError(
                f"algorithm.distill.path: line {number} of {path.name} has the unknown key "
                f"{unknown[0]!r}, which would not be read: remove it"
            )
        texts.append(FileText(text=text.strip(), task=task if is_task else None, match=match or {}))
    if not texts:
        raise DataError(f"algorithm.distill.path: {path.name} has no lines")
    return texts


def episode_lines(path: Sequence[Node]) -> list[str]:
    """Return a line per valid turn of the policy: its action without thinking, and the first line of the
    environment's response.
    """
    ending = str(path[-1].metadata.get(LAST_WORDS, ""))
    return [
        line
        for node, answer in answered_turns(path, ending)
        if not node.metadata.get("invalid") and (line := _turn_line(node, answer))
    ]


def feedback_lines(leaf: Leaf, path: Sequence[Node]) -> list[str]:
    """Return the errors of an episode, the environment's last words, and the score."""
    ending = str(path[-1].metadata.get(LAST_WORDS, ""))
    turns = answered_turns(path, "")
    errors = [_turn_line(node, answer) for node, answer in turns if node.metadata.get("invalid") and answer]
    words = [line.strip() for line in _TAG.sub("\n", ending).splitlines() if line.strip()]
    return [*errors, *words, f"Score: {leaf.episode_return:.3g}"]


def _turn_line(node: Node, answer: str) -> str:
    action = action_text(without_thoughts(node.message.content))
    first = next((line.strip() for line in _TAG.sub("\n", answer).splitlines() if line.strip()), "")
    return f"{action}: {first}" if action and first else action


def find_sibling(trace: Trace, rollout: int, threshold: float) -> list[Node] | None:
    """Return the path of the first other rollout of the group with a return of at least ``threshold``.

    A rollout that shares turns of the policy is skipped: it contains the tokens that it would help with.
    """
    leaf = trace.leaves[rollout]
    assert leaf.node_id is not None
    own = {node.node_id for node in trace.path(leaf.node_id) if node.trainable}
    for other, path in trace.scored_rollouts():
        is_success = other.episode_return is not None and other.episode_return >= threshold
        if is_success and other.rollout != rollout and not own & {node.node_id for node in path}:
            return path
    return None


def weigh_turns(trace: Trace, settings: DistillSettings) -> None:
    """Write the weights of the turns that teach the other context: of the valid turns of a group that acted
    on the same observation, the first one with the highest return (UCOB).
    """
    turns_by_observation: dict[str, list[tuple[float, Node]]] = {}
    for leaf, path in trace.scored_rollouts():
        turns = policy_turns(path)
        returns = step_returns(path, episode_return=leaf.episode_return or 0.0, gamma=settings.pair_gamma)
        for turn, value in zip(turns, returns, strict=True):
            if not turn.node.metadata.get("invalid"):
                turns_by_observation.setdefault(turn.observation, []).append((value, turn.node))
    for turns_ in turns_by_observation.values():
        best, winner = max(turns_, key=lambda turn: turn[0])
        gaps = sorted((best - value for value, node in turns_ if node is not winner), reverse=True)
        weight = sum(pair_weight(gap, settings) for gap in gaps[: settings.max_pairs])
        if weight:
            winner.metadata[PAIR_WEIGHT] = weight


def pair_weight(gap: float, settings: DistillSettings) -> float:
    """Return the weight of a difference of returns: 0 up to the margin, then proportional up to the cap."""
    return min(gap / settings.pair_scale, settings.pair_cap) if gap > settings.pair_margin else 0.0


# Parts of one help text, which are shortened until the text fits.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The lines of one source. Lines with the lowest ``ages`` are dropped first. ``is_cut``: some lines were
    dropped before.
    """

    source: HelpSource
    lines: tuple[str, ...]
    ages: tuple[int, ...] = ()
    is_cut: bool = False

    def without_oldest(self, num: int) -> "_Part":
        """Return the part without its ``num`` oldest lines."""
        ages = self.ages or tuple(range(len(self.lines)))
        kept = sorted(sorted(range(len(ages)), key=ages.__getitem__)[num:])
        return replace(self, lines=tuple(self.lines[i] for i in kept), ages=tuple(ages[i] for i in kept))


# Modes.


def with_helped_mode(
    modes: Sequence[str], settings: DistillSettings | None, *, group: int, seed: int, has_tips: bool
) -> Sequence[str]:
    """Return the modes of a group's rollouts, marked if they are sampled with help.

    Of the groups of a run, ``helped_share`` are (``plays = "both"``), in exact proportions; with ``pairs``,
    the last rollouts of every group. In a run with tips, the modes of EMPO² decide instead. ``group`` numbers
    the groups of the run.
    """
    if settings is None or settings.plays == "unhelped" or has_tips:
        return modes
    if settings.pairs != "none":
        num_plain = len(modes) - max(1, round(settings.helped_share * len(modes)))
        return (*modes[:num_plain], *(join_modes(mode, HELPED) for mode in modes[num_plain:]))
    if settings.plays == "both":
        schedule = ModeSchedule(
            memory_probability=settings.helped_share, off_policy_probability=0.0, seed=seed
        )
        if schedule.mode(group) != TIPS_ON:
            return modes
    return tuple(join_modes(mode, HELPED) for mode in modes)


# The hook.


@dataclass(kw_only=True)
class HelpHook(Hook):
    """Collects help after rollouts, and shows it to rollouts whose mode is ``helped``.

    ``tips`` and ``retrieval`` are the run's hooks of these sources. If the group's own tips are excluded,
    this hook must come before that of the tips. ``count_tokens`` counts the tokens of a text inside a
    message. ``demonstrations`` are the lines of the experts' episodes by task key. ``renderer`` and
    ``context_length`` are those of the process that collects help; without a renderer none is collected.
    """

    settings: DistillSettings = field(kw_only=False)
    count_tokens: Callable[[str], int]
    tips: TipHook | None = None
    retrieval: RetrievalHook | None = None
    texts: Sequence[FileText] = ()
    renderer: ChatRenderer | None = None
    context_length: int = 0
    demonstrations: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _fitted: dict[tuple[tuple[_Part, ...], int], tuple[str, str]] = field(default_factory=dict)

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        """Show help in front of the first turn of every context of a rollout that is sampled with it, or of
        every turn.
        """
        is_place = self.settings.place == "turn" or not state.turn or state.last_node.restarts
        if not is_place or not has_part(state.mode, HELPED):
            return ()
        parts = [self.task_part(source, state.task) for source in self.settings.help]
        text, source = self._fit(parts, self.settings.max_help_tokens)
        return [Splice(origin=Origin.MEMORY, text=text, metadata={"source": source})] if text else ()

    def after_turn(self, state: EpisodeState) -> None:
        """Store the message with which the environment ended the episode; no node contains it."""
        last = state.last_result
        if last is not None and last.done and last.text and {"sibling", "feedback"} & {*self.settings.help}:
            state.last_node.metadata[LAST_WORDS] = last.text[:_MAX_LAST_WORDS]

    def after_group(self, trace: Trace) -> None:
        """Insert help for the teacher into the rollouts that were sampled without it."""
        pairs = self.settings.pairs != "none"
        if any(has_part(mode, HELPED) for mode in trace.modes) and not pairs:
            trace.without_memory = True
        if self.renderer is None:
            return
        self._fitted = {}
        for leaf, path in trace.scored_rollouts():
            mode = trace.modes[leaf.rollout]
            if not any(node.trainable for node in path):
                continue
            if has_part(mode, HELPED):
                if not any(node.origin is Origin.MEMORY for node in path):
                    parts = [self.task_part(source, trace.task) for source in self.settings.help]
                    path[-1].metadata[WITHOUT_HELP] = self._reason(parts)
            elif tip_mode(mode) == PLAIN and self.settings.plays != "helped":
                is_hybrid = has_part(mode, HYBRID)  # it retrieves itself
                sources = [source for source in self.settings.help if source != "retrieved" or not is_hybrid]
                if sources:
                    self._insert(trace, leaf, path, self.renderer, sources)
        if pairs:
            weigh_turns(trace, self.settings)

    def _insert(
        self,
        trace: Trace,
        leaf: Leaf,
        path: Sequence[Node],
        renderer: ChatRenderer,
        sources: Sequence[HelpSource],
    ) -> None:
        is_repeated = self.settings.place == "first"  # one text in all contexts
        trained = without_open_prompt(path)
        rooms = [
            self.context_length - sum(len(node.token_ids) for node in context)
            for context in split_contexts(trained)
        ]
        rooms = [min(rooms)] * len(rooms) if is_repeated else rooms
        insertions: list[Insertion] = []
        parts: list[_Part] = []
        shown: list[int] = []
        number, insertion = 0, None
        for node, offset in help_positions(trained, renderer.opening, place=self.settings.place):
            number += node.restarts
            if not (is_repeated and parts):
                before = path[: path.index(node) + 1]
                budget = min(self.settings.max_help_tokens, rooms[number])
                own = [
                    self._rollout_part(source, trace, leaf, path, before, budget, shown) for source in sources
                ]
                parts += own
                text, source = self._fit(own, budget)
                token_ids = renderer.bridge((), [Message(role="inline", content=text)]) if text else ()
                insertion = Insertion(
                    node_id=node.node_id, offset=offset, token_ids=token_ids, text=text, source=source
                )
                rooms[number] -= len(token_ids)
            if insertion is not None and insertion.text:
                insertions.append(replace(insertion, node_id=node.node_id, offset=offset))
        if insertions:
            trace.help[leaf.rollout] = tuple(insertions)
        else:
            path[-1].metadata[WITHOUT_HELP] = self._reason(parts)

    def _reason(self, parts: Sequence[_Part]) -> str:
        """Return why a rollout has no help: no text, or none that fits."""
        has_text = any(part.lines or part.is_cut for part in parts)
        return NO_ROOM if has_text else _REASONS.get(self.settings.help[0], NO_ROOM)

    def _rollout_part(
        self,
        source: HelpSource,
        trace: Trace,
        leaf: Leaf,
        path: Sequence[Node],
        before: Sequence[Node],
        budget: int,
        shown: list[int],
    ) -> _Part:
        """Return the lines of a source for one rollout, at the end of the nodes ``before``. ``shown`` are the
        ids of the retrieved steps so far, which are extended.
        """
        if source == "sibling":
            sibling = find_sibling(trace, leaf.rollout, self.settings.threshold)
            return _Part(source=source, lines=() if sibling is None else tuple(episode_lines(sibling)))
        if source == "feedback":
            return _Part(source=source, lines=tuple(feedback_lines(leaf, path)))
        if source == "tips" and self.tips is not None:
            hits, fitting, _ = self.tips.select(before, trace.task, budget=budget)
            return _Part(
                source=source,
                lines=tuple(hit.tip.text for hit in fitting),
                ages=tuple(hit.tip.tip_id for hit in fitting),
                is_cut=len(fitting) < len(hits),
            )
        if source == "retrieved" and self.retrieval is not None:
            history = [
                Step(text=node.message.content, observation=answer)
                for node, answer in answered_turns(before, "")
            ]
            records = self.retrieval.nearest_steps(trace.task, history, shown)
            shown += [record.step_id for record in records]
            texts = (join_observation(record.text, record.observation).strip() for record in records)
            return _Part(source=source, lines=tuple(texts))
        return self.task_part(source, trace.task)

    def task_part(self, source: HelpSource, task: Task) -> _Part:
        """Return the lines of a source that depends on the task only."""
        if source == "demonstration":
            return _Part(source=source, lines=self.demonstrations.get(task.key, ()))
        return _Part(source=source, lines=tuple(text.text for text in self.texts if text.is_for(task)))

    def is_whole(self, part: _Part) -> bool:
        """Whether all lines fit into the limit."""
        return self.count_tokens(self._render([part])) <= self.settings.max_help_tokens

    def _fit(self, parts: Sequence[_Part], budget: int) -> tuple[str, str]:
        """Return the text of the parts within ``budget`` tokens and the names of its sources; empty if
        nothing fits. Earlier sources have priority.
        """
        key = (tuple(parts), budget)
        if key not in self._fitted:  # siblings often have the same help
            chosen: list[_Part] = []
            for part in parts:
                if (shorter := self._shorten(chosen, part, budget)).lines:
                    chosen.append(shorter)
            sources = "+".join(part.source for part in chosen)
            self._fitted[key] = (self._render(chosen) if chosen else "", sources)
        return self._fitted[key]

    def _shorten(self, chosen: Sequence[_Part], part: _Part, budget: int) -> _Part:
        """Drop as few of the oldest lines as possible so that the text fits, after the ``chosen`` parts."""

        def fits(num_dropped: int) -> bool:
            shorter = part.without_oldest(num_dropped)
            return not shorter.lines or self.count_tokens(self._render([*chosen, shorter])) <= budget

        return part.without_oldest(bisect_left(range(len(part.lines) + 1), True, key=fits))

    def _render(self, parts: Sequence[_Part]) -> str:
        """Return the text that is inserted. Tips alone look as in rollouts that see them."""
        if self.settings.help == ("tips",):
            return render_tips(parts[0].lines)
        blocks = [
            "\n".join([HEADING, *(f"- {line}" for line in part.lines)])
            if part.source == "tips"
            else "\n".join(part.lines)
            for part in parts
        ]
        return "\n\n" + self.settings.template.replace("{help}", "\n\n".join(blocks))

    def snapshot(self) -> dict[str, tuple[str, ...]]:
        """Return the demonstrations."""
        return dict(self.demonstrations)

    def restore(self, snapshot: Mapping[str, tuple[str, ...]]) -> None:
        """Restore the demonstrations."""
        self.demonstrations = dict(snapshot)


def help_positions(
    path: Sequence[Node], opening: tuple[int, ...], *, place: Literal["first", "turn"] = "first"
) -> list[tuple[Node, int]]:
    """Return the nodes and the offsets at which help is inserted into a rollout.

    With ``first``, this is for each context the end of the first user message, before the tokens that the
    template writes after it (``opening``). A context that starts with another prompt has help at the end of
    its own prompt. With ``turn``, it is the end of the newest message before every turn of the policy.
    """
    positions: list[tuple[Node, int]] = []
    if place == "turn":
        newest: Node | None = None
        for node in path:
            if node.origin in (Origin.PROMPT, Origin.ENVIRONMENT):
                newest = node
            elif node.trainable and newest is not None:
                positions.append((newest, _text_length(newest.token_ids, opening)))
                newest = None
        return positions
    begin = _text_length(path[0].token_ids, opening)
    prompt = path[0].token_ids[:begin]
    for sample in split_contexts(path):
        first = sample[0]
        is_same = first.token_ids[:begin] == prompt
        positions.append((first, begin if is_same else _text_length(first.token_ids, opening)))
    return positions


def _text_length(token_ids: tuple[int, ...], opening: tuple[int, ...]) -> int:
    ends_open = bool(opening) and token_ids[-len(opening) :] == opening
    return len(token_ids) - len(opening) if ends_open else len(token_ids)


# The hook of a run, and its metrics.


def add_help_hook(algorithm: Algorithm, *, count_tokens: Callable[[str], int]) -> None:
    """Add the hook that the settings of ``algorithm`` require, if any. Raises DataError for a file of help
    that cannot be used.
    """
    settings = algorithm.objective.distill
    if settings is None:
        return
    hook = HelpHook(
        settings,
        count_tokens=count_tokens,
        tips=next((item for item in algorithm.hooks if isinstance(item, TipHook)), None),
        retrieval=next((item for item in algorithm.hooks if isinstance(item, RetrievalHook)), None),
        texts=() if settings.path is None else read_help_file(Path(settings.path)),
    )
    # A prefix executes turns: help at the prompt is shown before them, and help at a turn after them.
    is_first = settings.place == "first" if hook.tips is None else settings.exclude_own_group
    algorithm.hooks = (hook, *algorithm.hooks) if is_first else (*algorithm.hooks, hook)


def find_help_hook(algorithm: Algorithm) -> HelpHook | None:
    """Return the hook that collects help; None without self-distillation."""
    return next((hook for hook in algorithm.hooks if isinstance(hook, HelpHook)), None)


def file_lines(hook: HelpHook, tasks: Sequence[Task]) -> list[str]:
    """Return warnings about a file of help: tasks without text, text for no task, and text that is too long
    for most tasks.
    """
    if not hook.texts or not tasks:
        return []
    path, limit = Path(hook.settings.path or "").name, hook.settings.max_help_tokens
    parts = Counter(hook.task_part("file", task) for task in tasks)
    num_missing = sum(num for part, num in parts.items() if not part.lines)
    num_long = sum(num for part, num in parts.items() if part.lines and not hook.is_whole(part))
    lines = []
    if num_missing:
        lines.append(f"{path} has no help for {num_missing} of the {plural(len(tasks), 'training task')}")
    keys = {task.key for task in tasks}
    num_unused = sum(
        text.task not in keys if text.task is not None else not any(map(text.is_for, tasks))
        for text in hook.texts
    )
    if num_unused:
        lines.append(
            f"{path}: {num_unused} of {plural(len(hook.texts), 'text is', 'texts are')} for none of the "
            "training tasks"
        )
    if num_long * 2 > len(tasks):
        lines.append(
            f"{path} has more than algorithm.distill.max_help_tokens = {limit} tokens for {num_long} of the "
            f"{plural(len(tasks), 'training task')}: their first texts are left out"
        )
    return lines


def help_metrics(traces: Sequence[Trace]) -> dict[str, float]:
    """Return the metrics of a step's help (docs/metrics.md)."""
    rollouts = [
        (trace, leaf, path)
        for trace in traces
        for leaf, path in trace.own_rollouts()
        if leaf.episode_return is not None
    ]
    if not rollouts:
        return {}
    reasons = Counter(path[-1].metadata.get(WITHOUT_HELP) for _, _, path in rollouts if path)
    metrics = {
        f"distill/num_without_help_{reason}": float(reasons[reason])
        for reason in (*_REASONS.values(), NO_ROOM)
    }
    nodes = {id(node): node for _, _, path in rollouts for node in path}.values()
    if num_pairs := sum(PAIR_WEIGHT in node.metadata for node in nodes):
        metrics["distill/num_teaching_turns"] = float(num_pairs)
    sizes = [_num_help_tokens(trace, leaf, path) for trace, leaf, path in rollouts]
    metrics["distill/share_rollouts"] = sum(map(bool, sizes)) / len(sizes)
    if any(sizes):
        metrics["distill/help_tokens"] = fmean(filter(None, sizes))
    returns: dict[bool, list[float]] = {True: [], False: []}
    for _, leaf, path in rollouts:
        returns[any(node.origin is Origin.MEMORY for node in path)].append(leaf.episode_return or 0.0)
    if returns[True] and returns[False]:
        metrics["distill/return_helped"] = fmean(returns[True])
        metrics["distill/return_unhelped"] = fmean(returns[False])
    return metrics


def _num_help_tokens(trace: Trace, leaf: Leaf, path: Sequence[Node]) -> float:
    """Number of tokens in which the two renderings of a rollout differ, the mean over its contexts with help;
    0 if it has one rendering only.
    """
    if insertions := trace.help.get(leaf.rollout):
        path = with_help(path, insertions)
    elif not trace.without_memory:
        return 0
    sizes = [
        sum(len(node.token_ids) for node in context if node.origin is Origin.MEMORY)
        for context in split_contexts(path)
    ]
    return fmean(filter(None, sizes)) if any(sizes) else 0
