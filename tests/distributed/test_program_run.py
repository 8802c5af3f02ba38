"""Runs from the command line whose rollout workers play programs, call tools of a server, and play worlds
behind one: the same bits again, after a kill too, and nothing is left behind.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.command_runs import CommandRuns
from tests.distributed.processes import blocked_by, children_of, command_of, descendants, wait_until_ended
from tests.distributed.test_remote_run import plain_state, without_transfer
from tests.training.forked import forked_outrider
from tests.training.whole_runs import command, differences, metrics, write_data

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("ray", reason="several processes need the extra 'cluster'")
pytest.importorskip("uvicorn", reason="needs the extra agent")
STEPS = 3
TWO = ("cluster.num_engines=2", "cluster.num_rollout_workers=2")
# rollouts beside an update, of tokens that are one version old
AHEAD = ("cluster.num_rollout_workers=2", "cluster.weights=store", "cluster.max_staleness=1")
ALOFT = (*AHEAD[:2], "cluster.max_staleness=2", "cluster.in_flight=true", "cluster.batching=stream")
STREAM = (*TWO, "cluster.batching=stream")
LAUNCHER = "environments.agent.launcher"
DATA = 'train = {{path = "{root}/tasks.jsonl"}}, test = {{path = "{root}/tasks.jsonl", limit = 3}}'
IN_FLIGHT = (  # without forks
    "algorithm.type=grpo",
    f'environment={{{{type = "agent", function = "tests.environments.agents.programs:chatty", {DATA}}}}}',
    "rollout.max_turns=6",
    "rollout.max_response_tokens=400",
)
BY_COMMAND = (
    "algorithm.type=grpo",
    'environment={{type = "agent", command = ["{python}", "{root}/asking.py", "{{question}}"], '
    f'reward = "tests.environments.agents.programs:score", {DATA}}}}}',
)
MCP = (
    "algorithm.type=grpo",
    "model.name={root}/model-python",  # which calls both tools
    'environment.tools=[{{type = "mcp", name = "places", script = "{root}/places.py"}}]',
)
OPENENV = (
    "algorithm.type=grpo",
    "model.name={root}/model-house",
    'environment={{type = "openenv", observation = ["text"], num_train = 6, num_test = 3, num_sessions = 4, '
    'command = ["{{python}}", "-m", "tests.environments.openenv_worlds", "{{port}}"]}}',
    "rollout.max_turn_tokens=1",
    "rollout.max_response_tokens=1200",
)
ASKING = """
import sys

sys.path.insert(0, {tests!r})
from tests.environments.agents.programs import chat

print(chat([{{"role": "user", "content": sys.argv[1]}}])["content"])
"""
PLACES = '''
from mcp.server import MCPServer

server = MCPServer("places")


@server.tool()
def search(query: str) -> str:
    """Look something up."""
    return f"{query}: hill"


@server.tool()
def python(code: str) -> str:
    """Say it again."""
    return code


server.run()
'''


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    write_data(folder)
    (folder / "asking.py").write_text(ASKING.format(tests=str(Path.cwd())))
    (folder / "places.py").write_text(PLACES)
    return folder


def given(root: Path, run: Path, case: tuple[str, ...], *overrides: str) -> list[str | Path]:
    """The case ``agent`` of whole runs, or else another environment of the case ``grpo``."""
    changed = [one.format(root=root, python=sys.executable) for one in case]
    return [*command(root, run, "grpo" if case else "agent"), *changed, f"train.num_steps={STEPS}",
            "evaluation.every=2", "evaluation.num_tasks=2", *overrides]  # fmt: skip


def played(root: Path, name: str, case: tuple[str, ...], *overrides: str) -> Path:
    CommandRuns().run(*given(root, root / name, case, *overrides))
    return root / name


@pytest.mark.parametrize(("name", "case"), [("function", ()), ("command", BY_COMMAND)])
def test_one_worker_is_one_process_bit_for_bit(root: Path, name: str, case: tuple[str, ...]) -> None:
    alone = root / f"{name}-alone"
    ended = forked_outrider(*given(root, alone, case))
    assert ended.returncode == 0, ended.stderr
    remote = played(root, f"{name}-remote", case, "cluster.weights=store")
    state = f"checkpoints/step-{STEPS:06d}/state.json"
    assert set(differences(alone, remote, num_steps=STEPS)) <= {"metrics.jsonl", state}
    assert without_transfer(alone) == without_transfer(remote)
    assert plain_state(alone / state) == plain_state(remote / state)


@pytest.mark.parametrize(
    ("name", "case", "how", "server"),
    [
        ("two", (), TWO, LAUNCHER),
        ("ahead", (), AHEAD, LAUNCHER),
        ("command", BY_COMMAND, TWO, LAUNCHER),
        ("mcp", MCP, TWO, "places.py"),
        ("openenv", OPENENV, TWO, "openenv_worlds"),
    ],
)
def test_the_same_bits_after_a_kill(
    root: Path, name: str, case: tuple[str, ...], how: tuple[str, ...], server: str
) -> None:
    """And every worker has a server of its own, which ends with the run."""
    whole = played(root, f"{name}-whole", case, *how)
    if not case:
        assert sum(one["branch/num_forks"] for one in steps_of(whole)) > 0
    run = root / f"{name}-killed"
    runs = CommandRuns()
    process = runs.start(*given(root, run, case, *how))
    is_on_record, servers = (run / "checkpoints" / "step-000001" / "state.json").exists, list[list[int]]()
    until = time.monotonic() + 240
    while not (is_on_record() and [len(found) for found in servers] == [1, 1]):
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.02)
        workers = [pid for pid in descendants(process.pid) if "ray::RolloutWorker" in command_of(pid)]
        servers = [[pid for pid in children_of(worker) if server in command_of(pid)] for worker in workers]
    started = [pid for worker in workers for pid in descendants(worker)]
    assert [blocked_by(pid) for (pid,) in servers] == [0, 0]  # workers of Ray block Ctrl-C
    runs.kill(process)
    wait_until_ended(started)
    runs.run("train", "--resume", run, "--progress", "plain")
    assert differences(whole, run, num_steps=STEPS) == []
    assert metrics(whole) == metrics(run)


@pytest.mark.parametrize(("name", "case", "how"), [("stream", (), STREAM), ("aloft", IN_FLIGHT, ALOFT)])
def test_requests_one_by_one(root: Path, name: str, case: tuple[str, ...], how: tuple[str, ...]) -> None:
    """Every rollout has one outcome, and no token is older than it may be."""
    steps = steps_of(played(root, name, case, *how))
    assert len(steps) == STEPS
    for one in steps:
        assert one["rollout/num"] == one["rollout/num_finished"] + one["rollout/num_truncated_turns"] == 8.0
        assert one.get("staleness/max", 0.0) <= 2.0 and one["gap/logprob_max"] < 1e-3


def steps_of(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [one for one in records if one["kind"] == "train"]
