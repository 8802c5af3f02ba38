"""Texts of unknown origin in a form that can be normalised in time proportional to their length."""

import unicodedata
from typing import Final

_MOST_MARKS: Final = 30  # in a row, of one letter: the limit of the Stream-Safe Text Format (UAX #15)


def stream_safe(text: str) -> str:
    """The text without the marks beyond the 30th of a letter, which no language writes.

    Normalisation sorts the marks of each letter in quadratic time, so that a text of many marks would hold
    the interpreter's lock for minutes.
    """
    if len(text) <= 10 * _MOST_MARKS or text.isascii():
        return text
    characters: list[str] = []
    num_marks = 0
    for character in text:
        num_marks = num_marks + 1 if unicodedata.combining(character) else 0
        if num_marks <= _MOST_MARKS:
            characters.append(character)
    return "".join(characters) if len(characters) < len(text) else text
