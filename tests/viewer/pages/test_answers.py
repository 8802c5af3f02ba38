"""What the server answers agrees with what is on disk, read another way."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import outrider
from outrider.errors import DataError
from outrider.metrics import declared_metric
from outrider.viewer import search as text_search
from outrider.viewer.answers import Catalogue, metric_curves
from outrider.viewer.run_reader import read_alarms
from outrider.viewer.search import RolloutIndex, TextSearch, _read, find
from tests.training.recorded_run import REASON
from tests.viewer.pages.serving import Served, serving
from tests.viewer.synthetic_run import write_config, write_metrics

ROOT = Path(__file__).parents[3]


def rows_on_disk(recorded: Path) -> list[dict[str, Any]]:
    run = outrider.load_run(recorded)
    return [row for step in run.steps() for row in run.rollouts(step).to_pylist()]


def test_finished_runs_of_every_kind_are_listed_as_such() -> None:
    """Steps, a token budget, and imitation without steps."""
    runs = Catalogue([ROOT / "records" / "packs" / "demo.pack" / "runs"]).overview()
    kinds = {(run["name"].partition("-")[0], run["method"], run["status"]) for run in runs}
    assert kinds == {
        ("rapo", "rapo", "finished"),
        ("grpo", "grpo", "finished"),
        ("sft", "imitation", "finished"),
    }


def test_a_run_has_status_score_and_last_alarm(served: Served, recorded: Path) -> None:
    [run] = served.data("runs")
    last = outrider.load_run(recorded).evaluations().to_pylist()[-1]
    assert (run["status"], run["method"], run["task"], run["steps"]) == ("finished", "combined", "tools", 3)
    assert run["score"] == [last["score.value"], last["score.ci_low"], last["score.ci_high"]]
    assert run["alarm"] == read_alarms(recorded)[-1] and run["num_alarms"] >= 1


@pytest.mark.parametrize(("value", "score"), [(0.5, (0.5, 0.4, 0.6)), (math.nan, None)])
def test_only_a_finite_score_is_an_answer(
    tmp_path: Path, value: float, score: tuple[float, ...] | None
) -> None:
    run = shutil.copytree(Path(__file__).parents[2] / "compat" / "c91e788" / "rapo", tmp_path / "run")
    line = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    line["metric"] = {"score": {"value": value, "ci_low": 0.4, "ci_high": 0.6}}
    (run / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    [entry] = metric_curves(run)["evaluations"]
    assert (entry["score"], entry["label"]) == (score, "after RAPO")
    assert Catalogue([run]).overview()[0]["score"] == score


def test_every_metric_has_the_registrys_words(served: Served, recorded: Path) -> None:
    found = served.data("curves")
    table = outrider.load_run(recorded).metrics().to_pylist()
    assert found["x"]["step"] == [1, 2, 3] and found["x"]["tokens"] == sorted(found["x"]["tokens"])
    for name, values in found["values"].items():
        assert values == [row[name] for row in table]
        metric = declared_metric(name)
        assert found["metrics"][name]["meaning"] == metric.meaning
        assert found["metrics"][name]["healthy"] == metric.healthy_range


@pytest.mark.parametrize(
    "sort", ["step", "episode_return", "task_key", "num_tokens", "mean_entropy", "fault"]
)
@pytest.mark.parametrize("descending", ["0", "1"])
def test_rollouts_are_sorted_with_those_without_a_value_last(
    served: Served, recorded: Path, sort: str, descending: str
) -> None:
    found = served.data("rollouts", sort=sort, descending=descending, training="1")
    rows = rows_on_disk(recorded)
    assert found["total"] == len(rows) == len(found["rows"])
    known = [row[sort] for row in rows if row[sort] is not None]
    expected = sorted(known, reverse=descending == "1") + [None] * (len(rows) - len(known))
    assert [row[sort] for row in found["rows"]] == expected


def test_filters_and_histogram_count_what_is_there(served: Served, recorded: Path) -> None:
    rows = rows_on_disk(recorded)
    for kind in {row["kind"] for row in rows}:
        found = served.data("rollouts", kind=kind, training="1")
        assert found["total"] == sum(row["kind"] == kind for row in rows)
    within = served.data("rollouts", low="-0.5", high="2", training="1")
    assert within["total"] == sum(
        row["episode_return"] is not None and row["episode_return"] >= -0.5 for row in rows
    )
    bars = within["histogram"]
    assert sum(bars["numbers"]) + bars["missing"] == len(rows)
    assert bars["missing"] == sum(row["episode_return"] is None for row in rows)
    assert REASON in {row["fault"] for row in served.data("rollouts", outcome="tool_fault")["rows"]}


def test_rollouts_can_be_filtered_and_sorted_by_failed_calls_and_explain_their_return(
    served: Served, recorded: Path
) -> None:
    rows = rows_on_disk(recorded)
    numbers = [row["num_failed_calls"] for row in rows]
    assert 0 in numbers and max(numbers) > 0
    for failed, expected in (("any", [n for n in numbers if n]), ("none", [n for n in numbers if not n])):
        found = served.data("rollouts", failed=failed, training="1", sort="num_failed_calls", descending="1")
        assert [row["num_failed_calls"] for row in found["rows"]] == sorted(expected, reverse=True)
        assert sum(found["histogram"]["numbers"]) + found["histogram"]["missing"] == len(expected)
    assert (
        "failed is any or none" in served.ask(f"/data/rollouts.json?run={served.ids[0]}&failed=x")[2].decode()
    )
    [scored, *_] = [row for row in served.data("rollouts", training="1")["rows"] if row["answer"]]
    [on_disk] = [row for row in rows if all(row[name] == scored[name] for name in ("trace_id", "rollout"))]
    assert scored["targets"] == json.loads(on_disk["targets"]) and scored["answer"] == on_disk["answer"]
    assert sum(scored["reward_parts"].values()) == pytest.approx(scored["episode_return"])
    assert scored["reason"] == on_disk["reason"] != ""
    places = {(row["where"], row["trace_id"]) for row in served.data("rollouts", training="1")["rows"]}
    groups = {place: served.data("group", where=place[0], trace=place[1]) for place in places}
    assert groups[scored["where"], scored["trace_id"]]["rollouts"][scored["rollout"]] == scored
    nodes = [node for group in groups.values() for node in group["nodes"]]
    calls = [call for node in nodes for call in node["metadata"].get("tool_calls", ())]
    assert {call["name"] for call in calls} == {"search"}
    for call in calls:  # only calls that were executed took time
        assert call["arguments"] and (call["seconds"] is not None) == (call["status"] in ("ok", "empty"))


def test_records_of_older_versions_have_no_explanations_and_match_no_filter_of_failed_calls() -> None:
    old = Path(__file__).parents[2] / "compat" / "c91e788" / "empo2"
    table = RolloutIndex(old).table()
    rows = find(table, {})["rows"]
    assert rows and {(row["targets"], row["reason"], row["num_failed_calls"]) for row in rows} == {
        (None,) * 3
    }
    assert [find(table, {"failed": failed})["total"] for failed in ("any", "none")] == [0, 0]


def test_search_finds_each_turn_that_has_the_words(served: Served, recorded: Path) -> None:
    run = outrider.load_run(recorded)
    nodes = [row for step in run.steps() for row in run.traces(step).to_pylist()]
    nodes += [row for number in (0, 1) for row in run.evaluation_traces(number).to_pylist()]
    for words in ("RING", "where is", "</search>", "&lt;", "nobody says this"):
        found = served.data("search", words=words)
        expected = [row for row in nodes if words.lower() in row["text"].lower()]
        locations = {(hit["where"][:4], hit["trace_id"], hit["node_id"]) for hit in found["hits"]}
        assert len(found["hits"]) == len(expected) and len(locations) <= len(expected)
        assert all(words.lower() in hit["text"].lower() for hit in found["hits"])


def test_a_group_has_the_tree_and_the_tokens_of_a_path(served: Served, recorded: Path) -> None:
    run = outrider.load_run(recorded)
    nodes = {row["node_id"]: row for row in run.traces(2).to_pylist() if row["trace_id"] == "2/0"}
    group = served.data("group", where="step-000002", trace="2/0")
    assert {node["node_id"]: node["parent_id"] for node in group["nodes"]} == {
        number: row["parent_id"] for number, row in nodes.items()
    }
    for row in group["rollouts"]:
        found = served.data("tokens", where="step-000002", trace="2/0", rollout=str(row["rollout"]))["nodes"]
        assert str(row["node_id"]) in found
        for number, values in found.items():
            assert values["tokens"] == nodes[int(number)]["tokens"]
            assert all(
                math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-9)
                for a, b in zip(values["entropies"], nodes[int(number)]["entropies"], strict=True)
            )


def test_the_memory_is_that_of_the_step(served: Served, recorded: Path) -> None:
    state = json.loads((recorded / "checkpoints" / "step-000002" / "state.json").read_text())
    held = served.data("memory", step="2")
    [buffer] = state["memory"]["tips"]["buffers"].values()
    assert [one["text"] for one in held["tips"]["items"]] == [tip["text"] for tip in buffer["tips"]]
    assert held["steps"]["revision"] == state["buffer_revision"] and held["steps"]["total"] >= 18
    assert served.data("memory", step="1")["tips"]["total"] < held["tips"]["total"]
    few = served.data("memory", step="2", words="the lamp")
    assert 0 < few["steps"]["total"] < held["steps"]["total"]
    assert all("lamp" in one["text"] + one["observation"] + one["key"] for one in few["steps"]["items"])


def test_the_nearest_of_a_memory_come_first(served: Served) -> None:
    for memory in ("steps", "tips"):
        found = served.data("neighbours", step="3", memory=memory, words="Where is the lamp?")
        similarities = [one["similarity"] for one in found]
        assert found and similarities == sorted(similarities, reverse=True)
    assert (
        "lamp" in served.data("neighbours", step="3", memory="steps", words="Where is the lamp?")[0]["text"]
    )


def test_insertions_are_listed_with_their_step(served: Served, recorded: Path) -> None:
    run = outrider.load_run(recorded)
    for step in run.steps():
        nodes = [row for row in run.traces(step).to_pylist() if row["origin"] in ("buffer", "memory")]
        assert len(served.data("shown", step=str(step))) == len(nodes)
    shown = [one for step in run.steps() for one in served.data("shown", step=str(step))]
    tip = next(one for one in shown if one["origin"] == "memory")
    again = served.data("shown", step="1", memory="tips", key="all", item=str(tip["ids"][0]))
    assert tip["node_id"] in {one["node_id"] for one in again if one["step"] == tip["step"]}


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("group", {"where": "../../config", "trace": "1/0"}),
        ("group", {"where": "step-000001", "trace": "9/9"}),
        ("tokens", {"where": "step-000001", "trace": "1/0", "rollout": "x"}),
        ("tokens", {"where": "step-000001", "trace": "1/0", "rollout": "99"}),
        ("rollouts", {"sort": "__class__"}),
        ("memory", {}),
        ("nothing", {}),
        ("curves", {"run": "../x"}),
        ("search", {"where": "../../run/traces/step-000001", "words": "ring"}),
    ],
)
def test_missing_data_is_one_line(served: Served, kind: str, given: dict[str, str]) -> None:
    from urllib.parse import urlencode

    status, _, body = served.ask(f"/data/{kind}.json?{urlencode({'run': served.ids[0], **given})}")
    assert status in (400, 404) and set(json.loads(body)) == {"error"}


def test_a_damaged_file_is_reported(recorded: Path, tmp_path: Path) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    (run / "rollouts" / "step-000002.parquet").write_bytes(b"PAR1 torn")
    with serving([run]) as found:
        rows = found.data("rollouts", training="1")
        assert {row["step"] for row in rows["rows"]} == {1, 3}
        [note] = rows["notes"]
        assert note.startswith("step-000002.parquet cannot be read") and str(tmp_path) not in note
        assert found.data("rollouts", training="1")["notes"] == [note]
        status, _, body = found.ask(f"/data/rollouts.json?run={found.ids[0]}&where=step-000002")
        assert (status, json.loads(body)) == (400, {"error": note})
        shutil.copy(recorded / "rollouts" / "step-000002.parquet", run / "rollouts")
        assert found.data("rollouts", training="1")["notes"] == []


def test_search_takes_files_of_any_cut(tmp_path: Path) -> None:
    """None of a step whose rollouts all wrote nothing, and several pieces of a large one."""
    text = ["Alpha beta", "", "gamma ALPHA", "al", "pha"]
    table = pa.table(dict.fromkeys(("task_key", "trace_id", "origin", "text"), text)).add_column(
        0, "node_id", [range(5)]
    )
    table = table.append_column("rollout", [range(5)])
    (tmp_path / "traces").mkdir()
    pq.write_table(table, tmp_path / "traces" / "step-000001.parquet", row_group_size=2)
    pq.write_table(table.slice(0, 0), tmp_path / "traces" / "step-000002.parquet")
    search = TextSearch(tmp_path)
    for _ in range(2):  # read, and kept
        for words, nodes in (("alpha", [0, 2]), ("phA", [0, 2, 4]), ("beta", [0]), ("a", [0, 2, 3, 4])):
            found = search.find(words, ["step-000001", "step-000002"])
            assert [hit["node_id"] for hit in found["hits"]] == nodes
    assert search.find("alpha", ["step-000009"]) == {"hits": [], "more": False}


def test_the_search_of_a_closed_run_stops(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever goes to and fro between runs makes the server hold the texts of them all."""
    read: list[Path] = []
    search = TextSearch(recorded)

    def leaving(path: Path, columns: list[str]) -> Any:
        read.append(path)
        search.leave()
        return _read(path, columns)

    monkeypatch.setattr(text_search, "_read", leaving)
    search.warm(["step-000001", "step-000002", "step-000003"])
    assert [path.stem for path in read] == ["step-000003"]
    assert search.find("where is", ["step-000002"])["hits"]


def test_a_folder_that_may_not_be_read_hides_no_other(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(recorded, tmp_path / "run")
    (tmp_path / "closed").mkdir()
    within = Path.iterdir

    def iterdir(folder: Path) -> Any:
        if folder.name == "closed":
            raise PermissionError(13, "Permission denied")
        return within(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert [run.path.name for run in Catalogue([tmp_path]).all()] == ["run"]


def test_folders_without_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run directory"):
        Catalogue([tmp_path])
    with pytest.raises(DataError, match="is no folder"):
        Catalogue([tmp_path / "absent"])


def test_runs_of_version_1_are_shown(tmp_path: Path) -> None:
    with serving([Path(__file__).parents[2] / "compat" / "c91e788"]) as old:
        assert len(old.data("runs")) == 2
        found = old.data("rollouts")
        assert found["total"] == 16
        row = found["rows"][0]
        group = old.data("group", where=row["where"], trace=row["trace_id"])
        assert {node["role"] for node in group["nodes"]} >= {"user", "assistant"}
        assert old.data("tokens", where=row["where"], trace=row["trace_id"], rollout=str(row["rollout"]))[
            "nodes"
        ]


def test_runs_have_names_that_tell_them_apart_and_numbers_of_their_configuration(tmp_path: Path) -> None:
    for name, seed, size in (("a/run", 0, 4), ("b/run", 1, 4), ("実験", 2, 8)):
        (tmp_path / name).mkdir(parents=True)
        text = f'seed = {seed}\n[algorithm]\ntype = "grpo"\ngroup_size = {size}\n'
        (tmp_path / name / "config.toml").write_text(text)
    runs = Catalogue([tmp_path]).overview()
    assert [run["name"] for run in runs] == ["a/run", "b/run", "実験"]
    first, second, third = (run["configuration"] for run in runs)
    assert first == second != third


def test_the_cold_start_is_among_the_curves(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_metrics(tmp_path, 4)
    curves = metric_curves(tmp_path)
    assert curves["cold_start"]["step"] == list(range(1, 11))
    assert curves["cold_start"]["values"] == {"sft/loss": [2.0 / step for step in range(1, 11)]}
    assert curves["metrics"]["sft/loss"]["meaning"] == declared_metric("sft/loss").meaning


def test_runs_that_cannot_be_compared_have_a_page_with_the_reason_and_a_way_back(
    served: Served,
) -> None:
    status, headers, body = served.ask(f"/compare?run={served.ids[0]}")
    assert status == 400 and headers["content-type"].startswith("text/html")
    assert b"<h1>Not compared</h1>" in body and b'<a href="./">Back to the runs</a>' in body
