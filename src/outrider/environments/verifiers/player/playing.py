"""Loads the environment and plays what the trainer asks for.

Requests and reports are JSON lines on the socket at file descriptor 0. When that ends, because the trainer
closed it or was killed, the episodes are cancelled and the process ends.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from typing import Any

from .loading import Loaded, load
from .outcomes import episode_outcome, format_problem
from .serving import Serving

# An episode has a key and so an HTTP client of its own, which verifiers keeps as long as its servers.
EPISODES_PER_SERVING = 128
END_S = 5.0  # that cancelled episodes may take to tidy up


def main() -> None:
    """Load what the first line asks for, say so, and play."""
    sock = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's workers block SIGINT, and what they start
    lines = sock.makefile("rb")
    request = json.loads(lines.readline())
    sys.path += [folder for folder in request["path"] if folder not in sys.path]
    try:
        loaded = load(request)
    except (Exception, SystemExit) as error:
        send_line(sock, {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        return
    send_line(sock, loaded.ready(with_rows=request["lists"]))
    asyncio.run(Player(sock, loaded).play(lines))


class Player:
    """Plays the episodes that are asked for, each as a task of one event loop."""

    def __init__(self, sock: socket.socket, loaded: Loaded) -> None:
        self._sock = sock
        self._loaded = loaded
        self._rows = {row.key: row for row in loaded.rows}
        self._running: dict[int, asyncio.Task[dict[str, Any]]] = {}
        self._serving: Serving | None = None
        self._holders: set[asyncio.Task[None]] = set()

    async def play(self, lines: Any) -> None:
        """Until the socket ends."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:  # a thread: a task that never waits must not keep the process alive
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                for line in lines:
                    loop.call_soon_threadsafe(self._handle_request, json.loads(line))
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(over.set)
            threading.Event().wait(END_S)
            os._exit(0)

        threading.Thread(target=read, daemon=True).start()
        await over.wait()
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for holder in self._holders:
            holder.cancel()
        await asyncio.gather(*self._holders, return_exceptions=True)
        os._exit(0)

    def _handle_request(self, request: dict[str, Any]) -> None:
        if "kill" in request:
            task = self._running.get(request["kill"])
            if task is not None:
                task.cancel()
            return
        number = request["name"]
        task = asyncio.create_task(self._play_episode(number, request))
        self._running[number] = task
        # not within the task: one that is cancelled before its first step runs none of its lines
        task.add_done_callback(lambda done: self._report(number, done))

    def _report(self, number: int, done: asyncio.Task[dict[str, Any]]) -> None:
        del self._running[number]
        if done.cancelled():
            outcome: dict[str, Any] = {"fault": "the episode was cancelled"}
        elif (error := done.exception()) is not None:
            outcome = {"fault": format_problem(type(error).__name__, str(error))}
        else:
            outcome = done.result()
        with contextlib.suppress(OSError):
            send_line(self._sock, {"name": number, "status": 0, "result": json.dumps(outcome), "tail": ""})

    async def _play_episode(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        row = self._rows.get(request["key"])
        if row is None or request["versions"] != self._loaded.versions:
            return {"fault": "the taskset has other rows than it had when the run listed them"}
        # verifiers reads a key from a variable; programs do not inherit those with API_KEY in their name
        variable = f"OUTRIDER_API_KEY_{number}"
        os.environ[variable] = request["api_key"]
        serving = self._current_serving()
        serving.enter()
        try:
            env = await asyncio.shield(serving.ready)
            client = EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
            [slot] = env.slots(row)
            episode = await env.run_slot(slot, ModelContext(model="policy", client=client))
        finally:
            serving.leave()
            del os.environ[variable]
        return episode_outcome(episode, variable)

    def _current_serving(self) -> Serving:
        serving = self._serving
        if serving is None or serving.begun >= EPISODES_PER_SERVING or serving.holder.done():
            if serving is not None:
                serving.retire()
            self._serving = serving = Serving(self._loaded.config)
            self._holders.add(serving.holder)
            serving.holder.add_done_callback(self._holders.discard)
        return serving


def send_line(sock: socket.socket, value: dict[str, Any]) -> None:
    """A line to the trainer."""
    sock.sendall(json.dumps(value).encode() + b"\n")
