"""pytest under the mutation benchmark: few examples, unchanged tests measured, a stop at a failure."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import coverage
import hypothesis
import pytest

from benchmarks.mutation_children import SURVIVED, live_functions, swap_code
from benchmarks.mutation_targets import SLOW

OPTIONS = (
    "-s",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-p",
    "no:terminal",
    "--strict-markers",
    "-o",
    "addopts=",
)
MARKERS = ("-m", "not slow and not vllm and not wheel and not java")
MAX_EXAMPLES = 25
_SETUP = "|setup"


@dataclass
class Baseline:
    """The unchanged tests: processor and wall seconds of each, and ``tests_of_line`` by source file and line.

    They ran in a fork whose code had been exchanged for itself, as mutants run.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    wall: dict[str, float] = field(default_factory=dict)
    tests_of_line: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    def add(self, file: Path) -> None:
        """What an earlier run wrote about one file of tests."""
        found = json.loads(file.read_text())
        self.seconds |= found["seconds"]
        self.wall |= found["wall"]
        for path, lines in found["tests_of_line"].items():
            mine = self.tests_of_line.setdefault(path, {})
            for line, tests in lines.items():
                mine[int(line)] = mine.get(int(line), []) + tests


class Frugal:
    """Hypothesis with a fixed seed, few examples, no shrinking. With ``seconds``: only those tests, fastest
    first.
    """

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self.seconds = seconds
        self.failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            function = getattr(item, "function", None)
            given = getattr(function, "_hypothesis_internal_use_settings", None)
            if function is not None and given is not None:
                function._hypothesis_internal_use_settings = _few(given)
        items[:] = [item for item in items if not any(name in item.nodeid for name in SLOW)]
        if (seconds := self.seconds) is not None:
            items[:] = [item for item in items if item.nodeid in seconds]
            items.sort(key=lambda item: seconds[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if not session.testsfailed:  # a file that cannot be collected has been noticed
            run_items(session.items, self.failed)
        return True


Serve = Callable[["Serving", Sequence[pytest.Item]], None]


class Serving(Frugal):
    """Hands the collected tests to ``serve`` instead of running them; ``imported``: the lines run so far."""

    def __init__(self, sources: Sequence[str], serve: "Serve") -> None:
        super().__init__()
        self.sources, self.serve = sources, serve
        self.imported: dict[str, set[int]] = {}
        self._enter: Callable[[], None] = lambda: None
        self._coverage = coverage.Coverage(data_file=None, include=list(sources), config_file=False)
        self._coverage.start()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._coverage.stop()
        data = self._coverage.get_data()
        self.imported = {path: set(data.lines(path) or ()) for path in self.sources}
        if not session.testsfailed:
            self.serve(self, session.items)
        return True

    def measure(self, items: Sequence[pytest.Item], kept: Path) -> int:
        """Run the tests of one file, in a fork. The lines of a wide fixture count for all its tests."""
        for (path, _), functions in live_functions(self.sources).items():
            if not swap_code(functions, Path(path).read_text(), path):
                raise AssertionError(f"{path} cannot be exchanged for itself")
        found = Baseline()
        counted = coverage.Coverage(data_file=None, include=list(self.sources), config_file=False)
        counted.start()
        for item, following in zip(items, [*items[1:], None], strict=True):
            self._enter = lambda item=item: counted.switch_context(item.nodeid)
            counted.switch_context(item.nodeid + _SETUP if _has_wide_fixtures(item) else item.nodeid)
            start, wall = time.process_time(), time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            found.seconds[item.nodeid] = time.process_time() - start
            found.wall[item.nodeid] = time.monotonic() - wall
        counted.stop()
        data = counted.get_data()
        for path in set(self.sources) & data.measured_files():
            lines = data.contexts_by_lineno(path)
            every = list(found.seconds)
            found.tests_of_line[path] = {line: _tests(names, every) for line, names in lines.items()}
        if not self.failed:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(asdict(found)))
        return SURVIVED

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        """The fixtures are there."""
        self._enter()


def _has_wide_fixtures(item: pytest.Item) -> bool:
    """Of a module or a session, and the tests' own."""
    found = getattr(item, "_fixtureinfo", None)
    every = [one for each in (found.name2fixturedefs.values() if found else ()) for one in each]
    return any(one.scope != "function" and "/tests/" in one.func.__code__.co_filename for one in every)


def run_items(items: Sequence[pytest.Item], failed: Sequence[str]) -> None:
    """Run tests until one fails."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if failed:
            break


def _tests(contexts: Sequence[str], every: Sequence[str]) -> list[str]:
    names = {context for context in contexts if not context.endswith(_SETUP)}
    return list(every) if len(names) < len(contexts) else sorted(names)


def of_file(items: Sequence[pytest.Item], file: str) -> list[pytest.Item]:
    """The tests of one file."""
    return [item for item in items if os.path.realpath(item.path) == os.path.realpath(file)]


def _few(given: hypothesis.settings) -> hypothesis.settings:
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    number = min(given.max_examples, MAX_EXAMPLES)
    every = list(hypothesis.HealthCheck)
    return hypothesis.settings(
        given,
        max_examples=number,
        derandomize=True,
        database=None,
        phases=phases,
        deadline=None,
        suppress_health_check=every,
    )
