"""Evaluations as log files of inspect-ai, which `inspect view` and other tools open.

:mod:`outrider.evals.inspect_log.of_run` and :mod:`outrider.evals.inspect_log.of_tasks` read what is on disk
into :class:`~outrider.evals.inspect_log.logged.LoggedEvaluation`;
:mod:`outrider.evals.inspect_log.writing` writes that with the package itself (extra ``inspect``).
"""
