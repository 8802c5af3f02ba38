"""Help of self-distillation: the sources, what is inserted where, and what is refused or warned about."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.algorithms.distill import DistillSettings
from outrider.algorithms.distill_help import (
    HELPED,
    FileText,
    HelpHook,
    add_help_hook,
    file_lines,
    find_help_hook,
    find_sibling,
    help_metrics,
    help_positions,
    read_help_file,
    with_helped_mode,
)
from outrider.algorithms.exploration import Empo2, Empo2Settings
from outrider.algorithms.grpo import Grpo, GrpoSettings
from outrider.algorithms.prefix import PrefixHook
from outrider.algorithms.tips import MemorySettings, TipHook, render_tips
from outrider.config import load_settings, validate
from outrider.engines.base import Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import EpisodeResult, StepResult
from outrider.errors import ConfigError, DataError
from outrider.memory.embedders import HashEmbedder
from outrider.metrics import declared_metric
from outrider.rollout.episode import Sampling
from outrider.rollout.hooks import Hook
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.trace import Leaf, Node, Trace, with_help, without_memory
from outrider.training.settings import RunSettings
from outrider.training.step_metrics import Advice
from outrider.types import Message, Origin, Outcome, Role, Task
from tests.rollout.fakes import TOKENIZER, Factory, Fake, Forking, say, scheduler, scripted, tasks
from tests.tokens.family_templates import FAMILIES, byte_tokenizer
from tests.vectors import load_vectors

END = StepResult(message=None, done=True)
RENDERER = ChatRenderer(TOKENIZER)
TEXT = "look in the hall"
SIBLINGS = load_vectors("distill")["help.sibling"]["cases"]


def distill(**options: Any) -> DistillSettings:
    if options.get("help", "file") == "file":
        options = {"help": "file", "path": "x", **options}
    return validate(DistillSettings, options)


def hook_for(
    options: Mapping[str, Any],
    *,
    texts: Sequence[str] = (TEXT,),
    renderer: ChatRenderer = RENDERER,
    context_length: int = 4096,
    **fields: Any,
) -> HelpHook:
    return HelpHook(
        distill(**options),
        count_tokens=renderer.count_tokens,
        texts=[FileText(text=text, task="task 0", match={}) for text in texts],
        renderer=renderer,
        context_length=context_length,
        **fields,
    )


class Scored(Fake):
    """Ends with the return ``last_words`` maps to, or 0."""

    def result(self) -> EpisodeResult:
        is_success = any("right" in text for text in self.texts)
        return EpisodeResult(episode_return=float(is_success), success=is_success)


def answer(number: int, text: str) -> StepResult:
    """One observation with a tag around it, one error, then an end with words."""
    if "bad" in text:
        return StepResult(message=Message(role="user", content="no such action\nsecond line"), invalid=True)
    if number < 2:
        return say(f"<result>\nseen {number}\nmore\n</result>", "user")
    return StepResult(message=Message(role="user", content="the end\nand more"), done=True)


def play(
    words: Sequence[Sequence[str]],
    hooks: Sequence[Hook],
    *,
    mode: str = "on_policy",
    num_tasks: int = 1,
    renderer: ChatRenderer = RENDERER,
    role: Role = "user",
) -> list[Trace]:
    """Groups whose rollout i writes ``words[i]``, whatever is in the context."""

    def script(request: Request, text: str) -> str:
        _, rollout, turn = request.request_id.split("/")
        return words[int(rollout)][int(turn)]

    def step(number: int, text: str) -> StepResult:
        result = answer(number, text)
        if role == "user" or result.message is None:
            return result
        return StepResult(message=Message(role=role, content=result.message.content), done=result.done)

    runs = Scheduler(
        engine=ScriptedEngine(
            tokenizer=renderer.tokenizer, script=script, context_length=4096, renderer=renderer
        ),
        renderer=renderer,
        factory=Factory(lambda task, number: Scored(on_step=step, question="where is it?")),
        limits=Limits(max_turns=3, max_turn_tokens=60, step_timeout_s=60),
        sampling=Sampling(stop=(".",)),
        run_seed=0,
        hooks=hooks,
    )
    return runs.run(tasks(num_tasks), modes=(mode,) * len(words), training_step=0).traces


def ids(path: Sequence[Node]) -> list[int]:
    return [token for node in path for token in node.token_ids]


def texts(trace: Trace) -> dict[int, str]:
    return {rollout: parts[0].text for rollout, parts in trace.help.items()}


def reasons(trace: Trace) -> dict[int, str]:
    return {
        leaf.rollout: path[-1].metadata["without_help"]
        for leaf, path in trace.rollouts()
        if "without_help" in path[-1].metadata
    }


GO = ("<think>hm</think><action>go hall</action>.", "go on.", "right.")
WAIT = ("wait.", "wait.", "wait.")


# The helped context


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt-oss"])  # no user messages later
def test_the_helped_context_is_that_of_a_rollout_that_saw_the_help(name: str) -> None:
    """Token by token, in every template; without the help it is the context of a plain rollout."""
    family = FAMILIES[name]
    renderer = ChatRenderer(
        byte_tokenizer(family), template_kwargs=family.variables, call_format=family.call_format
    )
    plain_hook = hook_for({}, renderer=renderer)
    shown_hook = hook_for({"plays": "helped", "form": "likelihood"}, renderer=renderer)
    [plain] = play([WAIT], [plain_hook], renderer=renderer)
    [helped] = play([WAIT], [shown_hook], mode=f"on_policy+{HELPED}", renderer=renderer)
    [(_, plain_path)], [(_, helped_path)] = plain.rollouts(), helped.rollouts()
    assert sum(node.trainable for node in plain_path) == 3 and not helped.help
    assert [node.origin for node in helped_path].count(Origin.MEMORY) == 1
    assert ids(with_help(plain_path, plain.help[0])) == ids(helped_path)
    assert ids(without_memory(helped_path)) == ids(plain_path)
    assert helped.without_memory and not plain.without_memory
    assert f"\n\nWhat is known here:\n{TEXT}" == plain.help[0][0].text


@pytest.mark.parametrize("role", ["user", "inline"])
def test_help_stands_at_the_end_of_the_first_user_message(role: Role) -> None:
    [trace] = play([WAIT, GO], [hook_for({})], role=role)
    for leaf, path in trace.rollouts():
        text = TOKENIZER.decode(ids(with_help(path, trace.help[leaf.rollout])), skip_special_tokens=False)
        assert f"where is it?\n\nWhat is known here:\n{TEXT}<|im_end|>\n<|im_start|>assistant" in text
        assert text.count(TEXT) == 1
        [insertion] = trace.help[leaf.rollout]
        assert insertion.source == "file" and insertion.node_id == path[0].node_id


def test_every_context_of_a_rollout_that_begins_anew_has_help() -> None:
    """Also behind a rewritten history; a context with another prompt has it at the end of that prompt."""
    opening = (90, 91)
    trace = Trace(task=Task(key="t", question="?"), modes=("on_policy",))
    contexts = [(1, 2, 3, *opening), (1, 2, 3, 7, 8, *opening), (4, 5, *opening), (6,)]
    last: Node | None = None
    for number, context in enumerate(contexts):
        last = trace.append(
            parent=None if last is None else last.node_id,
            origin=Origin.ENVIRONMENT if number else Origin.PROMPT,
            token_ids=context, restarts=number > 0, message=Message(role="user", content="x"),
        )  # fmt: skip
        last = trace.append(
            parent=last.node_id, origin=Origin.POLICY, token_ids=(50,), logprobs=(-1.0,), entropies=(1.0,),
            message=Message(role="assistant", content="y"),
        )  # fmt: skip
    assert last is not None
    positions = [(node.node_id, offset) for node, offset in help_positions(trace.path(last.node_id), opening)]
    assert positions == [(0, 3), (2, 3), (4, 2), (6, 1)]


def test_the_same_seed_gives_the_same_help() -> None:
    options = {"help": ["sibling", "feedback"]}
    first, second = (play([WAIT, GO, GO], [hook_for(options)], num_tasks=2) for _ in range(2))
    assert [trace.help for trace in first] == [trace.help for trace in second]
    assert all(len(trace.help) == 3 for trace in first)


# Sources


@pytest.mark.parametrize(
    "case", load_vectors("distill")["help.sibling"]["cases"], ids=lambda case: case["name"]
)
def test_sibling_vectors(case: dict[str, Any]) -> None:
    trace = Trace(task=Task(key="t", question="?"), modes=("on_policy",) * len(case["returns"]))
    for rollout, value in enumerate(case["returns"]):
        root = trace.append(
            parent=None, origin=Origin.PROMPT, token_ids=(rollout,), message=Message(role="user", content="")
        )
        trace.finish(
            Leaf(
                node_id=root.node_id, rollout=rollout, outcome=Outcome.FINISHED, episode_return=value
            )
        )  # fmt: skip
    threshold = 0.5 if "0.5" in case["name"] else 1.0
    found = [find_sibling(trace, rollout, threshold) for rollout in range(len(case["returns"]))]
    assert [None if path is None else path[0].token_ids[0] for path in found] == case["reads"]


def test_the_help_of_a_sibling_is_its_actions_and_the_first_lines_of_the_answers() -> None:
    [trace] = play([WAIT, GO], [hook_for({"help": "sibling"})])
    assert texts(trace) == {0: "\n\nWhat is known here:\ngo hall: seen 0\ngo on.: seen 1\nright.: the end"}
    assert reasons(trace) == {1: "no_sibling"}


def test_fork_twins_do_not_help_each_other() -> None:
    """They share the tokens that the success would help with; a rollout of its own start may help both."""

    def outcome(number: int, text: str) -> StepResult:
        return END if number == 1 else say(" o")

    hook = hook_for({"help": "sibling", "threshold": 0.5})
    engine = scripted(lambda request, text: f"t{request.request_id[-8:-4]}.")
    for num_first, expected in ((1, {}), (2, {0, 1, 2})):
        forking = Forking(lambda state: int(state.turn == 1 and state.rollout == 0), first_wave=num_first)
        runs = scheduler(engine, Factory(lambda task, number: Fake(on_step=outcome)), hooks=(hook, forking))
        [trace] = runs.run(tasks(1), modes=("on_policy",) * (num_first + 1), training_step=0).traces
        assert set(trace.help) == set(expected)
        if num_first == 2:
            assert texts(trace)[0] == texts(trace)[2] != texts(trace)[1]


def test_feedback_is_errors_last_words_and_score() -> None:
    bad = ("bad.", "wait.", "right.")
    [trace] = play([bad, WAIT], [hook_for({"help": "feedback"})])
    begin = "\n\nWhat is known here:\n"
    assert texts(trace) == {
        0: f"{begin}bad.: no such action\nthe end\nand more\nScore: 1",
        1: f"{begin}the end\nand more\nScore: 0",
    }


def tip_hook(**options: Any) -> TipHook:
    settings = MemorySettings(
        **{"writer": "environment", "scope": "all", "min_similarity": -1, "num_shown": 50, **options}
    )
    return TipHook(settings, embedder=HashEmbedder(), count_tokens=RENDERER.count_tokens, seed=0)


@pytest.mark.parametrize("excludes", [True, False])
def test_tips_are_those_before_the_group_as_rollouts_see_them(excludes: bool) -> None:
    tips = tip_hook()
    hook = hook_for({"help": "tips", "exclude_own_group": excludes, "max_help_tokens": 4000}, tips=tips)
    hooks = [hook, tips] if excludes else [tips, hook]
    first, second = play([WAIT, GO], hooks, mode="plain", num_tasks=2)
    if excludes:
        assert reasons(first) == {0: "no_tip", 1: "no_tip"} and not first.help
    else:
        assert set(first.help) == set(second.help) == {0, 1}
    # what a rollout that starts with tips is shown now
    [shown] = play([WAIT], [tips], mode="tips_on")
    memory = next(node for _, path in shown.rollouts() for node in path if node.origin is Origin.MEMORY)
    if excludes:
        assert texts(second)[0] == memory.message.content
    assert not any(node.origin is Origin.MEMORY for _, path in second.rollouts() for node in path)


def test_rollouts_with_tips_get_no_help() -> None:
    tips = tip_hook()
    for mode in ("tips_on", "tips_off"):
        traces = play([WAIT, GO], [hook_for({"help": "tips"}, tips=tips), tips], mode=mode, num_tasks=2)
        assert not any(trace.help or reasons(trace) for trace in traces)


def test_texts_of_a_file_match_by_key_or_metadata_in_file_order(tmp_path: Path) -> None:
    path = tmp_path / "help.jsonl"
    lines = [
        {"match": {"room": "hall", "level": 2}, "text": "one"},
        {"task": "a", "text": "two"},
        {"task": "b", "text": "three"},
        {"match": {"level": 2}, "text": " four\n"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = read_help_file(path)
    hook = HelpHook(distill(), count_tokens=len, texts=found)
    task = Task(key="a", question="?", metadata={"room": "hall", "level": 2})
    assert hook.task_part("file", task).lines == ("one", "two", "four")
    assert hook.task_part("file", Task(key="c", question="?")).lines == ()


@pytest.mark.parametrize(
    "line",
    ['{"task": "a"}', '{"text": "x"}', '{"task": "a", "match": {"b": 1}, "text": "x"}',
     '{"text": "x", "match": {}}',
     '{"task": "a", "text": " "}', "nonsense", '["text"]'],
)  # fmt: skip
def test_a_line_of_a_file_that_cannot_be_used_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "help.jsonl"
    path.write_text(f'{{"task": "a", "text": "x"}}\n{line}\n')
    with pytest.raises(DataError, match=r"algorithm.distill.path: line 2 of help.jsonl needs"):
        read_help_file(path)


def test_an_unknown_key_of_a_file_is_refused_with_its_line(tmp_path: Path) -> None:
    """A misspelt or unsupported key would be help that is not wholly read."""
    path = tmp_path / "help.jsonl"
    path.write_text('{"task": "a", "text": "x"}\n{"task": "b", "text": "y", "more_text": "z"}\n')
    with pytest.raises(DataError, match=r"line 2 of help\.jsonl has the unknown key 'more_text'"):
        read_help_file(path)


def test_a_file_without_lines_or_that_is_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "help.jsonl").write_text("\n")
    with pytest.raises(DataError, match="has no lines"):
        read_help_file(tmp_path / "help.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        read_help_file(tmp_path / "other.jsonl")


# Room


def test_whole_texts_are_dropped_until_the_help_fits() -> None:
    """The oldest first; a source that comes first in the list keeps its texts."""
    lines = [f"text {number} {'x' * 20}" for number in range(4)]
    sizes = {
        num: RENDERER.count_tokens("\n\nWhat is known here:\n" + "\n".join(lines[4 - num :]))
        for num in (1, 2, 4)
    }
    for num, size in sizes.items():
        for limit in (size, size + 3):
            [trace] = play([WAIT], [hook_for({"max_help_tokens": limit}, texts=lines)])
            assert texts(trace)[0].split("\n")[3:] == lines[4 - num :]
            assert len(trace.help[0][0].token_ids) == size
    [trace] = play([WAIT], [hook_for({"max_help_tokens": sizes[1] - 1}, texts=lines)])
    assert not trace.help and reasons(trace) == {0: "no_room"}
    options = {"help": ["feedback", "file"], "path": "x", "max_help_tokens": sizes[2]}
    [trace] = play([WAIT], [hook_for(options, texts=lines)])
    assert trace.help[0][0].source == "feedback+file"
    assert (
        "Score: 0" in texts(trace)[0]
        and texts(trace)[0].endswith(lines[3])
        and lines[2] not in texts(trace)[0]
    )


def test_help_never_exceeds_the_context() -> None:
    [plain] = play([WAIT], [])
    length = len(ids(next(path for _, path in plain.rollouts())))
    size = RENDERER.count_tokens(f"\n\nWhat is known here:\n{TEXT}")
    for room in (size - 1, size):
        [trace] = play([WAIT], [hook_for({}, context_length=length + room)])
        assert bool(trace.help) == (room == size)
        assert reasons(trace) == ({} if room == size else {0: "no_room"})


def test_counts_and_shares_of_a_step() -> None:
    [first, second] = play([WAIT, GO], [hook_for({"help": "sibling"})], num_tasks=2)
    [alone] = play([WAIT, WAIT], [hook_for({"help": "sibling"})])
    second.leaves[0].episode_return = None  # lost to a fault
    values = help_metrics([first, second, alone])
    assert values["distill/num_without_help_no_sibling"] == 4  # both successes, and the group without one
    assert values["distill/num_without_help_no_room"] == 0
    assert values["distill/share_rollouts"] == pytest.approx(1 / 5)
    assert values["distill/help_tokens"] == len(first.help[0][0].token_ids)
    assert "distill/return_helped" not in values
    [shown] = play([GO], [hook_for({"plays": "helped", "form": "likelihood"})], mode=HELPED)
    values = help_metrics([first, shown])
    assert (values["distill/return_helped"], values["distill/return_unhelped"]) == (1.0, 0.5)
    assert values["distill/share_rollouts"] == pytest.approx(2 / 3)
    assert all(declared_metric(name) for name in values)
    assert help_metrics([]) == {}


def test_rollouts_that_should_have_seen_help_are_counted_too() -> None:
    options = {"plays": "helped", "form": "likelihood", "max_help_tokens": 9}
    for texts_, reason in (((), "no_text"), ((TEXT,), "no_room")):
        [trace] = play([WAIT], [hook_for(options, texts=texts_)], mode=HELPED)
        assert reasons(trace) == {0: reason} and trace.without_memory


# Modes


def test_groups_with_help_have_exact_shares() -> None:
    chosen = distill(plays="both", helped_share=0.25)
    options: dict[str, Any] = {"seed": 3, "has_tips": False}
    modes = [with_helped_mode(("on_policy", "hybrid"), chosen, group=group, **options) for group in range(48)]
    assert Counter(modes) == {
        ("on_policy+helped", "hybrid+helped"): 12, ("on_policy", "hybrid"): 36,
    }  # fmt: skip
    again = [with_helped_mode(("on_policy", "hybrid"), chosen, group=group, **options) for group in range(48)]
    assert modes == again
    helped = distill(plays="helped", form="likelihood")
    assert with_helped_mode(("a",), helped, group=0, **options) == ("a+helped",)
    for unchanged in (None, distill()):
        assert with_helped_mode(("a",), unchanged, group=0, **options) == ("a",)
    assert with_helped_mode(("a",), helped, group=0, seed=0, has_tips=True) == ("a",)


def test_a_copy_of_the_hook_shows_the_same_demonstrations() -> None:
    hook = hook_for({"help": "demonstration", "plays": "helped", "form": "likelihood"})
    hook.demonstrations["task 0"] = ("go hall: seen", "take lamp")
    copy = HelpHook(hook.settings, count_tokens=RENDERER.count_tokens)
    assert copy.is_portable
    copy.restore(hook.snapshot())
    for own in (hook, copy):
        [trace] = play([WAIT], [own], mode=HELPED)
        [shown] = [node for _, path in trace.rollouts() for node in path if node.origin is Origin.MEMORY]
        assert shown.message.content == "\n\nWhat is known here:\ngo hall: seen\ntake lamp"
        assert shown.metadata["source"] == "demonstration"


# The hook in an algorithm


def test_the_hook_comes_before_that_of_the_tips_if_own_tips_are_excluded(tmp_path: Path) -> None:
    for excludes in (True, False):
        settings = validate(
            Empo2Settings,
            {"type": "empo2", "memory_probability": 0, "intrinsic_coefficient": 0,
             "distill": {"help": "tips", "exclude_own_group": excludes}},
        )  # fmt: skip
        algorithm = Empo2(settings, embedder=HashEmbedder())
        add_help_hook(algorithm, count_tokens=len)
        kinds = [type(hook) for hook in algorithm.hooks]
        assert kinds == ([HelpHook, TipHook] if excludes else [TipHook, HelpHook])
        found = find_help_hook(algorithm)
        assert found is not None and found.tips is algorithm.tips
    plain = Grpo(GrpoSettings())
    add_help_hook(plain, count_tokens=len)
    assert find_help_hook(plain) is None and not plain.hooks
    # Rollouts are shown help at their prompt, in front of a prefix.
    options = {"help": "demonstration", "plays": "helped", "exclude_own_group": False}
    guided = Grpo(validate(GrpoSettings, {"prefix": {}, "distill": options}))
    add_help_hook(guided, count_tokens=len)
    assert [type(hook) for hook in guided.hooks] == [HelpHook, PrefixHook]


def test_a_file_without_text_or_with_too_much_is_reported() -> None:
    hook = hook_for({"max_help_tokens": 40}, texts=["short", "x" * 60])
    assert file_lines(hook, tasks(3)) == ["x has no help for 2 of the 3 training tasks"]
    assert file_lines(hook, tasks(1)) == [
        "x has more than algorithm.distill.max_help_tokens = 40 tokens for 1 of the 1 training task: their "
        "first texts are left out"
    ]
    assert (
        file_lines(hook_for({}), tasks(1))
        == []
        == file_lines(hook_for({"help": "sibling"}, texts=()), tasks(9))
    )


def test_texts_that_no_training_task_reads_are_reported() -> None:
    texts = [
        FileText(text="one", task="task 0", match={}),
        FileText(text="two", task="a task of another file", match={}),
        FileText(text="three", task=None, match={"room": "hall"}),
    ]
    hook = HelpHook(distill(), count_tokens=len, texts=texts)
    [line] = file_lines(hook, [Task(key="task 0", question="?")])
    assert line.endswith(": 2 of 3 texts are for none of the training tasks")
    assert file_lines(hook, [Task(key="task 0", question="?", metadata={"room": "hall"})])[0].endswith(
        ": 1 of 3 texts are for none of the training tasks"
    )


# Refused settings and warnings

RUN: dict[str, Any] = {"environment": {"type": "house"}}
CUSTOM = {
    "environment": {"type": "tools", "tools": ["python"], "train": {"path": "x"}, "test": {"path": "x"}}
}
EMPO2 = {"type": "empo2"}
FILE = {"help": "file", "path": "x"}
UCOB = {"plays": "both", "pairs": "anchor"}


@pytest.mark.parametrize(
    ("run", "section", "algorithm", "message"),
    [
        ({}, {"help": "tips"}, {}, "nothing writes tips: add [algorithm.tips]"),
        ({}, {"help": ["file", "tips"], "path": "x"}, {}, "nothing writes tips"),
        (CUSTOM, {"help": "demonstration"}, {}, "needs experts, and the tasks of environment.type = tools"),
        ({"model": {"history_thinking": "strip"}}, {"help": "sibling"}, {}, "history_thinking = keep"),
        ({}, {"help": "sibling", "policy_weight": 0}, {"dynamic_sampling": {}}, "remove dynamic_sampling"),
        ({}, {"help": "feedback", "form": "advantage_add"}, {"loss": {"type": "gspo"}}, "one ratio per"),
        ({}, FILE | {"plays": "helped"}, EMPO2, "set help = tips"),
        ({}, {"plays": "both", "helped_share": 0.2}, EMPO2, "are the shares"),
        ({}, {"plays": "helped"}, EMPO2 | {"memory_probability": 0}, "trained without them"),
        ({}, {}, EMPO2 | {"memory_probability": 1}, "set memory_probability below 1"),
        ({}, FILE | {"plays": "helped"}, {"loss": {"type": "reinforce"}}, "need a ratio"),
        ({}, FILE | {"pairs": "anchor"}, {}, "set plays = both"),
        ({}, FILE | {"pair_margin": 0.1}, {}, "belongs to pairs = anchor"),
        ({}, FILE | UCOB | {"form": "ratio"}, {}, "form = ratio"),
        ({}, FILE | UCOB | {"where": "failed"}, {}, "where = all"),
        ({}, FILE | UCOB | {"policy_weight": 0}, {}, "set policy_outside"),
        ({}, {"help": "sibling"}, {"type": "gigpo", "group_size": 1}, "no rollout has a sibling"),
        ({}, FILE | UCOB, {"type": "arpo"}, "without tips and forks"),
        ({}, UCOB | {"help": "tips"}, EMPO2, "without tips and forks"),
        ({}, {"help": []}, {}, "at least one"),
        ({}, {"help": ["sibling", "sibling"]}, {}, "each source once"),
        ({}, {"help": "sibling", "template": "x"}, {}, "the mark {help}"),
        ({}, {"help": "sibling", "helped_share": 0.2}, {}, "belongs to plays = both"),
        ({}, {"help": "feedback", "threshold": 0.2}, {}, "belongs to help = sibling"),
        ({}, {"help": "sibling", "plays": "both"}, {}, "cannot be shown before it is"),
        ({}, FILE | {"plays": "both", "form": "likelihood"}, {}, "no teacher"),
        ({}, {"help": "sibling"}, {"type": "lamer"}, "remove [algorithm.distill]"),
        ({}, FILE | {"plays": "both"}, {"type": "rollout_replay"}, "stored groups keep it"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(
    run: dict[str, Any], section: dict[str, Any], algorithm: dict[str, Any], message: str
) -> None:
    tree = {**RUN, **run, "algorithm": {"type": "grpo", **algorithm, "distill": section}}
    with pytest.raises(ConfigError) as error:
        validate(RunSettings, tree)
    assert message in str(error.value)


def test_settings_that_work_are_accepted() -> None:
    for algorithm in (
        {"distill": {"help": "demonstration", "plays": "both"}},
        {"distill": {"help": ["sibling", "feedback"], "policy_weight": 0}},
        {"type": "empo2", "distill": {"plays": "both"}},
        {"type": "empo2", "memory_probability": 0, "distill": {}},
        {"type": "combined", "tips": {}, "distill": {"help": ["tips", "sibling"]}},
        {"type": "rollout_replay", "distill": FILE | UCOB},
    ):
        validate(RunSettings, {**RUN, "algorithm": {"type": "grpo", **algorithm}})


def test_a_relative_path_is_that_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "help.jsonl").write_text('{"task": "a", "text": "x"}\n')
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[environment]\ntype = "house"\n[algorithm]\ntype = "grpo"\n'
        '[algorithm.distill]\nhelp = "file"\npath = "help.jsonl"\n'
    )
    settings = load_settings(RunSettings, file=recipe)
    assert settings.algorithm.distill is not None
    assert settings.algorithm.distill.path == str(tmp_path / "help.jsonl")


def advice(values: Mapping[str, float], traces: Sequence[Trace], **options: Any) -> list[str]:
    run = validate(
        RunSettings, {**RUN, "algorithm": {"type": "grpo", "distill": {"help": "sibling", **options}}}
    )
    return Advice(settings=run, context_length=100, stop=()).lines(
        traces, step=1, values={"rollout/num": 4.0, "rollout/num_masked": 0.0, **values}
    )


def test_a_threshold_above_every_return_is_reported() -> None:
    traces = play([WAIT, WAIT], [hook_for({"help": "sibling"})])
    assert advice(help_metrics(traces), traces, threshold=2.5) == [
        "ALARM: step 1: 2 rollouts have no help for their teacher: no sibling reached "
        "algorithm.distill.threshold = 2.5; the highest return of the step is 0"
    ]
    traces = play([GO, WAIT], [hook_for({"help": "sibling"})])
    assert advice(help_metrics(traces), traces) == []


def test_help_that_is_too_long_for_most_rollouts_is_reported() -> None:
    traces = play([WAIT] * 4, [hook_for({"max_help_tokens": 5})])
    [line] = advice(help_metrics(traces), traces, max_help_tokens=5)
    assert "longer than algorithm.distill.max_help_tokens = 5" in line
    traces = play([WAIT] * 4, [hook_for({"help": "file"}, texts=())])
    [line] = advice(help_metrics(traces), traces)
    assert "no text (algorithm.distill.help = sibling)" in line


def test_tips_alone_look_as_in_rollouts_that_see_them() -> None:
    hook = hook_for({"help": "tips"}, tips=tip_hook())
    assert render_tips(["a"]) == hook._render(
        [hook.task_part("file", Task(key="task 0", question="")).without_oldest(0)]
    ).replace(TEXT, "a")
