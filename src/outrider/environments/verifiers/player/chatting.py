"""Verifiers' own chat program as a harness whose conversations are coroutines of this process."""

import sys
from typing import Any

HARNESS = "outrider_chat"


def register_chat_harness() -> None:
    """Verifiers' own chat program as a coroutine of this process: the harness ``null`` starts a Python for
    each piece of a conversation, and needs uv to prepare it.
    """
    from verifiers.v1.harnesses.null import NullHarness
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

    program = make_module("outrider_chat_program", CHAT_PROGRAM_SOURCE)
    share_connections(program)

    class ChatHarness(NullHarness):  # type: ignore[misc]
        """The chat program, here."""

        async def setup(self, runtime: Any) -> None:
            """Nothing has to be installed."""

        async def launch(self, ctx: Any, trace: Any, runtime: Any, *args: Any, **options: Any) -> Any:
            """See verifiers' ``Harness.launch``."""
            return await super().launch(ctx, trace, InProcessRuntime(runtime, program), *args, **options)

    harness = make_module(HARNESS, "")
    harness.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])


def make_module(name: str, source: str) -> Any:
    """A module made of a text."""
    module = type(sys)(name)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def share_connections(program: Any) -> None:
    """Let all conversations ask through one HTTP client, which the program makes anew each time."""
    make = program.DefaultAsyncHttpxClient
    clients: list[Any] = []

    def shared(**options: Any) -> Any:
        if not clients:
            clients.append(make(**options))
        return clients[0]

    program.DefaultAsyncHttpxClient = shared


class InProcessRuntime:
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
        prefix = f"{mark}{self._runtime.workdir}/"
        sys.argv[1:] = [
            argument.replace(mark, prefix, 1) if argument.startswith(mark) else argument for argument in argv
        ]
        try:
            await self._program.main()  # reads the arguments before it first waits
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
            return ProgramResult(exit_code=code, stdout="", stderr=str(error.__cause__ or error))
        except Exception as error:
            return ProgramResult(exit_code=1, stdout="", stderr=f"{type(error).__name__}: {error}")
        return ProgramResult(exit_code=0, stdout="", stderr="")
