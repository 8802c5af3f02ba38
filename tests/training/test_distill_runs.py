"""Short runs with self-distillation and a tiny real model: help in the files of a run, equal bits after a
kill, and both directions in every algorithm that has no tips.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.config import load_settings
from outrider.environments.base import make_task_set, split_tasks
from outrider.training.settings import RunSettings
from outrider.types import Origin
from outrider.viewer.records import TraceReader, TraceRow, parse_metadata
from tests.training.short_runs import assert_same, begin, interrupted, records, resume, same_weights, train
from tests.training.tool_run import write_house_model, write_tool_run

FILE = ("algorithm.distill.help=file", "algorithm.distill.path=help.jsonl")
HOUSE = (
    "model.name={root}/model-house",
    'environment={{type="house", num_train=4, num_test=1, max_moves=4}}',
    "environment.house.num_rooms=2",
    "environment.house.num_things=2",
    "rollout.max_turn_tokens=40",
    "algorithm.group_size=2",
    "rollout.max_response_tokens=1200",
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GRPO on questions with a tool; the file of help has the answer to every question."""
    path = write_tool_run(tmp_path_factory.mktemp("runs"))
    grpo = path.read_text().replace(
        'type = "rapo"\ngroup_size = 4\nnum_hybrid = 2', 'type = "grpo"\ngroup_size = 4'
    )
    path.write_text(grpo.replace("[evaluation]\n", "[evaluation]\nat_start = false\nnum_tasks = 1\n"))
    task_set = make_task_set(load_settings(RunSettings, file=path).environment)
    lines = [
        json.dumps({"task": task.key, "text": f"It is at the {task.answers[0]}."})
        for task in split_tasks(task_set, "train")
    ]
    (path.parent / "help.jsonl").write_text("\n".join(lines))
    return path


def leaves(run: Path, step: int = 1) -> list[tuple[TraceRow, dict[str, Any]]]:
    """The leaves of a step with their metadata."""
    rows = TraceReader(run / "traces").read(step)
    return [(row, parse_metadata(row)) for row in rows if row.outcome is not None]


def test_a_teacher_reads_a_file(recipe: Path) -> None:
    run = train(recipe, "file", "train.num_steps=1", *FILE)
    for _, metadata in leaves(run):
        [part] = metadata["help"]
        assert part["source"] == "file" and part["text"].startswith("\n\nWhat is known here:\nIt is at the ")
        assert part["tokens"] == len(part["text"])
    [step] = records(run)
    assert step["distill/share_rollouts"] == 1.0 and step["distill/loss"] > 0.0
    assert step["distill/num_without_help_no_text"] == 0.0
    plain = train(recipe, "plain", "train.num_steps=1")
    assert not same_weights(run, plain, 1)
    # the rollouts are those of a run without help
    texts = [
        [(row.origin, row.text) for row in TraceReader(each / "traces").read(1)] for each in (run, plain)
    ]
    assert texts[0] == texts[1]


def test_siblings_and_feedback_help_and_a_killed_run_ends_in_the_same_bits(recipe: Path) -> None:
    options = (
        'algorithm.distill.help=["sibling", "feedback"]',
        "algorithm.distill.threshold=0.0",
        "algorithm.distill.form=reverse_kl",
    )
    whole = begin(recipe, Path("sibling"), *options)
    found = [metadata["help"][0] for step in (1, 2) for _, metadata in leaves(whole, step)]
    assert {part["source"] for part in found} == {"sibling+feedback"}
    assert all("\nScore: " in part["text"] for part in found)
    killed = interrupted(whole)
    resume(killed)
    assert_same(whole, killed)
    assert leaves(whole, 2) == leaves(killed, 2)


def test_rollouts_are_sampled_with_a_file_and_trained_without_it(recipe: Path) -> None:
    """Trainer and engine agree on the context that was sampled, and the algorithm has no part for tips."""
    options = ("algorithm.distill.plays=both", "train.num_steps=2")
    run = train(recipe, "both", *FILE, *options)
    num_shown = 0
    for step in (1, 2):
        shown = {
            row.task_key for row in TraceReader(run / "traces").read(step) if row.origin is Origin.MEMORY
        }
        for row, metadata in leaves(run, step):
            assert ("helped" in metadata["mode"]) == (row.task_key in shown) == ("help" not in metadata)
        num_shown += len(shown)
        assert records(run)[step - 1]["gap/logprob_max"] < 1e-3
        assert records(run)[step - 1]["distill/share_rollouts"] == 1.0
    assert 0 < num_shown < 4
    # no success, so no rollout has the term, and the policy term remains
    options = ("plays=helped", "form=likelihood", "where=succeeded")
    run = train(recipe, "helped", "train.num_steps=1", *FILE, *(f"algorithm.distill.{o}" for o in options))
    assert not same_weights(run, run, 0, 1)


def test_an_expert_demonstrates_each_task_once(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = recipe.parent
    write_house_model(root / "model-house")
    requested: list[str] = []
    from outrider.training import data

    original = data.request_expert_paths

    def counted(task_set: Any, tasks: Any, *arguments: Any, **options: Any) -> Any:
        requested.extend(task.key for task in tasks)
        return original(task_set, tasks, *arguments, **options)

    monkeypatch.setattr(data, "request_expert_paths", counted)
    house = [option.format(root=root) for option in HOUSE]
    help_ = ("algorithm.distill.help=demonstration", "algorithm.distill.max_help_tokens=400")
    whole = begin(recipe, Path("demonstration"), *house, *help_)
    assert len(requested) == len(set(requested)) == 4
    for _, metadata in leaves(whole):
        assert "\ngo " in metadata["help"][0]["text"] and "\ntake " in metadata["help"][0]["text"]
    killed = interrupted(whole)
    resume(killed)
    assert_same(whole, killed)


def test_plain_rollouts_write_the_tips_that_their_teacher_reads(recipe: Path) -> None:
    """Also if no group is sampled with tips."""
    options = (
        'algorithm={type="empo2", group_size=4, memory_probability=0, memory={embedder="hash", '
        'writer="environment", scope="all", min_similarity=-1}, distill={help="tips"}}',
    )
    run = train(recipe, "tips", "train.num_steps=2", *options)
    first, second = records(run)
    assert first["tips/num_stored"] > 0 and first["distill/num_without_help_no_tip"] > 0
    assert second["distill/share_rollouts"] == 1.0 and second["tips/num_shown"] == 0
    for _, metadata in leaves(run, 2):
        assert metadata["help"][0]["text"].startswith("\n\n<tip>\nNotes from earlier attempts:\n- ")


def test_turns_teach_the_context_that_they_were_not_sampled_in(recipe: Path) -> None:
    run = train(
        recipe,
        "ucob",
        "train.num_steps=1",
        "algorithm.distill.preset=ucob",
        "algorithm.distill.path=help.jsonl",
    )
    for row, metadata in leaves(run):
        assert ("helped" in metadata["mode"]) == (row.rollout >= 2) == ("help" not in metadata)
    rows = TraceReader(run / "traces").read(1)
    weights = [parse_metadata(row)["pair_weight"] for row in rows if "pair_weight" in parse_metadata(row)]
    [step] = records(run)
    assert step["distill/num_teaching_turns"] == len(weights) > 0 and min(weights) > 0.0
    assert step["distill/loss"] > 0.0 and step["gap/logprob_max"] < 1e-3
