"""An MCP server over stdio that starts quickly because it does not import the package ``mcp``.

python fake_server.py [MODE [COUNTER]]

MODE names a way to break the protocol, COUNTER a file in which the server counts its starts.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

MODE = sys.argv[1] if len(sys.argv) > 1 else ""
COUNTER = Path(sys.argv[2]) if len(sys.argv) > 2 else None
num_starts = 1
if COUNTER is not None:
    num_starts = len(COUNTER.read_text()) + 1 if COUNTER.exists() else 1
    COUNTER.write_text("x" * num_starts)


def tool(name: str, required: dict[str, Any] | None = None, optional: dict[str, Any] | None = None) -> Any:
    properties = {**(required or {}), **(optional or {})}
    schema = {"type": "object", "properties": properties, "required": list(required or {})}
    return {"name": name, "description": f"Do {name}.", "inputSchema": schema}


INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
TOOLS = [
    tool("add", {"a": INTEGER}, {"b": {**INTEGER, "default": 1}}),
    tool("shout", {"text": TEXT}),
    tool("variable", {"name": TEXT}),
    tool("process_id"),
    tool("meet", {"folder": TEXT, "others": INTEGER}),
    tool("die", {"status": INTEGER}),
    tool("sleep"),
    tool("hang"),
    tool("say"),
    tool("Get-Time.now"),
]
if os.environ.get("NUMBERS_OTHER"):
    TOOLS[0]["description"] = "Add."
if os.environ.get("NUMBERS_MORE"):
    TOOLS.append(tool("double", {"a": INTEGER}))


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def respond(request: dict[str, Any], **body: Any) -> None:
    write(json.dumps({"jsonrpc": "2.0", "id": request["id"], **body}) + "\n")


def respond_text(request: dict[str, Any], text: str) -> None:
    respond(request, result={"content": [{"type": "text", "text": text}]})


def respond_error(request: dict[str, Any], code: int, message: str) -> None:
    respond(request, error={"code": code, "message": message})


def call(request: dict[str, Any], name: str, arguments: dict[str, Any]) -> None:
    match name:
        case "add":
            respond_text(request, str(arguments["a"] + arguments.get("b", 1)))
        case "shout":
            respond_text(request, arguments["text"].upper())
        case "variable":
            respond_text(request, os.environ.get(arguments["name"], "is not set"))
        case "process_id":
            respond_text(request, str(os.getpid()))
        case "meet":  # respond only when as many calls are here at the same time
            folder = Path(arguments["folder"])
            (folder / str(os.getpid())).touch()
            while len(list(folder.iterdir())) < arguments["others"]:
                time.sleep(0.01)
            respond_text(request, "met")
        case "die":
            print("a grave fault", file=sys.stderr, flush=True)
            os._exit(arguments["status"])
        case "sleep":  # no response, but later requests are served
            pass
        case "hang":
            time.sleep(3600)
        case "say":
            say(request)
        case _:
            respond_text(request, "noon")


def say(request: dict[str, Any]) -> None:
    match MODE:
        case "banner":
            write("Welcome!\n\n{}\n[1]\n")
            respond_text(request, f"start {num_starts}")
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
            respond_text(request, "x" * 200_000)
        case "no-result":
            respond(request, result={"content": "no list"})
        case "bad-arguments":
            respond_error(request, -32602, "it does not work")
        case "broken":
            respond_error(request, -32603, "it does not work")
        case _:
            respond_text(request, f"start {num_starts}")
    if MODE in ("starts-once", "dies-after-each", "other-version"):
        sys.exit(5)


def list_tools(request: dict[str, Any]) -> None:
    match MODE:
        case "no-tools":
            respond(request, result={"tools": []})
        case "endless-list":
            respond(request, result={"tools": [], "nextCursor": "more"})
        case "two-alike":
            respond(request, result={"tools": [tool("say"), tool("Say")]})
        case "any-argument":
            respond(request, result={"tools": [tool("say", {"what": True})]})
        case _:
            respond(request, result={"tools": TOOLS})


def main() -> None:
    if MODE == "starts-once" and num_starts > 2:  # once for its list, once for its first call
        sys.exit("not again")
    if MODE == "never-starts":
        sys.stdin.read()
    for line in sys.stdin:
        request = json.loads(line)
        match request.get("method"):
            case "server/discover":
                respond_error(request, -32601, "unknown")
            case "initialize":
                version = str(num_starts) if MODE == "other-version" else os.environ.get("NUMBERS_VERSION")
                result = {
                    "protocolVersion": request["params"]["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "numbers", "version": version or "1.0"},
                }
                respond(request, result=result)
            case "tools/list":
                list_tools(request)
            case "tools/call":
                call(request, request["params"]["name"], request["params"].get("arguments", {}))


if __name__ == "__main__":
    main()
