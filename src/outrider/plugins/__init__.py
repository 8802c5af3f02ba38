"""Plug-ins by name: algorithms, environments, tools, engines, embedders and trackers, ours and anybody's.

:mod:`~outrider.plugins.registry` turns a name into a class, :mod:`~outrider.plugins.registry` checks a
plug-in's section of a recipe and :mod:`~outrider.plugins.imports` says where its code came from. No torch,
and no plug-in is imported before it is named.
"""
