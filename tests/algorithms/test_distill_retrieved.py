"""Help that is retrieved, and help at every turn."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.algorithms.distill_help import (
    HELPED,
    HelpHook,
    add_help_hook,
    find_help_hook,
    help_metrics,
    help_positions,
)
from outrider.algorithms.exploration import Rapo, RapoSettings
from outrider.algorithms.grpo import Grpo, GrpoSettings
from outrider.algorithms.prefix import PrefixHook
from outrider.algorithms.retrieval import RetrievalHook, RetrievalSettings
from outrider.config import validate
from outrider.errors import ConfigError
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.step_store import StepFilter, history_text
from outrider.metrics import declared_metric
from outrider.tokens import ChatRenderer
from outrider.trace import Leaf, Node, Trace, with_help, without_memory
from outrider.training.settings import RunSettings
from outrider.types import Message, Origin, Outcome, Role, Step, Task, Trajectory
from tests.algorithms.test_distill_help import (
    GO,
    RENDERER,
    RUN,
    TEXT,
    WAIT,
    hook_for,
    ids,
    play,
    reasons,
    tip_hook,
)
from tests.rollout.fakes import TOKENIZER, tasks
from tests.tokens.family_templates import FAMILIES, byte_tokenizer

QUESTIONS = {task.key: task.question for task in tasks(2)}
BEGIN = "\n\nWhat is known here:\n"


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StepTraceBuffer]:
    """Two trajectories per task, of three steps, of which the last is terminal."""
    path: Path = tmp_path_factory.mktemp("buffer") / "steps.sqlite"
    with StepTraceBuffer(path, load_embedder("hash"), mode="write") as made:
        made.add_trajectories(
            [
                Trajectory(
                    trajectory_id=f"{task.key}/{number}", task_key=task.key, agent="expert", prompt=(),
                    steps=tuple(
                        Step(
                            text=f"do {task.key} {number} {i}", observation=f"saw {number} {i}",
                            is_terminal=i == 2,
                        )
                        for i in range(3)
                    ),
                    reward=1.0,
                )
                for task in tasks(2)
                for number in range(2)
            ],
            questions=QUESTIONS,
        )  # fmt: skip
        yield made


def retrieval(buffer: StepTraceBuffer, **options: Any) -> RetrievalHook:
    return RetrievalHook(RetrievalSettings(**options), buffer=buffer, num_training_steps=1)


def retrieved(buffer: StepTraceBuffer, options: dict[str, Any], **retrieve: Any) -> HelpHook:
    return hook_for({"help": "retrieved", **options}, retrieval=retrieval(buffer, **retrieve))


def turns(path: Sequence[Node]) -> list[Node]:
    return [node for node in path if node.trainable]


def test_the_prompt_has_the_step_nearest_to_the_question(buffer: StepTraceBuffer) -> None:
    """In every rollout of the group, as a line of the template; terminal steps are left out."""
    [trace] = play([WAIT, GO], [retrieved(buffer, {}, scope="same_task")])
    record = buffer.query(QUESTIONS["task 0"], StepFilter(scope="same_task", task_key="task 0"))[0].record
    assert record.step_index == 0
    expected = f"{BEGIN}{record.text}\n{record.observation}"
    assert {rollout: [part.text for part in parts] for rollout, parts in trace.help.items()} == {
        0: [expected], 1: [expected],
    }  # fmt: skip
    assert trace.help[0][0].source == "retrieved"


def test_every_turn_has_the_step_nearest_to_its_own_history(buffer: StepTraceBuffer) -> None:
    """What a hybrid rollout in the same state would be shown; no step is shown twice."""
    hook = retrieved(buffer, {"place": "turn"}, probability=1.0)
    [trace] = play([WAIT], [hook])
    [(_, path)] = trace.rollouts()
    parts = trace.help[0]
    assert len(parts) == len(turns(path)) == 3
    seen: list[int] = []
    steps: list[Step] = []
    for number, part in enumerate(parts):
        allowed = StepFilter(exclude=frozenset(seen))
        record = buffer.query(history_text(QUESTIONS["task 0"], steps), allowed)[0].record
        assert part.text == f"{BEGIN}{record.text}\n{record.observation}"
        seen.append(record.step_id)
        answer = trace.nodes[part.node_id] if number == 0 else path[2 * number]
        assert part.node_id == answer.node_id
        observation = path[2 * number + 2].message.content if number < 2 else ""
        steps.append(Step(text=WAIT[number], observation=observation))
    # a rollout that retrieves before its second turn sees the step for that state, too
    sees_all = retrieval(buffer, probability=1.0)
    [hybrid] = play([WAIT], [sees_all], mode="hybrid")
    shown = [node.metadata["step_ids"] for _, p in hybrid.rollouts() for node in p
             if node.origin is Origin.BUFFER]  # fmt: skip
    first_two = hook.retrieval
    assert first_two is not None and shown[0] == [
        first_two.nearest_steps(trace.task, steps[:1], ())[0].step_id
    ]


def test_whole_trajectories_lose_their_oldest_steps(buffer: StepTraceBuffer) -> None:
    [whole] = play([WAIT], [retrieved(buffer, {}, level="trajectory", scope="same_task")])
    text = whole.help[0][0].text
    assert text.count("saw") == 2  # the last of three steps is terminal
    size = RENDERER.count_tokens(text)
    hook = retrieved(buffer, {"max_help_tokens": size - 1}, level="trajectory", scope="same_task")
    [cut] = play([WAIT], [hook])
    assert cut.help[0][0].text == BEGIN + "\n".join(text.split("\n")[-2:])
    [segment] = play([WAIT], [retrieved(buffer, {}, level="segment", scope="same_task")])
    assert segment.help[0][0].text == text


def test_rollouts_that_retrieve_get_no_retrieved_help(buffer: StepTraceBuffer) -> None:
    hook = retrieved(buffer, {})
    assert hook.retrieval is not None
    [hybrid] = play([WAIT], [hook, hook.retrieval], mode="hybrid")
    assert not hybrid.help and not reasons(hybrid)
    options = {"help": ["retrieved", "file"], "path": "x"}
    [both] = play([WAIT], [hook_for(options, retrieval=hook.retrieval)], mode="hybrid")
    assert both.help[0][0].source == "file"
    [plain] = play([WAIT], [hook_for(options, retrieval=hook.retrieval)])
    assert plain.help[0][0].source == "retrieved+file" and plain.help[0][0].text.endswith(f"\n\n{TEXT}")


def test_a_task_without_steps_is_counted(buffer: StepTraceBuffer) -> None:
    *_, other = play([WAIT], [retrieved(buffer, {"place": "turn"}, scope="same_task")], num_tasks=3)
    values = help_metrics([other])
    assert not other.help and reasons(other) == {0: "no_step"}
    assert values["distill/num_without_help_no_step"] == 1.0
    assert all(declared_metric(name) for name in values)


def test_the_run_s_buffer_is_that_of_its_algorithm(buffer: StepTraceBuffer) -> None:
    """Also if no rollout retrieves."""
    for num_hybrid in (0, 1):
        settings = validate(
            RapoSettings,
            {"type": "rapo", "group_size": 4, "num_hybrid": num_hybrid, "distill": {"help": "retrieved"}},
        )
        assert settings.retrieves
        algorithm = Rapo(
            settings, buffer=buffer, num_training_steps=1, vocabulary_size=50, every_action=False
        )
        add_help_hook(algorithm, count_tokens=len)
        hook = find_help_hook(algorithm)
        assert hook is not None and hook.retrieval is algorithm.retrieval is not None
    assert not validate(RapoSettings, {"type": "rapo", "group_size": 4, "num_hybrid": 0}).retrieves


RETRIEVED: dict[str, Any] = {"help": "retrieved"}


@pytest.mark.parametrize(
    ("section", "algorithm", "message"),
    [
        (RETRIEVED, {"type": "grpo"}, "nothing retrieves: add [algorithm.retrieval]"),
        (RETRIEVED, {"type": "rapo", "retrieval": {"mode": "execute"}}, "set retrieval.mode = context"),
        (RETRIEVED, {"type": "rapo", "group_size": 4, "num_hybrid": 4}, "num_hybrid below group_size"),
        (RETRIEVED | {"plays": "both"}, {"type": "rapo"}, "set plays = unhelped"),
        ({"plays": "helped", "place": "turn"}, {"type": "empo2"}, "distill.place has no effect"),
        ({"plays": "helped", "place": "turn", "form": "ratio"}, {"type": "empo2"}, "no other key"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    section: dict[str, Any], algorithm: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        validate(RunSettings, {**RUN, "algorithm": {**algorithm, "distill": section}})
    assert message in str(error.value)


def test_settings_that_work_are_accepted() -> None:
    for algorithm in (
        {"type": "rapo", "distill": RETRIEVED | {"place": "turn"}},
        {"type": "combined", "retrieval": {"num_hybrid": 0}, "distill": RETRIEVED},
        {"type": "empo2", "distill": {"help": "tips", "plays": "both", "place": "turn"}},
    ):
        validate(RunSettings, {**RUN, "algorithm": algorithm})


# Help at every turn


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt-oss"])  # no user messages later
def test_help_at_every_turn_is_that_of_a_rollout_that_saw_it(name: str) -> None:
    """Token by token, in every template; without it, the context is that of a plain rollout."""
    family = FAMILIES[name]
    renderer = ChatRenderer(
        byte_tokenizer(family), template_kwargs=family.variables, call_format=family.call_format
    )
    options: dict[str, Any] = {"place": "turn"}
    [plain] = play([WAIT], [hook_for(options, renderer=renderer)], renderer=renderer)
    shown_hook = hook_for(options | {"plays": "helped", "form": "likelihood"}, renderer=renderer)
    [helped] = play([WAIT], [shown_hook], mode=f"on_policy+{HELPED}", renderer=renderer)
    [(_, plain_path)], [(_, helped_path)] = plain.rollouts(), helped.rollouts()
    assert [node.origin for node in helped_path].count(Origin.MEMORY) == len(plain.help[0]) == 3
    assert ids(with_help(plain_path, plain.help[0])) == ids(helped_path)
    assert ids(without_memory(helped_path)) == ids(plain_path)


@pytest.mark.parametrize("role", ["user", "inline"])
def test_help_is_inserted_at_the_end_of_the_message_before_every_turn(role: Role) -> None:
    [trace] = play([WAIT], [hook_for({"place": "turn"})], role=role)
    [(leaf, path)] = trace.rollouts()
    text = TOKENIZER.decode(ids(with_help(path, trace.help[leaf.rollout])), skip_special_tokens=False)
    assert text.count(f"{BEGIN}{TEXT}") == 3
    assert f"where is it?{BEGIN}{TEXT}<|im_end|>\n<|im_start|>assistant" in text
    last = f"{BEGIN}{TEXT}<|im_end|>\n<|im_start|>assistant\n" if role == "user" else f"{BEGIN}{TEXT}"
    assert f"{last}wait." in text
    assert help_metrics([trace])["distill/help_tokens"] == sum(len(p.token_ids) for p in trace.help[0])


def test_tips_at_every_turn_are_those_of_a_rollout_that_sees_them() -> None:
    tips = tip_hook(num_shown=1, state_key="observation", max_prompt_tokens=4000)
    play([WAIT, GO], [tips], mode="plain")
    hook = hook_for({"help": "tips", "place": "turn", "max_help_tokens": 4000}, tips=tips)
    [trace] = play([WAIT], [hook], mode="plain")
    [shown] = play([WAIT], [tips], mode="tips_on")
    memory = [
        node.message.content for _, path in shown.rollouts() for node in path if node.origin is Origin.MEMORY
    ]
    assert len(memory) == 3 and [part.text for part in trace.help[0]] == memory


def test_the_room_of_a_context_is_shared_by_its_turns() -> None:
    [plain] = play([WAIT], [])
    length = len(ids(next(path for _, path in plain.rollouts())))
    size = RENDERER.count_tokens(f"{BEGIN}{TEXT}")
    for room in (0, 2 * size, 3 * size - 1, 3 * size):
        [trace] = play([WAIT], [hook_for({"place": "turn"}, context_length=length + room)])
        assert len(trace.help.get(0, ())) == room // size
        assert reasons(trace) == ({} if room else {0: "no_room"})


def test_contexts_that_begin_anew_have_rooms_of_their_own() -> None:
    opening = (90, 91)
    trace = Trace(task=Task(key="task 0", question="?"), modes=("on_policy",))
    last: Node | None = None
    for number in range(3):
        last = trace.append(
            parent=None if last is None else last.node_id,
            origin=Origin.ENVIRONMENT if number else Origin.PROMPT,
            token_ids=(number, 2, *opening), restarts=number > 0, message=Message(role="user", content="x"),
        )  # fmt: skip
        last = trace.append(
            parent=last.node_id, origin=Origin.POLICY, token_ids=(50,), logprobs=(-1.0,), entropies=(1.0,),
            message=Message(role="assistant", content="y"),
        )  # fmt: skip
    assert last is not None
    places = help_positions(trace.path(last.node_id), opening, place="turn")
    assert [(node.node_id, offset) for node, offset in places] == [(0, 2), (2, 2), (4, 2)]
    trace.finish(Leaf(node_id=last.node_id, rollout=0, outcome=Outcome.FINISHED, episode_return=1.0))
    trace.nodes[2].token_ids = (1, *range(100), *opening)  # a longer context than the others
    size = RENDERER.count_tokens(f"{BEGIN}{TEXT}")
    for room, expected in ((5 + size, [0, 4]), (104 + size, [0, 2, 4])):
        trace.help.clear()
        hook_for({"place": "turn"}, context_length=room).after_group(trace)
        assert [part.node_id for part in trace.help[0]] == expected
    hook_for({"place": "first"}, context_length=5 + size).after_group(trace)
    assert reasons(trace) == {0: "no_room"}  # one text for all contexts


def test_help_at_a_turn_comes_after_a_prefix() -> None:
    """The hook of the prefix executes turns, and help is for the turn after them."""
    for place, expected in (("first", [HelpHook, PrefixHook]), ("turn", [PrefixHook, HelpHook])):
        options = {"help": "demonstration", "plays": "helped", "place": place}
        guided = Grpo(validate(GrpoSettings, {"prefix": {}, "distill": options}))
        add_help_hook(guided, count_tokens=len)
        assert [type(hook) for hook in guided.hooks] == expected
