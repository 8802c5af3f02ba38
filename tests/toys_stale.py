"""The lock played with weights that are a few versions old, as rollouts beside an update are."""

import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.algorithms.grpo import GrpoSettings
from outrider.algorithms.rapo.algorithm import RapoSettings
from tests.toy_result import Result
from tests.toys import MAX_POLICY_TOKENS, TabularEngine, Toy, ToyRun


class StaleEngine(TabularEngine):
    """Generates with the weights of ``staleness`` loads ago, the first ones until there are so many."""

    def __init__(self, model: Any, *, staleness: int, tokenizer: Any) -> None:
        super().__init__(copy.deepcopy(model), tokenizer)
        self._trained, self._staleness = model, staleness
        self._states = [copy.deepcopy(model.state_dict())]
        self._num_loads = 0

    def load(self, version: int) -> None:
        """The policy moved once more."""
        self._num_loads += 1
        self._states.append(copy.deepcopy(self._trained.state_dict()))
        del self._states[: -self._staleness - 1]
        self._model.load_state_dict(self._states[0])
        self.weight_version = max(0, self._num_loads - self._staleness)


class StaleRun(ToyRun):
    """One algorithm on one toy, its engine ``staleness`` versions behind."""

    def __init__(self, toy: Toy, settings: Any, *, staleness: int, folder: Path) -> None:
        super().__init__(toy, settings, folder=folder)
        self.engine = StaleEngine(self.model, staleness=staleness, tokenizer=self.engine.tokenizer)


def play(
    settings: GrpoSettings | RapoSettings,
    *,
    seed: int,
    staleness: int,
    max_policy_tokens: int = MAX_POLICY_TOKENS,
    toy: Toy | None = None,
) -> Result:
    """One run in a folder of its own, on ``toy`` or else on the lock of four doors with this seed."""
    with TemporaryDirectory() as folder:
        run = StaleRun(toy or Toy(seed=seed), settings, staleness=staleness, folder=Path(folder))
        try:
            return run.train(max_policy_tokens=max_policy_tokens)
        finally:
            run.buffer.close()
