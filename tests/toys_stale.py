"""The lock played with weights that are a few versions old, as rollouts beside an update are, or with older
and newer ones in one episode.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.algorithms.exploration import RapoSettings
from outrider.algorithms.grpo import GrpoSettings
from outrider.engines.base import Generation, Request
from outrider.seeding import stream
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


class MixedEngine(StaleEngine):
    """An episode begins with weights of ``staleness`` loads ago; in front of each further turn one newer
    version may have come, with a chance of a half.
    """

    def __init__(self, model: Any, *, staleness: int, tokenizer: Any) -> None:
        super().__init__(model, staleness=staleness, tokenizer=tokenizer)
        self._ages: dict[str, int] = {}

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Each request with the weights of its moment."""
        found: dict[str, Generation] = {}
        ages = {request.request_id: self._age(request) for request in requests}
        for age in sorted(set(ages.values())):
            self._model.load_state_dict(self._states[-1 - age])
            self.weight_version = self._num_loads - age
            own = [request for request in requests if ages[request.request_id] == age]
            found |= {one.request_id: one for one in super().generate(own)}
        return [found[request.request_id] for request in requests]

    def _age(self, request: Request) -> int:
        key = request.cache_key or request.request_id
        if key not in self._ages:
            self._ages[key] = len(self._states) - 1
        elif self._ages[key]:
            moved = stream(self._num_loads, "weights in flight", request.request_id).integers(2)
            self._ages[key] -= int(moved)
        return self._ages[key]

    def load(self, version: int) -> None:
        """The policy moved once more: the next episodes begin."""
        super().load(version)
        self._ages = {}


class StaleRun(ToyRun):
    """One algorithm on one toy, its engine ``staleness`` versions behind, or up to that (``is_mixed``)."""

    def __init__(
        self, toy: Toy, settings: Any, *, staleness: int, folder: Path, is_mixed: bool = False
    ) -> None:
        super().__init__(toy, settings, folder=folder)
        kind = MixedEngine if is_mixed else StaleEngine
        self.engine = kind(self.model, staleness=staleness, tokenizer=self.engine.tokenizer)


def play(
    settings: GrpoSettings | RapoSettings,
    *,
    seed: int,
    staleness: int,
    max_policy_tokens: int = MAX_POLICY_TOKENS,
    toy: Toy | None = None,
    is_mixed: bool = False,
) -> Result:
    """One run in a folder of its own, on ``toy`` or else on the lock of four doors with this seed."""
    with TemporaryDirectory() as folder:
        run = StaleRun(
            toy or Toy(seed=seed), settings, staleness=staleness, folder=Path(folder), is_mixed=is_mixed
        )
        try:
            return run.train(max_policy_tokens=max_policy_tokens)
        finally:
            run.buffer.close()
