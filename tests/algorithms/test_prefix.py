"""Groups that start behind steps of an expert: the controller of k, context that is never trained on, and
what is refused.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.algorithms.base import write_advantages
from outrider.algorithms.grpo import Grpo, GrpoSettings, ReinforcePlusPlus, ReinforcePlusPlusSettings
from outrider.algorithms.prefix import GUIDED, PrefixHook, PrefixSettings, prefix_length
from outrider.config import validate
from outrider.environments.base import StepResult
from outrider.errors import ConfigError, EnvironmentFault
from outrider.rollout.experts import play_experts
from outrider.rollout.hooks import ON_POLICY
from outrider.rollout.scheduler import RolloutReport
from outrider.rollout.settings import Limits
from outrider.testing import build_group, check_algorithm
from outrider.trace import Trace
from outrider.training.packing import RolloutPath, pack
from outrider.training.settings import RunSettings
from outrider.types import Message, Origin, Outcome, Step, Task
from tests.rollout.fakes import END, TOKENIZER, Factory, Fake, say, scheduler, scripted

TASK = Task(key="task", question="?")
ACTIONS = ("one.", "two.", "three.", "four.")


def play_of(paths: Mapping[str, Sequence[Step] | None]) -> Any:
    """The experts of a step, which count their requests."""
    play = SimpleNamespace(requests=[])

    def request(tasks: Sequence[Task]) -> tuple[Any, list[str]]:
        play.requests.append([task.key for task in tasks])
        return {task.key: paths[task.key] for task in tasks if task.key in paths}, []

    play.request_expert_paths = request
    return play


def expert(num_steps: int) -> Any:
    return play_of({TASK.key: [Step(text=f"step {i}", observation="") for i in range(num_steps)]})


def group(length: int, returns: Sequence[float | None], *, mode: str = GUIDED, key: str = TASK.key) -> Trace:
    """A group of rollouts behind ``length`` turns of a demonstrator; a return of 1 is a success."""
    trace = build_group(returns, key=key, modes=(mode,) * len(returns))
    root, *nodes = trace.nodes
    last = root
    for turn in range(length):
        for origin in (Origin.DEMONSTRATION, Origin.ENVIRONMENT):
            message = Message(role="assistant", content=f"{origin} {turn}")
            last = trace.append(parent=last.node_id, origin=origin, token_ids=(5, turn), message=message)
    for node in nodes:
        if node.parent == root.node_id:
            node.parent = last.node_id
    return trace


def solved(share: float) -> list[float]:
    return [float(i < share * 8) for i in range(8)]


def texts(hook: PrefixHook, play: Any) -> tuple[str, ...]:
    """The prefix of the next guided group."""
    hook.prepare([TASK], [(GUIDED,) * 8], play=play)
    return hook.texts.get(TASK.key, ())


# The controller. The four cases of the vectors: POPE's rule is a bound below one success in a group.


@pytest.mark.parametrize(
    ("solved_share_by_length", "num_steps", "length"),
    [
        ({0: 0.0, 1: 0.0, 2: 0.125, 3: 0.5}, 6, 2),
        ({0: 0.0, 1: 0.0, 2: 0.0}, 3, 2),
        ({0: 0.25}, 6, 0),
    ],
    ids=["shortest that is ever solved", "nothing helps", "solved from the start"],
)
def test_the_shortest_prefix_that_is_ever_solved(
    solved_share_by_length: Mapping[int, float], num_steps: int, length: int
) -> None:
    hook, play = PrefixHook(PrefixSettings(low=0.1)), expert(num_steps)
    for _ in range(6):
        now = len(texts(hook, play))
        hook.adapt([group(now, solved(solved_share_by_length[now]))])
    assert len(texts(hook, play)) == length


def test_one_step_more_below_low_and_one_less_above_high() -> None:
    hook, play, lengths = PrefixHook(PrefixSettings(start=0.8)), expert(6), []
    assert texts(hook, play) == ("step 0", "step 1", "step 2", "step 3")
    for share in (0.0, 0.125, 0.75, 0.75, 0.5, 1.0, 1.0, 1.0):
        hook.adapt([group(len(texts(hook, play)), solved(share))])
        lengths.append(len(texts(hook, play)))
    assert lengths == [5, 5, 4, 3, 3, 2, 1, 0]
    num_requests = len(play.requests)
    assert texts(hook, play) == () and len(play.requests) == num_requests  # none for a task without a prefix
    hook.adapt([group(0, solved(0.0))])
    assert texts(hook, play) == ("step 0",)  # again, once too few succeed without it


def test_only_guided_groups_move_the_controller() -> None:
    hook, play = PrefixHook(PrefixSettings()), expert(3)
    hook.prepare([TASK], [(ON_POLICY,) * 8], play=play)
    assert play.requests == [] and not hook.texts
    metrics = hook.adapt([group(0, solved(0.0), mode=ON_POLICY), group(0, [None, None])])
    assert hook.lengths == {} and metrics == {
        "prefix/num_groups": 0.0, "prefix/num_missing": 0.0, "prefix/num_tasks": 0.0,
        "prefix/success_unguided": 0.0,
    }  # fmt: skip


def test_tasks_without_an_expert_start_at_their_prompt_and_are_counted() -> None:
    for play in (play_of({TASK.key: None}), play_of({})):  # none, or lost to a fault
        hook = PrefixHook(PrefixSettings(start=1.0))
        assert texts(hook, play) == ()
        assert hook.adapt([group(0, solved(0.0))])["prefix/num_missing"] == 1.0 and hook.lengths == {}
    hook = PrefixHook(PrefixSettings())
    hook.lengths = {TASK.key: 3}
    assert texts(hook, play_of({})) == ()
    hook.adapt([group(0, solved(0.0))])
    assert hook.lengths == {TASK.key: 3}  # a lost request changes nothing


def test_metrics_separate_groups_with_and_without_a_prefix() -> None:
    hook = PrefixHook(PrefixSettings())
    hook.lengths = {"a": 2, "b": 0}
    traces = [
        group(2, solved(0.5), key="a"),
        group(0, solved(1.0), key="b"),
        group(0, solved(0.25), mode=ON_POLICY, key="c"),
    ]
    assert hook.adapt(traces) == {
        "prefix/num_groups": 1.0, "prefix/num_missing": 0.0, "prefix/num_tasks": 1.0,
        "prefix/length_mean": 1.0, "prefix/success_guided": 0.5, "prefix/success_unguided": 0.625,
    }  # fmt: skip


def test_the_share_of_guided_groups_is_exact() -> None:
    for share in (0.5, 0.25, 1.0):
        hook = PrefixHook(PrefixSettings(share=share), groups_per_step=8, seed=3)
        flags = [hook.is_guided(step, number) for step in range(6) for number in range(8)]
        assert sum(flags) == share * 48
        assert share == 1.0 or flags != sorted(flags)


def test_the_contract_and_the_state() -> None:
    def make() -> Grpo:
        return Grpo(GrpoSettings(prefix=PrefixSettings()), groups_per_step=2, seed=1)

    check_algorithm(make)
    algorithm, other = make(), make()
    assert algorithm.remembers and not Grpo(GrpoSettings()).remembers and Grpo(GrpoSettings()).hooks == ()
    assert algorithm.prefix is not None and other.prefix is not None
    algorithm.prefix.lengths = {"a": 3}
    other.restore(*algorithm.state())
    assert other.prefix.lengths == {"a": 3}


# Advantages and the update.


@pytest.mark.parametrize(
    "make",
    [
        lambda prefix: Grpo(GrpoSettings(advantage_std="batch", group_size=4, prefix=prefix)),
        lambda prefix: Grpo(
            GrpoSettings(advantage_std="batch", advantage="leave_one_out", group_size=4, prefix=prefix)
        ),
        lambda prefix: ReinforcePlusPlus(ReinforcePlusPlusSettings(group_size=4, prefix=prefix)),
    ],
    ids=["std of the batch", "leave-one-out", "whitening"],
)
def test_statistics_over_groups_never_mix_starts(make: Any) -> None:
    returns = [[1.0, 0.0, 0.0, 0.0], [0.5, 0.25, 0.0, 1.0], [0.0, 0.0, 0.5, 0.0], [1.0, 1.0, 0.5, 0.0]]

    def groups(numbers: Sequence[int]) -> list[Trace]:
        return [group(2 * (i % 2), returns[i], key=str(i)) for i in numbers]

    together = make(PrefixSettings()).assign_step_advantages(groups(range(4)))
    for part in ((0, 2), (1, 3)):
        alone = make(None).assign_step_advantages(groups(part))
        for number, result in zip(part, alone, strict=True):
            assert together[number].advantages.values.tolist() == result.advantages.values.tolist()
    mixed = make(None).assign_step_advantages(groups(range(4)))
    assert any(
        a.advantages.values.tolist() != b.advantages.values.tolist()
        for a, b in zip(mixed, together, strict=True)
    )


def test_no_token_of_a_prefix_is_trained_and_it_is_computed_once() -> None:
    trace = group(2, [1.0, 0.0, 0.0, 1.0])
    Grpo(GrpoSettings(group_size=4, prefix=PrefixSettings())).assign_advantages(trace)
    assert all((node.credit is not None) == node.trainable for node in trace.nodes)
    paths = [
        RolloutPath(nodes=path, rollout_index=leaf.rollout, rollout=leaf.rollout)
        for leaf, path in trace.rollouts()
    ]
    [batch] = pack(paths, max_tokens=1000)
    policy = [node for node in trace.nodes if node.trainable]
    assert len(batch.token_T) == sum(len(node.token_ids) for node in policy)
    num_shared = sum(len(node.token_ids) for node in paths[0].nodes[:5])
    alone = sum(sum(len(node.token_ids) for node in path.nodes[5:]) for path in paths)
    assert paths[0].nodes[4] is paths[3].nodes[4] and batch.num_tokens <= num_shared + alone
    assert batch.ids_N.tolist()[:num_shared] == [
        token for node in paths[0].nodes[:5] for token in node.token_ids
    ]
    assert int(batch.predictors_U.min()) == num_shared - 1  # the prefix predicts, and is not predicted
    # A demonstration of LUFFY remains trained.
    demonstration = group(1, [1.0])
    demonstration.leaves[0].is_demonstration = True
    write_advantages(demonstration, SimpleNamespace(values=np.ones(1), assigned=np.ones(1, bool), turns=None))  # type: ignore[arg-type]
    assert [node.credit for node in demonstration.nodes if node.origin is Origin.DEMONSTRATION] == [
        (1.0, 1.0)
    ]


# Rollouts.


def observed(number: int, text: str) -> StepResult:
    """Four steps; the observation names the action."""
    return say(f" {number}:{text} ", "user") if number < 3 else END


def run(
    hook: PrefixHook,
    *,
    factory: Factory | None = None,
    max_concurrent: int = 8,
    size: int = 3,
    marks_observations: bool = False,
    **options: Any,
) -> RolloutReport:
    hook.prepare([TASK], [(GUIDED,) * size], play=play_of({TASK.key: steps()}))
    engine = scripted(lambda request, context: f"own {request.request_id[-8:-4]}.")
    runs = scheduler(
        engine, factory or make_factory(), hooks=(hook,), max_concurrent=max_concurrent, **options
    )
    runs = replace(runs, marks_observations=marks_observations)
    return runs.run([TASK], modes=(GUIDED,) * size, training_step=1)


def steps() -> list[Step]:
    return [Step(text=text, observation="") for text in ACTIONS]


def make_factory() -> Factory:
    return Factory(lambda task, number: Fake(observed, delay=0.001 * (number % 3)))


def starting_at(length: int) -> PrefixHook:
    hook = PrefixHook(PrefixSettings())
    hook.lengths[TASK.key] = length
    return hook


def test_siblings_share_the_prefix_and_every_environment_replays_it() -> None:
    factory = make_factory()
    [trace] = run(starting_at(2), factory=factory).traces
    paths = [path for _, path in trace.rollouts()]
    origins = [Origin.PROMPT, *(Origin.DEMONSTRATION, Origin.ENVIRONMENT) * 2, Origin.POLICY]
    assert all([node.origin for node in path[:6]] == origins for path in paths)
    assert all(path[:5] == paths[0][:5] for path in paths) and prefix_length(trace) == 2
    assert len(trace.nodes) == 5 + 3 * 3  # two turns and the observation between them
    assert [env.texts[:2] for env in factory.made if isinstance(env, Fake)] == [["one.", "two."]] * 3
    assert {env.num_steps for env in factory.made if isinstance(env, Fake)} == {4}
    assert all("rollout" not in node.metadata for node in paths[0][:5])
    # The ids are those of a rollout of the expert itself.
    [whole] = play_experts(
        tasks=[TASK], expert=lambda task: steps(), factory=make_factory(), tokenizer=TOKENIZER,
        limits=Limits(step_timeout_s=60), stop=(".",), run_seed=0, context_length=4096, training_step=1,
    )  # fmt: skip
    assert [node.token_ids for node in paths[0][:5]] == [node.token_ids for node in whole.nodes[:5]]


def test_no_observation_of_a_prefix_is_trained() -> None:
    """With ``observation_nll``, those after the policy's own turns are."""
    [trace] = run(starting_at(2), marks_observations=True).traces
    for _, path in trace.rollouts():
        marked = [bool(node.body_positions) for node in path if node.origin is Origin.ENVIRONMENT]
        assert marked == [False, False, True]


def test_the_tree_does_not_depend_on_concurrency_and_on_retries() -> None:
    def described(trace: Trace) -> list[Any]:
        return [(n.node_id, n.parent, n.origin, n.token_ids, n.metadata) for n in trace.nodes]

    [first] = run(starting_at(2)).traces
    for max_concurrent in (1, 2):
        [trace] = run(starting_at(2), max_concurrent=max_concurrent).traces
        assert described(trace) == described(first)

    def breaks(number: int, text: str) -> StepResult:
        if number == 1:
            raise EnvironmentFault("broken")
        return observed(number, text)

    broken = Factory(lambda task, number: Fake(breaks if number == 1 else observed))
    report = run(starting_at(2), factory=broken, max_concurrent=1)
    assert report.num_retries == 1 and described(report.traces[0]) == described(first)


def test_environments_that_answer_differently_have_prefixes_of_their_own() -> None:
    dice = random.Random(0)
    factory = Factory(lambda task, number: Fake(lambda n, text: say(f" {dice.random()} ") if n < 3 else END))
    [trace] = run(starting_at(1), factory=factory).traces
    paths = [path for _, path in trace.rollouts()]
    assert paths[0][1] is paths[1][1] and paths[0][2] is not paths[1][2]


@pytest.mark.parametrize(
    ("limits", "outcome", "num_turns", "length_after"),
    [
        ({"max_turns": 2}, Outcome.TRUNCATED_TURNS, 2, 1),
        ({"max_response_tokens": 16, "max_turn_tokens": 16}, Outcome.TRUNCATED_TOKENS, 1, 0),
        ({"max_turns": 4}, Outcome.FINISHED, 3, 2),
    ],
)
def test_a_prefix_that_leaves_no_room_gets_shorter(
    limits: dict[str, int], outcome: Outcome, num_turns: int, length_after: int
) -> None:
    hook = starting_at(3)
    report = run(hook, limits=validate(Limits, {"step_timeout_s": 60.0, **limits}))
    [trace] = report.traces
    assert {leaf.outcome for leaf in trace.leaves.values()} == {outcome}
    assert prefix_length(trace) == num_turns
    hook.adapt([trace])
    assert hook.lengths[TASK.key] == length_after


def test_a_prefix_ends_before_a_turn_that_would_be_truncated() -> None:
    """A part of an action is another action; the policy continues where the expert would have acted."""
    hook = starting_at(3)
    limits = validate(Limits, {"step_timeout_s": 60.0, "max_turn_tokens": 8})
    long = [Step(text="one.", observation=""), Step(text="two and more words.", observation=""), *steps()[2:]]
    hook.prepare([TASK], [(GUIDED,)], play=play_of({TASK.key: long}))
    engine = scripted(lambda request, context: "own.")
    factory = make_factory()
    runs = scheduler(engine, factory, hooks=(hook,), limits=limits)
    [trace] = runs.run([TASK], modes=(GUIDED,), training_step=1).traces
    assert prefix_length(trace) == 1
    assert [env.texts for env in factory.made if isinstance(env, Fake)] == [["one.", "own.", "own.", "own."]]


def test_copies_of_the_hook_have_its_prefixes() -> None:
    hook, copy = starting_at(2), PrefixHook(PrefixSettings())
    assert texts(hook, expert(4)) == ("step 0", "step 1") and hook.is_portable
    copy.restore(hook.snapshot())
    state: Any = SimpleNamespace(turn=0, task=TASK)
    assert [turn.text for turn in copy.before_turn(state)] == ["step 0", "step 1"]
    state.turn = 1
    assert copy.before_turn(state) == []


# Refusals.


@pytest.mark.parametrize(
    ("environment", "more", "message"),
    [
        (
            {"type": "tools", "train": {"path": "x.jsonl"}, "corpus": "c"},
            {},
            r"needs experts.*environment.type = tools",
        ),
        (
            {"type": "agent", "function": "a:b", "expert": "a:c"}, {},
            r"does not support environment.type = agent",
        ),
        (
            {"type": "scienceworld", "deterministic": False},
            {},
            r"these tasks replay differently: .*remove \[algorithm.prefix\]",
        ),
        (
            {"type": "factbook"},
            {"cluster": {"max_staleness": 2}},
            r"does not support cluster.max_staleness above 1",
        ),
    ],
    ids=["experts", "program", "replay", "far ahead"],
)  # fmt: skip
def test_refusals(environment: dict[str, Any], more: dict[str, Any], message: str) -> None:
    settings = {"environment": environment, "algorithm": {"type": "grpo", "prefix": {}}, **more}
    with pytest.raises(ConfigError, match=message):
        validate(RunSettings, settings)


@pytest.mark.parametrize(
    "kind",
    ["rejection", "gigpo", "luffy", "tree_grpo", "rollout_replay", "rapo", "arpo", "empo2", "combined"],
)
def test_other_algorithms_refuse_a_prefix(kind: str) -> None:
    settings = {"environment": {"type": "factbook"}, "algorithm": {"type": kind, "prefix": {}}}
    with pytest.raises(ConfigError, match="prefix"):
        validate(RunSettings, settings)


def test_bounds_in_the_wrong_order() -> None:
    with pytest.raises(ConfigError, match=r"prefix.low 0.75 exceeds prefix.high 0.5"):
        validate(GrpoSettings, {"prefix": {"low": 0.75}})
