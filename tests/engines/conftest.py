"""Tests marked `vllm` start real servers of vLLM, from an interpreter of its own."""

import os

import pytest

VARIABLE = "ROOST_VLLM_PYTHON"


def pytest_runtest_setup(item):
    if item.get_closest_marker("vllm") and not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} names no interpreter that has vLLM; `make test-vllm` makes one")


@pytest.fixture(scope="session")
def vllm_python():
    return os.environ[VARIABLE]
