"""The functions of functions-qwen3-1.7b-lora.toml: a shop with prices in euros and exchange rates.

python recipes/one-card/own_functions.py        # writes the questions again
"""

import json
from pathlib import Path

PRICES = {
    "lamp": 34, "desk": 219, "chair": 87, "shelf": 64, "carpet": 145, "mirror": 58, "curtain": 29, "vase": 17,
    "clock": 41, "stool": 36, "cabinet": 312, "pillow": 13,
}  # fmt: skip
RATES = {"USD": 1.08, "CHF": 0.96, "GBP": 0.85, "PLN": 4.31, "SEK": 11.24}


def price(item: str) -> int:
    """Return the price of one item in euros.

    Args:
        item: its name in the singular, such as lamp
    """
    return PRICES[item.strip().lower()]


def exchange_rate(currency: str) -> float:
    """Return the price of one euro in another currency.

    Args:
        currency: three letters, such as USD
    """
    return RATES[currency.strip().upper()]


def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: one number
        b: another number
    """
    return round(a * b, 2)


def questions() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The questions to train on and the held-out ones: every fourth number of pieces is held out."""
    splits: tuple[list[dict[str, str]], list[dict[str, str]]] = ([], [])
    for item in PRICES:
        for currency in RATES:
            for pieces in (3, 6, 7, 12):
                answer = multiply(multiply(pieces, price(item)), exchange_rate(currency))
                question = f"What is the total price of {pieces} pieces of the item {item!r} in {currency}?"
                splits[pieces == 7].append({"question": question, "answer": f"{answer:g}"})
    return splits


if __name__ == "__main__":
    for split, rows in zip(("train", "test"), questions(), strict=True):
        file = Path(__file__).with_name("own_functions") / f"{split}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
