"""What ``--dry-run`` prints."""

from outrider.config import Settings, to_toml


def show(settings: Settings) -> int:
    """The resolved configuration, which :func:`load_settings` reads back."""
    print(to_toml(settings.model_dump(mode="json")))
    return 0
