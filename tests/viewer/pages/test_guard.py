"""Who may ask, and what a page of another origin cannot do."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError, DataError
from outrider.files import FileLock
from outrider.viewer import answers as live
from outrider.viewer import server
from outrider.viewer.answers import Viewer
from outrider.viewer.run_reader import LIVE
from outrider.viewer.server import is_loopback
from tests.viewer.pages.serving import Served, serving


def stop_token(served: Served) -> str:
    found = re.search(r'name="outrider-stop" content="([^"]+)"', served.ask("/")[2].decode())
    assert found is not None
    return found[1]


def test_nothing_runs_but_our_own_files(served: Served) -> None:
    for path in ("/", "/main.js", "/data/runs.json", "/nowhere"):
        _, headers, _ = served.ask(path)
        policy = headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        )
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_another_host_name_is_refused(served: Served, host: str) -> None:
    status, _, body = served.ask("/data/runs.json", headers={"Host": host})
    assert status in (400, 403) and b"score" not in body


def test_own_host_names_are_accepted(served: Served) -> None:
    for host in (f"localhost:{served.port}", f"127.0.0.1:{served.port}", "localhost"):
        assert served.ask("/data/runs.json", headers={"Host": host})[0] == 200


def test_a_server_on_another_address_requires_the_token(recorded: Path) -> None:
    with serving([recorded], hosts=None, token="a-token") as found:
        for path in ("/", "/data/runs.json", "/main.js", "/data/runs.json?token=", "/?token=b-token"):
            assert found.ask(path)[0] == 403
        status, headers, _ = found.ask("/?token=a-token")
        cookie = headers["set-cookie"]
        assert status == 200 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
        kept = {"Cookie": cookie.partition(";")[0]}
        assert found.ask("/data/runs.json", headers=kept)[0] == 200
        assert found.ask("/data/runs.json", headers={"Cookie": "outrider_view=b"})[0] == 403


def test_it_is_read_only(served: Served) -> None:
    own = {"Origin": f"http://127.0.0.1:{served.port}"}
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert served.ask("/data/runs.json", method=method, headers=own)[0] == 405
    assert served.ask("/data/runs.json", method="POST", headers=own)[0] == 405
    assert served.ask("/stop", method="GET")[0] in (404, 405)


@pytest.mark.parametrize(
    "path", ["/../guard.py", "/%2e%2e/guard.py", "/vendor/../../guard.py", "//etc/passwd"]
)
def test_only_the_pages_files_are_given_out(served: Served, path: str) -> None:
    status, _, body = served.ask(path)
    assert status == 404 and b"import" not in body


def running(folder: Path, pid: int = 4_000_000) -> Path:
    """A folder that says it runs, under a process that cannot be."""
    import platform

    (folder / "config.toml").write_text("seed = 1\n")
    (folder / LIVE).write_text(json.dumps({"pid": pid, "host": platform.node(), "stage": "train"}))
    return folder


def test_a_stop_needs_our_origin_and_our_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(live.signal, "pidfd_send_signal", lambda process, number: killed.append(number))
    with serving([running(tmp_path, os.getpid())]) as found:
        path = f"/stop?run={found.ids[0]}"
        own, token = f"http://127.0.0.1:{found.port}", stop_token(found)
        refused: list[dict[str, Any]] = [
            {},
            {"Origin": own},
            {"X-Outrider-Stop": token},
            {"Origin": own, "X-Outrider-Stop": "guessed"},
            {"Origin": "http://evil.example", "X-Outrider-Stop": token},
            {"Origin": "null", "X-Outrider-Stop": token},
            {"Origin": own, "X-Outrider-Stop": token, "Sec-Fetch-Site": "cross-site"},
            {"Origin": "http://evil.example", "Host": "evil.example", "X-Outrider-Stop": token},
        ]
        for headers in refused:
            assert found.ask(path, method="POST", headers=headers)[0] == 403
        good = {"Origin": own, "X-Outrider-Stop": token}
        assert found.ask(path, method="POST", headers=good)[0] == 409  # nothing holds its lock
        with FileLock(tmp_path / "lock"):
            assert found.ask("/stop?run=x", method="POST", headers=good)[0] == 404
            assert killed == []
            assert found.ask(path, method="POST", headers=good)[0] == 200
    assert killed == [signal.SIGTERM]


def test_a_process_that_only_has_the_runs_number_is_left_alone(tmp_path: Path) -> None:
    """The run's process has died, its children hold the lock, and the system gave its number to another."""
    with subprocess.Popen(["sleep", "600"]) as other:
        with (
            FileLock(running(tmp_path, other.pid) / "lock"),
            pytest.raises(DataError, match="the process that it names is another one"),
        ):
            live.stop(tmp_path)
        assert other.poll() is None
        other.kill()


def test_the_process_that_holds_the_lock_is_ended(tmp_path: Path) -> None:
    held = (
        "import sys, time; from outrider.files import FileLock;"
        "lock = FileLock(sys.argv[1]); print(flush=True); time.sleep(600)"
    )
    lock = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", held, str(lock)], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stdout.readline()
        running(tmp_path, run.pid)
        live.stop(tmp_path)
        assert run.wait(60) == -signal.SIGTERM


def test_requests_of_another_origin_are_refused(served: Served) -> None:
    for site in ("cross-site", "same-site"):  # another port of this machine is of the same site
        for mode in ("no-cors", "cors", "websocket"):
            asked = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode}
            assert served.ask("/data/runs.json", headers=asked)[0] == 403
        assert served.ask("/", headers={"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"})[0] == 200
    own = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}
    assert served.ask("/data/runs.json", headers=own)[0] == 200


def test_requests_are_answered_a_few_at_a_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may hold a whole file in memory."""
    begun, go = threading.Semaphore(0), threading.Event()
    at_once: list[int] = []
    now: list[None] = []

    def slow(viewer: Viewer, request: str, given: Any) -> Any:
        now.append(None)
        at_once.append(len(now))
        begun.release()
        go.wait(60)
        now.pop()
        return []

    monkeypatch.setattr(Viewer, "answer", slow)
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(served.ask, "/data/runs.json") for _ in range(16)]
        for _ in range(server.MOST_ANSWERS):
            assert begun.acquire(timeout=60)
        begun.acquire(timeout=0.5)  # one more would come now
        go.set()
        assert [one.result()[0] for one in asked] == [200] * 16
    assert max(at_once) == server.MOST_ANSWERS


def test_only_so_many_pages_follow_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_FOLLOWERS", 1)
    with serving([running(tmp_path)]) as found:
        connection = http.client.HTTPConnection("127.0.0.1", found.port, timeout=60)
        connection.request("GET", f"/events?run={found.ids[0]}")
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        assert found.ask(f"/events?run={found.ids[0]}")[0] == 503
        answer.close()
        connection.close()
        again = http.client.HTTPConnection("127.0.0.1", found.port, timeout=60)
        status = 503
        while status == 503:  # until the server has seen that the first one left
            again.close()
            again.request("GET", f"/events?run={found.ids[0]}")
            status = again.getresponse().status
        assert status == 200
        again.close()


def test_a_run_of_another_machine_or_of_no_process_is_not_stopped(tmp_path: Path) -> None:
    with FileLock(running(tmp_path) / "lock"):
        with pytest.raises(DataError, match="cannot be stopped: No such process"):
            live.stop(tmp_path)
        (tmp_path / LIVE).write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
        with pytest.raises(DataError, match="on another machine, elsewhere"):
            live.stop(tmp_path)
        running(tmp_path, pid=-1)
        with pytest.raises(DataError, match="does not record its process id"):
            live.stop(tmp_path)


def test_events_come_when_something_has_changed(tmp_path: Path) -> None:
    with serving([running(tmp_path)]) as found:
        connection = http.client.HTTPConnection("127.0.0.1", found.port, timeout=30)
        connection.request("GET", f"/events?run={found.ids[0]}")
        answer = connection.getresponse()
        first = json.loads(answer.readline().removeprefix(b"data: "))
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "kind": "train"}\n')
        answer.readline()
        second = json.loads(answer.readline().removeprefix(b"data: "))
        assert first["live"]["stage"] == "train" and not first["running"]
        assert first["sizes"][0] == -1 and second["sizes"][0] > 0
        answer.close()
        connection.close()
        assert found.ask("/events?run=x")[0] == 404


def test_loopback_addresses_are_recognized() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example"))


def test_an_address_that_is_taken_is_one_line(served: Served) -> None:
    from outrider.viewer.server import bind

    with pytest.raises(ConfigError, match="cannot be bound: Address already in use"):
        bind("127.0.0.1", served.port)
