"""Experts of the tests' OpenEnv worlds."""

from collections.abc import Generator


def says_the_word(prompt: str) -> Generator[str, str, None]:
    told = prompt
    while True:
        word = told.split()[-1].strip(".")
        told = yield f"<action>{word}</action>"


def gives_up(prompt: str) -> Generator[str, str, None]:
    yield "<action>nothing</action>"


def breaks(prompt: str) -> Generator[str, str, None]:
    yield "<action>nothing</action>"
    raise KeyError("no way")
