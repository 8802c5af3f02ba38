"""Text of others, made fit for a terminal."""


def one_line(text: str) -> str:
    """The text with every control character, line breaks and terminal escapes included, replaced by a space."""
    return "".join(char if char.isprintable() else " " for char in text)
