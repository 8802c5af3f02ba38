"""``--smoke``: any recipe end to end in seconds on a CPU, before a GPU is paid for.

One shrinking of settings (:mod:`outrider.smoke.settings`) that stands above recipe and command line: a tiny
random model, a step, two tasks, small groups, short turns, and stand-ins for files and servers that are not
there (:mod:`outrider.smoke.settings`). What it finds is a recipe that cannot run; no number of it means
anything.
"""
