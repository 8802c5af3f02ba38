"""The settings of a run for its other processes."""

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from outrider.errors import ConfigError
from outrider.plugins.imports import add_search_folder, search_folders
from outrider.plugins.registry import substituted_kinds
from outrider.training.settings import RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A run's settings for another process.

    Relative paths start at ``folder``, and import paths are searched in ``searched``. The settings are
    ``pickled`` separately, because modules of plug-ins must be found before they can be unpickled.
    """

    folder: str
    searched: tuple[str, ...]
    pickled: bytes

    @classmethod
    def from_settings(cls, settings: RunSettings) -> "Recipe":
        """Raises ConfigError for an object in place of a name, which another process cannot create."""
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
        """Unpickle the settings in the other process, after changing to the folder if it exists there."""
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        for folder in reversed(self.searched):
            add_search_folder(Path(folder))
        return cast(RunSettings, pickle.loads(self.pickled))
