"""Settings of all tests: examples have no deadline, since a busy machine is no fault of the code; the longest
files begin.

The fast tests draw the same examples every time, so that a change fails for what it changed. `make fuzz`
draws others on each call.
"""

import functools
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _BUSY, derandomize=True, max_examples=20)
settings.register_profile("random", _BUSY, print_blob=True)
settings.load_profile(os.environ.get("OUTRIDER_EXAMPLES", "same"))

# `make test` gives each worker whole files. These take longest, and the first of them longest: one that
# began last would leave the other worker without work.
LONGEST = (
    "distributed/test_rank_updates.py",  # the first of the files that share Ray and ranks
    "training/test_resume.py",
    "training/test_algorithm_runs.py",
    "golden/test_golden.py",
    "environments/test_factbook.py",
    "environments/test_agent.py",
    "plugins/test_foreign_package.py",
    "test_first_day.py",
    "training/test_algorithm_runs.py",
    "training/test_families_run.py",
    "distributed/test_rank_run.py",
    "test_papers_smoke.py",
    "learning/test_rapo_learns.py",
    "docsite/test_tutorial.py",
    "environments/test_reasoning_gym.py",
    "environments/test_openenv.py",
    "environments/test_math_pool.py",
    "plugins/test_contracts.py",
    "tools/mcp/test_faults.py",
    "plugins/test_new.py",
    "benchmarks/test_gpu.py",
    "distributed/test_remote_run.py",
    "evaluation/test_endpoint.py",
    "tools/mcp/test_calls.py",
    "environments/test_agent_clients.py",
    "training/test_push.py",
    "learning/test_native_calls_learn.py",
    "learning/test_empo2_learns.py",
    "training/test_pack_update.py",
    "benchmarks/test_learning_toys.py",
    "environments/test_scienceworld_java.py",
    "training/test_damaged_runs.py",
    "algorithms/test_rapo_rollout.py",
    "packaging/test_extras.py",
    "learning/test_three_learn.py",
)


@functools.cache
def _place(file: Path) -> int:
    ends = (number for number, name in enumerate(LONGEST) if file.as_posix().endswith(f"/{name}"))
    return next(ends, len(LONGEST))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only the files change places, so that fixtures of a module stay together; and only for workers, since
    one process makes fixtures of a package once where its files stay together too.
    """
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _place(item.path))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The one of ``--dist loadfile``, for which the files that share Ray and ranks are one file."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            has_shared = "tests/distributed/" in file and not file.endswith("_run.py")
            return "distributed" if has_shared else file

    return Files(config, log)
