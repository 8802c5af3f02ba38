"""Named task sets: the formats they read, what they ask for when data are missing, and what freezes a
panel.
"""

import base64
import hashlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import ConfigError, DataError, ToolUnavailable
from outrider.evaluation.grading import VARIANTS
from outrider.evaluation.tasks import BENCHMARKS, PROMPTS, load_benchmark, prompt_messages
from outrider.types import Message, Task

DATA = Path(__file__).parents[3] / "shared" / "data"
CANARY = "keep out"


def write(tmp_path: Path, rows: list[dict[str, Any]], name: str = "mine.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def encrypted(text: str) -> str:
    raw, key = text.encode(), hashlib.sha256(CANARY.encode()).digest()
    stretched = (key * (len(raw) // len(key) + 1))[: len(raw)]
    return base64.b64encode(bytes(a ^ b for a, b in zip(raw, stretched, strict=True))).decode()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for the package ``datasets``: ``rows`` to hand out, or ``error`` to raise; ``asked`` is what
    was wanted.
    """
    state = types.SimpleNamespace(rows=[], error=None, asked=None)

    def load_dataset(name: str, config: str | None, *, split: str) -> list[dict[str, Any]]:
        state.asked = (name, config, split)
        if state.error is not None:
            raise state.error
        return list(state.rows)

    library = types.ModuleType("datasets")
    monkeypatch.setattr(library, "load_dataset", load_dataset, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", library)
    return state


HUB_ROWS = {
    "gsm8k": {"question": "q", "answer": "so <<1=1>>\n#### 1,234"},
    "math500": {
        "problem": "q",
        "solution": "s",
        "answer": "1234",
        "subject": "Algebra",
        "level": 5,
        "unique_id": "u",
    },
    "aime24": {"id": 60, "problem": "q", "solution": "s", "answer": "1234", "url": "u", "year": "2024"},
    "aime25": {"problem": "q", "answer": "1234", "id": "0"},
    "hotpotqa": {"id": "dev_0", "question": "q", "golden_answers": ["1234"], "metadata": {"type": "bridge"}},
    "2wiki": {"id": "dev_0", "question": "q", "golden_answers": ["1234"], "metadata": {}},
    "musique": {"id": "2hop", "question": "q", "golden_answers": ["1234"], "metadata": {}},
    "bamboogle": {"id": "test_0", "question": "q", "golden_answers": ["1234"], "metadata": {}},
    "simpleqa": {"metadata": "{}", "problem": "q", "answer": "1234"},
    "webwalkerqa": {"question": "q", "answer": "1234", "root_url": "u", "info": {}},
    "gaia": {
        "task_id": "c",
        "Question": "q",
        "Level": "1",
        "Final answer": "1234",
        "file_name": "",
        "Annotator Metadata": {},
    },
    "browsecomp": {
        "problem": encrypted("q"),
        "answer": encrypted("1234"),
        "problem_topic": "Art",
        "canary": CANARY,
    },
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_named_set_reads_its_hub_format(name: str, hub: types.SimpleNamespace) -> None:
    hub.rows = [HUB_ROWS[name]]
    panel = load_benchmark(name)
    metadata = {"level": "1"} if name == "gaia" else {}
    assert panel.tasks == (Task(key=f"{name}-0", question="q", answers=("1234",), metadata=metadata),)
    assert hub.asked == BENCHMARKS[name].hub
    assert panel.benchmark is BENCHMARKS[name] and panel.panel_hash == hash_tasks(panel.tasks)


@pytest.mark.parametrize(
    ("name", "file", "num", "first"),
    [
        ("gsm8k", "math/gsm8k.jsonl", 1319, ("18",)),
        ("math500", "math/math500.jsonl", 500, ("\\left( 3, \\frac{\\pi}{2} \\right)",)),
        ("aime24", "math/aime24.jsonl", 30, ("204",)),
        ("aime25", "math/aime25.jsonl", 30, ("70",)),
        ("hotpotqa", "qa/hotpotqa.jsonl", 200, ("Frank Lowy",)),
        ("2wiki", "qa/2wiki.jsonl", 200, None),
        ("musique", "qa/musique.jsonl", 200, ("passes over the Rio di Palazzo",)),
        ("bamboogle", "qa/bamboogle.jsonl", 125, ("james madison",)),
        ("simpleqa", "qa/SimpleQA.jsonl", 500, ("Michio Sugeno",)),
    ],
)
def test_the_shared_evaluation_files_are_read(
    name: str, file: str, num: int, first: tuple[str, ...] | None
) -> None:
    if not (DATA / file).exists():
        pytest.skip("the evaluation files of ../shared/data are not here")
    panel = load_benchmark(f"{name}={DATA / file}")
    assert len(panel.tasks) == num and len({task.key for task in panel.tasks}) == num
    assert first is None or panel.tasks[0].answers == first
    assert all(task.question and all(task.answers) for task in panel.tasks)
    assert load_benchmark(f"{name}={DATA / file}", limit=7).tasks == panel.tasks[:7]
    # the golds themselves must be right, but for what a variant normalises away
    for variant in VARIANTS.values():
        graded = [
            variant.grade(task.answers[0], task.answers, panel.benchmark.kind) for task in panel.tasks[:40]
        ]
        assert sum(not one.em for one in graded) <= 1
        if panel.benchmark.kind == "math":
            assert all(one.math for one in graded)


def test_wiki_answers_all_count(hub: types.SimpleNamespace) -> None:
    hub.rows = [{"question": "q", "golden_answers": ["New York", " NYC ", "", "New York"], "metadata": {}}]
    assert load_benchmark("2wiki").tasks[0].answers == ("New York", "NYC")


def test_gaia_skips_tasks_with_an_attachment(hub: types.SimpleNamespace) -> None:
    row = HUB_ROWS["gaia"]
    hub.rows = [{**row, "file_name": "a.xlsx"}, row, {**row, "file_name": None, "Level": 3}]
    panel = load_benchmark("gaia")
    assert panel.num_left_out == 1 and [task.key for task in panel.tasks] == ["gaia-1", "gaia-2"]
    assert [task.metadata["level"] for task in panel.tasks] == ["1", "3"]
    hub.rows = hub.rows[:1]
    with pytest.raises(DataError, match="every task needs an attachment"):
        load_benchmark("gaia")


def test_errors_of_gated_sets_explain_access(hub: types.SimpleNamespace) -> None:
    hub.error = PermissionError("401 gated\nlong story")
    with pytest.raises(
        DataError,
        match=r"^gaia-benchmark/GAIA: cannot load: 401 gated\. GAIA is gated: accept its terms .* gaia=FILE",
    ):
        load_benchmark("gaia")
    with pytest.raises(
        DataError, match=r"cannot load: 401 gated\. BrowseComp must not be published .* browsecomp=FILE"
    ):
        load_benchmark("browsecomp")
    with pytest.raises(DataError, match=r"^openai/gsm8k: cannot load: 401 gated; or give gsm8k=FILE$"):
        load_benchmark("gsm8k")
    hub.error = ValueError()
    with pytest.raises(DataError, match=r"cannot load: ValueError\(\);"):
        load_benchmark("gsm8k")


def test_the_hub_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ToolUnavailable,
        match=r"aime_2024: the hub needs the package datasets .*outrider\[hub\].* aime24=FILE",
    ):
        load_benchmark("aime24")


def test_an_empty_hub_set_is_an_error(hub: types.SimpleNamespace) -> None:
    with pytest.raises(DataError, match="openai/gsm8k: the data set is empty"):
        load_benchmark("gsm8k")


@pytest.mark.parametrize(
    "row",
    [
        {"problem": "not base64", "answer": "eA==", "canary": CANARY},
        {"problem": "//79", "answer": "eA==", "canary": "other"},
    ],
)
def test_a_row_that_cannot_be_decrypted_is_named(tmp_path: Path, row: dict[str, str]) -> None:
    with pytest.raises(DataError, match=r"b\.jsonl:1: cannot decrypt with the row's canary"):
        load_benchmark(f"browsecomp={write(tmp_path, [row], 'b.jsonl')}")


def test_browsecomp_reads_unicode_and_decrypted_copies(tmp_path: Path) -> None:
    long = "Who wrote \u201c\u00c9tudes\u201d? " * 9 + "Who?"
    path = write(
        tmp_path, [{"problem": encrypted(long), "answer": encrypted("Ch\u014din"), "canary": CANARY}]
    )
    assert load_benchmark(f"browsecomp={path}").tasks == (
        Task(key="browsecomp-0", question=long, answers=("Ch\u014din",)),
    )
    plain = write(tmp_path, [{"problem": "q", "answer": "a"}], "plain.jsonl")
    assert load_benchmark(f"browsecomp={plain}").tasks[0].answers == ("a",)


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"question": "q", "answer": 7}, ("7",)),
        ({"problem": "q", "answer": 0.5}, ("0.5",)),
        ({"question": "q", "golden_answers": ["a", "b"]}, ("a", "b")),
        ({"problem": "q", "golden_answers": ["a"]}, ("a",)),
    ],
)
def test_files_without_a_name_are_questions(
    tmp_path: Path, row: dict[str, Any], answers: tuple[str, ...]
) -> None:
    panel = load_benchmark(str(write(tmp_path, [row])))
    assert panel.tasks == (Task(key="mine-0", question="q", answers=answers),)
    assert (panel.benchmark.kind, panel.benchmark.scorer) == ("qa", "f1")


def test_a_parquet_file_under_a_name(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"problem": "q", "answer": 3}]), tmp_path / "a=b.parquet")
    assert load_benchmark(f"AIME25={tmp_path / 'a=b.parquet'}").tasks[0].answers == ("3",)
    assert load_benchmark(str(tmp_path / "a=b.parquet")).tasks[0].key == "a=b-0"


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "gsm8k",
            {"question": "q", "answer": "18"},
            r"mine\.jsonl:1: the answer lacks a number behind '#### '",
        ),
        (
            "gsm8k",
            {"question": "q", "answer": "#### 1/2"},
            r"mine\.jsonl:1: the answer lacks a number behind '#### ', or has other text in that line",
        ),
        (
            "gsm8k",
            {"problem": "q", "answer": "18"},
            r"mine\.jsonl:1: gsm8k needs the columns 'question' and 'answer'; the row has",
        ),
        (
            "math500",
            {"x": 1},
            r"needs the columns 'problem' and 'answer' or 'question' and 'answer'; the row has x",
        ),
        (
            "simpleqa",
            {"question": " ", "answer": "a"},
            r"mine\.jsonl:1: column 'question' must hold a string",
        ),
        (
            "simpleqa",
            {"question": "q", "answer": [" ", ""]},
            r"mine\.jsonl:1: column 'answer' holds no answer",
        ),
        ("simpleqa", {"question": "q", "answer": []}, r"mine\.jsonl:1: column 'answer' holds no answer"),
        (
            "simpleqa",
            {"question": "q", "answer": None},
            r"mine\.jsonl:1: column 'answer' must hold text or numbers, got None",
        ),
        ("simpleqa", {"question": "q", "answer": [True]}, r"must hold text or numbers, got True"),
        ("simpleqa", {"question": "q", "answer": float("nan")}, r"must hold text or numbers, got nan"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, name: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_benchmark(f"{name}={write(tmp_path, [row])}")


def test_unknown_names_and_limits() -> None:
    for name in ("gsm9k", "gsm8k=", "data.csv", ""):
        with pytest.raises(
            ConfigError,
            match=r"unknown task set .* give one of gsm8k, math500, .* or a file \(\.jsonl, \.parquet\)",
        ):
            load_benchmark(name)
    with pytest.raises(ConfigError, match="at least one task, not 0"):
        load_benchmark("gsm8k", limit=0)
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        load_benchmark("gsm8k=gone.jsonl")


def test_the_hash_covers_the_selected_tasks(tmp_path: Path) -> None:
    rows = [{"question": f"q{index}", "answer": "a"} for index in range(3)]
    path = write(tmp_path, rows)
    full, part = load_benchmark(f"simpleqa={path}"), load_benchmark(f"simpleqa={path}", limit=2)
    assert full.panel_hash != part.panel_hash
    assert (
        part.panel_hash == load_benchmark(f"simpleqa={write(tmp_path, rows[:2], 'other.jsonl')}").panel_hash
    )
    assert full.panel_hash != load_benchmark(f"hotpotqa={path}").panel_hash


def test_prompts_ask_for_a_box() -> None:
    task = Task(key="k", question="q?")
    for task_set in BENCHMARKS.values():
        system, user = prompt_messages(task_set, task)
        assert (system.role, user) == ("system", Message(role="user", content="q?"))
        assert system.content == PROMPTS[task_set.kind] and "\\boxed{...}" in system.content
