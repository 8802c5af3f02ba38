"""Evaluation of models and runs: task sets, grading, reports, comparisons with statistics, packs, and the
hub.
"""
