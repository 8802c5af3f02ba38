"""LaMer: the released code's returns, exact advantages of small groups, and rollouts of several episodes."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from outrider.algorithms.gigpo import episode_advantages_per_turn
from outrider.algorithms.grpo import Grpo, GrpoSettings
from outrider.algorithms.lamer import Lamer, LamerHook, LamerSettings, episode_turns, returns_to_go
from outrider.config import validate
from outrider.engines.base import Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import EpisodeResult, StepResult
from outrider.errors import ConfigError, EnvironmentFault
from outrider.evaluation.critic_training import build_trajectories
from outrider.rollout.episode import Sampling
from outrider.rollout.faults import limiting_setting
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.trace import EARLIER_RETURN, EPISODE, REFLECTION, Node, Trace, split_contexts, split_episodes
from outrider.training.packing import pack
from outrider.training.settings import RunSettings
from outrider.training.setup import check_reflections
from outrider.training.step_records import trace_rows
from outrider.training.update import rollout_paths
from outrider.types import Message, Origin, Outcome
from outrider.viewer.records import last_episode
from tests.algorithms.builders import add_node, finish, new_trace
from tests.rollout.fakes import TOKENIZER, Factory, Forking, tasks
from tests.vectors import load_vectors

CASES = load_vectors("lamer")


def phases(inputs: dict[str, Any]) -> list[tuple[int, float | None]]:
    """The turns of a vector as pairs of episode and reward."""
    rewards = [list(own) for own in inputs["step_rewards_by_episode"]]
    turns: list[tuple[int, float | None]] = []
    episode = 0
    for phase in inputs["phases"]:
        if phase == "reflect":
            episode += 1
        turns.append((episode, None if phase == "reflect" else rewards[episode].pop(0)))
    return turns


@pytest.mark.parametrize("name", CASES)
def test_returns_of_the_released_code(name: str) -> None:
    inputs = CASES[name]["inputs"]
    found = returns_to_go(phases(inputs), step_gamma=inputs["step_gamma"], episode_gamma=inputs["traj_gamma"])
    assert found == pytest.approx(CASES[name]["expected"], abs=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_a_trace_has_the_turns_and_rewards_of_the_released_code(name: str) -> None:
    """The reward of a failed episode may be paid only at its end, where no step reward explains it."""
    inputs = CASES[name]["inputs"]
    for is_paid_at_the_end in (False, True):
        trace = new_trace()
        add_rollout(trace, inputs["step_rewards_by_episode"], is_paid_at_the_end=is_paid_at_the_end)
        ((leaf, path),) = trace.rollouts()
        assert leaf.episode_return is not None
        turns = episode_turns(path, episode_return=leaf.episode_return)
        assert [(turn.episode, turn.reward) for turn in turns] == phases(inputs)


def add_rollout(
    trace: Trace, rewards: Sequence[Sequence[float]], *, is_paid_at_the_end: bool = False, prompt: str = "go"
) -> list[Node]:
    """Append a rollout with these step rewards by episode. Returns its policy nodes, with two tokens each."""
    written: list[Node] = []
    node: Node | None = None
    for episode, own in enumerate(rewards):
        if node is None:
            node = next((root for root in trace.nodes if root.parent is None), None)
            node = node or add_node(trace, None, Origin.PROMPT, prompt)
        else:
            node = add_node(trace, node, Origin.ENVIRONMENT, "reflect", metadata={REFLECTION: True})
            node = add_node(trace, node, Origin.POLICY, "note", num_tokens=2, metadata={REFLECTION: True})
            written.append(node)
            metadata = {EPISODE: episode, EARLIER_RETURN: math.fsum(rewards[episode - 1])}
            node = add_node(trace, node, Origin.PROMPT, prompt, restarts=True, metadata=metadata)
        for turn, reward in enumerate(own):
            if turn:
                node = add_node(trace, node, Origin.ENVIRONMENT, f"seen {turn}")
            reward = 0.0 if is_paid_at_the_end else reward
            node = add_node(trace, node, Origin.POLICY, f"act {turn}", num_tokens=2, reward=reward)
            written.append(node)
    finish(trace, node, math.fsum(rewards[-1]), success=math.fsum(rewards[-1]) > 0.0)
    return written


def credits(nodes: Sequence[Node]) -> list[float]:
    assert all(node.credit is not None and len(set(node.credit)) == 1 for node in nodes)
    return [node.credit[0] for node in nodes if node.credit is not None]


def test_advantages_compare_turns_of_the_same_number_of_the_same_episode() -> None:
    """With discounts of 0.5 and 0.25. The first rollout fails, reflects and solves the task, the second fails
    twice, and the third solves it at once.
    """
    trace = new_trace(modes=("on_policy",) * 3)
    first = add_rollout(trace, [[0.0, 0.0], [0.0, 1.0]])
    second = add_rollout(trace, [[0.0], [0.0]])
    third = add_rollout(trace, [[1.0]])
    options = {"step_gamma": 0.5, "episode_gamma": 0.25}
    result = Lamer(validate(LamerSettings, options)).assign_advantages(trace)
    # Returns to go: [0.0625, 0.125, reflection 0.5, 0.5, 1], [0, reflection 0, 0] and [1].
    mean = (0.0625 + 0.0 + 1.0) / 3
    assert credits(first) == pytest.approx([0.0625 - mean, 0.0, 0.25, 0.25, 0.0])
    assert credits(second) == pytest.approx([-mean, -0.25, -0.25])
    assert credits(third) == pytest.approx([1.0 - mean])
    assert result.advantages.has_signal
    assert result.advantages.values.tolist() == pytest.approx(
        [(0.0625 - mean + 0.5) / 5, (-mean - 0.5) / 3, 1.0 - mean]
    )
    measured = result.measurements
    assert measured["lamer/episodes"] == [2.0, 2.0, 1.0] and measured["lamer/solved_first"] == [0.0, 0.0, 1.0]
    assert sum(measured["lamer/share_alone"]) == 2.0  # turn 1 of the first rollout's episodes
    assert measured["lamer/reflection_advantage_abs"] == pytest.approx([0.25, 0.25])
    assert measured["lamer/reflection_tokens"] == [2.0, 2.0]


def test_the_form_of_the_released_scripts_has_both_parts_of_gigpo() -> None:
    """Turns with the same observation in any episode, and the centred return of the turn's own episode, in
    which reflections count as 0.
    """
    trace = new_trace(modes=("on_policy",) * 2)
    first = add_rollout(trace, [[0.0], [1.0]])
    second = add_rollout(trace, [[0.0, 0.0], [0.0]])
    settings = validate(LamerSettings, {"anchor": "state", "step_gamma": 0.5, "episode_gamma": 0.5})
    Lamer(settings).assign_advantages(trace)
    returns, own_returns = [0.5, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    anchors = ["go", "reflection", "go", "go", "seen 1", "reflection", "go"]
    expected = []
    for value, own, anchor in zip(returns, own_returns, anchors, strict=True):
        peers = [other for other, name in zip(returns, anchors, strict=True) if name == anchor]
        expected.append(own - sum(own_returns) / 7 + value - sum(peers) / len(peers))
    assert credits([*first, *second]) == pytest.approx(expected)


def test_without_failures_it_is_a_discounted_group_advantage() -> None:
    """Rollouts of one episode and one turn: the centred returns, as in Dr. GRPO."""
    trace = new_trace(modes=("on_policy",) * 4)
    returns = [0.0, 1.0, 0.5, 0.0]
    nodes = [add_rollout(trace, [[value]])[0] for value in returns]
    Lamer(LamerSettings()).assign_advantages(trace)
    expected = episode_advantages_per_turn(returns, population=returns, normalization="none")
    assert credits(nodes) == pytest.approx(expected.tolist())


def test_the_expected_gradient_of_each_turn() -> None:
    """All outcomes of two rollouts of a policy with three coins: solve at once, reflect well, and solve after
    a good or a bad reflection. With leave-one-out, the expected gradient of a turn is that of its own return
    to go, times the probability that the other rollout reached this turn as well.
    """
    solve_1, reflect, after = 0.3, 0.6, {True: 0.8, False: 0.1}

    def outcomes() -> Iterator[tuple[float, list[list[float]], list[tuple[str, float]]]]:
        """Probability, step rewards by episode, and the score function of the logit of every turn."""
        yield solve_1, [[1.0]], [("solve_1", 1.0 - solve_1)]
        for is_good, is_solved in product((True, False), repeat=2):
            coins = [("solve_1", False, solve_1), ("reflect", is_good, reflect)]
            coins.append((f"after {is_good}", is_solved, after[is_good]))
            probability = math.prod(p if head else 1.0 - p for _, head, p in coins)
            yield probability, [[0.0], [float(is_solved)]], [(name, head - p) for name, head, p in coins]

    algorithm = Lamer(LamerSettings(advantage="leave_one_out", episode_gamma=0.6, group_size=2))
    found = dict.fromkeys(("solve_1", "reflect", "after True", "after False"), 0.0)
    for group in product(list(outcomes()), repeat=2):
        trace = new_trace(modes=("on_policy",) * 2)
        rollouts = [add_rollout(trace, rewards) for _, rewards, _ in group]
        algorithm.assign_advantages(trace)
        probability = group[0][0] * group[1][0]
        for nodes, (_, _, scores) in zip(rollouts, group, strict=True):
            for value, (name, score) in zip(credits(nodes), scores, strict=True):
                found[name] += probability * value * score / 2
    failed = 1.0 - solve_1
    later = reflect * after[True] + (1.0 - reflect) * after[False]
    slopes = {name: p * (1.0 - p) for name, p in (("solve_1", solve_1), ("reflect", reflect))}
    assert found == pytest.approx(
        {
            "solve_1": slopes["solve_1"] * (1.0 - 0.6 * later),
            "reflect": failed**2 * slopes["reflect"] * (after[True] - after[False]),
            "after True": failed**2 * reflect * 0.8 * 0.2,
            "after False": failed**2 * (1.0 - reflect) * 0.1 * 0.9,
        },
        abs=1e-12,
    )


# Rollouts.


@dataclass
class Door:
    """Opens for the turn "open" of an episode whose prompt shows enough notes. An episode has two turns."""

    number: int
    log: list[tuple[str, int]]
    num_steps: int = 0
    is_open: bool = False
    opens: str = "open"
    fails: Callable[[], bool] = field(default=lambda: False)

    def reset(self, seed: int) -> Sequence[Message]:
        self.log.append(("reset", seed))
        return (Message(role="user", content="A door."),)

    def step(self, message: Message) -> StepResult:
        if self.fails():
            raise EnvironmentFault("the door fell")
        self.num_steps += 1
        self.is_open = message.content == self.opens
        done = self.is_open or self.num_steps == 2
        text = None if done and self.is_open else f"seen {self.num_steps} of door"
        return StepResult(
            message=None if text is None else Message(role="user", content=text),
            done=done,
            reward=float(self.is_open),
        )

    def result(self) -> EpisodeResult:
        return EpisodeResult(episode_return=float(self.is_open), success=self.is_open)

    def close(self) -> None:
        self.log.append(("close", self.number))


@dataclass
class Played:
    trace: Trace
    log: list[tuple[str, int]]
    requests: list[tuple[Request, str]]


def play(
    script: Callable[[str], str],
    *,
    num: int = 1,
    limits: Limits | None = None,
    context_length: int = 4096,
    fails: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Played:
    log: list[tuple[str, int]] = []
    requests: list[tuple[Request, str]] = []

    def answer(request: Request, text: str) -> str:
        requests.append((request, text))
        return script(text)

    renderer = ChatRenderer(TOKENIZER)
    runner = Scheduler(
        engine=ScriptedEngine(
            tokenizer=TOKENIZER, script=answer, context_length=context_length, renderer=renderer
        ),
        renderer=renderer,
        factory=Factory(lambda task, number: Door(number, log, fails=fails)),
        limits=limits or Limits(step_timeout_s=60),
        sampling=Sampling(),
        run_seed=0,
        hooks=(LamerHook(LamerSettings(**options)),),
        is_training=True,
    )
    [trace] = runner.run(tasks(1), modes=("on_policy",) * num, training_step=0).traces
    return Played(trace, log, requests)


def stubborn(text: str) -> str:
    return "a plan" if "What went wrong" in text else "push"


def solves_second(text: str) -> str:
    if "What went wrong" in text:
        return "it is open or push"
    return "open" if "it is open or push" in text else "SECRET"


def test_a_rollout_reflects_and_starts_again_until_it_succeeds() -> None:
    played = play(solves_second)
    ((leaf, path),) = played.trace.rollouts()
    assert (leaf.episode_return, leaf.success, leaf.outcome) == (1.0, True, Outcome.FINISHED)
    assert leaf.reflection == ""  # it is a turn of the rollout
    first, second = split_episodes(path)
    assert [node.message.content for node in first if node.trainable] == [
        "SECRET",
        "SECRET",
        "it is open or push",
    ]
    assert [node.message.content for node in second if node.trainable] == ["open"]
    assert second[0].restarts and second[0].metadata[EARLIER_RETURN] == 0.0
    assert second[0].metadata[EPISODE] == 1
    request = first[-2].message.content
    assert request.startswith("seen 2 of door\n\nAttempt 1") and "score of 0," in request
    # A new environment with the same seed; the first one is closed before.
    assert [name for name, _ in played.log] == ["reset", "close", "reset", "close"]
    assert played.log[0] == played.log[2] and [played.log[1], played.log[3]] == [("close", 0), ("close", 1)]


def test_the_reflection_alone_reaches_the_next_episode() -> None:
    played = play(solves_second)
    texts = [text for _, text in played.requests]
    assert len(texts) == 4 and "SECRET" in texts[2] and "seen 1" in texts[2]
    assert texts[3].count("A door.") == 1 and "it is open or push" in texts[3]
    for leaked in ("SECRET", "seen", "What went wrong", "Attempt 1"):
        assert leaked not in texts[3]
    ((_, path),) = played.trace.rollouts()
    contexts = split_contexts(path)
    assert len(contexts) == 2
    # The trained context is the one that the engine saw.
    last = contexts[-1]
    assert tuple(token for node in last[:-1] for token in node.token_ids) == played.requests[3][0].token_ids
    # Without its reflections, the prompt equals that of the first episode, token for token.
    plain = [token for node in last[:-1] if node.origin is not Origin.MEMORY for token in node.token_ids]
    assert tuple(plain) == path[0].token_ids


def test_every_reflection_is_shown_and_draws_are_different() -> None:
    notes = iter(["first note", "second note"])
    played = play(lambda text: next(notes) if "What went wrong" in text else "push")
    ((leaf, path),) = played.trace.rollouts()
    assert not leaf.success and leaf.outcome is Outcome.FINISHED
    episodes = split_episodes(path)
    assert [sum(node.trainable for node in part) for part in episodes] == [3, 3, 2]  # none after the last
    shown = [node for node in path if node.origin is Origin.MEMORY]
    assert [node.metadata["num_reflections"] for node in shown] == [1, 2]
    assert shown[1].message.content.endswith("1. first note\n2. second note")
    assert len({request.seed for request, _ in played.requests}) == len(played.requests) == 8
    assert len({request.request_id for request, _ in played.requests}) == 8


def test_limits_apply_to_each_episode() -> None:
    limits = Limits(step_timeout_s=60, max_turns=1)
    played = play(stubborn, limits=limits)
    ((leaf, path),) = played.trace.rollouts()
    assert leaf.outcome is Outcome.TRUNCATED_TURNS
    assert [sum(node.trainable for node in part) for part in split_episodes(path)] == [2, 2, 1]
    assert limiting_setting(leaf, path, limits, context_length=4096) == "rollout.max_turns = 1"
    whole = play(stubborn).trace
    ((leaf, path),) = whole.rollouts()
    assert limiting_setting(leaf, path, Limits(max_turns=3), context_length=4096) is None  # 5 turns in all


def test_without_room_for_a_reflection_the_next_episode_starts_without_one() -> None:
    played = play(stubborn, context_length=200, max_reflection_tokens=190)
    ((_, path),) = played.trace.rollouts()
    assert [sum(node.trainable for node in part) for part in split_episodes(path)] == [2, 2, 2]
    assert not any(node.origin is Origin.MEMORY for node in path)
    result = Lamer(LamerSettings()).assign_advantages(played.trace)
    assert result.measurements["lamer/shown_fraction"] == [0.0, 0.0]


def test_a_prompt_without_room_is_not_tried_again() -> None:
    played = play(stubborn, context_length=4)
    ((leaf, path),) = played.trace.rollouts()
    assert leaf.outcome is Outcome.TRUNCATED_TOKENS and len(path) == 1


def test_a_fault_in_a_later_episode_starts_the_rollout_again() -> None:
    calls = iter(range(100))
    played = play(solves_second, fails=lambda: next(calls) == 2)
    ((leaf, path),) = played.trace.rollouts()
    assert leaf.success and len(split_episodes(path)) == 2
    assert [name for name, _ in played.log] == ["reset", "close"] * 4
    assert sorted(number for name, number in played.log if name == "close") == [0, 1, 2, 3]


def test_reflections_are_packed_and_trained() -> None:
    """Two of four rollouts solve the task in their second episode."""
    trace = new_trace(modes=("on_policy",) * 4)
    rollouts = [add_rollout(trace, [[0.0], [float(number % 2)]]) for number in range(4)]
    Lamer(LamerSettings()).assign_advantages(trace)
    for number, (play_1, reflection, play_2) in enumerate(rollouts):
        sign = 1 if number % 2 else -1
        assert reflection.metadata == {REFLECTION: True}
        assert credits([play_1, reflection, play_2]) == pytest.approx([sign * 0.3, sign * 0.5, sign * 0.5])
    [batch] = pack(rollout_paths([trace]), max_tokens=1000)
    for number in range(4):
        own = (batch.rollout_index_T == number).nonzero().flatten()
        own = own[batch.ordinal_T[own].argsort()]
        expected = [value for node in rollouts[number] for value in node.credit or ()]
        assert batch.advantages_T[own].tolist() == pytest.approx(expected) and len(own) == 3 * 2
        assert batch.ordinal_T[own].tolist() == [0, 1, 2, 3, 4, 5]


def test_records_read_the_last_episode() -> None:
    trace = play(solves_second).trace
    rows = trace_rows([trace], step=1, tokenizer=TOKENIZER).nodes
    assert [row.text for row in last_episode(rows)][-1] == "open"
    assert len(last_episode(rows)) < len(rows) and last_episode(rows[:2]) == rows[:2]
    [trajectory] = build_trajectories(rows, name="run")
    assert [step.text for step in trajectory.steps] == ["open"] and trajectory.reward == 1.0


def test_several_episodes_do_not_fork() -> None:
    class Both(Forking):
        num_episodes = 2

    renderer = ChatRenderer(TOKENIZER)
    runner = Scheduler(
        engine=ScriptedEngine(tokenizer=TOKENIZER, script=lambda request, text: "a"),
        renderer=renderer, factory=Factory(lambda task, number: Door(number, [])), limits=Limits(),
        sampling=Sampling(), run_seed=0, hooks=(Both(rule=lambda state: 0),),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="several episodes cannot fork"):
        runner.run(tasks(1), modes=("m",) * 4, training_step=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_episodes": 1}, "num_episodes"),
        ({"step_gamma": 1.1}, "step_gamma"),
        ({"episode_gamma": -0.1}, "episode_gamma"),
        ({"max_reflection_tokens": 0}, "max_reflection_tokens"),
        ({"advantage": "mean_normalized"}, "compares returns of turns"),
        ({"advantage": "pass_at_k", "pass_k": 2}, "compares returns of turns"),
        ({"anchor": "state", "advantage": "leave_one_out"}, "centres both of its parts"),
        ({"positive_nll": 0.1}, "also those of its failed episodes"),
        # Without help, a rollout would lose its reflections, too: they are memory nodes like help.
        ({"distill": {"help": "demonstration", "plays": "helped"}}, "has several contexts, with reflections"),
    ],
)
def test_settings_that_contradict_the_method_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(LamerSettings, options)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"environment": {"type": "agent", "function": "tests.environments.agents.programs:chatty"}},
            "leaves episodes to a program",
        ),
        ({"model": {"history_thinking": "strip"}}, "leaves out the reflections"),
    ],
)
def test_runs_without_a_second_episode_are_refused(table: dict[str, Any], message: str) -> None:
    whole = {"environment": {"type": "house"}, "algorithm": {"type": "lamer"}}
    assert validate(RunSettings, whole).algorithm.label == "lamer"
    with pytest.raises(ConfigError, match=message):
        validate(RunSettings, whole | table)


def test_reflections_that_do_not_fit_into_the_context_are_refused() -> None:
    lamer = Lamer(LamerSettings(max_reflection_tokens=64))
    check_reflections(lamer, context_length=65)
    with pytest.raises(ConfigError, match="max_reflection_tokens = 64 does not fit into the context of 64"):
        check_reflections(lamer, context_length=64)
    check_reflections(Grpo(GrpoSettings()), context_length=1)
