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
    ``smoke`` are the overrides of ``--smoke``. Raises ConfigError where something that it names is not there.
    """
    require_named(settings)
    from outrider.train.state.same_settings import UNSEEN

    given = given_by(recipe, overrides) | dict.fromkeys(given_by(None, smoke), "smoke")
    shown = as_toml(leaves(settings, given=given, unseen=UNSEEN, others=others))
    say(*shown.split("\n"))
    return 0
