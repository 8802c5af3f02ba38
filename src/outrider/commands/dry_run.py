"""Output of ``--dry-run``."""

from collections.abc import Sequence
from pathlib import Path

from outrider.config import Settings
from outrider.plugins.record import require_named
from outrider.printing import say
from outrider.resolved import given_by, leaves
from outrider.resolved import show as as_toml


def show(
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
    require_named(settings)
    checked = [] if smoke else _checked(settings)
    from outrider.train.state.same_settings import UNSEEN

    given = given_by(recipe, overrides) | dict.fromkeys(given_by(None, smoke), "smoke")
    shown = as_toml(leaves(settings, given=given, unseen=UNSEEN, others=others))
    say(*shown.split("\n"))
    if checked:
        say("", *(f"# {line}".rstrip() for line in checked))
    return 0


def _checked(settings: Settings) -> list[str]:
    """Of a training, or an evaluation on a recipe's tasks: what is there."""
    from outrider.commands.run_checks import check_run
    from outrider.train.settings import RunSettings

    return check_run(settings) if isinstance(settings, RunSettings) else []
