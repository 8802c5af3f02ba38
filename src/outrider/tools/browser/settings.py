"""Settings of the browser tool: where pages come from, who reads them, and every limit."""

import re
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, field_validator

from outrider.config import Settings
from outrider.engines.chat.engine import EndpointSettings

_HOST = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*(?::[0-9]{1,5})?|\[[0-9a-f:.]+\](?::[0-9]{1,5})?")


class FetchSettings(Settings):
    """Live pages over http and https. What they say changes, and with it a run's bits."""

    details: ClassVar[frozenset[str]] = frozenset(
        {"private_hosts", "max_bytes", "timeout_s", "max_redirects"}
    )

    # Lists, because a tool's table is compared with that of a checkpoint, and JSON has no tuples.
    allowed_hosts: list[str] = Field(min_length=1)
    """The only hosts that are asked, also by way of redirects: ``en.wikipedia.org``, ``*.example.org`` for
    all names below it, ``127.0.0.1:8080`` with another port than that of the scheme.
    """
    private_hosts: list[str] = Field(default_factory=list)
    """Those of them that may stand for an address of this machine or of a private network (a mirror)."""
    max_bytes: int = Field(default=2 << 20, ge=1, le=16 << 20)
    """A larger page is refused, and no more of it is read."""
    timeout_s: float = Field(default=15.0, gt=0)
    """Seconds for a page as a whole: all redirects, headers and the last byte."""
    max_redirects: int = Field(default=4, ge=0, le=20)
    cache_pages: int = Field(default=1024, ge=1)
    """Fetched pages that are kept, so that all rollouts of a run see the same one; the oldest goes first."""

    @field_validator("allowed_hosts", "private_hosts")
    @classmethod
    def _are_hosts(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(
                    f"{host!r} is no host: lower case, without a scheme or path, such as en.wikipedia.org"
                )
        return hosts


class ReaderEndpoint(EndpointSettings):
    """The reader's chat server. Less patience than elsewhere: a call has to end within a rollout's step."""

    timeout_s: float = Field(20.0, gt=0)
    max_retries: int = Field(1, ge=0)


class NoReader(Settings):
    """The beginning of the page, whatever is looked for."""

    type: Literal["none"] = "none"


class PassageReader(Settings):
    """The passages of the page that BM25 ranks first, in the page's order."""

    type: Literal["bm25"] = "bm25"
    passage_chars: int = Field(default=400, ge=40)
    """Characters of a passage at most; passages end with a sentence where they can."""


class EndpointReader(Settings):
    """A model behind an OpenAI-compatible server reads the page and answers in its own words."""

    type: Literal["endpoint"] = "endpoint"
    endpoint: ReaderEndpoint
    max_tokens: int = Field(default=512, ge=1)
    """Tokens that the reader may write."""
    temperature: float = Field(default=0.0, ge=0)


Reader: TypeAlias = Annotated[NoReader | PassageReader | EndpointReader, Field(discriminator="type")]


class BrowserSettings(Settings):
    """How pages are read, and whether live ones are. Those of a file are the environment's ``pages``."""

    fetch: FetchSettings | None = None
    """Live pages beside those; None asks nobody."""
    reader: Reader = PassageReader()
    max_page_chars: int = Field(default=24_000, ge=100)
    """Characters of a page that are read; about the 6,000 tokens of ARPO's browser."""
    max_chars: int = Field(default=2_000, ge=40)
    """Characters of an observation below the page's title, of which 200 are shown."""
    cache_readings: int = Field(default=4_096, ge=1)
    """Readings that are kept, by what is on the page and what was looked for; the oldest goes first."""
