"""The MCP server of recipes/mcp-shop.toml: a shop's shelves, over stdio.

`python recipes/mcp_shop.py --questions recipes/mcp-shop` writes the questions, and what an expert does, anew.
"""

import json
import random
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

COLOURS = [
    "red",
    "blue",
    "green",
    "black",
    "white",
    "yellow",
    "brown",
    "grey",
    "pink",
    "orange",
    "purple",
    "golden",
]
NOUNS = [
    "kettle",
    "lamp",
    "chair",
    "table",
    "basket",
    "mirror",
    "clock",
    "candle",
    "blanket",
    "pillow",
    "bottle",
    "vase",
    "carpet",
    "drawer",
    "bench",
    "ladder",
    "bucket",
    "broom",
    "teapot",
    "plate",
]
THINGS = [f"{colour} {noun}" for noun in NOUNS for colour in COLOURS]
ASKS = {
    "price": "What does the {thing} cost?",
    "stock": "How many pieces of the {thing} are there?",
    "weight": "How heavy is the {thing}?",
}
SIZES = {"train": 128, "valid": 32, "test": 80}  # things: a split asks for none of another one's
NUM_SHOWN = 24  # training questions that an expert answers

draw = random.Random(0)
CODES = dict(zip(THINGS, (str(code) for code in draw.sample(range(1000, 10000), len(THINGS))), strict=True))
FACTS = {ask: {code: str(draw.randrange(2, 100)) for code in CODES.values()} for ask in ASKS}

server = MCPServer("shop", version="1.0")


def fact(ask: str, code: str) -> str:
    """What is known of a code."""
    found = FACTS[ask].get(code.strip())
    if found is None:
        raise ToolError(f"There is no code {code.strip()!r}.")
    return found


@server.tool()
def find(thing: str) -> str:
    """Find the code of a thing."""
    code = CODES.get(" ".join(thing.lower().split()).removeprefix("the "))
    if code is None:
        raise ToolError("There is no such thing.")
    return f"code {code}"


@server.tool()
def price(code: str) -> str:
    """Tell the price of a code."""
    return fact("price", code)


@server.tool()
def stock(code: str) -> str:
    """Tell how many pieces of a code there are."""
    return fact("stock", code)


@server.tool()
def weight(code: str) -> str:
    """Tell how heavy a code is."""
    return fact("weight", code)


def write_questions(folder: Path) -> None:
    """The splits, and demonstrations for the first training questions."""
    things, asks = THINGS.copy(), list(ASKS)
    order = random.Random(1)
    order.shuffle(things)
    for split, size in SIZES.items():
        rows = []
        for thing in (things.pop() for _ in range(size)):
            ask = order.choice(asks)
            answer = FACTS[ask][CODES[thing]]
            rows.append((thing, ask, {"question": ASKS[ask].format(thing=thing), "answer": answer}))
        _write(folder / f"{split}.jsonl", [row for _, _, row in rows])
        if split == "train":
            _write(folder / "demonstrations.jsonl", [shown(*row) for row in rows[:NUM_SHOWN]])


def shown(thing: str, ask: str, row: dict[str, str]) -> dict[str, object]:
    """A question and the turns that answer it."""
    turns = [f"<find>{thing}</find>", f"<{ask}>{CODES[thing]}</{ask}>", f"<answer>{row['answer']}</answer>"]
    messages = [{"role": "assistant", "content": turn} for turn in turns]
    return {"question": row["question"], "reward": 1.0, "messages": messages}


def _write(path: Path, rows: list[dict[str, str]] | list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    if "--questions" in sys.argv:
        write_questions(Path(sys.argv[-1]))
    else:
        server.run()
