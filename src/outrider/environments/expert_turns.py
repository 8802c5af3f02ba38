"""An expert that is a function of the user's: its turns, played."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from outrider.environments.base import Environment, EnvironmentFactory
from outrider.plugins.imports import import_target
from outrider.types import Step, Task

EnvironmentT = TypeVar("EnvironmentT", bound=Environment)


class ExpertTurns(Generic[EnvironmentT]):
    """``path`` names the function, ``play(environment, function, seed)`` plays what it says. The factory of
    ``make`` is made when an expert is first asked for, and again after :meth:`close`.
    """

    def __init__(
        self,
        path: str | None,
        make: Callable[[], EnvironmentFactory],
        play: Callable[[EnvironmentT, Any, int], Sequence[Step]],
    ) -> None:
        self._path = path
        self._make = make
        self._play = play
        self._solve: Any = None
        self._factory: EnvironmentFactory | None = None

    def steps(self, task: Task, seed: int) -> Sequence[Step] | None:
        """The turns; None without a function, or where they are no success. Raises
        :class:`EnvironmentFault` where the function raises.
        """
        if self._path is None:
            return None
        if self._solve is None:
            self._solve = import_target(self._path)
        if self._factory is None:
            self._factory = self._make()
        environment: Any = self._factory(task)
        try:
            steps = self._play(environment, self._solve, seed)
        finally:
            environment.close()
        return steps if environment.result().success else None

    def close(self) -> None:
        """Close the factory; may be called twice."""
        factory, self._factory = self._factory, None
        if factory is not None:
            factory.close()
