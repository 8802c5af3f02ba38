"""The process that plays episodes of a verifiers environment. It runs under the Python that has verifiers,
which need not have Outrider: nothing of Outrider is imported here.

Requests and reports are JSON lines on the socket at file descriptor 0. When that ends, because the trainer
closed it or was killed, the episodes are cancelled and the process ends.
"""

import asyncio
import contextlib
import importlib
import importlib.metadata
import json
import logging
import os
import signal
import socket
import sys
import threading
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

# An episode has a key and so an HTTP client of its own, which verifiers keeps as long as its servers.
EPISODES_PER_SERVING = 128
END_S = 5.0  # that cancelled episodes may take to tidy up
POLICY_ERRORS = ("HarnessError",)  # of the agent's program, which did what the policy told it


def main() -> None:
    """Load what the first line asks for, say so, and play."""
    sock = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's workers block SIGINT, and what they start
    lines = sock.makefile("rb")
    given = json.loads(lines.readline())
    sys.path += [folder for folder in given["path"] if folder not in sys.path]
    try:
        found = load(given)
    except (Exception, SystemExit) as error:
        say(sock, {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        return
    say(sock, found.ready(with_rows=given["lists"]))
    asyncio.run(Player(sock, found).play(lines))


class Loaded:
    """A verifiers environment: how it is made, its rows, and which versions they are of."""

    def __init__(self, config: Any, rows: list[Any], versions: dict[str, str]) -> None:
        self.config = config
        self.rows = rows
        self.versions = versions

    def ready(self, *, with_rows: bool) -> dict[str, Any]:
        """The first line to the trainer."""
        rows = [{"key": row.key, "question": row.data.prompt_text} for row in self.rows] if with_rows else []
        return {"ready": True, "versions": self.versions, "rows": rows}


def load(given: dict[str, Any]) -> Loaded:
    """Import verifiers and the taskset, and read as many rows as are asked for."""
    import verifiers
    from verifiers.v1.utils.loaders import import_taskset, load_environment, resolve_env_config

    logging.getLogger("verifiers").setLevel(logging.CRITICAL)  # what matters is in an episode's errors
    register_chat_harness()
    config = resolve_env_config(with_defaults(given["id"], given["options"]))
    taskset = load_environment(config).taskset
    number = given["num_rows"]
    if given["shuffle_seed"] is not None:
        bounded = taskset if taskset.bounded else taskset.take(number)
        taskset = bounded.shuffle(given["shuffle_seed"])
    rows = list(islice(taskset, number))
    if len(rows) < number:
        raise ValueError(f"{given['id']} has {len(rows)} rows, and the splits need {number}")
    module = import_taskset(given["id"])
    return Loaded(config, rows, {"verifiers": verifiers.__version__, "taskset": version_of(module)})


def with_defaults(taskset_id: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of the environment's config: agents run on this machine, and chat in this process, where
    neither the recipe nor the environment says otherwise.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    taskset = {**options.get("taskset", {}), "id": taskset_id}
    found = {**options, "taskset": taskset}
    bundled = default_harness_id(taskset_id) == taskset_id
    for name, field in env_config_type(taskset_id, options.get("id", "")).model_fields.items():
        declared = field.default
        if isinstance(declared, AgentConfig):
            agent = dict(options.get(name, {}))
            if "runtime" not in declared.model_fields_set:
                agent.setdefault("runtime", {"type": "subprocess"})
            if declared.harness is None and not bundled:
                agent.setdefault("harness", {"id": HARNESS})
            found[name] = agent
    return found


def version_of(module: Any) -> str:
    """The version of a taskset's package; of a file that belongs to none, what its text hashes to."""
    top = module.__name__.partition(".")[0]
    names = importlib.metadata.packages_distributions().get(top, [])
    if names:
        return f"{names[0]} {importlib.metadata.version(names[0])}"
    return f"{top} {sha256(Path(module.__file__).read_bytes()).hexdigest()[:12]}"


HARNESS = "outrider_chat"


def register_chat_harness() -> None:
    """Verifiers' own chat program as a coroutine of this process: the harness ``null`` starts a Python for
    each piece of a conversation, and needs uv to prepare it.
    """
    from verifiers.v1.harnesses.null import NullHarness
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

    program = module_of("outrider_chat_program", CHAT_PROGRAM_SOURCE)
    share_connections(program)

    class ChatHarness(NullHarness):  # type: ignore[misc]
        """The chat program, here."""

        async def setup(self, runtime: Any) -> None:
            """Nothing has to be installed."""

        async def launch(self, ctx: Any, trace: Any, runtime: Any, *args: Any, **options: Any) -> Any:
            """See verifiers' ``Harness.launch``."""
            return await super().launch(ctx, trace, Here(runtime, program), *args, **options)

    harness = module_of(HARNESS, "")
    harness.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])


def module_of(name: str, source: str) -> Any:
    """A module made of a text."""
    module = type(sys)(name)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def share_connections(program: Any) -> None:
    """Let all conversations ask through one HTTP client, which the program makes anew each time."""
    make = program.DefaultAsyncHttpxClient
    made: list[Any] = []

    def shared(**options: Any) -> Any:
        if not made:
            made.append(make(**options))
        return made[0]

    program.DefaultAsyncHttpxClient = shared


class Here:
    """Stands for the runtime where the chat program is told to run: it runs in this process."""

    def __init__(self, runtime: Any, program: Any) -> None:
        self._runtime = runtime
        self._program = program

    async def write(self, path: str, data: bytes) -> None:
        """The program's input file, in the episode's own folder."""
        await self._runtime.write(path, data)

    async def prepare_uv_script(self, source: str, env: Any, *, activate: bool = True) -> list[str]:
        """Nothing stands in front of the arguments."""
        return []

    async def run_program(self, argv: list[str], env: Any) -> Any:
        """Run it with these arguments; a failure is reported as that of a process would be."""
        from verifiers.v1.runtimes import ProgramResult

        mark = "--initial-messages-file="
        at = f"{mark}{self._runtime.workdir}/"
        sys.argv[1:] = [one.replace(mark, at, 1) if one.startswith(mark) else one for one in argv]
        try:
            await self._program.main()  # reads the arguments before it first waits
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
            return ProgramResult(exit_code=code, stdout="", stderr=str(error.__cause__ or error))
        except Exception as error:
            return ProgramResult(exit_code=1, stdout="", stderr=f"{type(error).__name__}: {error}")
        return ProgramResult(exit_code=0, stdout="", stderr="")


class Serving:
    """What verifiers keeps for many episodes (tool servers, the server that agents ask), and its users."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.begun = 0
        self._running = 0
        self._is_retired = False
        self._over = asyncio.Event()
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.holder = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        """In a task of its own: what is opened here has to be closed by the same task."""
        from verifiers.v1.utils.loaders import load_environment

        try:
            env = load_environment(self._config)
            async with env.serving():
                self.ready.set_result(env)
                await self._over.wait()
        except Exception as error:
            if not self.ready.done():
                self.ready.set_exception(error)

    def enter(self) -> None:
        """An episode begins."""
        self.begun += 1
        self._running += 1

    def leave(self) -> None:
        """An episode has ended."""
        self._running -= 1
        self._end_if_unused()

    def retire(self) -> None:
        """No episode begins any more."""
        self._is_retired = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._is_retired and self._running == 0:
            self._over.set()


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
                    loop.call_soon_threadsafe(self._requested, json.loads(line))
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

    def _requested(self, request: dict[str, Any]) -> None:
        if "kill" in request:
            task = self._running.get(request["kill"])
            if task is not None:
                task.cancel()
            return
        number = request["name"]
        task = asyncio.create_task(self._played(number, request))
        self._running[number] = task
        # not within the task: one that is cancelled before its first step runs none of its lines
        task.add_done_callback(lambda done: self._ended(number, done))

    def _ended(self, number: int, done: asyncio.Task[dict[str, Any]]) -> None:
        del self._running[number]
        if done.cancelled():
            found: dict[str, Any] = {"fault": "the episode was cancelled"}
        elif (error := done.exception()) is not None:
            found = {"fault": problem_of(type(error).__name__, str(error))}
        else:
            found = done.result()
        with contextlib.suppress(OSError):
            say(self._sock, {"name": number, "status": 0, "result": json.dumps(found), "tail": ""})

    async def _played(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
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
        return outcome_of(episode, variable)

    def _current_serving(self) -> Serving:
        serving = self._serving
        if serving is None or serving.begun >= EPISODES_PER_SERVING or serving.holder.done():
            if serving is not None:
                serving.retire()
            self._serving = serving = Serving(self._loaded.config)
            self._holders.add(serving.holder)
            serving.holder.add_done_callback(self._holders.discard)
        return serving


def outcome_of(episode: Any, variable: str) -> dict[str, Any]:
    """What an episode was worth: the mean reward of its traces that are trained, as verifiers reports it. Or
    why it has no reward: an ``error`` of the agent, or a ``fault`` of everything else.
    """
    if not episode.ok:
        failed = [trace.errors[-1] for trace in episode.traces if not trace.ok and trace.errors]
        error = (failed or episode.errors or [None])[-1]
        if error is None:
            return {"fault": "verifiers calls the episode failed and does not say why"}
        kind = "error" if error.type in POLICY_ERRORS and not episode.errors else "fault"
        return {kind: problem_of(error.type, error.message)}
    for trace in episode.traces:
        if not trace.agent.trainable and trace.agent.config.client.api_key_var == variable:
            name = trace.agent.name
            return {
                "fault": f"the agent {name} is not to be trained, but asks the policy: name another "
                f"endpoint in environment.options.{name}.client"
            }
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    scores: dict[str, list[float]] = {}
    for trace in trained:
        for name, value in trace.metrics.items():
            if value is not None:
                scores.setdefault(name, []).append(float(value))
        for name, reward in trace.rewards.items():
            if reward is not None:
                scores.setdefault(f"reward_{name}", []).append(float(reward.value))
    if not any(name.startswith("reward_") for name in scores):
        return {"fault": "the environment gave no reward"}
    value = sum(float(trace.reward) for trace in trained) / len(trained)
    means = {name: sum(values) / len(values) for name, values in scores.items()}
    if not all(abs(one) < float("inf") for one in (value, *means.values())):
        return {"fault": f"the environment gave the reward {value} and {means}, which are no finite numbers"}
    return {"value": {"reward": value, "metrics": means}}


def problem_of(kind: str, message: str) -> str:
    """An error in one line."""
    return f"{kind}: {' '.join(message.split())}"[:300]


def say(sock: socket.socket, value: dict[str, Any]) -> None:
    """A line to the trainer."""
    sock.sendall(json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main()
