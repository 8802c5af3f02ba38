"""The Dockerfile, as far as it can be checked without a container: sources, base, user, order of steps."""

import re
import tomllib
from fnmatch import fnmatch

from tests.packaging.wheels import ROOT

LINES = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text(encoding="utf-8")).splitlines()
STEPS = [tuple(line.split(" ", 1)) for line in LINES if line and not line.startswith("#")]


def arguments(instruction: str) -> list[str]:
    return [text for name, text in STEPS if name == instruction]


def sources() -> list[str]:
    return [name for copied in arguments("COPY") for name in copied.split()[:-1]]


def test_every_copied_source_exists_and_is_sent_to_the_builder() -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert rules[1] == "*" and kept == set(sources())  # nothing else is sent: no run, no environment
    assert all((ROOT / name).exists() for name in sources())
    assert any(fnmatch("src/outrider/__pycache__", rule) for rule in rules)


def test_the_installation_has_all_that_the_package_is_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {project["readme"], *project["license-files"], "src", "recipes"} <= set(sources())
    assert "demo" in project["optional-dependencies"]
    install = arguments("RUN")
    assert "--extra demo" in install[0] and install[1].endswith(".")
    # The requirements are a layer of their own in front of the sources.
    assert STEPS.index(("RUN", install[0])) < STEPS.index(("COPY", "src src"))
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert set(re.findall(r"torch==[\d.]+", install[0])) <= set(pinned)


def test_commands_run_as_an_unprivileged_user_on_any_base() -> None:
    names = [name for name, _ in STEPS]
    assert STEPS[:2] == [("ARG", "BASE=python:3.11-slim"), ("FROM", "${BASE}")] and names.count("FROM") == 1
    [user] = arguments("USER")
    assert user.isdecimal() and int(user) > 0 and f"--uid {user}" in arguments("RUN")[2]
    assert "RUN" not in names[names.index("USER") :]
    assert arguments("ENTRYPOINT") == ['["outrider"]']
