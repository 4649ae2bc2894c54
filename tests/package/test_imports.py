"""Imports."""

from helpers import starts_no_backend


def test_importing_starts_no_backend():
    assert starts_no_backend("import jaxamp; jaxamp.amp(lambda x: x); jaxamp.default_amp_policy")
