"""``outrider data``: downloads from a server on 127.0.0.1 that breaks off, ignores ranges or sends other
bytes; archives and folders of several releases.
"""

import errno
import fcntl
import hashlib
import json
import re
import shlex
import shutil
import threading
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import downloads
from outrider.cli import main
from outrider.commands import data as command
from outrider.config import load_settings
from outrider.downloads import (
    DataFile,
    DataSet,
    FileState,
    check_commands,
    check_file,
    check_unpacked,
    download,
    unpack,
)
from outrider.errors import ConfigError, DataError
from outrider.training.settings import RunSettings

ROOT = Path(__file__).parents[1]
CONTENT = bytes(range(256)) * 40
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Server:
    """Serves ``files`` by path. ``limits`` are the lengths after which the next responses break off."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    limits: list[int] = field(default_factory=list)
    supports_ranges: bool = True
    max_range: int | None = None
    has_total: bool = True
    offset: int = 0  # between the requested range and the one that is sent
    retry_after: str | None = None
    waits: list[float] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    content_type: str = "application/octet-stream"
    requests: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    def file(self, path: str = "a.bin", **changes: Any) -> DataFile:
        values = {"num_bytes": len(CONTENT), "sha256": DIGEST, "urls": (f"{self.url}/{path}",)} | changes
        return DataFile(name="a.bin", **values)


class _Handler(BaseHTTPRequestHandler):
    state: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        state = self.state
        state.requests.append((self.path, dict(self.headers)))
        content = state.files.get(self.path)
        status = state.statuses.pop(0) if state.statuses else 200
        if content is None or status != 200:
            self.send_response(404 if content is None else status)
            if state.retry_after is not None:
                self.send_header("Retry-After", state.retry_after)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        body = content
        if start and state.supports_ranges:
            first = int(start[1]) + state.offset
            body = content[first:][: state.max_range]
            self.send_response(206 if body else 416)
            sent = f"{first}-{first + len(body) - 1}" if body else "*"
            total = len(content) if state.has_total or not body else "*"
            self.send_header("Content-Range", f"bytes {sent}/{total}")
        else:
            self.send_response(200)
        self.send_header("Content-Type", state.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if state.limits and state.limits[0] < len(body):
            body, self.close_connection = body[: state.limits[0]], True
        if state.limits:
            state.limits.pop(0)
        self.wfile.write(body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    state = Server(files={"/a.bin": CONTENT})
    monkeypatch.setattr(downloads.time, "sleep", state.waits.append)
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    http.daemon_threads = True
    state.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield state
    http.shutdown()
    http.server_close()
    thread.join()


def _ranges(server: Server) -> list[str | None]:
    return [headers.get("Range") for _, headers in server.requests]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- One file ---


def test_a_file_is_downloaded_and_verified(server: Server, tmp_path: Path) -> None:
    sizes: list[int] = []
    assert download(server.file(), tmp_path / "new", sizes.append) == DIGEST
    assert (tmp_path / "new" / "a.bin").read_bytes() == CONTENT and _names(tmp_path / "new") == ["a.bin"]
    assert sizes[-1] == len(CONTENT) and check_file(server.file(), tmp_path / "new")[0] is FileState.OK


def test_a_broken_connection_is_continued(server: Server, tmp_path: Path) -> None:
    server.limits = [1000, 500]
    download(server.file(), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert _ranges(server) == [None, "bytes=1000-", "bytes=1500-"]


@pytest.mark.parametrize("has_total", [True, False])
def test_capped_ranges_are_continued(server: Server, tmp_path: Path, has_total: bool) -> None:
    """RFC 9110: a server may send less than the requested range, and ``*`` for the size of the file."""
    server.max_range, server.has_total = 4000, has_total
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:1000])
    download(server.file(), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert _ranges(server) == ["bytes=1000-", "bytes=5000-", "bytes=9000-"]


def test_another_range_than_the_requested_one_keeps_the_part(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:1000])
    server.offset = 10
    with pytest.raises(DataError, match="did not continue the file at byte 1,000; run the command again"):
        download(server.file(), tmp_path)
    assert (tmp_path / "a.bin.part").read_bytes() == CONTENT[:1000]


def test_the_next_command_continues_an_unfinished_file(server: Server, tmp_path: Path) -> None:
    server.limits = [1000] + [0] * 20
    with pytest.raises(DataError, match="run the command again to continue"):
        download(server.file(), tmp_path)
    assert _names(tmp_path) == ["a.bin.part"]
    assert check_file(server.file(), tmp_path) == (FileState.INCOMPLETE, "1,000 of 10,240 bytes")
    server.limits, server.requests = [], []
    download(server.file(), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and _ranges(server) == ["bytes=1000-"]


def test_a_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    server.supports_ranges, server.limits = False, [1000]
    download(server.file(), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and len(server.requests) == 2


def test_a_complete_part_needs_no_request(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    download(server.file(), tmp_path)
    assert _names(tmp_path) == ["a.bin"] and not server.requests


def test_a_part_with_a_wrong_beginning_is_removed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(bytes(5000))
    with pytest.raises(DataError, match="the download was removed"):
        download(server.file(), tmp_path)
    assert _names(tmp_path) == []


def test_a_part_that_is_too_long_is_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(bytes(20_000))
    download(server.file(), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and _ranges(server) == [None]


@pytest.mark.parametrize("size", [1000, 9000])
def test_the_rest_of_a_file_of_another_size_is_not_appended(
    server: Server, tmp_path: Path, size: int
) -> None:
    """The server's file is shorter: a range inside of it has another total, one behind it is status 416."""
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:size])
    server.files["/a.bin"] = CONTENT[:9000]
    with pytest.raises(DataError, match=r"9,000 bytes, expected 10,240; a\.bin\.part was removed"):
        download(server.file(), tmp_path)
    assert _names(tmp_path) == []


def test_a_wrong_digest_is_refused_and_names_both(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"SHA-256 {DIGEST}, expected {'0' * 64}"):
        download(server.file(sha256="0" * 64), tmp_path)
    assert _names(tmp_path) == []


@pytest.mark.parametrize("num_bytes", [100, 20_000])
def test_a_wrong_size_is_refused(server: Server, tmp_path: Path, num_bytes: int) -> None:
    with pytest.raises(DataError, match=f"10,240 bytes, expected {num_bytes:,}"):
        download(server.file(num_bytes=num_bytes), tmp_path)
    assert _names(tmp_path) == []


def test_a_web_page_in_place_of_the_file_is_an_error(server: Server, tmp_path: Path) -> None:
    server.content_type = "text/html; charset=utf-8"
    with pytest.raises(DataError, match=r"sent a web page in place of the file.* store it as a\.bin"):
        download(server.file(), tmp_path)
    assert _names(tmp_path) == []


def test_a_missing_file_is_an_error(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.bin: status 404"):
        download(server.file("gone.bin"), tmp_path)
    assert _names(tmp_path) == [] and len(server.requests) == 1


def test_the_next_address_is_used_if_the_first_fails(server: Server, tmp_path: Path) -> None:
    download(server.file(urls=(f"{server.url}/gone.bin", f"{server.url}/a.bin")), tmp_path)
    assert [path for path, _ in server.requests] == ["/gone.bin", "/a.bin"]


def test_an_overloaded_server_is_tried_again(server: Server, tmp_path: Path) -> None:
    server.statuses = [503, 429]
    download(server.file(), tmp_path)
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("retry_after", "wait_s"),
    [
        ("7", 7.0),
        ("3600", 60.0),
        ("Fri, 01 Jan 2100 00:00:00 GMT", 60.0),
        ("Mon, 01 Jan 2001 00:00:00 GMT", 1.0),
        ("soon", 1.0),
    ],
)
def test_retry_after_is_respected_up_to_a_minute(
    server: Server, tmp_path: Path, retry_after: str, wait_s: float
) -> None:
    server.statuses, server.retry_after = [429], retry_after
    download(server.file(), tmp_path)
    assert server.waits == [wait_s]


def test_a_server_that_stays_down_is_an_error(server: Server, tmp_path: Path) -> None:
    server.statuses = [503] * 20
    with pytest.raises(DataError, match="status 503"):
        download(server.file(), tmp_path)
    assert len(server.requests) == 5 and _names(tmp_path) == []


def test_without_a_digest_the_result_is_reported(server: Server, tmp_path: Path) -> None:
    file = server.file(sha256=None)
    assert download(file, tmp_path) == DIGEST
    state, detail = check_file(file, tmp_path)
    assert state is FileState.UNKNOWN and DIGEST in detail


def test_a_second_process_is_refused(server: Server, tmp_path: Path) -> None:
    with (tmp_path / "a.bin.part").open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process"):
            download(server.file(), tmp_path)


def test_a_full_disk_keeps_the_part(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.limits = [1000]
    append = downloads._Part.append

    def fails_later(part: Any, chunk: bytes) -> None:
        if part.size:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(part, chunk)

    monkeypatch.setattr(downloads._Part, "append", fails_later)
    with pytest.raises(OSError, match="No space left"):
        download(server.file(), tmp_path)
    assert (tmp_path / "a.bin.part").read_bytes() == CONTENT[:1000]


def test_files_of_the_hub_come_from_the_endpoint_with_the_token(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"{server.url}/mirror/")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    path = "/datasets/o/n/resolve/main/a.bin"
    server.files[f"/mirror{path}"] = CONTENT
    download(server.file(urls=(f"https://huggingface.co{path}",)), tmp_path)
    [(requested, headers)] = server.requests
    assert requested == f"/mirror{path}" and headers["Authorization"] == "Bearer hf_secret"
    server.requests.clear()
    download(server.file(), tmp_path)
    assert "Authorization" not in server.requests[0][1]


# --- The command ---


@pytest.fixture
def known(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, DataSet]:
    """One set of a small file, in an empty current folder."""
    known = {
        "small": DataSet(
            title="A file", purpose="tests", licence="MIT", files=(server.file(),),
            after=("read {dir}/a.bin",),
        ),
    }  # fmt: skip
    monkeypatch.setattr(command, "data_sets", lambda: known)
    monkeypatch.chdir(tmp_path)
    return known


def test_get_list_and_check(
    known: dict[str, DataSet], server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "list"]) == 0 and "here     no" in capsys.readouterr().out
    assert main(["data", "get", "small"]) == 0
    out = capsys.readouterr().out
    assert f"data/small/a.bin: verified; SHA-256 {DIGEST}" in out and "  read data/small/a.bin" in out
    assert main(["data", "get", "small"]) == 0 and "exists (ok" in capsys.readouterr().out
    assert len(server.requests) == 1
    assert main(["data", "list"]) == 0 and "1 of 1 file in data/small" in capsys.readouterr().out
    assert main(["data", "check", "data/small"]) == 0
    assert capsys.readouterr().out == f"ok          small  a.bin: 10,240 bytes, SHA-256 {DIGEST}\n"


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.bin", CONTENT[:-1], "differs     small  a.bin: 10,239 bytes, expected 10,240"),
        ("a.bin", bytes(len(CONTENT)), f"expected {DIGEST}"),
        ("a.bin.part", CONTENT[:-1], "incomplete  small  a.bin: 10,239 of 10,240 bytes"),
    ],
)
def test_check_fails_for_other_files(
    known: dict[str, DataSet],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes,
    line: str,
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["data", "check", "."]) == 1
    assert line in capsys.readouterr().out


def test_check_of_a_folder_without_known_files_is_an_error(
    known: dict[str, DataSet], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "check", "."]) == 1
    assert "contains no file of a known data set" in capsys.readouterr().err


def test_check_of_a_folder_that_does_not_exist_is_an_error(
    known: dict[str, DataSet], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "check", "nowhere"]) == 1
    assert "nowhere does not exist" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["data", "check", "file"]) == 1
    assert "file is not a folder" in capsys.readouterr().err


def test_check_names_a_missing_file(
    known: dict[str, DataSet], server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    second = server.file().model_copy(update={"name": "b.bin"})
    known["small"] = known["small"].model_copy(update={"files": (server.file(), second)})
    (tmp_path / "a.bin").write_bytes(CONTENT)
    assert main(["data", "check", "."]) == 1
    assert "missing     small  b.bin: 10,240 bytes" in capsys.readouterr().out


def test_get_does_not_replace_another_file(
    known: dict[str, DataSet], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.bin").write_bytes(b"mine")
    assert main(["data", "get", "small", "--dir", "."]) == 1
    assert "4 bytes, expected 10,240; remove it" in capsys.readouterr().err
    assert (tmp_path / "a.bin").read_bytes() == b"mine"


def test_get_needs_space(
    known: dict[str, DataSet],
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command.shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    assert main(["data", "get", "small"]) == 1
    assert "10.2 kB are needed, but only 10.0 kB are free" in capsys.readouterr().err
    assert not server.requests


def test_a_large_set_needs_a_confirmation(
    known: dict[str, DataSet],
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "LARGE", 10_000)
    assert main(["data", "get", "small"]) == 2
    assert "needs a download of 10.2 kB: repeat the command with --yes" in capsys.readouterr().err
    assert not server.requests
    assert main(["data", "get", "small", "--yes"]) == 0


def test_a_set_without_files_prints_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "scienceworld"]) == 0
    assert '  pip install "outrider[scienceworld]"' in capsys.readouterr().out.splitlines()


# --- The data sets of the package ---


def test_the_known_data_sets_are_complete() -> None:
    assert {"alfworld", "webshop-small", "search-qa"} <= set(downloads.data_sets())
    for data_set in downloads.data_sets().values():
        assert data_set.title and data_set.purpose and data_set.licence and data_set.after
        for file in data_set.files:
            assert all(url.startswith("https://") for url in file.urls) and file.num_bytes > 0
            assert Path(file.name).name == file.name
            assert re.fullmatch("[0-9a-f]{64}", file.sha256) if file.sha256 else len(file.urls) == 1


@pytest.mark.parametrize("name", downloads.data_sets())
def test_the_commands_after_a_download_have_valid_settings(name: str) -> None:
    for line in downloads.data_sets()[name].after:
        words = shlex.split(line.replace("{dir}", f"data/{name}"), comments=True)
        if words[:2] != ["outrider", "train"]:
            continue
        try:
            load_settings(RunSettings, file=ROOT / words[2], overrides=words[5:])
        except ConfigError as error:  # the files do not exist here
            assert re.search("no such file|does not exist", str(error)), error


# --- Archives of several releases in one folder ---

GAMES = {
    "json_2.1.1/train/a/game.tw-pddl": b"game a",
    "json_2.1.1/train/b/game.tw-pddl": b"game b",
}
TEXTS = {"json_2.1.1/train/a/traj_data.json": b"{}", "json_2.1.1/train/a/game.tw-pddl": b"an older game"}


def _archive(path: Path, files: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_archives_are_unpacked_once_and_the_last_one_wins(tmp_path: Path) -> None:
    archives = [_archive(tmp_path / "json.zip", TEXTS), _archive(tmp_path / "games.zip", GAMES)]
    assert unpack(archives, tmp_path, "json_2.1.1") == 3
    assert (tmp_path / "json_2.1.1/train/a/game.tw-pddl").read_bytes() == b"game a"
    assert unpack(archives, tmp_path, "json_2.1.1") == 0
    (tmp_path / "json_2.1.1/train/b/game.tw-pddl").unlink()
    (tmp_path / "json_2.1.1/train/a/traj_data.json").write_bytes(b"{")
    assert unpack(archives, tmp_path, "json_2.1.1") == 2
    state, detail = check_unpacked(archives, tmp_path, "json_2.1.1")
    assert state is FileState.OK and detail == "2 games, those of games.zip"


def test_games_of_another_release_are_not_mixed(tmp_path: Path) -> None:
    unpack([_archive(tmp_path / "old.zip", GAMES)], tmp_path, "json_2.1.1")
    changed = dict.fromkeys(GAMES, b"other!") | {"json_2.1.1/train/c/game.tw-pddl": b"new"}
    new = _archive(tmp_path / "new.zip", changed)
    with pytest.raises(DataError, match=r"differs from the game in new\.zip: another release"):
        unpack([new], tmp_path, "json_2.1.1")
    assert not (tmp_path / "json_2.1.1/train/c").exists()
    (tmp_path / "json_2.1.1/train/b/game.tw-pddl").write_bytes(b"other!")
    state, detail = check_unpacked([tmp_path / "old.zip", new], tmp_path, "json_2.1.1")
    assert state is FileState.DIFFERS
    assert detail == "2 games: 1 of the 2 games of old.zip, 1 of the 3 games of new.zip"


def test_games_with_different_commands_are_of_mixed_releases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also without the archives, by which a folder is usually checked. The command was renamed in 0.4."""
    template = 'action PutObject {\n    template :: "%s";\n}'
    games = {"a": "move {o} to {r}", "b": "move {o} to {r}", "c": "put {o} in/on {r}"}
    for name, put in games.items():
        folder = tmp_path / "json_2.1.1" / "train" / name
        folder.mkdir(parents=True)
        (folder / "game.tw-pddl").write_text(json.dumps({"grammar": template % put}))
    state, detail = check_commands(tmp_path, "json_2.1.1")
    assert state is FileState.DIFFERS
    assert '"move {o} to {r}" in 2 games, "put {o} in/on {r}" in 1 games' in detail
    assert main(["data", "check", str(tmp_path)]) == 1
    assert "releases are mixed" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "json_2.1.1" / "train" / "c")
    assert check_commands(tmp_path, "json_2.1.1")[0] is FileState.OK


def test_games_without_an_archive_get_a_digest(tmp_path: Path) -> None:
    unpack([_archive(tmp_path / "games.zip", GAMES)], tmp_path, "json_2.1.1")
    state, detail = check_unpacked([], tmp_path, "json_2.1.1")
    assert state is FileState.UNKNOWN and re.search("2 games.*SHA-256 of all is [0-9a-f]{64}", detail)


@pytest.mark.parametrize(
    "name", ["../evil", "/evil", "json_2.1.1/../../evil", "json_2.1.1/..\\evil", "other/file"]
)
def test_a_path_outside_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    archive = _archive(folder / "games.zip", GAMES | {name: b"evil"})
    with pytest.raises(DataError, match="nothing was unpacked"):
        unpack([archive], folder, "json_2.1.1")
    assert _names(folder) == ["games.zip"] and _names(tmp_path) == ["data"]


def test_a_damaged_archive_is_an_error(tmp_path: Path) -> None:
    archive = _archive(tmp_path / "games.zip", {"json_2.1.1/train/a/game.tw-pddl": b"x" * 5000})
    content = bytearray(archive.read_bytes())
    content[60] ^= 0xFF
    archive.write_bytes(content)
    with pytest.raises(DataError, match=r"games\.zip"):
        unpack([archive], tmp_path, "json_2.1.1")
    assert not list(tmp_path.rglob("*.tmp"))


def test_get_unpacks_archives(
    known: dict[str, DataSet], server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = _archive(tmp_path / "source.zip", GAMES).read_bytes()
    server.files["/a.bin"] = content
    file = server.file(num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    known["small"] = known["small"].model_copy(update={"files": (file,), "unpacked_folder": "json_2.1.1"})
    assert main(["data", "get", "small"]) == 0
    assert "data/small/json_2.1.1: 2 files unpacked" in capsys.readouterr().out
    assert main(["data", "check", "data/small"]) == 0
    assert "ok          small  json_2.1.1: 2 games, those of a.bin" in capsys.readouterr().out
