"""What a recipe needs before it runs: memory, tokens, bytes and seconds, from the model's shape alone.

Arithmetic only: no torch, no weights, no Ray, no device. :mod:`outrider.planning.memory` has the formulas.
"""
