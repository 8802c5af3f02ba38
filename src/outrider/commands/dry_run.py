"""Output of ``--dry-run``."""

from collections.abc import Sequence
from pathlib import Path

from outrider.config import Settings
from outrider.plugins.record import validate_references
from outrider.printing import print_lines
from outrider.resolved import format_toml as as_toml
from outrider.resolved import key_sources, leaves


def print_settings(
    settings: Settings,
    recipe: Path | None,
    overrides: Sequence[str],
    *,
    others: str = "derived",
    smoke: Sequence[str] = (),
) -> int:
    """The resolved configuration, which :func:`load_settings` reads back, and who set what of it:
    ``smoke`` are the overrides of ``--smoke``, for whose stand-ins nothing is looked up. Raises ConfigError
    if something that the settings name is missing or cannot be used.
    """
    validate_references(settings)
    check_lines = [] if smoke else _check_lines(settings)
    from outrider.train.state.same_settings import UNSEEN

    origins = key_sources(recipe, overrides) | dict.fromkeys(key_sources(None, smoke), "smoke")
    text = as_toml(leaves(settings, sources=origins, unseen=UNSEEN, others=others))
    print_lines(*text.split("\n"))
    if check_lines:
        print_lines("", *(f"# {line}".rstrip() for line in check_lines))
    return 0


def _check_lines(settings: Settings) -> list[str]:
    """Of a training, or an evaluation on a recipe's tasks: what is there."""
    from outrider.commands.run_checks import check_run
    from outrider.train.settings import RunSettings

    return check_run(settings) if isinstance(settings, RunSettings) else []
