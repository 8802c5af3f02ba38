"""A retrieval server on 127.0.0.1 for tests: BM25 over passages, in the forms of Search-R1 and verl-agent."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from outrider.tools.search import Passage, SearchConfig, SearchTool
from tests.chat_server import Answer, Asked, ChatServer, chat_server


class RetrievalServer:
    """Answers from an index. ``answers`` are given first, one per request, in place of results."""

    def __init__(self, passages: Sequence[Passage], answers: Sequence[Answer] = ()) -> None:
        self._passages = passages
        self._answers = list(answers)

    def __call__(self, asked: Asked) -> Answer:
        if self._answers:
            return self._answers.pop(0)
        body: Mapping[str, Any] = asked.body or {}
        if asked.path != "/retrieve" or not body.get("return_scores"):
            return Answer({"detail": "Not Found"}, status=404)
        queries = body.get("queries") or [body["query"]]
        index = SearchTool(self._passages, SearchConfig(top_k=body["topk"]))
        return Answer({"result": [self._hits(index, query) for query in queries]})

    def _hits(self, index: SearchTool, query: str) -> list[dict[str, Any]]:
        found = index.run(query)
        # Servers with several threads return hits in any order.
        rows = list(zip(found.passages, found.scores, strict=True))[::-1]
        return [
            {"document": {"id": hit.passage_id, "contents": f'"{hit.title}"\n{hit.text}'}, "score": score}
            for hit, score in rows
        ]


@contextmanager
def retrieval_server(
    passages: Sequence[Passage], answers: Sequence[Answer] = ()
) -> Iterator[tuple[str, ChatServer]]:
    """Yield the address without a path, and the server with its requests."""
    with chat_server(RetrievalServer(passages, answers)) as server:
        yield server.url.removesuffix("/v1"), server


def passages(*texts: str) -> list[Passage]:
    """Passages with the titles p0, p1, ..."""
    return [Passage(passage_id=str(n), title=f"p{n}", text=text) for n, text in enumerate(texts)]


MALFORMED = (
    Answer(b"no json"),
    Answer([]),
    Answer({"result": []}),
    Answer({"result": [[{"document": {"contents": "a"}}]]}),
    Answer({"result": [[{"document": {"contents": 3}, "score": 1.0}]]}),
    Answer(json.dumps({"result": [[{"document": {"contents": "a"}, "score": float("nan")}]]}).encode()),
)
