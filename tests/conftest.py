"""What holds for every test: no example fails for the time it took, since speed is measured in bench/ and not here."""

from hypothesis import HealthCheck, settings

settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
