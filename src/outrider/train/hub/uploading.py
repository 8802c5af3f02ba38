"""A folder as a repository of the Hugging Face hub: its name, its privacy, and errors in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

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

CARD: Final = "README.md"
_LONGEST: Final = 300  # characters of the hub's own words


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What lies on the hub, or would: ``url`` is empty for what was only tried."""

    card: str
    files: tuple[tuple[str, int], ...]
    """Names and sizes in bytes."""
    url: str = ""


def hub() -> HfApi:
    """The hub's client: the address is ``$HF_ENDPOINT``."""
    return HfApi(library_name="outrider", library_version=__version__)


def require_target(repo: str, *, dry_run: bool) -> None:
    """Raises ConfigError for a name that no repository can have, HubError where nobody is logged in."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"--repo {repo!r} is no name of a repository: {one_line(str(error))}") from error
    if "/" not in repo:
        raise ConfigError(f"--repo {repo!r} names no owner: write owner/{repo}")
    if not dry_run and get_token() is None:
        raise HubError("no token for the hub: log in with 'hf auth login', or set HF_TOKEN")


def list_files(folder: Path) -> tuple[tuple[str, int], ...]:
    """What a push of the folder sends: names and sizes in bytes."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return tuple((path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths)


def upload(
    api: HfApi, folder: Path, repo: str, *, kind: Literal["model", "dataset"], private: bool, message: str
) -> str:
    """Send a folder; its address. The repository is made where it is not there, and ``message`` is the commit's
    message. Raises ConfigError for ``private`` where there is a public one, HubError where the hub fails; the
    same call then goes on, and sends no file again that has arrived.
    """
    with _hub_errors(repo):
        api.create_repo(repo, private=private, exist_ok=True, repo_type=kind)
        is_public = private and not api.repo_info(repo, repo_type=kind).private
    if is_public:  # it was there already, and the hub says nothing of that
        raise ConfigError(
            f"{repo} is there already and can be read by everybody; nothing was sent: change that in its "
            "settings on the hub, or push without --private"
        )
    with _hub_errors(repo):
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, repo_type=kind)
    return f"{api.endpoint}/{'datasets/' if kind == 'dataset' else ''}{repo}"


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """One line for whatever the hub or its client says, without the token."""
    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
        # the last two: an answer that lacks what the client looks for
        words = _format_error(error)
        if token := get_token():
            words = words.replace(token, "(token)")
        raise HubError(
            f"{repo} was not pushed: {words[:_LONGEST]}; the same command goes on where this one ended"
        ) from error


def _format_error(error: BaseException) -> str:
    if isinstance(error, HfHubHTTPError) and error.server_message:
        return one_line(f"{error.server_message} (status {error.response.status_code})")
    if type(error) is RuntimeError and error.__cause__ is not None:  # of a file, which the cause says more of
        return f"{one_line(str(error))} {_format_error(error.__cause__)}"
    return one_line(str(error)) or type(error).__name__
