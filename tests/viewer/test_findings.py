"""Known problems of runs: each planted one is found at several strengths, and runs that learn have none."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from outrider import cli
from outrider.viewer.findings import Finding, find_problems
from outrider.viewer.ranges import RangeWatch
from outrider.viewer.run_reader import read_run
from tests.viewer.made_up_runs import NUM, NUM_GROUPS, Curve, write_metrics, write_traces

DEMO = Path(__file__).parents[2] / "records" / "packs" / "demo.pack" / "runs"


def kinds(run: Path) -> list[str]:
    return [finding.kind for finding in find_problems(run)]


@pytest.mark.parametrize("seed", range(10))
def test_a_run_that_learns_has_no_problem(tmp_path: Path, seed: int) -> None:
    run = write_metrics(tmp_path / "run", seed=seed)
    write_traces(run, seed=seed)
    assert find_problems(run) == [] and alarms(run) == []


@pytest.mark.parametrize("seed", range(5))
def test_the_demo_has_no_problem(seed: int) -> None:
    assert find_problems(DEMO / f"rapo-{seed}") == [] and alarms(DEMO / f"rapo-{seed}") == []


def alarms(run: Path) -> list[str]:
    data = read_run(run)
    watch = RangeWatch(data.settings)
    return [
        line
        for record in data.records
        if record["kind"] == "train"
        for line in watch.update(int(str(record["step"])), record)
    ]


def no_signal(share: float, **others: Curve) -> dict[str, Curve]:
    names = {
        f"group/num_without_signal_{name}"
        for name in others
        if name in ("singleton", "unscorable", "rejected")
    }
    planted: dict[str, Curve] = {
        "group/fraction_without_signal": lambda t: share,
        "group/num_without_signal_no_spread": lambda t: 0 if names else share * NUM_GROUPS,
        **{name: lambda t: share * NUM_GROUPS for name in names},
        "reward/mean": lambda t: 0.02,
        "reward/success_rate": lambda t: 0.02,
    }
    return planted | {name: curve for name, curve in others.items() if "/" in name}


CAUSES: Mapping[str, tuple[dict[str, Curve], str]] = {
    "all wrong": (no_signal(1.0), "fail"),
    "all right": (
        no_signal(1.0) | {"reward/success_rate": lambda t: 1.0, "reward/mean": lambda t: 1.0},
        "solve the task",
    ),
    "turns": (no_signal(1.0) | {"rollout/num_truncated_turns": lambda t: 0.9 * NUM}, "turn limit"),
    "tokens": (no_signal(1.0) | {"rollout/num_truncated_tokens": lambda t: 0.9 * NUM}, "token limit"),
    "invalid": (no_signal(1.0) | {"rollout/num_invalid": lambda t: 0.9 * NUM}, "no action"),
    "faults": (no_signal(1.0, unscorable=lambda t: 1), "faults"),
    "single": (no_signal(1.0, singleton=lambda t: 1), "single rollouts"),
    "rejected": (no_signal(1.0, rejected=lambda t: 1), "threshold"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_run_without_signal_names_the_cause(tmp_path: Path, cause: str) -> None:
    planted, words = CAUSES[cause]
    run = write_metrics(tmp_path / "run", planted=planted)
    [first, *_] = find_problems(run)
    assert first.kind == "no_signal" and words in first.text and first.steps and first.look_at


def test_a_run_that_has_solved_its_tasks_has_no_problem(tmp_path: Path) -> None:
    """It had a signal while it learned."""
    planted: dict[str, Curve] = {
        "group/fraction_without_signal": lambda t: 0.2 if t < 0.5 else 1.0,
        "reward/success_rate": lambda t: min(1.0, 2 * t),
        "reward/mean": lambda t: min(1.0, 2 * t),
        "entropy/token_mean": lambda t: 1e-3 + max(0.0, 0.5 - t),
    }
    assert kinds(write_metrics(tmp_path / "run", planted=planted)) == []


def falls_to(end: float, begin: float = 1.0) -> Curve:
    return lambda t: begin if t < 0.3 else max(end, begin * (1 - 1.6 * (t - 0.3)))


FLAT: dict[str, Curve] = {
    "reward/mean": lambda t: 0.3 - 0.1 * t,
    "reward/success_rate": lambda t: 0.3 - 0.1 * t,
}


def constant(name: str, value: float, **others: float) -> dict[str, Curve]:
    def at(number: float) -> Curve:
        return lambda t: number

    return {name: at(value)} | {key.replace("__", "/"): at(other) for key, other in others.items()}


def rising(with_help: str, without_help: str, rise: float) -> dict[str, Curve]:
    return {with_help: lambda t: 0.1 + 0.8 * t, without_help: lambda t: 0.2 + rise * t}


RETRIEVAL = ("retrieval/reward_hybrid", "retrieval/reward_on_policy")
TIPS = ("tips/return_tips_on", "tips/return_plain")
PLANTED: list[tuple[str, dict[str, Curve]]] = [
    *(("no_signal", no_signal(share)) for share in (0.92, 1.0)),
    *(("logprob_mismatch", constant("gap/logprob_mean", gap)) for gap in (0.02, 0.1, 2.0)),
    ("logprob_mismatch", constant("ratio/importance_ess_share", 0.2)),
    *(("entropy_collapse", {"entropy/token_mean": falls_to(end)}) for end in (0.03, 0.01, 0.0)),
    *(("entropy_collapse", FLAT | {"entropy/token_mean": falls_to(end)}) for end in (0.15, 0.01)),
    *(
        ("tool_calls_die_out", FLAT | {"rollout/tool_calls_per_leaf": falls_to(end, 2.5)})
        for end in (0.4, 0.1, 0.0)
    ),
    *(("truncation", FLAT | constant("rollout/num_truncated_turns", share * NUM)) for share in (0.6, 0.75)),
    *(("truncation", FLAT | constant("rollout/num_truncated_tokens", share * NUM)) for share in (0.6, 0.75)),
    *(("unread_memory", constant("tips/num_shown", shown, tips__num_turns_without=60)) for shown in (0, 1)),
    *(("unread_memory", constant("retrieval/num_inserted", inserted)) for inserted in (0, 0.3)),
    (
        "unread_memory",
        constant("retrieval/num_inserted", 0, retrieval__num_no_candidate=0, retrieval__num_dropped=0),
    ),
    *(("retrieval_crutch", rising(*RETRIEVAL, rise)) for rise in (0.0, -0.1)),
    *(("tips_crutch", rising(*TIPS, rise)) for rise in (0.0, -0.1)),
]


@pytest.mark.parametrize(
    ("kind", "planted"), PLANTED, ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_planted_problem_is_found_and_no_other(
    tmp_path: Path, kind: str, planted: dict[str, Curve], seed: int
) -> None:
    assert kinds(write_metrics(tmp_path / "run", seed=seed, planted=planted)) == [kind]


RISES: dict[str, Curve] = {"reward/mean": lambda t: 0.1 + 0.8 * t}
NO_PROBLEM: Mapping[str, tuple[str, dict[str, Curve]]] = {
    "fewer calls": ("", RISES | {"rollout/tool_calls_per_leaf": falls_to(0.2, 8.0)}),
    "episodes of fixed length": ("", RISES | constant("rollout/num_truncated_turns", NUM)),
    "no entropy": ("", FLAT | constant("entropy/token_mean", 0.0)),
    "tips for the teacher": (
        "",
        constant("tips/num_shown", 0, tips__num_turns_without=0, distill__help_tokens=50),
    ),
    "distillation alone": (
        "[algorithm.distill]\npolicy_weight = 0.0\n",
        no_signal(1.0) | constant("distill/num_tokens", 900),
    ),
    "hybrids that ended early": (
        "[algorithm]\ngroup_size = 8\nnum_hybrid = 8\n",
        rising(*RETRIEVAL, 0.0),
    ),
}


@pytest.mark.parametrize("case", NO_PROBLEM)
def test_a_healthy_exception_is_no_problem(tmp_path: Path, case: str) -> None:
    config, planted = NO_PROBLEM[case]
    run = write_metrics(tmp_path / "run", planted=planted)
    with (run / "config.toml").open("a", encoding="utf-8") as stream:
        stream.write(config)
    assert kinds(run) == []


def test_with_distillation_no_spread_stops_the_policy_gradient_only(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "run", planted=no_signal(1.0) | constant("distill/num_tokens", 900))
    [finding] = find_problems(run)
    assert "give no policy gradient: " in finding.text


@pytest.mark.parametrize(("num_solved", "expected"), [(20, []), (2, ["retrieval_crutch"])])
def test_a_held_out_score_that_rises_excludes_a_crutch(
    tmp_path: Path, num_solved: int, expected: list[str]
) -> None:
    run = write_metrics(tmp_path / "run", planted=rising(*RETRIEVAL, 0.0))
    lines = [
        {
            "label": "test", "split": "test", "num_tasks": 30, "step": step, "temperature": 1.0,
            "panel_hash": "x", "metric": {"score": {"value": num / 30, "ci_low": 0.0, "ci_high": 1.0}},
            "task_scores": {str(i): float(i < num) for i in range(30)},
        }
        for step, num in ((0, 1), (24, num_solved))
    ]  # fmt: skip
    (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert kinds(run) == expected
    assert all("held-out score changes by" in finding.text for finding in find_problems(run))


@pytest.mark.parametrize("name", ["fading.pack/runs/rapo-32-seed1", "search.pack/runs/rapo-32-float32"])
def test_a_recorded_run_that_learns_without_retrieval_has_no_crutch(name: str) -> None:
    assert kinds(DEMO.parents[1] / f"rapo-{name}") == []


@pytest.mark.parametrize("template", [0.9, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_turns_that_no_longer_depend_on_the_task_are_found(
    tmp_path: Path, template: float, seed: int
) -> None:
    run = write_metrics(tmp_path / "run", seed=seed)
    write_traces(run, seed=seed, template=template)
    [finding] = find_problems(run)
    assert finding.kind == "template_collapse" and finding.steps == (5, 6)
    write_metrics(run, seed=seed, planted={"reward/mean": lambda t: min(1.0, 2 * t)})
    assert kinds(run) == []  # it has solved its tasks


def test_turns_that_never_depended_on_the_task_are_no_collapse(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "run")
    write_traces(run, template=1.0, steps=range(1, 13))
    for step in range(1, 8):
        (run / "traces" / f"step-{step:06d}.parquet").unlink()
    assert kinds(run) == []


def test_fading_retrieval_is_not_an_unread_buffer(tmp_path: Path) -> None:
    names = ("inserted", "no_candidate", "dropped")
    planted: dict[str, Curve] = {f"retrieval/num_{name}": lambda t: 5 if t < 0.4 else 0 for name in names}
    run = write_metrics(tmp_path / "run", planted=planted)
    assert kinds(run) == ["unread_memory"]
    (run / "config.toml").write_text('[algorithm.retrieval]\nschedule = "linear"\n', encoding="utf-8")
    assert kinds(run) == []


def test_a_gap_that_float32_excludes_is_healthy_in_bfloat16(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "run", planted={"gap/logprob_mean": lambda t: 0.03})
    assert kinds(run) == ["logprob_mismatch"]
    (run / "config.toml").write_text('[model]\nprecision = "bfloat16"\n', encoding="utf-8")
    assert kinds(run) == []


def test_the_most_serious_problem_comes_first(tmp_path: Path) -> None:
    planted = no_signal(1.0) | {
        "rollout/num_truncated_turns": lambda t: NUM,
        "gap/logprob_mean": lambda t: 1.0,
    }
    assert kinds(write_metrics(tmp_path / "run", planted=planted)) == [
        "no_signal",
        "logprob_mismatch",
        "truncation",
    ]


@pytest.mark.parametrize("damage", ["empty", "torn", "values", "traces"])
def test_missing_and_damaged_files_are_skipped(tmp_path: Path, damage: str) -> None:
    run = write_metrics(tmp_path / "run")
    write_traces(run)
    if damage == "empty":
        for name in ("config.toml", "metrics.jsonl"):
            (run / name).unlink()
    elif damage == "torn":
        (run / "metrics.jsonl").write_bytes(
            b'\xff{"step": 1\nnull\n' + b'{"step": "x"}\n{"step": 1, "kind": "train"}\n'
        )
    elif damage == "values":
        (run / "metrics.jsonl").write_text(
            '{"step": 1, "kind": "train", "group/num": "x", "reward/mean": [], "rollout/num": true, '
            '"rollout/num_truncated_turns": 3}\n' * 9
        )
    else:
        for path in (run / "traces").iterdir():
            path.write_bytes(b"PAR1")
    assert find_problems(run) == []


def test_why_prints_the_problems_and_what_to_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted: dict[str, Curve] = FLAT | {"rollout/num_truncated_tokens": lambda t: 0.75 * NUM}
    bad, good = (
        write_metrics(tmp_path / name, planted=values) for name, values in (("bad", planted), ("good", {}))
    )
    [finding] = find_problems(bad)
    assert isinstance(finding, Finding)
    assert cli.main(["why", str(bad)]) == 0
    assert capsys.readouterr().out == f"truncation: {finding.text}\n  look at: {finding.look_at}\n"
    assert cli.main(["why", str(good)]) == 0
    assert capsys.readouterr().out == "No problem found in 24 steps.\n"


def test_why_refuses_an_unknown_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["why", str(tmp_path / "none")]) == 2
    assert "no run directory" in capsys.readouterr().err
