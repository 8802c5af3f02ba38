"""Outrider trains LLM agents to explore."""

__version__ = "0.1.0"
