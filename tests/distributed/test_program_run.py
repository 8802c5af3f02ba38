"""Runs from the command line whose rollout workers run programs, call tools of a server, and step
environments behind one: the same bits for any number of workers and after a kill, and nothing is left behind.
"""

import sys
import time
from pathlib import Path

import pytest

from tests.distributed.command_runs import CommandRuns
from tests.distributed.processes import children_of, command_of, descendants, wait_until_ended
from tests.training.whole_runs import command, differences, metrics, write_data

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("uvicorn", reason="needs the extra agent")
STEPS = 3
TWO = ("cluster.num_engines=2", "cluster.num_rollout_workers=2")
AHEAD = ("cluster.num_rollout_workers=2", "cluster.max_staleness=1")
THREE = ("cluster.num_rollout_workers=2", "cluster.max_staleness=3")
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
    """Return the code."""
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
    """Every worker has its own server, which ends with the run."""
    whole = played(root, f"{name}-whole", case, *how)
    run = root / f"{name}-killed"
    runs = CommandRuns()
    checkpoint = run / "checkpoints" / "step-000001" / "state.json"
    process = runs.start_until(checkpoint, *given(root, run, case, *how))
    servers, until = list[list[int]](), time.monotonic() + 240
    while [len(pids) for pids in servers] != [1, 1]:
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.02)
        workers = [pid for pid, command in runs.processes().items() if command.startswith("worker ")]
        servers = [[pid for pid in children_of(worker) if server in command_of(pid)] for worker in workers]
    started = [pid for worker in workers for pid in descendants(worker)]
    runs.kill(process)
    wait_until_ended(started)
    runs.run("train", "--resume", run, "--progress", "plain")
    assert differences(whole, run, num_steps=STEPS) == []
    assert metrics(whole) == metrics(run)


def test_no_token_is_older_than_max_staleness(root: Path) -> None:
    """Every rollout has one outcome."""
    records = metrics(played(root, "three", IN_FLIGHT, *THREE))
    steps = [record for record in records if record["kind"] == "train"]
    assert len(steps) == STEPS
    for step in steps:
        assert (
            step["rollout/num"] == step["rollout/num_finished"] + step["rollout/num_truncated_turns"] == 8.0
        )
        assert step.get("staleness/max", 0.0) <= 3.0 and step["gap/logprob_max"] < 1e-3
