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

# `make test` and `make test-fast-and-long` give each worker whole files. These take longest, and the first
# of them longest: one that began last would leave the other worker without work. tests/README.md names the
# tests.
LONGEST = (
    "distributed/test_rank_updates.py",  # the first of the files that share Ray and ranks
    "distributed/test_rank_run.py",
    "golden/test_golden.py",
    "training/test_resume.py",
    "benchmarks/test_campaigns.py",
    "docsite/test_tutorial.py",
    "training/test_algorithm_runs.py",
    "examples/test_notebook.py",
    "packaging/test_extras.py",
    "test_papers_smoke.py",
    "plugins/test_foreign_package.py",
    "plugins/test_new.py",
    "distributed/test_remote_run.py",
    "training/test_adapter_runs.py",
    "environments/test_scienceworld_java.py",
    "learning/test_rapo_learns.py",
    "engines/test_local.py",
    "environments/test_openenv.py",
    "environments/test_math_pairs.py",
    "environments/test_grading_time.py",
    "environments/test_reasoning_gym.py",
    "environments/test_factbook.py",
    "plugins/test_contracts.py",
    "engines/test_flex.py",
    "benchmarks/test_gpu.py",
    "evaluation/test_local_model.py",
    "learning/test_native_calls_learn.py",
    "learning/test_empo2_learns.py",
    "training/test_families_run.py",
    "environments/test_agent_clients.py",
    "environments/test_agent_processes.py",
    "environments/test_agent.py",
    "golden/test_corpus.py",
    "environments/test_verifiers.py",
    "training/test_push.py",
    "environments/test_math_pool.py",
    "algorithms/test_combined.py",
    "rollout/test_branching.py",
    "training/test_resumed_runs.py",
    "evaluation/test_endpoint.py",
    "examples/test_examples.py",
    "test_first_day.py",
    "tools/mcp/test_faults.py",
    "tools/mcp/test_calls.py",
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
