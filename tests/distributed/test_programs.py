"""Agent programs under rollout workers over real Ray: each worker has its own server and launcher; one that
is gone takes its programs and what they started along, and another one plays its groups to the same bits.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

from outrider.config import validate  # noqa: E402
from outrider.plugins import imports  # noqa: E402
from outrider.rollout.scheduler import RolloutReport  # noqa: E402
from outrider.training.settings import RunSettings  # noqa: E402
from outrider.types import Outcome  # noqa: E402
from tests.distributed.processes import blocked_by, children_of, command_of, parent_of, wait_until_ended  # noqa: E402
from tests.distributed.test_remote_faults import Crew, bits, crew_with, settings_of  # noqa: E402
from tests.environments.verifiers_fake.make import write_fake  # noqa: E402

if TYPE_CHECKING:
    from outrider.distributed.ray_session import Session

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(300)]

AGENT = '''
"""Starts a process of its own, tells of both, and goes on behind its first question once it may."""

import os
import subprocess
import time
from pathlib import Path

from tests.environments.agents.programs import chat

HERE = Path(__file__).parent


def run(task):
    started = subprocess.Popen(["sleep", "3600"])
    messages = [{"role": "user", "content": task.question}]
    messages += [chat(messages), {"role": "user", "content": "and?"}]
    (HERE / f"pids-{os.getpid()}-{started.pid}").touch()
    while (HERE / "held").exists():
        time.sleep(0.02)
    messages.append(chat(messages))
    return sum(len(one["content"]) for one in messages) % 5 / 4
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a recipe: an agent's module lies beside it."""
    made = tmp_path_factory.mktemp("programs")
    (made / "held_agent.py").write_text(AGENT)
    rows = "".join(f'{{"question": "what is {n}?", "answer": "{n}"}}\n' for n in range(4))
    (made / "tasks.jsonl").write_text(rows)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(imports, "_folders", [])
        imports.add_search_folder(made)
        yield made


def settings(folder: Path, place: Path, **changed: Any) -> RunSettings:
    data = {"path": str(place / "tasks.jsonl")}
    agent = {"type": "agent", "function": "held_agent:run", "train": data, "test": data}
    given = settings_of(folder, num_engines=1).model_dump(exclude_unset=True)
    return validate(RunSettings, {**given, "environment": agent, **changed})


@pytest.fixture(scope="module")
def crew(session: "Session", folder: Path, place: Path) -> Iterator[Crew]:
    with crew_with(session, settings(folder, place), place) as made:
        yield made


@pytest.fixture(scope="module")
def unbroken(crew: Crew) -> RolloutReport:
    return crew.play()


def test_each_worker_has_its_own_launcher_and_equal_groups_have_the_same_bits(
    crew: Crew, unbroken: RolloutReport
) -> None:
    leaves = [leaf for trace in unbroken.traces for leaf in trace.leaves.values()]
    assert [leaf.outcome for leaf in leaves] == [Outcome.FINISHED] * 8, unbroken.fault_reasons
    assert bits(crew.play()) == bits(unbroken)
    launchers = [launchers_of(pid) for pid in (*crew.remote.worker_pids, *crew.remote.engine_pids)]
    assert [len(found) for found in launchers] == [1, 1, 0]


def test_several_workers_generate_the_tokens_of_one_process(crew: Crew, unbroken: RolloutReport) -> None:
    for one, other in zip(crew.play_here().traces, unbroken.traces, strict=True):
        assert [node.token_ids for node in one.nodes] == [node.token_ids for node in other.nodes]
        assert one.leaves == other.leaves


@pytest.mark.parametrize(
    "how",
    ["ended", pytest.param("killed", marks=pytest.mark.slow), pytest.param("silent", marks=pytest.mark.slow)],
)
def test_programs_end_with_their_worker_and_run_again(
    crew: Crew, place: Path, unbroken: RolloutReport, how: str
) -> None:
    """Also what they have started, whoever ends it: the kernel, Ray, or the run that takes it for dead."""
    worker = crew.remote.worker_pids[1]
    [launcher] = launchers_of(worker)
    with held(crew, place) as play:
        mine = [launcher, *programs_of(place, launcher, num=4)]
        assert {blocked_by(pid) for pid in mine} == {0}  # those of Ray block Ctrl-C
        if how == "ended":
            crew.remote._session.ray.kill(crew.remote.workers[1], no_restart=True)
        else:
            os.kill(worker, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how != "silent":  # else it is ended once the others have played
            wait_until_ended(mine)
    wait_until_ended(mine)
    assert bits(play()) == bits(unbroken)
    counts = {name: one for name, one in crew.remote.repairs.pop_counts().items() if one}
    assert counts == {"cluster/worker_deaths": 1.0, "rollout/num_groups_replayed": 2.0}
    assert len(crew.remote.notes()) == 1
    assert len(launchers_of(crew.remote.worker_pids[1])) == 1


def test_close_ends_all_processes(crew: Crew, place: Path) -> None:
    launchers = [one for pid in crew.remote.worker_pids for one in launchers_of(pid)]
    with held(crew, place):
        mine = [one for launcher in launchers for one in programs_of(place, launcher, num=4)]
        crew.remote.close()
        wait_until_ended([*launchers, *mine, *crew.remote.worker_pids])


@pytest.mark.slow
def test_each_worker_runs_verifiers_in_a_process_of_its_own(
    session: "Session", folder: Path, place: Path, tmp_path: Path
) -> None:
    write_fake(tmp_path)
    imports.add_search_folder(tmp_path)
    rows = ("good", "two", "raise", "other", "held out")
    splits = {"num_train": 4, "num_valid": 0, "num_test": 1}
    given = {"type": "verifiers", "id": "fake_taskset", "options": {"taskset": {"rows": rows}}, **splits}
    with crew_with(session, settings(folder, place, environment=given), tmp_path) as crew:
        unbroken = crew.play()
        leaves = [list(trace.leaves.values()) for trace in unbroken.traces]
        assert [[leaf.episode_return for leaf in group] for group in leaves] == [
            [0.75, 0.75], [0.5, 0.5], [None, None], [0.75, 0.75],
        ]  # fmt: skip
        assert {leaf.outcome for leaf in leaves[2]} == {Outcome.ENVIRONMENT_FAULT}
        players = [
            player for pid in crew.remote.worker_pids for player in started_by(pid, "verifiers/player")
        ]
        assert len(players) == 2
        os.kill(crew.remote.worker_pids[0], signal.SIGKILL)
        wait_until_ended(players[:1])
        assert bits(crew.play()) == bits(unbroken)
        players[:1] = started_by(crew.remote.worker_pids[0], "verifiers/player")
    wait_until_ended(players)


class held:
    """A batch that is played meanwhile, whose programs wait between their two questions."""

    def __init__(self, crew: Crew, place: Path) -> None:
        self._processes, self._held = crew, place / "held"
        self._found: list[RolloutReport] = []
        self._thread = threading.Thread(target=self._play)

    def _play(self) -> None:
        try:
            self._found.append(self._processes.play())
        except Exception:  # of a crew that was ended
            return

    def __enter__(self) -> Callable[[], RolloutReport]:
        for one in self._held.parent.glob("pids-*"):
            one.unlink()
        self._held.touch()
        self._thread.start()
        return lambda: self._found[0]

    def __exit__(self, *given: Any) -> None:
        self._held.unlink()
        self._thread.join(120)


def programs_of(place: Path, launcher: int, *, num: int) -> list[int]:
    """The programs that wait under a launcher, and the processes that they started."""
    until = time.monotonic() + 60
    while True:
        pairs = [list(map(int, one.name.split("-")[1:])) for one in place.glob("pids-*")]
        mine = [pid for pair in pairs if parent_of(pair[0]) == launcher for pid in pair]
        if len(mine) == 2 * num:
            return mine
        assert time.monotonic() < until, f"{len(mine)} of {2 * num} wait"
        time.sleep(0.02)


def started_by(worker: int, words: str) -> list[int]:
    """The processes that one has started whose command has these words."""
    return [one for one in children_of(worker) if words in command_of(one)]


def launchers_of(worker: int) -> list[int]:
    return started_by(worker, "environments.agent.launcher")
