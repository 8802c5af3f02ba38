"""Named random streams. Each draw belongs to a stream keyed by its purpose, so that the order of execution
never matters.
"""

import hashlib

import numpy as np


def stream_seed(run_seed: int, *key: str | int) -> int:
    """Return a 63-bit seed for the stream ``key``, the same on every machine and Python version.

    Keys are length-prefixed before hashing, so ``("ab", "c")`` and ``("a", "bc")`` differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (run_seed, *key):
        encoded = f"{type(part).__name__}:{part}".encode()
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return int.from_bytes(digest.digest(), "big") >> 1


def reset_seed(run_seed: int, training_step: int, task_key: str) -> int:
    """Return the seed for resetting a task in a training step; a group shares its initial state."""
    return stream_seed(run_seed, "reset", training_step, task_key)


def stream(run_seed: int, *key: str | int) -> np.random.Generator:
    """Return a numpy generator at the start of the stream ``key``."""
    return np.random.Generator(np.random.PCG64(stream_seed(run_seed, *key)))
