"""Settings of all tests: examples have no deadline, since a busy machine is no fault of the code."""

from hypothesis import HealthCheck, settings

settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("outrider")
