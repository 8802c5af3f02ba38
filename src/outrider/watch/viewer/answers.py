"""What the page may ask: each answer is plain data, made of files, with or without a server around it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final

from outrider.watch.viewer.alarms import alarms_of
from outrider.watch.viewer.catalogue import Catalogue, ViewedRun
from outrider.watch.viewer.curves import curves_of
from outrider.watch.viewer.group_view import group_view, tokens_view, whole_text
from outrider.watch.viewer.memory_view import memory_view, neighbours, shown
from outrider.watch.viewer.rollout_query import Query, find
from outrider.watch.viewer.text_search import TextSearch

Given = Mapping[str, str]


@dataclass(slots=True)
class Viewer:
    """The runs, and the searches that have begun in them."""

    catalogue: Catalogue
    _searches: dict[str, TextSearch] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def run(self, given: Given) -> ViewedRun:
        """Raises KeyError."""
        return self.catalogue.of(given["run"])

    def search(self, run: ViewedRun) -> TextSearch:
        """The one search of a run."""
        with self._lock:
            return self._searches.setdefault(run.id, TextSearch(run.path))


def _runs(viewer: Viewer, given: Given) -> Any:
    return viewer.catalogue.overview()


def _curves(viewer: Viewer, given: Given) -> Any:
    return curves_of(viewer.run(given).path)


def _places(viewer: Viewer, given: Given) -> Any:
    return viewer.run(given).index.places()


def _rollouts(viewer: Viewer, given: Given) -> Any:
    return find(viewer.run(given).index.table(), Query.of(given))


def _search(viewer: Viewer, given: Given) -> Any:
    run = viewer.run(given)
    places = [given["where"]] if given.get("where") else run.index.places()
    return viewer.search(run).find(given.get("words", "")[:1000], places)


def _group(viewer: Viewer, given: Given) -> Any:
    return group_view(viewer.run(given).path, _place(viewer, given), given["trace"])


def _tokens(viewer: Viewer, given: Given) -> Any:
    run = viewer.run(given).path
    return tokens_view(run, _place(viewer, given), given["trace"], int(given["rollout"]))


def _text(viewer: Viewer, given: Given) -> Any:
    return whole_text(viewer.run(given).path, _place(viewer, given), given["trace"], int(given["node"]))


def _memory(viewer: Viewer, given: Given) -> Any:
    return memory_view(viewer.run(given).path, int(given["step"]), given.get("words", ""))


def _neighbours(viewer: Viewer, given: Given) -> Any:
    run = viewer.run(given).path
    return neighbours(run, int(given["step"]), given.get("words", ""), memory=given.get("memory", "steps"))


def _shown(viewer: Viewer, given: Given) -> Any:
    run = viewer.run(given).path
    if "item" in given:
        return shown(run, memory=given.get("memory", ""), key=given.get("key", ""), item=int(given["item"]))
    return shown(run, until=int(given["step"]))


def _alarms(viewer: Viewer, given: Given) -> Any:
    return alarms_of(viewer.run(given).path)


def _place(viewer: Viewer, given: Given) -> str:
    """One of the run's files and nothing else: it becomes a part of a path. Raises KeyError."""
    if given["where"] not in viewer.run(given).index.places():
        raise KeyError(given["where"])
    return given["where"]


ANSWERS: Final[Mapping[str, Callable[[Viewer, Given], Any]]] = {
    "runs": _runs,
    "curves": _curves,
    "places": _places,
    "rollouts": _rollouts,
    "search": _search,
    "group": _group,
    "tokens": _tokens,
    "text": _text,
    "memory": _memory,
    "neighbours": _neighbours,
    "shown": _shown,
    "alarms": _alarms,
}
