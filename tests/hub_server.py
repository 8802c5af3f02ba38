"""A Hugging Face hub on 127.0.0.1 for tests: repositories from memory, over the paths that its client
libraries ask for. What is written comes as plain files and LFS objects (not by Xet, which needs a server of
its own: HF_HUB_DISABLE_XET).
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)")
_API = re.compile(r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/[^/]+(?:/(.*))?)?")
_PREUPLOAD = re.compile(r"/api/((?:datasets|models)/[^/]+/[^/]+)/preupload/main")
_COMMIT = re.compile(r"/api/((?:datasets|models)/[^/]+/[^/]+)/commit/main")
_BATCH = re.compile(r"/((?:datasets/)?[^/]+/[^/]+)\.git/info/lfs/objects/batch")
_LARGE = (".safetensors", ".sqlite", ".parquet")  # what goes by LFS
_OBJECT = re.compile(r"/lfs/([0-9a-f]{64})")


@dataclass
class Repository:
    """``gated``: the files need a login, as GAIA's do."""

    files: MutableMapping[str, bytes]
    gated: bool = False
    private: bool = False


@dataclass
class Hub:
    """``repositories`` by kind and name, as ``datasets/openai/gsm8k``; ``asked`` is every method and path.
    Who writes needs ``token``; the first ``failures`` requests to commit break.
    """

    url: str
    repositories: dict[str, Repository]
    asked: list[str] = field(default_factory=list)
    token: str = ""
    failures: int = 0
    objects: dict[str, bytes] = field(default_factory=dict)


@contextmanager
def hub_server(repositories: dict[str, Repository], *, token: str = "", failures: int = 0) -> Iterator[Hub]:
    """Serve until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    url = f"http://127.0.0.1:{server.server_address[1]}"
    hub = Hub(url=url, repositories=repositories, token=token, failures=failures)
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests look at ``asked``."""

    def _serve(self) -> None:
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if self._writes(path, body):
            return
        if found := _RESOLVE.fullmatch(path):
            self._file("datasets" if found[1] else "models", found[2], found[3])
        elif found := _API.fullmatch(path):
            self._api(found[1], found[2], found[3], found[4] or "", body)
        else:
            self._send(404, b"", {})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _writes(self, path: str, body: bytes) -> bool:
        """Answer a request that writes; whether it is one."""
        if found := _OBJECT.fullmatch(path):  # its address was told to who had the token
            assert hashlib.sha256(body).hexdigest() == found[1]
            self.hub.objects[found[1]] = body
            self._send(200, b"", {})
            return True
        if path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
            return True
        routes = {_PREUPLOAD: self._preupload, _COMMIT: self._commit, _BATCH: self._batch}
        matches = [(found, answer) for route, answer in routes.items() if (found := route.fullmatch(path))]
        if path != "/api/repos/create" and not matches:
            return False
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._send(401, b'{"error": "Invalid user token."}', {"X-Error-Message": "Invalid user token."})
        elif matches:
            matches[0][1](matches[0][0][1], body)
        else:
            self._create(json.loads(body))
        return True

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        key = f"{wanted.get('type', 'model')}s/{name}"
        if key in self.hub.repositories:
            told = {"error": "You already created this repo", "url": f"{self.hub.url}/{name}"}
            return self._send(409, json.dumps(told).encode(), {})
        private = wanted.get("visibility") == "private"
        self.hub.repositories[key] = Repository(files={}, private=private)
        self._json({"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def _preupload(self, name: str, body: bytes) -> None:
        files = json.loads(body)["files"]
        modes = {one["path"]: "lfs" if one["path"].endswith(_LARGE) else "regular" for one in files}
        told = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
        self._json({"files": told})

    def _batch(self, name: str, body: bytes) -> None:
        objects = json.loads(body)["objects"]
        for one in objects:
            if one["oid"] not in self.hub.objects:
                one["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, body: bytes) -> None:
        if self.hub.failures:
            self.hub.failures -= 1
            return self._send(500, b'{"error": "the disk is full"}', {"X-Error-Message": "the disk is full"})
        files = self.hub.repositories[name].files
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

    def _file(self, kind: str, name: str, path: str) -> None:
        repository = self.hub.repositories.get(f"{kind}/{name}")
        if repository is None:
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        if repository.gated:
            told = {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {name} is restricted."}
            return self._send(403, b"", told)
        if path not in repository.files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        raw = repository.files[path]
        self._send(
            200,
            raw,
            {"ETag": f'"{hashlib.sha1(raw).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"},
        )

    def _api(self, kind: str, name: str, what: str | None, under: str, body: bytes) -> None:
        repository = self.hub.repositories.get(f"{kind}/{name}")
        if repository is None:
            return self._send(401, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        files = repository.files
        entries = [_entry(path, raw) for path, raw in files.items()]
        if what == "tree":
            return self._json(_tree(files, under.strip("/")))
        if what == "paths-info":
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else []
            return self._json([entry for entry in entries if entry["path"] in wanted])
        about = {
            "id": name,
            "sha": COMMIT,
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
            "disabled": False,
        }
        self._json(
            about
            | {"siblings": [{"rfilename": path} for path in files], "tags": [], "downloads": 0, "likes": 0}
        )

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, raw: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)


def _entry(path: str, raw: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}


def _tree(files: Mapping[str, bytes], under: str) -> list[dict[str, Any]]:
    """Files and folders below ``under``, however deep: what is asked for recursively is also right for one
    level of these tests.
    """
    inside = {path: raw for path, raw in files.items() if not under or path.startswith(f"{under}/")}
    folders = sorted({path.rpartition("/")[0] for path in inside if "/" in path} - {under})
    return [{"type": "directory", "path": folder, "oid": COMMIT} for folder in folders] + [
        _entry(*one) for one in inside.items()
    ]
