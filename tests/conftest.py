"""Options of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--golden", action="store_true", help="rewrite the golden files instead of comparing"
    )


@pytest.fixture
def rewrites_golden(request):
    """Whether golden files are to be rewritten."""
    return request.config.getoption("--golden")
