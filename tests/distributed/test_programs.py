"""Agent programs of rollout workers: each worker has its own server and launcher; if it is lost, its programs
and their children end, and another worker plays its groups to the same bits.
"""

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
from tests.distributed.processes import children_of, command_of, parent_of, send_signal, wait_until_ended  # noqa: E402
from tests.distributed.test_remote_faults import Crew, bits, crew_with, settings_of  # noqa: E402

if TYPE_CHECKING:
    from outrider.distributed.processes import Cluster

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(300)]

AGENT = '''
"""Starts a process, records both, and continues after its first question when it may."""

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
def crew(cluster: "Cluster", folder: Path, place: Path) -> Iterator[Crew]:
    with crew_with(cluster, settings(folder, place), place) as made:
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
    launchers = {name: len(launchers_of(pid)) for name, pid in crew.pids.items()}
    assert launchers == {"engine 0": 0, "rollout worker 0": 1, "rollout worker 1": 1}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_programs_end_with_their_worker_and_run_again(
    crew: Crew, place: Path, unbroken: RolloutReport, how: signal.Signals
) -> None:
    """Also the processes that they have started, whether the worker died or is ended as silent."""
    worker = crew.pids["rollout worker 1"]
    [launcher] = launchers_of(worker)
    with held(crew, place) as play:
        mine = [launcher, *programs_of(place, launcher, num=4)]
        send_signal(worker, how)
        wait_until_ended(mine)
    assert bits(play()) == bits(unbroken)
    assert crew.counts() == {"cluster/worker_deaths": 1.0, "rollout/num_groups_replayed": 2.0}
    assert len(crew.remote.notes()) == 1
    assert len(launchers_of(crew.pids["rollout worker 1"])) == 1


def test_close_ends_all_processes(crew: Crew, place: Path) -> None:
    launchers = [launcher for pid in crew.pids.values() for launcher in launchers_of(pid)]
    with held(crew, place):
        mine = [pid for launcher in launchers for pid in programs_of(place, launcher, num=4)]
        pids = list(crew.pids.values())
        crew.remote.close()
        wait_until_ended([*launchers, *mine, *pids])


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


def launchers_of(worker: int) -> list[int]:
    return [pid for pid in children_of(worker) if "environments.agent.launcher" in command_of(pid)]
