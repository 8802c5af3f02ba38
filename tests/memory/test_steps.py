"""The step-trace buffer: storing, ranking and querying trajectories, revisions, and invalid input."""

import itertools
import math
import pickle
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.errors import CheckpointError, ConfigError, DataError
from outrider.memory.embedders import HashEmbedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.step_store import StepFilter, StepRecord, history_text, prompt_question, select_best
from outrider.types import Message, Step, Trajectory
from tests.memory.builders import make_trajectory


def open_writer(path: Path, name: str = "buffer.sqlite") -> StepTraceBuffer:
    return StepTraceBuffer(path / name, HashEmbedder(), mode="write")


def everything(buffer: StepTraceBuffer) -> list[StepRecord]:
    """All visible records, through the public query."""
    hits = buffer.query("anything", StepFilter(include_terminal=True), k=10_000)
    return sorted((hit.record for hit in hits), key=lambda record: record.step_id)


def test_a_stored_step_has_its_key_and_value(tmp_path: Path) -> None:
    with open_writer(tmp_path) as buffer:
        trajectory = make_trajectory("a", task="t1", reward=0.5, num_steps=3)
        report = buffer.add_trajectories([trajectory], count_tokens=lambda text: len(text.split()))
        assert (report.num_inserted, report.num_steps_inserted, report.revision) == (1, 3, 1)
        first, second, last = everything(buffer)
    assert first.history_text == "question of t1"
    assert second.history_text == "question of t1\na acts 0\na sees 0"
    assert (second.text, second.observation, second.step_index) == ("a acts 1", "a sees 1", 1)
    assert (second.task_key, second.trajectory_id, second.agent, second.reward) == ("t1", "a", "expert", 0.5)
    assert (second.num_tokens, second.is_terminal, last.is_terminal) == (6, False, True)


def test_same_history_is_nearest(tmp_path: Path) -> None:
    with open_writer(tmp_path) as buffer:
        buffer.add_trajectories([make_trajectory(f"t{i}", task=f"task{i}", num_steps=5) for i in range(20)])
        for record in [record for record in everything(buffer) if not record.is_terminal]:
            (hit,) = buffer.query(record.history_text)
            assert hit.record == record
            assert hit.similarity == pytest.approx(1.0, abs=1e-6)


def test_history_text_is_the_same_for_building_and_querying() -> None:
    prompt = (Message(role="system", content="rules"), Message(role="user", content=" q "))
    steps = [Step(text="think\n", observation="  "), Step(text="act", observation="seen \udce9")]
    assert prompt_question(prompt) == " q "
    assert history_text(prompt_question(prompt), []) == "q"
    assert history_text("q", steps) == "q\nthink\nact\nseen \ufffd"
    assert prompt_question([Message(role="system", content="only")]) == "only"


def test_questions_replace_the_prompt(tmp_path: Path) -> None:
    with open_writer(tmp_path) as buffer:
        buffer.add_trajectories([make_trajectory("a", task="t")], questions={"t": "the bare question"})
        assert everything(buffer)[0].history_text == "the bare question"


def test_terminal_steps_are_retrieved_only_on_request(tmp_path: Path) -> None:
    with open_writer(tmp_path) as buffer:
        buffer.add_trajectories([make_trajectory(f"t{i}", task=f"k{i}", num_steps=4) for i in range(10)])
        terminal = [record for record in everything(buffer) if record.is_terminal]
        assert len(terminal) == 10
        for record in terminal:
            assert not any(hit.record.is_terminal for hit in buffer.query(record.history_text, k=1000))
            assert buffer.query(record.history_text, StepFilter(include_terminal=True))[0].record == record


def test_excluded_steps_never_come_twice(tmp_path: Path) -> None:
    with open_writer(tmp_path) as buffer:
        buffer.add_trajectories([make_trajectory(f"t{i}", task=f"k{i}", num_steps=4) for i in range(6)])
        taken: set[int] = set()
        while hits := buffer.query("question of k2", StepFilter(exclude=frozenset(taken | {0, 999_999}))):
            assert hits[0].record.step_id not in taken
            taken.add(hits[0].record.step_id)
        assert len(taken) == 18


def test_scopes_and_reward_filter(tmp_path: Path) -> None:
    with open_writer(tmp_path) as buffer:
        buffer.add_trajectories(
            [make_trajectory(f"t{i}", task=f"k{i % 3}", reward=i / 10, num_steps=3) for i in range(9)]
        )

        def found(step_filter: StepFilter) -> set[str]:
            return {hit.record.trajectory_id for hit in buffer.query("question of k1", step_filter, k=100)}

        assert found(StepFilter(scope="same_task", task_key="k1")) == {"t1", "t4", "t7"}
        assert found(StepFilter(scope="other_tasks", task_key="k1")) == {"t0", "t2", "t3", "t5", "t6", "t8"}
        assert found(StepFilter(scope="same_task", task_key="unknown")) == set()
        assert len(found(StepFilter(scope="other_tasks", task_key="unknown"))) == 9
        both = {"task_key": "k1", "other_key": "k2"}
        assert found(StepFilter(scope="other_tasks", **both)) == {"t0", "t3", "t6"}  # type: ignore[arg-type]
        assert len(found(StepFilter(scope="same_task", **both))) == 6  # type: ignore[arg-type]
        assert found(StepFilter(min_reward=0.7)) == {"t7", "t8"}
        assert found(StepFilter(scope="same_task", task_key="k1", min_reward=0.5)) == {"t7"}
    with pytest.raises(ConfigError, match="needs a task key"):
        StepFilter(scope="same_task")
    with pytest.raises(ConfigError, match="not one of"):
        StepFilter(scope="mine")  # type: ignore[arg-type]


def test_batched_queries_take_a_filter_each(tmp_path: Path) -> None:
    with open_writer(tmp_path) as buffer:
        buffer.add_trajectories([make_trajectory(f"t{i}", task=f"k{i}", num_steps=3) for i in range(40)])
        histories = [f"question of k{i}" for i in range(40)]
        filters = [
            StepFilter(scope="same_task" if i % 2 else "other_tasks", task_key=f"k{i}") for i in range(40)
        ]
        together = buffer.query_batch(histories, filters, k=2)
        assert together == [buffer.query(h, f, k=2) for h, f in zip(histories, filters, strict=True)]
        assert all((hits[0].record.task_key == f"k{i}") == bool(i % 2) for i, hits in enumerate(together))
        with pytest.raises(ValueError, match="must be"):
            buffer.query_vectors(np.ones((1, 3), np.float32), [StepFilter()])


def reference_filter(portions: list[list[Trajectory]], num_kept: int, min_reward: float) -> set[str]:
    """The specification, written out: repeatedly take the best one left. Unknown token counts come first
    among equals.
    """
    seen: list[Trajectory] = []
    for trajectory in (trajectory for portion in portions for trajectory in portion):
        if all(other.trajectory_id != trajectory.trajectory_id for other in seen):
            seen.append(trajectory)
    kept: set[str] = set()
    for task in {trajectory.task_key for trajectory in seen}:
        left = [t for t in seen if t.task_key == task and t.reward >= min_reward and t.steps]
        for _ in range(min(num_kept, len(left))):
            best = left[0]
            for other in left[1:]:
                fewer = best.num_tokens > 0 and (other.num_tokens == 0 or other.num_tokens < best.num_tokens)
                if other.reward > best.reward or (other.reward == best.reward and fewer):
                    best = other
            kept.add(best.trajectory_id)
            left.remove(best)
    return kept


offers = st.lists(
    st.tuples(
        st.integers(0, 1), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2), st.sampled_from([0, 1, 1, 2])
    ),
    min_size=6,
    max_size=16,
)


@given(offered=offers, num_kept=st.integers(1, 4))
def test_ranking_of_one_task(offered: list[tuple[int, float, int, int]], num_kept: int) -> None:
    trajectories = [
        make_trajectory(f"id{i}", reward=reward, num_tokens=tokens)
        for i, (_, reward, tokens, _) in enumerate(offered)
    ]
    candidates = [(t.reward, t.num_tokens) for t in trajectories]
    expected = reference_filter([trajectories], num_kept, min_reward=0.0)
    assert {f"id{order}" for order in select_best(candidates, num_kept)} == expected
    assert select_best(candidates, None) == set(range(len(offered)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offered=offers,
    cuts=st.lists(st.integers(0, 16), max_size=4),
    num_kept=st.integers(1, 3),
    again=st.booleans(),
)
def test_reward_aware_filter(
    tmp_path_factory: pytest.TempPathFactory,
    offered: list[tuple[int, float, int, int]],
    cuts: list[int],
    num_kept: int,
    again: bool,
) -> None:
    """However the stream is cut into calls, and if calls are repeated, the K best a task remain, and counts
    add up.
    """
    trajectories = [
        make_trajectory(f"id{i}", task=f"k{task}", reward=reward, num_tokens=tokens, num_steps=steps)
        for i, (task, reward, tokens, steps) in enumerate(offered)
    ]
    edges = [0, *sorted(min(cut, len(trajectories)) for cut in cuts), len(trajectories)]
    portions = [trajectories[start:end] for start, end in itertools.pairwise(edges)]
    with open_writer(tmp_path_factory.mktemp("filter")) as buffer:
        num_live = 0
        for portion in portions + (portions[:2] if again else []):
            report = buffer.add_trajectories(portion, keep_best=num_kept, min_reward=0.25, batch_steps=2)
            parts = (report.num_inserted, report.num_present, report.num_duplicate, report.num_empty)
            assert (
                report.num_offered
                == len(portion)
                == sum(parts) + report.num_below_min_reward + report.num_outranked
            )
            num_live += report.num_inserted - report.num_removed
        stats = buffer.stats()
        found = {record.trajectory_id for record in everything(buffer)}
    assert found == reference_filter(portions, num_kept, 0.25)
    assert stats.num_trajectories == len(found) == num_live


def test_earlier_one_stays_among_equals(tmp_path: Path) -> None:
    with open_writer(tmp_path) as buffer:
        for name, reward in (("first", 0.5), ("second", 0.5), ("third", 0.5), ("best", 1.0)):
            buffer.add_trajectories([make_trajectory(name, reward=reward)], keep_best=2)
        assert {record.trajectory_id for record in everything(buffer)} == {"first", "best"}


def test_repeating_a_build_adds_nothing(tmp_path: Path) -> None:
    trajectories = [make_trajectory(f"t{i}", task=f"k{i % 4}") for i in range(12)]
    with open_writer(tmp_path) as buffer:
        buffer.add_trajectories([*trajectories, trajectories[3]])
        before = everything(buffer)
        report = buffer.add_trajectories([*trajectories, trajectories[3]])
        counts = (report.num_inserted, report.num_present, report.num_duplicate, report.revision)
        assert counts == (0, 12, 1, 1)
        assert everything(buffer) == before


def test_odd_texts_survive_and_repairs_are_counted(tmp_path: Path) -> None:
    texts = ["", "\x00 nul \x00", "bad \udce9 byte", "漢字 \U0001f600", "x" * 3_000_000]
    steps = (*(Step(text=text, observation=text[::-1]) for text in texts), Step(text="end", observation=""))
    prompt = (Message(role="user", content="q\udce9"),)
    trajectory = Trajectory(
        trajectory_id="a", task_key="t", agent="e", prompt=prompt, steps=steps, reward=1.0
    )
    with open_writer(tmp_path) as buffer:
        assert (
            buffer.add_trajectories([trajectory]).num_repaired_texts == 2
        )  # the message has repaired its own
    with StepTraceBuffer(tmp_path / "buffer.sqlite", HashEmbedder(), mode="read") as buffer:
        records = buffer.trajectory("a")
        assert [r.text for r in records] == [step.text.replace("\udce9", "\ufffd") for step in steps]
        assert [r.observation for r in records] == [
            step.observation.replace("\udce9", "\ufffd") for step in steps
        ]
        assert buffer.query(history_text("q?", steps[:3]))[0].record == records[3]


def test_rollback_replays_exactly(tmp_path: Path) -> None:
    """A killed run resumed from a checkpoint must see what the run saw that was not killed: ids, order,
    revisions.
    """
    first = [make_trajectory(f"a{i}", task=f"k{i % 3}", reward=0.1 * i) for i in range(6)]
    second = [make_trajectory(f"b{i}", task=f"k{i % 3}", reward=0.9) for i in range(6)]
    third = [make_trajectory(f"c{i}", task=f"k{i % 4}", reward=0.95) for i in range(8)]
    with open_writer(tmp_path) as buffer:
        buffer.add_trajectories(first, keep_best=2, batch_steps=1)
        checkpoint, at_checkpoint = buffer.revision, everything(buffer)
        report = buffer.add_trajectories(second, keep_best=2, batch_steps=1)
        assert report.num_removed == 6
        straight = everything(buffer)
    with open_writer(tmp_path) as buffer:
        buffer.add_trajectories(third, keep_best=2)
        with StepTraceBuffer(buffer.path, HashEmbedder(), mode="read", revision=checkpoint) as old:
            assert everything(old) == at_checkpoint and old.revision == checkpoint
            with pickle.loads(pickle.dumps(old)) as copy:
                assert everything(copy) == at_checkpoint
        assert buffer.rollback(checkpoint) == (6 + 8, 6)  # dropped and restored
        assert (everything(buffer), buffer.revision) == (at_checkpoint, checkpoint)
        buffer.add_trajectories(second, keep_best=2, batch_steps=1)
        assert everything(buffer) == straight
        with pytest.raises(CheckpointError, match="revision 99 is not in the buffer, which contains 0 to"):
            buffer.rollback(99)
    with StepTraceBuffer(tmp_path / "buffer.sqlite", HashEmbedder(), mode="read") as buffer:
        assert everything(buffer) == straight


def test_memory_equals_file_after_every_call(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        for round_index in range(6):
            new = [
                make_trajectory(f"r{round_index}-{i}", task=f"k{i}", reward=round_index + i / 10)
                for i in range(4)
            ]
            writer.add_trajectories(new, keep_best=2, batch_steps=1 + 4 * round_index)
            with StepTraceBuffer(writer.path, HashEmbedder(), mode="read") as reader:
                assert everything(reader) == everything(writer)
                assert (reader.revision, reader.stats()) == (writer.revision, writer.stats())


def test_a_reader_of_an_earlier_revision_sees_its_whole_trajectories(tmp_path: Path) -> None:
    """Retrieval of trajectories reads the steps after a hit, which must not vanish if a better trajectory
    replaces them.
    """
    with open_writer(tmp_path) as writer:
        writer.add_trajectories([make_trajectory("a", reward=0.5)], keep_best=1)
        reader = StepTraceBuffer(writer.path, HashEmbedder(), mode="read")
        with StepTraceBuffer(writer.path, HashEmbedder(), mode="read", revision=1) as pinned:
            steps = writer.trajectory("a")
            writer.add_trajectories([make_trajectory("b", reward=0.9)], keep_best=1)
            assert len(steps) == 3 and pinned.trajectory("a") == reader.trajectory("a") == steps
            assert pinned.trajectory("b") == reader.trajectory("b") == []
        assert writer.trajectory("a") == [] and len(writer.trajectory("b")) == 3
        reader.close()


def test_a_reader_can_be_pinned_to_the_revision_of_a_checkpoint(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.add_trajectories([make_trajectory("a")])
        at_first = everything(writer)
        writer.add_trajectories([make_trajectory("b")])
        reader = StepTraceBuffer(writer.path, HashEmbedder(), mode="read")
        assert len(everything(reader)) == 6
        reader.pin(1)
        assert (everything(reader), reader.revision) == (at_first, 1)
        with pytest.raises(CheckpointError, match="revision 9 is not in the buffer"):
            reader.pin(9)
        assert everything(reader) == at_first
        with pytest.raises(CheckpointError, match="at revision 2, the checkpoint used 1"):
            writer.pin(1)
        reader.close()


def test_flushed_batches_are_in_the_file_itself(tmp_path: Path) -> None:
    """A commit does not force the write-ahead log to disk: after a power failure only the file is sure."""
    with open_writer(tmp_path) as writer:
        writer.add_trajectories([make_trajectory("a")])
        writer.flush()
        writer.flush()
        shutil.copy(writer.path, tmp_path / "after.sqlite")  # without the log beside it
    with StepTraceBuffer(tmp_path / "after.sqlite", HashEmbedder(), mode="read") as reader:
        assert reader.revision == 1 and len(everything(reader)) == 3
        with pytest.raises(DataError, match="opened for reading"):
            reader.flush()


def test_a_reader_keeps_its_revision_and_pickles_by_path(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.add_trajectories([make_trajectory("a")])
        reader = StepTraceBuffer(writer.path, HashEmbedder(), mode="read")
        writer.add_trajectories([make_trajectory("b")])
        assert {r.trajectory_id for r in everything(reader)} == {"a"}
        with pytest.raises(DataError, match="opened for reading"):
            reader.add_trajectories([make_trajectory("c")])
        copy = pickle.loads(pickle.dumps(writer))
        assert everything(copy) == everything(writer)
        # The same revision number with other rows, after a rollback, must be noticed too.
        writer.rollback(1)
        writer.add_trajectories([make_trajectory("d", num_steps=5)])
        for behind in (reader, copy):
            with pytest.raises(DataError, match="rolled back since it was loaded here; open it again"):
                behind.query("question of t")
            behind.close()
        with StepTraceBuffer(writer.path, HashEmbedder(), mode="read") as reader:
            assert everything(reader) == everything(writer)
            assert {r.trajectory_id for r in everything(reader)} == {"a", "d"}


def test_threads_query_while_a_writer_adds(tmp_path: Path) -> None:
    """Every result is of one revision: trajectories are replaced as a whole, so there is always one."""
    failures: list[object] = []
    done = threading.Event()

    def ask(buffer: StepTraceBuffer) -> None:
        while not done.is_set():
            for task in range(3):
                hits = buffer.query(
                    "x", StepFilter(scope="same_task", task_key=f"k{task}", include_terminal=True), k=100
                )
                names = {hit.record.trajectory_id for hit in hits}
                if len(names) != 1 or len(hits) != 3:
                    failures.append(names)

    with open_writer(tmp_path) as buffer:
        buffer.add_trajectories(
            [make_trajectory(f"start{i}", task=f"k{i}", reward=-1.0) for i in range(3)], keep_best=1
        )
        threads = [threading.Thread(target=ask, args=(buffer,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for round_index in range(25):
            new = [
                make_trajectory(f"r{round_index}-{i}", task=f"k{i}", reward=float(round_index))
                for i in range(3)
            ]
            buffer.add_trajectories(new, keep_best=1)
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_sample_is_uniform_over_the_filter_and_seeded(tmp_path: Path) -> None:
    with open_writer(tmp_path) as buffer:
        buffer.add_trajectories([make_trajectory(f"t{i}", task=f"k{i}", num_steps=3) for i in range(2)])

        def draw(seed: int, num: int) -> list[int]:
            generator = np.random.Generator(np.random.PCG64(seed))
            records = [buffer.sample(StepFilter(), generator) for _ in range(num)]
            assert all(record is not None and not record.is_terminal for record in records)
            return [record.step_id for record in records if record is not None]

        drawn = draw(1, 400)
        assert drawn == draw(1, 400) != draw(2, 400)
        counts = [drawn.count(step_id) for step_id in sorted(set(drawn))]
        assert len(counts) == 4 and min(counts) > 70
        assert buffer.sample(StepFilter(min_reward=2.0), np.random.Generator(np.random.PCG64(0))) is None


def test_stats(tmp_path: Path) -> None:
    with open_writer(tmp_path) as buffer:
        assert np.isnan(buffer.stats().reward_quantiles[0]) and buffer.stats().num_steps == 0
        trajectories = [
            make_trajectory(f"t{i}", task=f"k{i % 2}", reward=float(i), num_steps=1 + i, agent="ab"[i % 2])
            for i in range(5)
        ]
        buffer.add_trajectories(trajectories, count_tokens=lambda text: 2)
        stats = buffer.stats()
    assert (stats.num_tasks, stats.num_trajectories, stats.num_steps, stats.num_tokens) == (2, 5, 15, 60)
    assert (stats.num_trajectories_by_agent, stats.num_steps_by_agent) == ({"a": 3, "b": 2}, {"a": 9, "b": 6})
    assert stats.share_terminal == pytest.approx(5 / 15)
    assert stats.steps_per_trajectory_quantiles == (1, 2, 3, 4, 5)
    assert stats.reward_quantiles == (0, 1, 2, 3, 4)


def test_steps_by_id_keep_the_order_and_are_never_of_another_generation(
    tmp_path: Path,
) -> None:
    with open_writer(tmp_path) as buffer:
        assert buffer.lost_batch is False
        buffer.add_trajectories([make_trajectory("a", num_steps=3)])
        revision = buffer.revision
        buffer.add_trajectories([make_trajectory("b", num_steps=2)])
        by_id = {record.step_id: record for record in everything(buffer)}
        wanted = sorted(by_id, reverse=True)
        assert buffer.steps(wanted) == [by_id[step_id] for step_id in wanted] and buffer.steps([]) == []
        with pytest.raises(DataError, match="is not in the buffer"):
            buffer.steps([99])
        with StepTraceBuffer(tmp_path / "buffer.sqlite", HashEmbedder(), mode="read") as reader:
            assert buffer.rollback(revision) == (1, 0) and buffer.revision == revision
            with pytest.raises(DataError, match="open it again"):
                reader.steps([1])
        with StepTraceBuffer(tmp_path / "buffer.sqlite", HashEmbedder(), mode="read") as reader:
            assert [record.step_id for record in reader.steps([2, 1])] == [2, 1]


# Invalid trajectories and options


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[StepTraceBuffer]:
    with open_writer(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize("options", [{"keep_best": 0}, {"keep_best": -1}, {"batch_steps": 0}], ids=str)
def test_counts_below_one_are_errors(buffer: StepTraceBuffer, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        buffer.add_trajectories([make_trajectory("a")], **options)  # type: ignore[arg-type]
    assert len(buffer) == 0 and buffer.revision == 0


def test_the_smallest_counts_are_valid(buffer: StepTraceBuffer) -> None:
    """One trajectory of a task, a revision for each task, and without a bound all of them."""
    offered = [make_trajectory(name, task=task) for name, task in (("a", "s"), ("b", "s"), ("c", "t"))]
    report = buffer.add_trajectories(offered, keep_best=1, batch_steps=1)
    assert (report.num_inserted, report.num_outranked, report.revision) == (2, 1, 2)
    assert buffer.add_trajectories(offered, keep_best=None).num_inserted == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": math.nan}, "trajectory 'a': reward is nan"),
        ({"reward": math.inf}, "trajectory 'a': reward is inf"),
        ({"num_tokens": -1}, "trajectory 'a': num_tokens is -1"),
        ({"num_tokens": 2**63}, "trajectory 'a': num_tokens is"),
        ({"agent": "\ud800"}, "trajectory 'a': .* is not valid text"),
        ({"trajectory_id": "\udce9"}, "is not valid text"),
        ({"task_key": "\ud800"}, "trajectory 'a': .* is not valid text"),
    ],
    ids=str,
)
def test_an_error_names_the_trajectory_and_nothing_is_written(
    buffer: StepTraceBuffer, changes: dict[str, Any], message: str
) -> None:
    wrong = replace(make_trajectory("a"), **changes)
    with pytest.raises(DataError, match=message):
        buffer.add_trajectories([make_trajectory("fine"), wrong])
    with pytest.raises(DataError, match=message):
        buffer.check([wrong])
    assert len(buffer) == 0


def test_an_id_of_another_task_is_an_error_with_both_names(buffer: StepTraceBuffer) -> None:
    """Within one offer, and against what is stored; the same id twice for its own task only counts."""
    with pytest.raises(DataError, match="trajectory 'a': belongs to task 's' and to task 't'"):
        buffer.add_trajectories([make_trajectory("a", task="s"), make_trajectory("a", task="t")])
    report = buffer.add_trajectories([make_trajectory("a", task="s"), make_trajectory("a", task="s")])
    assert (report.num_offered, report.num_inserted, report.num_duplicate) == (2, 1, 1)
    with pytest.raises(DataError, match="trajectory 'a': belongs to task 's' and to task 't'"):
        buffer.add_trajectories([make_trajectory("a", task="t")])


def test_an_id_with_other_content_is_an_error(buffer: StepTraceBuffer) -> None:
    with pytest.raises(DataError, match="trajectory 'a': two trajectories with other steps or rewards"):
        buffer.add_trajectories([make_trajectory("a", reward=0.0), make_trajectory("a", reward=1.0)])


def test_a_trajectory_after_a_repeated_id_is_stored(buffer: StepTraceBuffer) -> None:
    """And tasks are counted by their keys, not by anything else of their trajectories."""
    offered = [make_trajectory(name, task="s", agent=name) for name in ("a", "a", "b")]
    report = buffer.add_trajectories(offered)
    assert (report.num_offered, report.num_inserted, report.num_duplicate) == (3, 2, 1)
    assert buffer.stats().num_tasks == 1
