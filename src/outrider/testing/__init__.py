"""Contract checks for plug-ins, ours and yours: each raises AssertionError, which says what a run would
stumble over."""

from outrider.testing.algorithm import check_algorithm
from outrider.testing.call_format import check_call_format
from outrider.testing.engine import check_engine
from outrider.testing.environment import check_environment
from outrider.testing.tool import check_tool

__all__ = ["check_algorithm", "check_call_format", "check_engine", "check_environment", "check_tool"]
