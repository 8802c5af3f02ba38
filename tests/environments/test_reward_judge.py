"""The reward ``judge``: its verdict is the correctness, equal answers get equal rewards, and a server that
fails makes a fault and never a wrong answer.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError

from outrider.environments.base import EnvironmentEpisode, EpisodeFactory
from outrider.environments.tool_qa.environment import EpisodeConfig
from outrider.environments.tool_qa.rewards import RewardConfig
from outrider.errors import ToolFault, ToolUnavailable
from outrider.types import Message, Task
from tests.chat_server import Answer, Asked, ChatServer, chat_server, completion
from tests.tool_episodes import tool_factory
from tests.training.short_runs import assert_same, begin, interrupted, resume
from tests.training.tool_run import write_tool_run

TASK = Task(key="t", question="Where is the tower?", answers=("Paris",))
MODELS = Answer({"data": [{"id": "judge"}]})
Script = Callable[[Asked], Answer]


def prediction_in(asked: Asked) -> str:
    assert asked.body is not None
    found = re.search(r"<prediction>\n(.*)\n</prediction>", asked.body["messages"][1]["content"], re.DOTALL)
    assert found is not None
    return found[1]


def city_of_light(asked: Asked) -> Answer:
    if asked.path.endswith("/models"):
        return MODELS
    right = "light" in prediction_in(asked).lower()
    return completion(f"<judgment>{'Correct' if right else 'Incorrect'}</judgment>")


def always(verdict: str) -> Script:
    said = completion(f"<judgment>{verdict}</judgment>")
    return lambda asked: MODELS if asked.path.endswith("/models") else said


def num_judged(server: ChatServer) -> int:
    return sum(one.path.endswith("/completions") for one in server.asked)


def judge_table(url: str, **endpoint: object) -> dict[str, object]:
    given = {"base_url": url, "timeout_s": 5.0, "max_retries": 0} | endpoint
    return {"answer": "judge", "require_think": False, "require_boxed": False, "judge": {"endpoint": given}}


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server(city_of_light) as one:
        yield one


def factory_at(url: str) -> EpisodeFactory:
    config = EpisodeConfig.model_validate({"reward": judge_table(url)})
    return tool_factory(tools=[], config=config, system_prompt="")


def started(factory: EpisodeFactory) -> EnvironmentEpisode:
    environment = factory(TASK)
    environment.reset(0)
    return environment


def answer(environment: EnvironmentEpisode, text: str) -> float | None:
    return environment.step(Message(role="assistant", content=f"<answer>{text}</answer>")).reward


@pytest.mark.parametrize(
    ("text", "reward", "num_requests"),
    [
        ("the City of Light", 1.0, 1),
        ("London", 0.0, 1),
        ("Paris", 1.0, 0),  # the accepted answer itself
        ("  ", 0.0, 0),
    ],
)
def test_the_verdict_is_the_correctness(
    server: ChatServer, text: str, reward: float, num_requests: int
) -> None:
    environment = started(factory_at(server.url))
    assert answer(environment, text) == reward
    result = environment.result()
    assert (result.episode_return, result.success) == (reward, reward == 1.0)
    assert result.metrics["em"] == float(text == "Paris")
    assert num_judged(server) == num_requests  # the step and the result need one request


def test_a_bad_format_is_not_judged(server: ChatServer) -> None:
    environment = started(factory_at(server.url))
    ended = environment.step(Message(role="assistant", content="the City of Light"))
    assert ended.reward == -1.0 and not environment.result().success
    cut = started(factory_at(server.url))
    assert cut.result().episode_return == -1.0 and num_judged(server) == 0


def test_equal_answers_of_all_episodes_are_judged_once() -> None:
    """A judge that changes its mind would give equal rollouts of a group other rewards."""
    num_requests = 0
    begun = threading.Barrier(8)

    def moody(asked: Asked) -> Answer:
        nonlocal num_requests
        if asked.path.endswith("/models"):
            return MODELS
        num_requests += 1
        return completion("Correct" if num_requests % 2 else "Incorrect")

    with chat_server(moody) as server:
        factory = factory_at(server.url)

        def play(number: int) -> float | None:
            environment = started(factory)
            begun.wait(20)
            return answer(environment.copy(), "the City of Light")

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(play, range(8))) == {1.0}
    assert num_requests == 1


@pytest.mark.parametrize("failure", [Answer(status=500), completion("I cannot tell."), Answer(status=401)])
def test_no_verdict_is_a_fault_and_leaves_the_episode_as_it_was(failure: Answer) -> None:
    broken = True

    def script(asked: Asked) -> Answer:
        is_list = asked.path.endswith("/models")
        return failure if broken and not is_list else city_of_light(asked)

    with chat_server(script) as server:
        environment = started(factory_at(server.url))
        with pytest.raises(ToolFault, match="the reward's judge"):
            answer(environment, "the City of Light")
        broken = False
        assert answer(environment, "the City of Light") == 1.0  # the retry plays the same step


def test_a_missing_judge_is_an_error_at_the_start() -> None:
    with chat_server([Answer(status=401)]) as server, pytest.raises(ToolUnavailable, match="judge"):
        factory_at(server.url)
    with pytest.raises(ToolUnavailable, match="judge"):
        factory_at("http://127.0.0.1:9/v1")


def test_a_judge_and_its_reward_need_each_other() -> None:
    with pytest.raises(ValidationError, match="need each other"):
        RewardConfig(answer="judge")
    with pytest.raises(ValidationError, match="need each other"):
        RewardConfig.model_validate(judge_table("http://127.0.0.1:9/v1") | {"answer": "em"})


def test_a_run_is_rewarded_by_the_judge_and_continues_to_the_same_bits(tmp_path: Path) -> None:
    recipe = write_tool_run(tmp_path / "data")
    returns = {}
    for verdict in ("Correct", "Incorrect"):
        with chat_server(always(verdict)) as server:
            judge = f"judge = {{endpoint = {{base_url = '{server.url}'}}}}"
            table = f"{{answer = 'judge', {judge}, require_think = false, require_boxed = false}}"
            run = begin(recipe, tmp_path / verdict, f"environment.reward={table}", "evaluation.every=2")
            if verdict == "Correct":
                copy = interrupted(run)
                resume(copy)
                assert_same(run, copy)
        assert num_judged(server) > 0
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        returns[verdict] = [line["reward/mean"] for line in lines if line["kind"] == "train"]
    # the first step's rollouts are the same in both, and some of them answered
    assert returns["Correct"][0] > returns["Incorrect"][0]
