"""The program that plays episodes of a verifiers environment.

It runs under the Python that has verifiers, which may not have Outrider, so it imports nothing of Outrider.
Requests and reports are JSON lines on the socket at file descriptor 0. If the trainer closes it or dies, the
episodes are cancelled and the process ends.
"""

import asyncio
import contextlib
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

HARNESS = "outrider_chat"
POLICY_ERRORS = ("HarnessError",)  # of the agent's program, which followed the policy
# Every episode has its own key and so its own HTTP client, which verifiers keeps as long as its servers.
EPISODES_PER_SERVING = 128
END_S = 5.0  # for cancelled episodes to clean up


class Serving:
    """What verifiers shares between episodes (tool servers, the server that agents call), with its users."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.begun = self.running = 0  # episodes
        self.is_retired = False  # no more episodes begin
        self._over = asyncio.Event()
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.holder = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        """Runs in a task of its own, because the task that opens verifiers' servers must close them."""
        from verifiers.v1.utils.loaders import load_environment

        try:
            env = load_environment(self._config)
            async with env.serving():
                self.ready.set_result(env)
                await self._over.wait()
        except Exception as error:
            if not self.ready.done():
                self.ready.set_exception(error)

    def end_if_unused(self) -> None:
        if self.is_retired and self.running == 0:
            self._over.set()


def episode_outcome(episode: Any, variable: str) -> dict[str, Any]:
    """The result of an episode: the mean reward of its trained traces, as verifiers reports it. Or why there
    is no reward: an ``error`` of the agent, or a ``fault`` of anything else.
    """
    if not episode.ok:
        failed = [trace.errors[-1] for trace in episode.traces if not trace.ok and trace.errors]
        error = (failed or episode.errors or [None])[-1]
        if error is None:
            return {"fault": "verifiers reports a failed episode without a reason"}
        kind = "error" if error.type in POLICY_ERRORS and not episode.errors else "fault"
        return {kind: format_problem(error.type, error.message)}
    for trace in episode.traces:
        if not trace.agent.trainable and trace.agent.config.client.api_key_var == variable:
            name = trace.agent.name
            return {
                "fault": f"the agent {name} is not to be trained, but calls the policy: set another "
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
    if not all(abs(number) < float("inf") for number in (value, *means.values())):
        return {"fault": f"the environment gave the reward {value} and {means}, which are no finite numbers"}
    parts = {name.removeprefix("reward_"): mean for name, mean in means.items() if name.startswith("reward_")}
    return {"value": {"reward": value, "metrics": means, "reward_parts": parts}}


def format_problem(kind: str, message: str) -> str:
    """An error in one line."""
    return f"{kind}: {' '.join(message.split())}"[:300]


def load(request: dict[str, Any]) -> tuple[Any, list[Any], dict[str, str]]:
    """Import verifiers and the taskset, and read the requested number of rows. Returns the environment's
    config, the rows, and the versions that determine them.
    """
    import verifiers
    from verifiers.v1.utils.loaders import import_taskset, load_environment, resolve_env_config

    logging.getLogger("verifiers").setLevel(logging.CRITICAL)  # an episode's errors are reported anyway
    register_chat_harness()
    config = resolve_env_config(with_defaults(request["id"], request["options"]))
    taskset = load_environment(config).taskset
    number = request["num_rows"]
    if request["shuffle_seed"] is not None:
        bounded = taskset if taskset.bounded else taskset.take(number)
        taskset = bounded.shuffle(request["shuffle_seed"])
    rows = list(islice(taskset, number))
    if len(rows) < number:
        raise ValueError(f"{request['id']} has {len(rows)} rows, and the splits need {number}")
    module = import_taskset(request["id"])
    return config, rows, {"verifiers": verifiers.__version__, "taskset": package_version(module)}


def with_defaults(taskset_id: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of the environment's config. Unless the recipe or the environment sets something else,
    agents run on this machine and chat in this process.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    taskset = {**options.get("taskset", {}), "id": taskset_id}
    config = {**options, "taskset": taskset}
    bundled = default_harness_id(taskset_id) == taskset_id
    for name, field in env_config_type(taskset_id, options.get("id", "")).model_fields.items():
        declared = field.default
        if isinstance(declared, AgentConfig):
            agent = dict(options.get(name, {}))
            if "runtime" not in declared.model_fields_set:
                agent.setdefault("runtime", {"type": "subprocess"})
            if declared.harness is None and not bundled:
                agent.setdefault("harness", {"id": HARNESS})
            config[name] = agent
    return config


def package_version(module: Any) -> str:
    """The version of a taskset's package; for a file without a package, a hash of its text."""
    top = module.__name__.partition(".")[0]
    names = importlib.metadata.packages_distributions().get(top, [])
    if names:
        return f"{names[0]} {importlib.metadata.version(names[0])}"
    return f"{top} {sha256(Path(module.__file__).read_bytes()).hexdigest()[:12]}"


def register_chat_harness() -> None:
    """Register verifiers' own chat program as a harness that runs as a coroutine of this process. The harness
    ``null`` starts a Python for every turn of a conversation, and needs uv.
    """
    from verifiers.v1.harnesses.null import NullHarness
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

    program = make_module("outrider_chat_program", CHAT_PROGRAM_SOURCE)

    # One HTTP client for all conversations; the program makes a new one each time.
    make = program.DefaultAsyncHttpxClient
    clients: list[Any] = []

    def shared(**options: Any) -> Any:
        if not clients:
            clients.append(make(**options))
        return clients[0]

    program.DefaultAsyncHttpxClient = shared

    class ChatHarness(NullHarness):  # type: ignore[misc]
        """The chat program in this process."""

        async def setup(self, runtime: Any) -> None:
            """Nothing to install."""

        async def launch(self, ctx: Any, trace: Any, runtime: Any, *args: Any, **options: Any) -> Any:
            return await super().launch(ctx, trace, InProcessRuntime(runtime, program), *args, **options)

    harness = make_module(HARNESS, "")
    harness.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])


def make_module(name: str, source: str) -> Any:
    """Make a module from its source."""
    module = type(sys)(name)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
    return module


class InProcessRuntime:
    """Replaces the runtime of the chat program, which runs in this process instead."""

    def __init__(self, runtime: Any, program: Any) -> None:
        self._runtime = runtime
        self._program = program

    async def write(self, path: str, data: bytes) -> None:
        """Write the program's input file in the episode's folder."""
        await self._runtime.write(path, data)

    async def prepare_uv_script(self, source: str, env: Any, *, activate: bool = True) -> list[str]:
        """The command in front of the arguments: none."""
        return []

    async def run_program(self, argv: list[str], env: Any) -> Any:
        """Run the program with these arguments; a failure is reported like that of a process."""
        from verifiers.v1.runtimes import ProgramResult

        mark = "--initial-messages-file="
        prefix = f"{mark}{self._runtime.workdir}/"
        sys.argv[1:] = [
            argument.replace(mark, prefix, 1) if argument.startswith(mark) else argument for argument in argv
        ]
        try:
            await self._program.main()  # reads the arguments before its first await
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
            return ProgramResult(exit_code=code, stdout="", stderr=str(error.__cause__ or error))
        except Exception as error:
            return ProgramResult(exit_code=1, stdout="", stderr=f"{type(error).__name__}: {error}")
        return ProgramResult(exit_code=0, stdout="", stderr="")


def main() -> None:
    """Load the environment that the first line names, and play."""
    sock = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's workers and their children block SIGINT
    lines = sock.makefile("rb")
    request = json.loads(lines.readline())
    sys.path += [folder for folder in request["path"] if folder not in sys.path]
    try:
        config, rows, versions = load(request)
    except (Exception, SystemExit) as error:
        send_line(sock, {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        return
    shown = rows if request["lists"] else []
    listed = [{"key": row.key, "question": row.data.prompt_text} for row in shown]
    send_line(sock, {"ready": True, "versions": versions, "rows": listed})
    asyncio.run(Player(sock, config, rows, versions).play(lines))


class Player:
    """Plays the requested episodes, each as a task of one event loop."""

    def __init__(self, sock: socket.socket, config: Any, rows: list[Any], versions: dict[str, str]) -> None:
        self._sock, self._config, self._versions = sock, config, versions
        self._rows = {row.key: row for row in rows}
        self._running: dict[int, asyncio.Task[dict[str, Any]]] = {}
        self._serving: Serving | None = None
        self._holders: set[asyncio.Task[None]] = set()

    async def play(self, lines: Any) -> None:
        """Play until the socket ends."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:  # in a thread: a task that never waits must not keep the process alive
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
        # A callback, because a task that is cancelled before its first step runs no line.
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
        if row is None or request["versions"] != self._versions:
            return {"fault": "the taskset has other rows than it had when the run listed them"}
        # verifiers reads a key from a variable; programs do not inherit variables with API_KEY in their name
        variable = f"OUTRIDER_API_KEY_{number}"
        os.environ[variable] = request["api_key"]
        serving = self._current_serving()
        serving.begun += 1
        serving.running += 1
        try:
            env = await asyncio.shield(serving.ready)
            client = EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
            [slot] = env.slots(row)
            episode = await env.run_slot(slot, ModelContext(model="policy", client=client))
        finally:
            serving.running -= 1
            serving.end_if_unused()
            del os.environ[variable]
        return episode_outcome(episode, variable)

    def _current_serving(self) -> Serving:
        serving = self._serving
        if serving is None or serving.begun >= EPISODES_PER_SERVING or serving.holder.done():
            if serving is not None:
                serving.is_retired = True
                serving.end_if_unused()
            self._serving = serving = Serving(self._config)
            self._holders.add(serving.holder)
            serving.holder.add_done_callback(self._holders.discard)
        return serving


def send_line(sock: socket.socket, value: dict[str, Any]) -> None:
    """Send a line to the trainer."""
    sock.sendall(json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main()
