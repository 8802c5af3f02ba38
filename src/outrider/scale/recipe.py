"""A run's settings on their way to another process."""

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from outrider.errors import ConfigError
from outrider.plugins.imports import add_search_folder, search_folders
from outrider.plugins.registry import substituted_kinds
from outrider.train.settings import RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """``folder`` is where relative paths begin, ``searched`` where import paths are looked for. The settings
    are ``pickled`` apart: a plug-in's module has to be found before they can be read.
    """

    folder: str
    searched: tuple[str, ...]
    pickled: bytes

    @classmethod
    def from_settings(cls, settings: RunSettings) -> "Recipe":
        """Raises ConfigError for an object in the place of a name: another process cannot make it."""
        if objects := substituted_kinds():
            raise ConfigError(
                f"an object was given for {', '.join(objects)}: engines and rollout workers in processes of "
                "their own make theirs by name, so give a name, or play in one process"
            )
        return cls(
            folder=os.getcwd(),
            searched=tuple(str(folder) for folder in search_folders()),
            pickled=pickle.dumps(settings),
        )

    def settings(self) -> RunSettings:
        """In the other process: go to the folder, where it is there, and read them."""
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        for folder in reversed(self.searched):
            add_search_folder(Path(folder))
        return cast(RunSettings, pickle.loads(self.pickled))
