"""Which commands reach a game."""

import re
from typing import Final

MAX_COMMAND_CHARACTERS: Final = 100
"""The interpreter cuts off what is longer than its line."""
_READABLE: Final = re.compile(r"[a-z0-9' -]+")
# Commands to the interpreter: they write files, restart or end it, change how it talks, or repeat what the
# package typed unseen. Its dictionary holds nine letters of a word.
_OUTSIDE: Final = frozenset(
    word[:9]
    for word in (
        "again", "brief", "g", "long", "normal", "noscript", "notify", "nouns", "o", "oops", "pronouns",
        "q", "quit", "record", "recording", "replay", "restart", "restore", "save", "script", "short",
        "superbrief", "transcript", "undo", "unscript", "verbose", "verify", "version",
    )
)  # fmt: skip


def refusal(command: str) -> str:
    """Why a command does not reach the game, in words for the policy; empty where it does.

    Kept out: several commands in one line, and commands to the interpreter (``save`` and ``script`` would
    write files).
    """
    if len(command) > MAX_COMMAND_CHARACTERS:
        return f"The command is longer than {MAX_COMMAND_CHARACTERS} characters; nothing was done."
    if not _READABLE.fullmatch(command):
        return "A command holds only letters, digits, spaces, hyphens and apostrophes; nothing was done."
    words = command.split()
    if "then" in words:
        return "Found several commands; nothing was done. Write exactly one command."
    if words[0][:9] in _OUTSIDE or words[0].startswith("tw-"):
        return f"'{words[0]}' is not part of the game; nothing was done."
    return ""
