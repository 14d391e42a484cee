"""Tests in this folder have the mark `fast_way`: all others must also pass if `Modular` never takes the fast way."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.fast_way)
