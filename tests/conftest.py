"""Options of the whole suite."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

# where a landing is decided the same examples are tried each time; elsewhere new ones
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

# a shell's background jobs ignore Ctrl-C, and so would every process the tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption(
        "--golden", action="store_true", help="rewrite the golden files instead of comparing"
    )


@pytest.fixture
def rewrites_golden(request):
    """Whether golden files are to be rewritten."""
    return request.config.getoption("--golden")
