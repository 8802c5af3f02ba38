"""``outrider push``: a run's weights with a model card as a repository of the Hugging Face hub."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of whichever client it has
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from outrider import __version__
from outrider.errors import ConfigError, HubError
from outrider.printing import one_line
from outrider.train.export import checkpoint_of, export_run
from outrider.train.hub.card import Base, base_of, licensed, model_card
from outrider.train.state.checkpoint import step_of
from outrider.train.state.recorded import RECORD, recorded_settings
from outrider.watch.run_directory import read_run

CARD: Final = "README.md"
_LONGEST: Final = 300  # characters of the hub's own words


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What lies on the hub, or would: ``url`` is empty for what was only tried."""

    card: str
    files: tuple[tuple[str, int], ...]
    """Names and sizes in bytes."""
    url: str = ""


def push_run(
    run: Path, repo: str, *, step: int | None = None, private: bool = False, dry_run: bool = False
) -> Pushed:
    """Export the newest checkpoint (or that of ``step``), write its card, and upload both. The address is
    ``$HF_ENDPOINT``, the token that of the login or of ``$HF_TOKEN``.

    Raises :class:`ConfigError` for a name that no repository can have and for ``private`` where there is a
    public one, :class:`CheckpointError` as
    :func:`~outrider.train.export.export_run` does, and :class:`HubError` where the hub fails; the same call
    then goes on, and sends no file again that has arrived.
    """
    _require_name(repo)
    api = HfApi(library_name="outrider", library_version=__version__)
    if not dry_run and get_token() is None:
        raise HubError("no token for the hub: log in with 'hf auth login', or set HF_TOKEN")
    checkpoint = checkpoint_of(run, step)
    settings = recorded_settings(run / RECORD)
    base = base_of(settings.model.name)
    if base.name and not base.license:
        base = _with_license(api, base)
    with tempfile.TemporaryDirectory(prefix="outrider-push-") as scratch:
        folder = Path(scratch) / "model"
        export_run(run, folder, checkpoint=checkpoint)
        template = folder / "chat_template.jinja"
        card = model_card(
            repo, settings, read_run(run), step=step_of(checkpoint), base=base,
            template=template.read_text(encoding="utf-8") if template.is_file() else "",
        )  # fmt: skip
        (folder / CARD).write_text(card, encoding="utf-8")
        files = tuple((one.name, one.stat().st_size) for one in sorted(folder.iterdir()))
        if dry_run:
            return Pushed(card=card, files=files)
        with _told(repo):
            api.create_repo(repo, private=private, exist_ok=True)
            is_public = private and not api.model_info(repo).private
        if is_public:  # it was there already, and the hub says nothing of that
            raise ConfigError(
                f"{repo} is there already and can be read by everybody; nothing was sent: change that in its "
                "settings on the hub, or push without --private"
            )
        with _told(repo):
            told = f"Outrider {__version__}: step {step_of(checkpoint)}"
            api.upload_folder(repo_id=repo, folder_path=folder, commit_message=told)
    return Pushed(card=card, files=files, url=f"{api.endpoint}/{repo}")


def _require_name(repo: str) -> None:
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"--repo {repo!r} is no name of a repository: {one_line(str(error))}") from error
    if "/" not in repo:
        raise ConfigError(f"--repo {repo!r} names no owner: write owner/{repo}")


def _with_license(api: HfApi, base: Base) -> Base:
    """What the hub says of the base; a hub that does not know it, or is not there, says nothing."""
    try:
        about = api.model_info(base.name)
    except (HTTPError, OSError, ValueError):
        return base
    return licensed(base, about.card_data.get("license") if about.card_data else None)


@contextmanager
def _told(repo: str) -> Iterator[None]:
    """One line for whatever the hub or its client says, without the token."""
    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
        # the last two: an answer that lacks what the client looks for
        words = _words(error)
        if token := get_token():
            words = words.replace(token, "(token)")
        raise HubError(
            f"{repo} was not pushed: {words[:_LONGEST]}; the same command goes on where this one ended"
        ) from error


def _words(error: BaseException) -> str:
    if isinstance(error, HfHubHTTPError) and error.server_message:
        return one_line(f"{error.server_message} (status {error.response.status_code})")
    if type(error) is RuntimeError and error.__cause__ is not None:  # of a file, which the cause says more of
        return f"{one_line(str(error))} {_words(error.__cause__)}"
    return one_line(str(error)) or type(error).__name__
