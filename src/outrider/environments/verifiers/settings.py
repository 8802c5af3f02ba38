"""Which environment of verifiers is played, under which Python, and how its rows are split."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from outrider.environments.agent.settings import ProgramConfig

SPLITS: Final = ("train", "valid", "test")


class VerifiersConfig(ProgramConfig):
    """A taskset of the package verifiers (the Environments Hub's) with its agents and rewards. Its agents ask
    the policy as they would ask any endpoint.
    """

    details: ClassVar[frozenset[str]] = ProgramConfig.details | {"python", "start_limit_s"}

    starts_quickly: ClassVar[bool] = False
    input_paths: ClassVar[frozenset[str]] = frozenset({"python"})

    type: Literal["verifiers"] = "verifiers"
    id: Annotated[str, Field(min_length=1)]
    """The taskset: a package that is installed where verifiers is, or a module beside the recipe."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The environment's config, as in ``[env]`` of a verifiers file: ``taskset``, ``id``, agents by name."""
    python: Path | None = None
    """The interpreter that has verifiers and the taskset; None: the one that runs Outrider."""
    num_train: Annotated[int, Field(ge=0)] = 64
    """Rows of ``train``: the first ones of the taskset."""
    num_valid: Annotated[int, Field(ge=0)] = 16
    """The rows behind those."""
    num_test: Annotated[int, Field(ge=0)] = 32
    """And the rows behind those."""
    first_row: Annotated[int, Field(ge=0)] = 0
    """Rows in front of the first one that is used."""
    shuffle_seed: int | None = None
    """Shuffle the taskset (verifiers' own order of this seed) before it is split. None: its own order."""
    start_limit_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that the import and the taskset's data may take."""

    @model_validator(mode="after")
    def _validate(self) -> "VerifiersConfig":
        if self.num_train + self.num_valid + self.num_test == 0:
            raise ValueError("num_train, num_valid and num_test are all 0: there is nothing to play")
        taskset = self.options.get("taskset", {})
        if not isinstance(taskset, dict) or "id" in taskset:
            raise ValueError("options.taskset is a table without an id: the taskset is environment.id")
        return self

    @property
    def num_rows(self) -> int:
        """Rows that are read, the first ones that are left out among them."""
        return self.first_row + self.num_train + self.num_valid + self.num_test

    def split_rows(self, split: str) -> range:
        """The rows of a split."""
        numbers = dict(zip(SPLITS, (self.num_train, self.num_valid, self.num_test), strict=True))
        begin = self.first_row
        for name in SPLITS[: SPLITS.index(split)]:
            begin += numbers[name]
        return range(begin, begin + numbers[split])
