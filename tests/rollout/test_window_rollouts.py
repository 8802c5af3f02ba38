"""Rollouts whose every turn has a prompt of its own: contexts, budgets, long prompts, forks and tips."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from outrider.algorithms.gigpo import Gigpo, GigpoSettings
from outrider.engines.base import Request
from outrider.engines.chat import ChatEndpoint, EndpointSettings
from outrider.environments.base import make_task_set
from outrider.environments.house import HouseConfig
from outrider.environments.window import WindowEpisode
from outrider.errors import ConfigError
from outrider.rollout.endpoint import Collector
from outrider.rollout.episode import Sampling
from outrider.rollout.faults import failure_reasons, require_room
from outrider.rollout.hooks import EpisodeState, Hook, Splice, StatelessHook
from outrider.rollout.scheduler import RolloutReport, Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.trace import REBUILT, Trace, policy_turns, split_contexts
from outrider.types import Message, Origin, Outcome
from tests.chat_server import Answer, Asked, chat_server, completion
from tests.rollout.fakes import TOKENIZER, Forking, scripted

LIMITS = Limits(max_turns=4, max_turn_tokens=40, max_response_tokens=40, max_observation_tokens=1)
RENDERER = ChatRenderer(TOKENIZER)
Script = Callable[[Request, str], str]


def go_round(request: Request, context: str) -> str:
    """A different command at every turn, which never finds anything."""
    turn = int(request.request_id.rsplit("/", 1)[1])
    doors = context.partition("Doors: ")[2].partition(".")[0].split(", ")
    return f"<action>go {doors[turn % len(doors)]}</action>"


def play(
    script: Script = go_round, *, limits: Limits = LIMITS, hooks: Sequence[Hook] = (), num: int = 1,
    context_length: int = 8192, mode: str = "plain", **window: Any,
) -> tuple[Trace, RolloutReport]:  # fmt: skip
    window = {"max_prompt_tokens": 4000, **window}
    config = HouseConfig.model_validate({"max_moves": 20, "context": "window", "window": window})
    task_set = make_task_set(config)
    runs = Scheduler(
        engine=scripted(script, context_length=context_length), renderer=RENDERER, factory=task_set.make(),
        limits=limits, sampling=Sampling(stop=task_set.stop), run_seed=0, hooks=hooks, max_retries=0,
    )  # fmt: skip
    report = runs.run(task_set.tasks("train")[:1], modes=(mode,) * num, training_step=0)
    return report.traces[0], report


def prompts(**window: Any) -> list[str]:
    """The prompts of the same turns, without tokens and limits."""
    config = HouseConfig.model_validate({"max_moves": 20, "context": "window", "window": window})
    task_set = make_task_set(config)
    task = task_set.tasks("train")[0]
    episode = task_set.make()(task)
    assert isinstance(episode, WindowEpisode)
    found = [episode.reset(0)[0].content]
    for turn in range(3):
        request = Request(
            request_id=f"x/0/{turn}",
            token_ids=(),
            max_tokens=1,
            seed=0,
            temperature=1.0,
            stop=(),
            cache_key="",
        )
        episode.step(Message(role="assistant", content=go_round(request, found[-1])))
        found.append(episode.request.messages[0].content)
    return found


def ids_of(text: str) -> tuple[int, ...]:
    return RENDERER.prompt([Message(role="user", content=text)])


def test_every_turn_is_a_context_and_a_sample_with_a_budget_of_its_own() -> None:
    trace, report = play()
    [(leaf, path)] = trace.rollouts()
    assert leaf.outcome is Outcome.TRUNCATED_TURNS and not report.faults
    contexts = split_contexts(path[:-1])  # the last observation is the prompt of a turn that was not sampled
    assert [tuple(context[0].token_ids) for context in contexts] == [ids_of(text) for text in prompts()]
    assert all(len(context) == 2 and context[1].trainable for context in contexts)
    assert sum(len(node.token_ids) for node in path if node.trainable) > LIMITS.max_response_tokens
    assert [node.restarts for node in path] == [False, False, True, False, True, False, True, False, True]
    assert all(node.metadata[REBUILT] and node.is_prompt for node in path[2::2])


def test_messages_are_the_raw_observations_so_that_anchors_recur() -> None:
    trace, _ = play(num=2)
    paths = [path for _, path in trace.rollouts()]
    turns = policy_turns(paths[0])
    assert turns[0].observation.startswith("You are in the hall. Doors: ")
    assert turns[1].observation.startswith("You go to the ") and "Commands" not in turns[1].observation
    advantages = Gigpo(GigpoSettings(group_size=2)).assign_advantages(trace)
    assert advantages.measurements  # both rollouts acted on the same observations
    assert [turn.observation for turn in turns] == [turn.observation for turn in policy_turns(paths[1])]


def lengths() -> list[int]:
    return [len(ids_of(text)) for text in prompts()]


@pytest.mark.parametrize("overflow", ["left", "right"])
def test_ids_of_a_long_prompt_are_cut_at_one_side(overflow: str) -> None:
    limit = lengths()[0] - 7
    trace, _ = play(overflow=overflow, max_prompt_tokens=limit)
    [(_, path)] = trace.rollouts()
    whole = [ids_of(text) for text in prompts()]
    first = path[0]
    assert first.token_ids == (whole[0][7:] if overflow == "left" else whole[0][:-7])
    assert first.metadata["num_tokens_cut"] == 7
    later = [node for node in path if node.restarts]
    assert all(len(node.token_ids) == limit and node.metadata["num_tokens_cut"] > 0 for node in later)


def test_a_long_prompt_loses_its_oldest_steps() -> None:
    none, two = lengths()[1], lengths()[3]
    trace, _ = play(max_prompt_tokens=two - 1)
    [(leaf, path)] = trace.rollouts()
    contexts = [TOKENIZER.decode(context[0].token_ids) for context in split_contexts(path)]
    assert "The last 1:" in contexts[1] and "The last 1:" in contexts[3]
    assert "3. Seen" in contexts[3] and "2. Seen" not in contexts[3]
    assert leaf.metrics["num_shortened_prompts"] >= 1 and none < two


def test_a_prompt_that_cannot_be_shortened_ends_the_rollout_and_names_the_limit() -> None:
    limit = min(lengths()) + 5
    trace, _ = play(max_prompt_tokens=limit)
    [(leaf, path)] = trace.rollouts()
    assert leaf.outcome is Outcome.TRUNCATED_TOKENS and path[-1].trainable
    (reason,) = failure_reasons([trace], LIMITS, context_length=8192)
    assert f"environment.window.max_prompt_tokens = {limit}" in reason


@pytest.mark.parametrize("overflow", ["drop-oldest", "first-prompt"])
def test_a_first_prompt_that_is_too_long_gets_no_turn(overflow: str) -> None:
    limit = lengths()[0] - 1
    trace, report = play(max_prompt_tokens=limit, overflow=overflow)
    [(leaf, path)] = trace.rollouts()
    assert leaf.outcome is Outcome.TRUNCATED_TOKENS and not policy_turns(path) and not report.faults
    (reason,) = failure_reasons([trace], LIMITS, context_length=8192)
    assert f"environment.window.max_prompt_tokens = {limit}" in reason
    with pytest.raises(
        ConfigError, match=f"no prompt leaves .*window.max_prompt_tokens = {limit}, the short"
    ):
        require_room([trace], context_length=8192)


@pytest.mark.parametrize("overflow", ["drop-oldest", "first-prompt"])
def test_a_turn_before_a_shortened_prompt_stays_invalid(overflow: str) -> None:
    """Otherwise a penalty of invalid turns would depend on the length of the next prompt."""

    def script(request: Request, context: str) -> str:
        return "no command" if request.request_id.endswith("1") else go_round(request, context)

    trace, _ = play(script, max_prompt_tokens=lengths()[1], overflow=overflow)
    [(leaf, path)] = trace.rollouts()
    assert leaf.metrics["num_shortened_prompts"] > 0
    assert [node.metadata["invalid"] for node in path if node.trainable] == [False, True, False, False]


@pytest.mark.parametrize("turn", [0, 2])
def test_the_overflow_error_stops_the_run(turn: int) -> None:
    limit = lengths()[turn] - 1 if turn == 0 else max(lengths()[:2]) + 1
    with pytest.raises(ConfigError, match=r"the prompt has \d+ tokens, .*max_prompt_tokens = .*: raise"):
        play(overflow="error", max_prompt_tokens=limit)


def test_a_fork_shares_the_history_and_its_later_rows_differ() -> None:
    def script(request: Request, context: str) -> str:
        _, rollout, turn = request.request_id.rsplit("/", 2)
        if int(turn) < 2:
            return go_round(request, context)
        return f"<action>go {'hall' if int(rollout) else 'nowhere'}</action>"

    hook = Forking(lambda state: int(state.turn == 2 and state.rollout == 0), first_wave=1)
    trace, _ = play(script, hooks=[hook], num=2)
    (_, one), (_, other) = trace.rollouts()
    assert [node.node_id for node in one[:5]] == [
        node.node_id for node in other[:5]
    ]  # up to the third prompt
    assert one[5].node_id != other[5].node_id and one[6].token_ids != other[6].token_ids
    shown = [TOKENIZER.decode(path[6].token_ids) for path in (one, other)]
    history = [text.partition("2. Seen")[2].partition("3. Seen")[0] for text in shown]
    assert history[0] == history[1] != ""
    assert "Command: go nowhere" in shown[0] and "Command: go hall" in shown[1]


class Tips(StatelessHook):
    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        if state.turn != 1:
            return ()
        return [Splice(origin=Origin.MEMORY, text=" A tip.", metadata={})]


def test_a_tip_appears_once_in_the_row_that_showed_it() -> None:
    trace, _ = play(hooks=[Tips()])
    [(_, path)] = trace.rollouts()
    contexts = [
        TOKENIZER.decode([token for node in context for token in node.token_ids])
        for context in split_contexts(path)
    ]
    assert ["A tip." in text for text in contexts] == [False, True, False, False, False]
    plain, _ = play()
    without = [node for node in path if node.origin is not Origin.MEMORY]
    tokens = [token for node in without for token in node.token_ids]
    assert tokens == [token for node in plain.path(len(plain.nodes) - 1) for token in node.token_ids]


def test_an_endpoint_gets_one_message_a_turn_and_may_refuse_a_long_one() -> None:
    """The server's limit shortens prompts, the budget of tokens is that of a turn, and ``error`` stops."""

    def answer(asked: Asked) -> Answer:
        (message,) = (asked.body or {})["messages"]
        if message["content"].count("Seen:") > 1:
            error = {"error": {"message": "maximum context length", "code": "context_length_exceeded"}}
            return Answer(status=400, body=error)
        return completion("<action>go nowhere</action>")

    def collect(overflow: str) -> Any:
        window = {"max_prompt_tokens": 1, "overflow": overflow}
        config = HouseConfig.model_validate({"context": "window", "window": window})
        task_set = make_task_set(config)
        with chat_server(answer) as server:
            settings = EndpointSettings(base_url=server.url, model="agent", timeout_s=5.0, max_retries=0)
            chat = ChatEndpoint(settings, sleep=lambda seconds: None)
            runs = Collector(
                endpoint=chat, factory=task_set.make(), stop=(), run_seed=0, limits=LIMITS, max_retries=0
            )
            return runs.collect(task_set.tasks("train")[:1], num_rollouts=1).collected[0]

    collected = collect("drop-oldest")
    assert collected.outcome is Outcome.TRUNCATED_TURNS and collected.num_retries == 0
    assert collected.metrics["num_turns"] == LIMITS.max_turns
    assert collected.metrics["num_shortened_prompts"] == 2.0
    with pytest.raises(ConfigError, match=r"set environment\.window\.overflow"):
        collect("error")
