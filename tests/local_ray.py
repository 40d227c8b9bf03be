"""A local Ray that test modules share: kept from one module to the next, until one with other variables is needed."""

import os

_kept = None  # (variables, connection)


def shared_ray(**variables):
    """Connect to the kept local Ray, or to a new one whose processes have these variables.

    The caller sets the variables in its own environment for as long as it uses Ray.
    """
    global _kept
    import ray

    from roost.runtime.ray_connection import connect

    if _kept is not None and _kept[0] == variables and _is_open(_kept[1]):
        return
    end_ray()
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        assert not ray.is_initialized()
        _kept = variables, connect("local")
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _is_open(connection):
    import ray

    return ray.is_initialized() and ray.get_runtime_context().gcs_address == connection.address


def end_ray():
    """End the kept Ray, for a module that starts one of its own."""
    global _kept
    if _kept is not None:
        (_, connection), _kept = _kept, None
        connection.users = 1  # a test that failed may have left a cluster open
        connection.close()
