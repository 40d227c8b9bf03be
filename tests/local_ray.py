"""A local Ray that test modules share: kept from one module to the next, until one ends it."""

import uuid

ACCELERATORS = 8  # of the simulated machine
MARK = "ROOST_TEST_MARK"  # the variable by which processes that tests have started are known
# Memory counts only where a job says what it needs of it.
MACHINE = {
    "ROOST_FAKE_ACCELERATORS": str(ACCELERATORS),
    "ROOST_FAKE_MEMORY_GB": "80",
    MARK: uuid.uuid4().hex,
}

_kept = None


def shared_ray(patch):
    """Connect to the kept local Ray, or to a new one; `patch` sets the machine's variables while a module uses it."""
    global _kept
    import ray

    from roost.runtime.ray_connection import connect

    patch.delenv("RAY_ADDRESS", raising=False)
    for name, value in MACHINE.items():
        patch.setenv(name, value)
    if _kept is not None and _is_open(_kept):
        return
    end_ray()
    assert not ray.is_initialized()
    _kept = connect("local")


def _is_open(connection):
    import ray

    return ray.is_initialized() and ray.get_runtime_context().gcs_address == connection.address


def end_ray():
    """End the kept Ray, for a module that starts one of its own."""
    global _kept
    if _kept is not None:
        connection, _kept = _kept, None
        connection.users = 1  # a test that failed may have left a cluster open
        connection.close()
