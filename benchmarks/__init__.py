"""Measurements. They form a package, because an installed library (pyarrow 17) has a module of this name."""
