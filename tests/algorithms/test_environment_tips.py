"""Tips that are responses of the environment, and which tasks read them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.tips import PLAIN, TIPS_ON, TipHook, environment_tip
from outrider.environments.house import HouseConfig, HouseEnvironment, make_house
from outrider.environments.text_games import render_action
from outrider.rollout.scheduler import RolloutReport
from outrider.rollout.settings import Limits
from outrider.trace import Trace
from outrider.types import Origin, Task
from tests.algorithms.builders import add_node, build_episodes, tip_hook
from tests.rollout.fakes import scheduler, scripted

SETTINGS = HouseConfig(num_train=2, max_moves=6)
FAMILY = HouseEnvironment.build(SETTINGS)
TASKS = FAMILY.tasks("train")
LIMITS = Limits(max_turns=6, max_response_tokens=2000, max_observation_tokens=400)


def make_hook(**changes: Any) -> TipHook:
    defaults: dict[str, Any] = {
        "writer": "environment", "scope": "world", "rank": "similarity", "min_similarity": 0.0,
        "max_tip_tokens": 80, "max_shown_tokens": 2000, "max_prompt_tokens": 2000,
    }  # fmt: skip
    return tip_hook(**defaults | changes)


def play(hook: TipHook, tasks: list[Task], said: list[str], *, mode: str = PLAIN) -> RolloutReport:
    """Every task's one rollout says ``said``, turn by turn."""
    script = scripted(lambda request, context: said[int(request.request_id.split("/")[-1])])
    return scheduler(script, FAMILY.make(), hooks=(hook,), limits=LIMITS).run(
        tasks, modes=(mode,), training_step=3
    )


def test_findings_and_failures_are_tips_without_a_request_to_the_policy() -> None:
    task = TASKS[0]
    plan = make_house(SETTINGS.house, 0, "train", 0)
    goal = str(task.metadata["thing"])
    room = plan.find_room(goal)
    place = plan.furniture[room]
    hook = make_hook()
    said = ["nonsense", *map(render_action, ["go sauna", f"go {room}", f"open {place}", f"take {goal}"])]
    report = play(hook, [task], said)
    told = [tip.text for tip in hook.memory.tips(str(task.metadata["world"]))]
    assert told == [
        "go sauna: No door leads from the hall to the sauna.",
        f"go {room}: You go to the {room}.",
        f"open {place}: In the {place} in the {room} is the {goal}.",
        f"take {goal}: You take the {goal}.",  # said as the episode ended, in no node
    ]
    assert {(tip.policy_version, tip.score) for tip in hook.memory.tips(str(task.metadata["world"]))} == {
        (3, 1.0)
    }
    leaf = report.traces[0].leaves[0]
    assert (leaf.success, leaf.reflection, leaf.num_reflection_tokens) == (True, "", 0)
    assert (hook.counts["written"], hook.counts["stored"]) == (4, 4)
    play(hook, [task], said)
    assert len(hook.memory) == 4 and hook.counts["duplicates"] == 4


def test_the_last_response_of_an_episode_that_the_loop_cuts_is_a_tip() -> None:
    hook = make_hook()
    play(hook, [TASKS[0]], [render_action("go sauna")] * 5 + [render_action("open sauna")])
    texts = [tip.text for tip in hook.memory.tips(str(TASKS[0].metadata["world"]))]
    assert texts == [
        "go sauna: No door leads from the hall to the sauna.",
        "open sauna: There is no sauna in the hall.",
    ]
    trace = build_episodes([0.0], [["start"]])
    trace.leaves[0].node_id = add_node(trace, 1, Origin.ENVIRONMENT, "It is dark.").node_id
    hook.after_group(trace)
    assert [tip.text for tip in hook.memory.tips("t")] == ["act 0: It is dark."]


def test_tasks_of_one_house_share_their_tips() -> None:
    hook = make_hook()
    here = [task for task in TASKS if task.metadata["world"] == TASKS[0].metadata["world"]]
    other = next(task for task in TASKS if task.metadata["world"] != TASKS[0].metadata["world"])
    play(hook, [here[0]], [render_action("go sauna")] * 6)
    shown = play(hook, [here[1], other], [render_action("go sauna")] * 6, mode=TIPS_ON)
    assert "go sauna: No door leads" in memory_text(shown.traces[0]) and memory_text(shown.traces[1]) == ""
    apart = make_hook(scope="task")
    play(apart, [here[0]], [render_action("go sauna")] * 6)
    assert memory_text(play(apart, [here[1]], [render_action("go sauna")] * 6, mode=TIPS_ON).traces[0]) == ""
    assert make_hook().task_key(Task(key="alone", question="q")) == "alone"


def test_the_question_as_the_key_finds_the_tip_about_its_thing_among_tips_about_rooms() -> None:
    """An observation names every room, so by it the tips about rooms come first."""
    task = TASKS[0]
    plan = make_house(SETTINGS.house, 0, "train", 0)
    goal = str(task.metadata["thing"])
    room = plan.find_room(goal)
    fact = f"open {plan.furniture[room]}: In the {plan.furniture[room]} in the {room} is the {goal}."
    found = {}
    for state_key in ("observation", "question"):
        hook = make_hook(state_key=state_key, num_shown=2)
        for other in plan.parent:
            search = [f"go {other}", f"open {plan.furniture[other]}", "go hall"]
            failure = [f"go {other}", "take nothing", "go hall"]
            play(hook, [task], list(map(render_action, search + failure)))
        [trace] = play(hook, [task], ["x"] * 9, mode=TIPS_ON).traces
        first = next(node for node in trace.nodes if node.origin is Origin.MEMORY)
        found[state_key] = fact in first.message.content
    assert found == {"observation": False, "question": True}


def memory_text(trace: Trace) -> str:
    return "".join(node.message.content for node in trace.nodes if node.origin is Origin.MEMORY)


@given(words=st.lists(st.text("abc", min_size=1, max_size=9), max_size=12), limit=st.integers(1, 60))
def test_a_tip_fits_its_tokens_and_drops_its_last_words(words: list[str], limit: int) -> None:
    answer = "\n \n" + " ".join(words) + "\nmore"
    tip = environment_tip("go", answer, max_tokens=limit, count_tokens=len)
    assert len(tip) <= limit
    whole = f"go: {' '.join(words) or 'more'}"
    assert whole.startswith(tip) and (tip == whole or len(whole) > limit)


@pytest.mark.parametrize("answer", ["", " \n "])
def test_no_answer_is_no_tip(answer: str) -> None:
    assert environment_tip("go", answer, max_tokens=99, count_tokens=len) == ""
