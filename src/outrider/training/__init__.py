"""The training loop, the update, checkpoints and everything that a run needs. ``outrider.train`` is the
function.
"""
