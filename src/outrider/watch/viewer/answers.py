"""What the page may ask: each answer is plain data, made of files, with or without a server around it."""

import shlex
from collections.abc import Callable, Mapping
from threading import Lock, Thread
from typing import Any, Final

from outrider.watch.viewer.alarms import read_alarms
from outrider.watch.viewer.catalogue import Catalogue, ViewedRun
from outrider.watch.viewer.curves import metric_curves
from outrider.watch.viewer.group_view import group_view, tokens_view, whole_text
from outrider.watch.viewer.memory_view import insertions, memory_view, neighbours
from outrider.watch.viewer.rollout_query import Query, find
from outrider.watch.viewer.text_search import TextSearch

Params = Mapping[str, str]


class Viewer:
    """The runs, and the search in the one that is looked at: only its texts are kept."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._lock = Lock()
        self._search: tuple[str, TextSearch] | None = None

    def run(self, params: Params) -> ViewedRun:
        """Raises KeyError."""
        return self.catalogue.get(params["run"])

    def search(self, run: ViewedRun) -> TextSearch:
        """The search of a run. The first time its files are read in a thread, so that neither the first
        search nor the first filter waits for all of them: whatever opens a run asks for this.
        """
        with self._lock:
            if self._search is None or self._search[0] != run.id:
                if self._search is not None:
                    self._search[1].leave()
                self._search = run.id, TextSearch(run.path)
                Thread(target=_warm_cache, args=(run, self._search[1]), daemon=True).start()
            return self._search[1]


def _warm_cache(run: ViewedRun, search: TextSearch) -> None:
    run.index.table()
    search.warm(run.index.stems())


def _runs(viewer: Viewer, params: Params) -> Any:
    runs = viewer.catalogue.overview()
    if len(runs) == 1:
        viewer.search(viewer.catalogue.get(runs[0]["id"]))  # the one that will be opened
    return runs


def _curves(viewer: Viewer, params: Params) -> Any:
    run = viewer.run(params).path
    return metric_curves(run) | {"path": shlex.quote(str(run))}  # for commands that the page shows


def _stems(viewer: Viewer, params: Params) -> Any:
    run = viewer.run(params)
    viewer.search(run)  # the page asks for this first
    return run.index.stems()


def _rollouts(viewer: Viewer, params: Params) -> Any:
    index = viewer.run(params).index
    page = find(index.table(params.get("where", "")), Query.from_params(params))
    return page | {"notes": [] if params.get("where") else sorted(index.notes.values())}


def _search(viewer: Viewer, params: Params) -> Any:
    run = viewer.run(params)
    stems = [_require_stem(viewer, params)] if params.get("where") else run.index.stems()
    return viewer.search(run).find(params.get("words", "")[:1000], stems)


def _group(viewer: Viewer, params: Params) -> Any:
    return group_view(viewer.run(params).path, _require_stem(viewer, params), params["trace"])


def _tokens(viewer: Viewer, params: Params) -> Any:
    run = viewer.run(params).path
    return tokens_view(run, _require_stem(viewer, params), params["trace"], int(params["rollout"]))


def _text(viewer: Viewer, params: Params) -> Any:
    return whole_text(
        viewer.run(params).path, _require_stem(viewer, params), params["trace"], int(params["node"])
    )


def _memory(viewer: Viewer, params: Params) -> Any:
    return memory_view(viewer.run(params).path, int(params["step"]), params.get("words", ""))


def _neighbours(viewer: Viewer, params: Params) -> Any:
    run = viewer.run(params).path
    return neighbours(run, int(params["step"]), params.get("words", ""), memory=params.get("memory", "steps"))


def _insertions(viewer: Viewer, params: Params) -> Any:
    run = viewer.run(params).path
    if "item" in params:
        return insertions(
            run, memory=params.get("memory", ""), key=params.get("key", ""), item=int(params["item"])
        )
    return insertions(run, until=int(params["step"]))


def _alarms(viewer: Viewer, params: Params) -> Any:
    return read_alarms(viewer.run(params).path)


def _require_stem(viewer: Viewer, params: Params) -> str:
    """One of the run's files and nothing else: it becomes a part of a path. Raises KeyError."""
    if params["where"] not in viewer.run(params).index.stems():
        raise KeyError(params["where"])
    return params["where"]


ANSWERS: Final[Mapping[str, Callable[[Viewer, Params], Any]]] = {
    "runs": _runs,
    "curves": _curves,
    "places": _stems,
    "rollouts": _rollouts,
    "search": _search,
    "group": _group,
    "tokens": _tokens,
    "text": _text,
    "memory": _memory,
    "neighbours": _neighbours,
    "shown": _insertions,
    "alarms": _alarms,
}
