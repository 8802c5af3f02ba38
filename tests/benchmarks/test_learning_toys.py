"""The toy suite of benchmarks.learning: one budget for all, nothing played twice, and tables that name only
what the seeds carry.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.learning_methods import BASELINE, IMITATION, TOY_SUITES, Method
from benchmarks.learning_tables import toy_standings, toy_table
from benchmarks.learning_toys import ARENAS, Arena, load_result, play, play_all, result_path, save_result

from benchmarks import learning, learning_toys
from outrider.errors import ConfigError, DataError
from outrider.training.policy import set_threads
from tests.toy_result import Result
from tests.toys_quest import QuestToy

LOCK, CORRIDOR, HIDDEN, EXPEDITION, QUEST = ARENAS
BUDGET = 40
# a march that takes no time
SHORT = (*ARENAS[:-1], replace(QUEST, toy=lambda seed: QuestToy(seed=seed, march=20)))
DEFINED = [
    (arena, method) for arena in SHORT for method in arena.methods() if arena.name not in method.undefined
]
RESULT = Result(
    expected_return=0.5, sampled_return=0.5, num_policy_tokens=100, num_rollouts=10, num_steps=1,
    num_on_policy_rewards=1, num_hybrid_rewards=0,
)  # fmt: skip


def method_of(arena: Arena, key: str) -> Method:
    (found,) = [method for method in arena.methods() if method.key == key]
    return found


@pytest.mark.parametrize(
    ("arena", "method"),
    [
        pytest.param(*one, id=f"{one[0].name}-{one[1].key}", marks=[pytest.mark.slow] if number % 9 else [])
        for number, one in enumerate(DEFINED)
    ],
)
def test_every_method_stops_after_the_step_that_reaches_the_common_budget(
    arena: Arena, method: Method
) -> None:
    set_threads(1)
    played = play(arena, method, seed=0, max_policy_tokens=BUDGET)
    if method.key == IMITATION:
        assert played.num_policy_tokens == 0 and played.expected_return > 0.9
        return
    settings = arena.settings(method)
    largest_step = settings.group_size * (arena.toy(0).longest + 8)  # a tip has at most eight tokens
    assert BUDGET <= played.num_policy_tokens < BUDGET + largest_step
    assert played.num_rollouts == settings.group_size * played.num_steps


def test_methods_of_a_toy_differ() -> None:
    for arena in ARENAS:
        every, shared = arena.methods(), TOY_SUITES[arena.name].shared
        assert len({method.key for method in every}) == len({method.name for method in every}) == len(every)
        settings = {
            method.key: arena.settings(method).model_dump_json()
            for method in every
            if method.key != IMITATION
        }
        assert len(set(settings.values())) == len(settings)
        assert BASELINE in settings
        for method in every:
            found = arena.settings(method)
            assert found.group_size == method.algorithm.get("group_size", shared["group_size"])
            if not method.own_objective:
                loss = found.loss.model_dump()
                assert loss == loss | shared["loss"]
                assert found.aggregation == shared["aggregation"]


def test_the_toys_are_those_of_the_learning_tests() -> None:
    """RAPO, ARPO and EMPO² have the settings with which their own tests pass."""
    from tests import toys, toys_branching, toys_memory

    assert LOCK.settings(method_of(LOCK, "rapo")) == toys.rapo()
    assert LOCK.settings(method_of(LOCK, "grpo")) == toys.grpo()
    threshold = CORRIDOR.settings(method_of(CORRIDOR, "arpo-threshold"))
    assert threshold == toys_branching.branching(at_random=False)
    assert HIDDEN.settings(method_of(HIDDEN, "empo2")) == toys_memory.empo2()
    assert HIDDEN.settings(method_of(HIDDEN, "grpo")) == toys_memory.grpo()


def test_tips_require_a_policy_that_reads() -> None:
    for arena in (LOCK, CORRIDOR):
        assert "neither reads nor writes" in method_of(arena, "empo2").undefined[arena.name]
    assert not method_of(HIDDEN, "empo2").undefined.get("hidden")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was played instead of being loaded."""
    calls: list[tuple[str, int]] = []

    def instead(arena: Arena, method: Method, *, seed: int, max_policy_tokens: int) -> Result:
        calls.append((method.key, seed))
        return replace(RESULT, expected_return=seed / 10)

    monkeypatch.setattr(learning_toys, "play", instead)
    return calls


def play_two(
    out: Path, *, seeds: Sequence[int] = (0, 1), tokens: int = 6000, only_load: bool = False
) -> dict[str, dict[int, Result]]:
    chosen = [method_of(LOCK, key) for key in ("grpo", "rapo", "empo2")]
    return play_all(
        out, LOCK, chosen, seeds=seeds, max_policy_tokens=tokens, only_load=only_load, note=lambda text: None
    )


def test_finished_runs_are_not_repeated(tmp_path: Path, played: list[tuple[str, int]]) -> None:
    first = play_two(tmp_path)
    assert played == [("grpo", 0), ("grpo", 1), ("rapo", 0), ("rapo", 1)]
    assert first["empo2"] == {}
    assert play_two(tmp_path) == first
    assert len(played) == 4
    result_path(tmp_path, LOCK, method_of(LOCK, "rapo"), 0).unlink()
    assert play_two(tmp_path, seeds=range(3)) == {
        key: found | ({2: replace(RESULT, expected_return=0.2)} if found else {})
                                                  for key, found in first.items()}  # fmt: skip
    assert played[4:] == [("grpo", 2), ("rapo", 0), ("rapo", 2)]


def test_a_kill_leaves_complete_files_only(
    tmp_path: Path, played: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(learning_toys.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            play_two(tmp_path)
    assert play_two(tmp_path, only_load=True) == {"grpo": {}, "rapo": {}, "empo2": {}}
    assert play_two(tmp_path)["grpo"][1].expected_return == 0.1
    assert played == [("grpo", 0), ("grpo", 0), ("grpo", 1), ("rapo", 0), ("rapo", 1)]


def test_results_of_other_settings_or_budgets_are_refused(
    tmp_path: Path, played: list[tuple[str, int]]
) -> None:
    play_two(tmp_path)
    with pytest.raises(ConfigError, match="max_policy_tokens differ"):
        play_two(tmp_path, tokens=5000)
    grpo, noisy = method_of(LOCK, "grpo"), method_of(LOCK, "rapo-noise-50")
    renamed = replace(noisy, key="rapo")
    with pytest.raises(ConfigError, match="settings differ"):
        load_result(tmp_path, LOCK, renamed, 0, max_policy_tokens=6000)
    result_path(tmp_path, LOCK, grpo, 0).write_text('{"toy": "lock"')
    with pytest.raises(DataError, match="no result"):
        load_result(tmp_path, LOCK, grpo, 0, max_policy_tokens=6000)


def test_imitation_has_no_budget(tmp_path: Path) -> None:
    imitation = method_of(LOCK, IMITATION)
    save_result(tmp_path, LOCK, imitation, 0, RESULT, max_policy_tokens=6000)
    assert load_result(tmp_path, LOCK, imitation, 0, max_policy_tokens=7) == RESULT


def returns(*values: float) -> dict[int, Result]:
    return {seed: replace(RESULT, expected_return=value) for seed, value in enumerate(values)}


def test_a_winner_requires_seeds_and_a_difference() -> None:
    better, same = returns(*(0.9 + n / 1000 for n in range(10))), returns(*[0.00004] * 10)
    found = toy_standings({"grpo": returns(*[0.00001] * 10), "rapo": better, "gigpo": same}, num_seeds=10)
    assert found["rapo"].verdict.winner == "rapo" and found["rapo"].improvement.value == 1.0
    # what nobody sees is a tie
    assert found["gigpo"].verdict.winner is None and found["gigpo"].improvement.value == 0.5
    assert "grpo" not in found
    few = toy_standings({"grpo": returns(*[0.0] * 3), "rapo": returns(*[0.9] * 3)}, num_seeds=3)
    assert few["rapo"].verdict.winner is None and any(
        "p = 0.25" in reason for reason in few["rapo"].verdict.reasons
    )


def test_an_unfinished_method_wins_nothing() -> None:
    results = {"grpo": returns(*[0.0] * 10), "rapo": returns(*[0.9] * 9)}
    [said] = [
        reason
        for reason in toy_standings(results, num_seeds=10)["rapo"].verdict.reasons
        if "9 of 10" in reason
    ]
    assert said.startswith("rapo has ")


def test_the_table_explains_empty_cells() -> None:
    chosen = [method_of(LOCK, key) for key in ("grpo", "rapo", "empo2", "gigpo")]
    results = {"grpo": returns(*[0.0] * 10), "rapo": returns(*[0.5, 0.9] * 5), "empo2": {}, "gigpo": {}}
    table = toy_table(chosen, results, toy="lock", num_seeds=10)
    header, _, grpo, rapo, empo2, gigpo = table.text.splitlines()
    assert len({line.count(" | ") for line in (header, grpo, rapo, empo2, gigpo)}) == 1
    assert (
        "| 0.700 |" in rapo
        and "0.500, 0.900" in rapo
        and "**RAPO** scores higher" in rapo
        and "10 / 0" in rapo
    )
    assert "neither reads nor writes tips" in empo2 and "not played" in gigpo
    short, _, full = table.short("- a note").partition("<details markdown>")
    assert short.splitlines() == [
        "| method | interquartile mean [95 % interval], 10 seeds | against GRPO |",
        "| --- | --- | --- |",
        "| GRPO | 0.000 [0.000, 0.000] | baseline |",
        f"| RAPO | {rapo.split(' | ')[3]} | wins |",
        "| EMPO² |  | not defined |",
        "| GiGPO |  | not played |",
        "",
    ]
    assert table.text in full and "- a note\n\n</details>" in full


def test_the_command_writes_and_prints_its_table(
    tmp_path: Path, played: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "toys",
        "--out",
        str(tmp_path),
        "--seeds",
        "2",
        "--toys",
        "lock",
        "--methods",
        "grpo",
        "rapo",
    ]
    assert learning.main([*arguments, "--only-report"]) == 0
    assert played == [] and "not played" in (tmp_path / "toys.md").read_text()
    assert learning.main(arguments) == 0
    text = (tmp_path / "toys.md").read_text()
    assert (
        "6,000 policy tokens" in text and "| RAPO | 2 |" in text and text.strip() in capsys.readouterr().out
    )
    assert learning.main([*arguments[:-1], "magic"]) == 2
    assert "unknown methods magic" in capsys.readouterr().err


def test_two_processes_share_the_seeds(tmp_path: Path, played: list[tuple[str, int]]) -> None:
    arguments = ["toys", "--out", str(tmp_path), "--toys", "lock", "--methods", "grpo"]
    assert learning.main([*arguments, "--seeds", "1", "--first-seed", "1"]) == 0
    assert played == [("grpo", 1)] and "seeds 1 to 1" in (tmp_path / "toys.md").read_text()
    assert learning.main([*arguments, "--seeds", "2"]) == 0
    assert played == [("grpo", 1), ("grpo", 0)] and "| GRPO | 2 |" in (tmp_path / "toys.md").read_text()
