"""A result of a call as text: what is no text is said in words."""

import json
from collections.abc import Iterator
from typing import Any

from mcp_types import (
    AudioContent,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from outrider.tools.base import ToolOutput


def to_tool_output(result: CallToolResult, max_chars: int) -> ToolOutput:
    """Texts in order, a line apart; structured content where there is no text."""
    parts = list(_parts(result.content))
    if not any(isinstance(block, TextContent) for block in result.content) and result.structured_content:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = cut("\n".join(parts), max_chars)
    is_error = bool(result.is_error)
    return ToolOutput(text=text or ("The call failed." if is_error else ""), failed=is_error)


def cut(text: str, max_chars: int) -> str:
    """The beginning of a text that is too long, and how much there is more."""
    left = len(text) - max_chars
    return text if left <= 0 else f"{text[:max_chars]}\n[{left} more characters]"


def _parts(blocks: list[ContentBlock]) -> Iterator[str]:
    for block in blocks:
        match block:
            case TextContent():
                yield block.text
            case ImageContent() | AudioContent():
                yield _bytes(block.mime_type, block.data)
            case ResourceLink():
                yield f"[{block.name}: {block.uri}]"
            case EmbeddedResource(resource=TextResourceContents() as inside):
                yield inside.text
            case EmbeddedResource(resource=inside):
                yield _bytes(inside.mime_type or "a file", _blob(inside))


def _blob(resource: Any) -> str:
    return str(resource.blob)


def _bytes(kind: str, base64: str) -> str:
    padding = len(base64) - len(base64.rstrip("="))
    return f"[{kind}, {len(base64) * 3 // 4 - padding} bytes]"
