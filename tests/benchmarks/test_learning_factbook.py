"""The Factbook task of benchmarks.learning with scripted runs: one start a seed, one budget a seed, skipped,
resumed or refused.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from benchmarks.learning_factbook import (
    Plan,
    compare_all,
    factbook_jobs,
    is_finished,
    policy_tokens,
    train_all,
    write_recipe,
)
from benchmarks.learning_tables import factbook_notes, factbook_table

from benchmarks import learning
from outrider.algorithms.exploration import Empo2Settings, RapoSettings
from outrider.algorithms.retrieval import scheduled_probability
from outrider.config import load_settings, to_toml
from outrider.errors import ConfigError, OutriderError
from outrider.metrics import MetricsWriter
from outrider.plugins import imports
from outrider.training.settings import RunSettings

RECIPE = Path(__file__).parents[2] / "recipes" / "factbook-two-hops.toml"
TASKS = [f"task-{number}" for number in range(80)]
SHARES = {"sft": 0.2, "grpo": 0.3, "rapo": 0.9, "gigpo": 0.3}


@dataclass
class Runs:
    """Writes what ``outrider train`` would have written. ``stops`` names a run that is killed before its end,
    once.
    """

    started: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    stops: str = ""

    def launch(self, arguments: Sequence[str]) -> None:
        resumed = arguments[0] == "--resume"
        run = Path(arguments[1] if resumed else arguments[-1])
        self.started.append((run.name, tuple(arguments)))
        if not resumed:
            assert arguments[-2] == "--run" and not run.exists()
            settings = load_settings(RunSettings, file=Path(arguments[0]), overrides=arguments[1:-2])
            run.mkdir()
            (run / "config.toml").write_text(to_toml(settings.model_dump(mode="json")))
        if self.stops == run.name:
            self.stops = ""
            raise KeyboardInterrupt
        self.finish(run, load_settings(RunSettings, file=run / "config.toml"))

    def finish(self, run: Path, settings: RunSettings) -> None:
        key = run.name.rpartition("-")[0]
        if settings.train.num_steps == 0:
            return self.evaluate(run, "after cold start", step=0, key=key, seed=settings.seed)
        tokens = settings.train.max_policy_tokens or 1000 + settings.seed
        writer = MetricsWriter(run / "metrics.jsonl")
        for step in range(1, 6):
            spent = {"tokens/policy": tokens / 5, "tokens/policy_total": float(tokens * step // 5)}
            writer.write(step, "train", spent | {"reward/mean": 0.1})
        writer.close()
        if settings.evaluation.at_start:
            self.evaluate(
                run, f"of {settings.model.initial_checkpoint}", step=0, key="sft", seed=settings.seed
            )
        self.evaluate(run, f"after {key.upper()}", step=5, key=key, seed=settings.seed)

    def evaluate(self, run: Path, label: str, *, step: int, key: str, seed: int) -> None:
        scores = {
            task: float(number < len(TASKS) * SHARES.get(key, 0.5) + seed)
            for number, task in enumerate(TASKS)
        }
        mean = sum(scores.values()) / len(scores)
        line = {
            "label": label, "split": "test", "num_tasks": len(TASKS), "step": step, "temperature": 1.0,
            "panel_hash": "ab" * 32, "metric": {"score": {"value": mean, "ci_low": 0.0, "ci_high": 1.0}},
            "task_scores": scores,
        }  # fmt: skip
        with (run / "evaluations.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def settings_of(self, out: Path, name: str) -> RunSettings:
        return load_settings(RunSettings, file=out / name / "config.toml")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(recipe=RECIPE, out=tmp_path, seeds=range(3), policy_tokens=None, overrides=("num_threads=1",))


def train(plan: Plan, runs: Runs, *keys: str) -> None:
    chosen = [method for method in plan.methods() if not keys or method.key in keys]
    train_all(plan, chosen, launch=runs.launch, after_seed=lambda: None)


def test_all_methods_share_the_cold_start_and_the_token_budget(plan: Plan) -> None:
    runs = Runs()
    train(plan, runs)
    every = [method.key for method in plan.methods()]
    assert [name for name, _ in runs.started[:2]] == ["sft-0", "rapo-0"]
    assert sorted(name for name, _ in runs.started) == sorted(
        f"{key}-{seed}" for key in every for seed in range(3)
    )
    for seed in range(3):
        start = runs.settings_of(plan.out, f"sft-{seed}")
        assert (start.train.num_steps, start.seed, start.num_threads) == (
            0,
            seed,
            1,
        ) and start.cold_start.num_examples == 44
        spent = policy_tokens(plan.out / f"rapo-{seed}")
        for key in every:
            settings = runs.settings_of(plan.out, f"{key}-{seed}")
            assert settings.algorithm.group_size == 8
            if key == "sft":
                continue
            assert settings.model.initial_checkpoint == str(
                plan.out / f"sft-{seed}" / "checkpoints" / "step-000000"
            )
            assert settings.cold_start.num_examples == 0
            assert settings.train.max_policy_tokens == (None if key == "rapo" else spent)
            assert settings.train.num_steps == (5 if key == "rapo" else 100_000)


def test_all_methods_share_the_objective_of_the_recipe(plan: Plan) -> None:
    runs = Runs()
    train(replace(plan, seeds=range(1)), runs)
    settings = {
        method.key: runs.settings_of(plan.out, f"{method.key}-0").algorithm for method in plan.methods()
    }
    for key in ("grpo", "gigpo", "rapo", "arpo", "aepo", "empo2"):
        found = settings[key]
        assert (found.loss.clip_low, found.loss.clip_high, found.loss.dual_clip) == (0.28, 0.28, None)
        assert found.aggregation == "sequence_mean_token_mean"
    assert settings["dr-grpo"].advantage == "group_centered" and settings["dr-grpo"].max_length == 512
    assert (settings["dapo-loss"].loss.clip_low, settings["dapo-loss"].loss.clip_high) == (0.2, 0.28)
    assert settings["rapo"] == load_settings(RunSettings, file=RECIPE).algorithm


def test_a_written_recipe_finds_the_modules_beside_the_recipe(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_recipe(plan, plan.methods()[0])
    monkeypatch.setattr(imports, "_folders", [])  # of a new process
    load_settings(RunSettings, file=path)
    assert imports.search_folders() == (path.parent, RECIPE.parent)


def test_empo2_for_small_models_is_the_preset(plan: Plan) -> None:
    method = next(method for method in plan.methods() if method.key == "empo2-centered")
    algorithm = load_settings(RunSettings, file=write_recipe(plan, method), overrides=[]).algorithm
    assert isinstance(algorithm, Empo2Settings)
    assert (algorithm.preset, algorithm.advantage, algorithm.intrinsic_where_tied) == (
        "empo2-centered",
        "group_centered",
        False,
    )


def test_a_given_budget_applies_to_all_methods(plan: Plan) -> None:
    runs = Runs()
    train(replace(plan, policy_tokens=777, seeds=range(1)), runs, "grpo", "rapo")
    assert {
        name: runs.settings_of(plan.out, name).train.max_policy_tokens for name in ("grpo-0", "rapo-0")
    } == {"grpo-0": 777, "rapo-0": 777}
    train(replace(plan, policy_tokens=777, seeds=range(1), out=plan.out / "other"), other := Runs(), "grpo")
    assert [name for name, _ in other.started] == ["sft-0", "grpo-0"]


def test_finished_runs_are_skipped_and_a_killed_one_is_resumed(plan: Plan) -> None:
    runs = Runs(stops="gigpo-1")
    with pytest.raises(KeyboardInterrupt):
        train(plan, runs, "grpo", "rapo", "gigpo")
    assert runs.started[-1][0] == "gigpo-1" and not is_finished(plan.out / "gigpo-1")
    num_before = len(runs.started)
    train(plan, runs, "grpo", "rapo", "gigpo")
    assert runs.started[num_before] == ("gigpo-1", ("--resume", str(plan.out / "gigpo-1")))
    assert [name for name, _ in runs.started[num_before:]] == [
        "gigpo-1",
        "sft-2",
        "rapo-2",
        "grpo-2",
        "gigpo-2",
    ]
    train(plan, runs, "grpo", "rapo", "gigpo")
    assert runs.started[-1][0] == "gigpo-2"


def test_a_run_that_ends_early_is_an_error(plan: Plan) -> None:
    class Leaves(Runs):
        def finish(self, run: Path, settings: RunSettings) -> None:
            """As after SIGTERM: exit status 0, no last evaluation."""

    with pytest.raises(OutriderError, match=r"sft-0 was stopped before its end"):
        train(plan, Leaves())


def test_other_settings_in_the_same_folder_are_refused(plan: Plan) -> None:
    runs = Runs()
    train(plan, runs, "grpo", "rapo")
    num_before = len(runs.started)
    train(replace(plan, overrides=("num_threads=2", "train.checkpoint_every=1")), runs, "grpo", "rapo")
    assert len(runs.started) == num_before  # how fast and how safely it runs may change
    with pytest.raises(
        ConfigError, match=r"sft-0 was started with other settings \(optimizer.learning_rate\)"
    ):
        train(
            replace(plan, overrides=("num_threads=1", "optimizer.learning_rate=1e-3")), runs, "grpo", "rapo"
        )
    with pytest.raises(
        ConfigError,
        match=r"rapo-0 was started with other settings \(train.max_policy_tokens, train.num_steps\)",
    ):
        train(replace(plan, policy_tokens=5), runs, "grpo", "rapo")


def test_invalid_plans_stop_before_the_first_run(plan: Plan, tmp_path: Path) -> None:
    runs = Runs()
    with pytest.raises(ConfigError, match="--policy-tokens"):
        train(plan, runs, "grpo")
    with pytest.raises(ConfigError, match="no cold start"):
        train(replace(plan, overrides=("cold_start.num_examples=0",)), runs)
    with pytest.raises(ConfigError, match="unknown key"):
        train(replace(plan, overrides=("algorithm.num_hybrid=2",)), runs, "grpo", "rapo")
    assert runs.started == []


def test_the_table_has_every_method_with_the_verdict_of_compare(plan: Plan) -> None:
    runs = Runs()
    train(plan, runs, "grpo", "rapo", "gigpo")
    chosen = [method for method in plan.methods() if method.key in ("sft", "grpo", "rapo", "gigpo", "arpo")]
    comparison = compare_all(plan, chosen)
    assert comparison is not None and comparison.num_tasks == len(TASKS)
    header, _, *lines = factbook_table(chosen, comparison).text.splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    assert list(rows) == ["GRPO", "GiGPO", "imitation alone", "RAPO", "ARPO"]
    assert len({line.count(" | ") for line in (header, *lines)}) == 1
    assert (
        "**RAPO** scores higher" in rows["RAPO"]
        and "1.00 [1.00, 1.00]" in rows["RAPO"]
        and "1,001" in rows["RAPO"]
    )
    assert (
        "**GRPO** scores higher" in rows["imitation alone"] and "0.00 [0.00, 0.00]" in rows["imitation alone"]
    )
    assert "no winner" in rows["GiGPO"] and "not run" in rows["ARPO"] and "| 3 |" in rows["imitation alone"]
    said = factbook_notes(chosen, comparison)
    assert "final scores are not at equal training steps: GiGPO took 5, imitation alone none" in said
    # a run's name is not its group's
    assert any(note.startswith("no curve of held-out scores: gigpo-0 and ") for note in said)
    assert "| 0: 30.0, 1: 31.2, 2: 32.5 |" in rows["GRPO"]  # of 80 tasks 24, 25 and 26


def test_one_seed_names_no_winner_and_reasons_use_the_displayed_names(plan: Plan) -> None:
    runs = Runs()
    single = replace(plan, seeds=range(1))
    train(single, runs, "grpo", "rapo", "dr-grpo")
    chosen = [method for method in plan.methods() if method.key in ("grpo", "rapo", "dr-grpo")]
    comparison = compare_all(single, chosen)
    assert comparison is not None
    table = factbook_table(chosen, comparison).text
    assert (
        "scores higher" not in table
        and "Dr. GRPO has 1 seed, at least 3 are needed" in table
        and "one seed" in table
    )


def test_the_command_prints_finished_runs(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "factbook",
        "--out",
        str(plan.out),
        "--recipe",
        str(RECIPE),
        "--only-report",
        "num_threads=1",
    ]
    assert learning.main(arguments) == 0 and capsys.readouterr().out == ""
    train(plan, Runs(), "grpo", "rapo")
    assert learning.main(arguments) == 0
    text = (plan.out / "factbook.md").read_text()
    assert "| RAPO | 3 |" in text and text.strip() in capsys.readouterr().out
    with pytest.raises(SystemExit):
        learning.main([*arguments, "--magic"])


def test_a_recipe_is_written_atomically(tmp_path: Path) -> None:
    """Two processes with different first seeds share a folder: one writes a recipe anew while the other's run
    reads it.
    """
    plan = Plan(recipe=RECIPE, out=tmp_path, seeds=[0], policy_tokens=100, overrides=())
    method = plan.methods()[0]
    path = write_recipe(plan, method)
    text = path.read_text()
    with ThreadPoolExecutor(1) as other:
        writing = other.submit(lambda: [write_recipe(plan, method) for _ in range(60)])
        while not writing.done():
            assert path.read_text() == text
        writing.result()
    assert {file.name for file in path.parent.iterdir()} == {path.name, imports.ORIGINS_FILE}


def test_jobs_have_the_same_runs_in_the_same_order(plan: Plan) -> None:
    """A method's job knows its budget when the reference is done; played one after another they are
    train_all's runs.
    """
    chosen = [method for method in plan.methods() if method.key in ("grpo", "rapo")]
    jobs = {job.name: job for job in factbook_jobs(plan, chosen)}
    assert jobs["factbook/sft-0"].after == () and jobs["factbook/rapo-0"].after == ("factbook/sft-0",)
    assert jobs["factbook/grpo-0"].after == ("factbook/sft-0", "factbook/rapo-0")
    runs, done = Runs(), set[str]()
    for job in jobs.values():
        assert not job.is_done() and set(job.after) <= done
        runs.launch([one for one in job.command()[4:] if one not in ("--progress", "plain")])
        assert job.is_done()
        done.add(job.name)
    started = list(runs.started)
    train(plan, runs, "grpo", "rapo")
    assert runs.started == started
    spent = policy_tokens(plan.out / "rapo-1")
    assert runs.settings_of(plan.out, "grpo-1").train.max_policy_tokens == spent
    given = {job.name: job.after for job in factbook_jobs(replace(plan, policy_tokens=9), chosen)}
    assert given["factbook/grpo-0"] == ("factbook/sft-0",)
    with pytest.raises(ConfigError, match="started with other settings"):
        factbook_jobs(replace(plan, overrides=("num_threads=1", "optimizer.learning_rate=1e-3")), chosen)[
            0
        ].is_done()


def test_a_recipe_with_its_own_algorithm_is_unchanged(tmp_path: Path) -> None:
    """What the recipe says of its algorithm holds for its row; the shared objective, and nothing else, for
    the other rows.
    """
    for name, key in (("demo", "rapo"), ("house-empo2", "empo2")):
        plan = Plan(
            recipe=RECIPE.with_name(f"{name}.toml"),
            out=tmp_path / name,
            seeds=range(1),
            policy_tokens=9,
            overrides=(),
        )
        written = {
            method.key: load_settings(
                RunSettings, file=write_recipe(plan, method), overrides=["cold_start.num_examples=0"]
            )
            for method in plan.methods()
        }
        own = load_settings(RunSettings, file=plan.recipe).algorithm
        if isinstance(own, RapoSettings):
            fading = own.retrieval.model_copy(update={"schedule_steps": plan.settings().train.num_steps})
            own = own.model_copy(update={"retrieval": fading})
        assert written[key].algorithm == own
        assert written["grpo"].algorithm.positive_nll == own.positive_nll
        assert written["grpo"].algorithm.type == "grpo"


def test_imitation_with_tips_uses_the_algorithm_with_tips(tmp_path: Path) -> None:
    plan = Plan(
        recipe=RECIPE.with_name("house-empo2.toml"),
        out=tmp_path,
        seeds=range(1),
        policy_tokens=9,
        overrides=(),
    )
    imitation = next(method for method in plan.methods() if method.key == "sft")
    begun = load_settings(RunSettings, file=write_recipe(plan, imitation), overrides=["train.num_steps=0"])
    assert begun.cold_start.tip_share and begun.algorithm.type == "empo2"
    factbook_jobs(plan, plan.methods()[:1])  # possible: GRPO begins from that cold start and shows no tip


def test_retrieval_fades_over_the_steps_of_the_recipe(tmp_path: Path) -> None:
    """With a budget, num_steps is so large that the probability would stay where it begins."""
    demo = RECIPE.with_name("demo.toml")
    plan = Plan(recipe=demo, out=tmp_path, seeds=[0], policy_tokens=12_000, overrides=())
    by_key = {method.key: method for method in plan.methods()}
    rapo = load_settings(RunSettings, file=write_recipe(plan, by_key["rapo"]), overrides=[]).algorithm
    assert isinstance(rapo, RapoSettings) and not rapo.depends_on_num_steps
    assert [round(scheduled_probability(rapo.retrieval, step, 100_000), 2) for step in (0, 4, 8, 9)] == [
        0.7, 0.35, 0.0, 0.0
    ]  # fmt: skip
