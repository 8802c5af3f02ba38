"""Plug-ins: algorithms, environments, tools, engines, embedders, trackers and call formats by name.

:mod:`~outrider.plugins.registry` finds and builds the class of a name, :mod:`~outrider.plugins.imports`
imports it and finds its origin, :mod:`~outrider.plugins.listing` lists the plug-ins that exist or that a run
uses.
"""
