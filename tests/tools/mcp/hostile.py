"""A server by hand, over stdio, that breaks the protocol on purpose. Its first argument says how, its second
one is a file that counts its starts.
"""

import json
import sys
from pathlib import Path
from typing import Any

HOW, COUNTER = sys.argv[1], Path(sys.argv[2])
NUM_STARTS = len(COUNTER.read_text()) + 1 if COUNTER.exists() else 1
COUNTER.write_text("x" * NUM_STARTS)
TOOL = {"name": "say", "description": "Say it.", "inputSchema": {"type": "object", "properties": {}}}
ANYTHING = {"type": "object", "properties": {"what": True}, "required": ["what"]}


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def answer(request: dict[str, Any], result: dict[str, Any]) -> None:
    write(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}) + "\n")


def call(request: dict[str, Any]) -> None:
    text = {"content": [{"type": "text", "text": f"start {NUM_STARTS}"}]}
    match HOW:
        case "banner":
            write("Welcome!\n\n{}\n[1]\n")
            answer(request, text)
        case "garbage":
            while True:
                write("no message\n")
        case "endless-line":
            while True:
                write("x" * 65536)
        case "half-a-line":
            write('{"jsonrpc": "2.0", "id"')
            sys.exit(4)
        case "long-answer":
            answer(request, {"content": [{"type": "text", "text": "x" * 200_000}]})
        case "no-result":
            answer(request, {"content": "no list"})
        case "bad-arguments" | "broken":
            code = -32602 if HOW == "bad-arguments" else -32603
            error = {"code": code, "message": "it does not work"}
            write(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}) + "\n")
        case _:
            answer(request, text)


def main() -> None:
    if HOW == "starts-once" and NUM_STARTS > 2:  # once for its list, once for its first call
        sys.exit("not again")
    if HOW == "never-starts":
        sys.stdin.read()
    for line in sys.stdin:
        request = json.loads(line)
        match request.get("method"):
            case "server/discover":
                error = {"code": -32601, "message": "unknown"}
                write(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}) + "\n")
            case "initialize":
                about = {"name": "hostile", "version": str(NUM_STARTS) if HOW == "other-version" else "1"}
                version = request["params"]["protocolVersion"]
                answer(
                    request,
                    {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about},
                )
            case "tools/list" if HOW == "no-tools":
                answer(request, {"tools": []})
            case "tools/list" if HOW == "endless-list":
                answer(request, {"tools": [], "nextCursor": "more"})
            case "tools/list" if HOW == "two-alike":
                answer(request, {"tools": [TOOL, {**TOOL, "name": "Say"}]})
            case "tools/list" if HOW == "any-argument":
                answer(request, {"tools": [{**TOOL, "inputSchema": ANYTHING}]})
            case "tools/list":
                answer(request, {"tools": [TOOL]})
            case "tools/call":
                call(request)
                if HOW in ("starts-once", "dies-after-each", "other-version"):
                    sys.exit(5)


if __name__ == "__main__":
    main()
