"""What the page may ask: each answer is plain data, made of files, with or without a server around it."""

import shlex
from collections.abc import Callable, Mapping
from threading import Lock, Thread
from typing import Any, Final

from outrider.watch.viewer.alarms import alarms_of
from outrider.watch.viewer.catalogue import Catalogue, ViewedRun
from outrider.watch.viewer.curves import curves_of
from outrider.watch.viewer.group_view import group_view, tokens_view, whole_text
from outrider.watch.viewer.memory_view import memory_view, neighbours, shown
from outrider.watch.viewer.rollout_query import Query, find
from outrider.watch.viewer.text_search import TextSearch

Given = Mapping[str, str]


class Viewer:
    """The runs, and the search in the one that is looked at: only its texts are kept."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._lock = Lock()
        self._search: tuple[str, TextSearch] | None = None

    def run(self, given: Given) -> ViewedRun:
        """Raises KeyError."""
        return self.catalogue.of(given["run"])

    def search(self, run: ViewedRun) -> TextSearch:
        """The search of a run. The first time its files are read in a thread, so that neither the first
        search nor the first filter waits for all of them.
        """
        with self._lock:
            if self._search is None or self._search[0] != run.id:
                self._search = run.id, TextSearch(run.path)
                Thread(target=_read_ahead, args=(run, self._search[1]), daemon=True).start()
            return self._search[1]


def _read_ahead(run: ViewedRun, search: TextSearch) -> None:
    run.index.table()
    search.warm(run.index.places())


def _runs(viewer: Viewer, given: Given) -> Any:
    return viewer.catalogue.overview()


def _curves(viewer: Viewer, given: Given) -> Any:
    run = viewer.run(given).path
    return curves_of(run) | {"path": shlex.quote(str(run))}  # for commands that the page shows


def _places(viewer: Viewer, given: Given) -> Any:
    run = viewer.run(given)
    viewer.search(run)  # the page asks for this first
    return run.index.places()


def _rollouts(viewer: Viewer, given: Given) -> Any:
    return find(viewer.run(given).index.table(given.get("where", "")), Query.of(given))


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
