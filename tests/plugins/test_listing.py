"""``outrider list`` describes every built-in plug-in and preset in its own words, within 80 columns."""

import pytest

from outrider.cli import main
from outrider.plugins.listing import description, rows, summary
from outrider.plugins.registry import BUILT_IN, KINDS, resolve


@pytest.mark.parametrize("kind", KINDS)
def test_every_built_in_name_has_a_description(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = {name: (origin, line) for name, origin, line, _ in rows(kind)}  # type: ignore[arg-type]
    for name in BUILT_IN[kind]:  # type: ignore[index]
        assert description(kind, name) and len(description(kind, name)) <= 94  # type: ignore[arg-type]
    for name, (origin, line) in listed.items():
        assert not origin.startswith("of ") or not line.startswith(("Sets", "The default")), name
    assert main(["list", kind]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 80 and not any("``" in line or line != line.rstrip() for line in printed)
    for name, (origin, line) in listed.items():
        head = next(number for number, text in enumerate(printed) if text.split()[:1] == [name])
        assert line.split()[0] in printed[head + 1] and origin.removeprefix("built in") in printed[head]


def test_other_plug_ins_are_described_by_their_docstrings() -> None:
    class Own:
        """Does a thing. And more."""

    assert summary(Own) == "Does a thing." and description("tools", "own") == ""
    assert resolve("tools", "search").__doc__
