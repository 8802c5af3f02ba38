"""Everything that can break around a rollout, at random: tools, environments, engine, slow answers, killed
servers.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.soak_measure import descendants
from outrider.engines.base import Engine, Generation, Request
from outrider.environments.base import EnvironmentEpisode, EpisodeFactory, EpisodeResult, StepResult
from outrider.errors import EngineFault, EnvironmentFault, ToolFault
from outrider.types import Message, Task

SLOW_S: Final = 0.02
HANG_S: Final = 1.5
STEP_TIMEOUT_S: Final = 1.0
_PROGRAMS: Final = (
    "while True: pass", "import os; os._exit(3)", "x = bytearray(1 << 34)", "print('x' * 10**7)",
    "import time; time.sleep(100)", "open('f', 'w').write('x' * 10**8)", "raise SystemExit(1)",
    "import os; os.kill(os.getppid(), 9)", "[].append(1", "1 / 0",
)  # fmt: skip


@dataclass(slots=True)
class Faults:
    """Draws faults and counts them by name."""

    seed: str
    counts: Counter[str] = field(default_factory=Counter)
    _draws: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draws = random.Random(self.seed)

    def happens(self, name: str, probability: float) -> bool:
        """Whether it does this time."""
        happened = self._draws.random() < probability
        self.counts[name] += happened
        return happened

    def choose(self, among: Sequence[Any]) -> Any:
        """One of them."""
        return self._draws.choice(among)

    def around(self, call: str) -> None:
        """Called in place of a call of an environment: may raise a documented or an undocumented exception,
        or be slow.
        """
        kinds: dict[str, Callable[[], BaseException]] = {
            "tool fault": lambda: ToolFault("soak"),
            "environment fault": lambda: EnvironmentFault("soak"),
            "another exception": lambda: RuntimeError("soak"),
            "system exit": lambda: SystemExit(1),
        }
        for name, probability in (
            ("tool fault", 0.006),
            ("environment fault", 0.006),
            ("another exception", 0.003),
        ):
            if self.happens(f"{name} in {call}", probability):
                raise kinds[name]()
        if self.happens(f"system exit in {call}", 0.001):
            raise kinds["system exit"]()
        if self.happens(f"slow {call}", 0.01):
            time.sleep(SLOW_S)
        if self.happens(f"{call} hangs", 0.0005):
            time.sleep(HANG_S)


class FaultyEnvironment:
    """A tool episode in which anything may break."""

    def __init__(self, inner: EnvironmentEpisode, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    def reset(self, seed: int) -> Sequence[Message]:
        self._faults.around("reset")
        return self._inner.reset(seed)

    def step(self, message: Message) -> StepResult:
        self._faults.around("step")
        if "<python>" in message.content and self._faults.happens("hostile program", 0.05):
            text = f"<python>{self._faults.choose(_PROGRAMS)}</python>"
            message = Message(role="assistant", content=text)
        if self._faults.happens("server killed", 0.002) and (servers := descendants(os.getpid())):
            os.kill(self._faults.choose(servers), signal.SIGKILL)
        return self._inner.step(message)

    def result(self) -> EpisodeResult:
        self._faults.around("result")
        return self._inner.result()

    def copy(self) -> "FaultyEnvironment":
        self._faults.around("copy")
        return FaultyEnvironment(self._inner.copy(), self._faults)

    def close(self) -> None:
        self._inner.close()
        self._faults.around("close")


class FaultyFactory:
    """Makes these."""

    def __init__(self, inner: EpisodeFactory, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    def __call__(self, task: Task) -> FaultyEnvironment:
        self._faults.around("a new environment")
        return FaultyEnvironment(self._inner(task), self._faults)

    def close(self) -> None:
        self._inner.close()


def break_engine(engine: Engine, faults: Faults) -> None:
    """From now on a batch of this engine may fail or be slow."""
    generate = engine.generate

    def faulty(requests: Sequence[Request]) -> list[Generation]:
        if faults.happens("engine fault", 0.01):
            raise EngineFault("soak")
        if faults.happens("slow batch", 0.02):
            time.sleep(SLOW_S)
        return generate(requests)

    engine.generate = faulty  # type: ignore[method-assign]
