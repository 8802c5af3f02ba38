"""Settings of all tests: examples have no deadline, since a busy machine is no fault of the code; the longest
files begin.

The fast tests draw the same examples every time, so that a change fails for what it changed. `make fuzz`
draws others on each call.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

_BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _BUSY, derandomize=True)
settings.register_profile("random", _BUSY, print_blob=True)
settings.load_profile(os.environ.get("OUTRIDER_EXAMPLES", "same"))

# `make test` gives each worker whole files: one that takes a minute and begins last would leave the other
# without work.
LONGEST = (
    "train/test_resume.py",
    "train/test_mixed_runs.py",
    "train/test_group_family_run.py",
    "train/test_branching_run.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only the files change places, so that fixtures of a module stay together."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))
