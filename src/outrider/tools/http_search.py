"""The plug-in ``http-search``: search by a retrieval server, such as those of Search-R1 and verl-agent.

The server's path is ``/retrieve``. A request is ``{"queries": [QUERY], "topk": K, "return_scores": true}``
(Search-R1, ``search_r1/search/retrieval_server.py``) or the same with ``"query": QUERY`` (verl-agent,
``skyrl_gym/tools/search.py``). The response is ``{"result": [[{"document": {"contents": TEXT}, "score": S},
...]]}``, where the first line of ``contents`` is the title.
"""

import math
from typing import Any, Literal

from pydantic import Field, field_validator

from outrider.engines.chat import ChatEndpoint, EndpointSettings, Transient
from outrider.errors import EngineFault, ModelError, ToolFault, ToolUnavailable
from outrider.tools.base import SingleFlightCache, ToolContext, ToolOutput, ToolSettings
from outrider.tools.search import EMPTY_QUERY, NO_HITS, Passage, SearchConfig, SearchTool, render_passage

_CACHED_QUERIES = 10_000


class HttpSearchSettings(ToolSettings):
    """A retrieval server. If ``$OUTRIDER_SEARCH_KEY`` is set, it is sent as a bearer token."""

    base_url: str
    """Address without the path, for example ``http://127.0.0.1:8000``; requests go to ``/retrieve``."""
    request: Literal["search-r1", "verl-agent"] = "search-r1"
    """Form of the request: the field ``queries`` of Search-R1's server, or ``query`` of verl-agent's."""
    top_k: int = Field(3, ge=1, le=100)
    """Number of passages per query."""
    max_chars: int = Field(1000, ge=20)
    """Maximum characters of a passage (title and text); longer ones are truncated at a word."""
    timeout_s: float = Field(15.0, gt=0)
    """Time limit of a response. A call with all its retries must fit ``rollout.step_timeout_s``."""
    max_retries: int = Field(2, ge=0)
    """Retries after a broken connection, a timeout, a malformed response or a status of 500 and above. If all
    fail, the rollout is masked; a failed search is never part of an observation or a reward."""

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, base_url: str) -> str:
        return EndpointSettings(base_url=base_url).base_url


class HttpSearch:
    """Search by a server. Equal queries of a process get the results of the first one."""

    Settings = HttpSearchSettings
    name, usage = SearchTool.name, SearchTool.usage
    description, argument = SearchTool.description, SearchTool.argument

    def __init__(self, settings: HttpSearchSettings, endpoint: ChatEndpoint | None = None) -> None:
        self._settings = settings
        self._form = SearchConfig(max_chars=settings.max_chars)
        self._results: SingleFlightCache[str] = SingleFlightCache(_CACHED_QUERIES)
        self._endpoint = endpoint or ChatEndpoint(
            EndpointSettings(
                base_url=settings.base_url,
                api_key_variable="OUTRIDER_SEARCH_KEY",
                timeout_s=settings.timeout_s,
                max_retries=settings.max_retries,
            )
        )

    @classmethod
    def build(cls, settings: HttpSearchSettings, context: ToolContext) -> "HttpSearch":
        """Search once. Raises ToolUnavailable if the server does not respond as the module describes."""
        tool = cls(settings)
        try:
            tool.run_text("search")
        except ToolFault as fault:
            raise ToolUnavailable(str(fault)) from fault
        return tool

    def run_text(self, text: str) -> ToolOutput:
        """Search and return the passages, best first. Raises ToolFault if the server fails."""
        query = " ".join(text.split())
        if not query:
            return ToolOutput(text=EMPTY_QUERY, status="empty")
        found = self._results.get(query, lambda: self._search(query))
        return ToolOutput(text=found, status="empty" if found == NO_HITS else "ok")

    def _search(self, query: str) -> str:
        field = {"queries": [query]} if self._settings.request == "search-r1" else {"query": query}
        body = {**field, "topk": self._settings.top_k, "return_scores": True}
        try:
            hits = self._endpoint.request("retrieve", body, _read_hits, 0)
        except (EngineFault, ModelError) as error:
            raise ToolFault(f"http-search: {error}") from error
        passages = [passage for _, passage in hits[: self._settings.top_k]]
        return "\n".join(render_passage(passage, self._form)[0] for passage in passages) or NO_HITS

    def close(self) -> None:
        """Nothing to release."""


def _read_hits(response: Any) -> list[tuple[float, Passage]]:
    """The hits of one query, best first; those with equal scores in the order of their texts, because a
    server may return them in any order. Raises Transient for a malformed response.
    """
    try:
        [rows] = response["result"]
        hits = []
        for row in rows:
            score, contents = float(row["score"]), row["document"]["contents"]
            if not math.isfinite(score) or not isinstance(contents, str):
                raise ValueError("a score is not finite, or a text is missing")
            title, _, text = contents.strip().partition("\n")
            # a text of one line has no title
            hits.append((score, Passage(passage_id="", title=title if text else "", text=text or title)))
    except (KeyError, TypeError, ValueError) as error:
        raise Transient("garbage", f"the response has no list of passages ({error!r})"[:200]) from error
    return sorted(hits, key=lambda hit: (-hit[0], hit[1].title, hit[1].text))
