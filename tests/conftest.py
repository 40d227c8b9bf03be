"""How tests are spread over processes (`pytest -n 2 --dist loadgroup`), where they are."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Clusters find each other on a machine, and some tests look at all of its processes: these run one after the other.
WITH_RAY = (
    "runtime/live",
    "trainer/live",
    "engines/live/test_on_a_cluster.py",
    "engines/test_server_process.py",
    "cli/test_inventory_command.py",
)


def is_with_ray(item):
    return item.path.is_relative_to(HERE) and item.path.relative_to(HERE).as_posix().startswith(WITH_RAY)


def pytest_collection_modifyitems(items):
    """Tests of a file stay together, as they share what they start. Those with Ray begin: they take the longest."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ray" if is_with_ray(item) else str(item.path)))
    items.sort(key=lambda item: not is_with_ray(item))
