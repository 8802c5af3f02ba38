"""Measurements: a package, so that one of this name in an installed library (pyarrow 17 has one) is not taken
for it.
"""
