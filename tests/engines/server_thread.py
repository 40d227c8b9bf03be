"""A web application on a port of the loopback interface, in a thread of its own."""

import contextlib
import threading

import uvicorn


@contextlib.contextmanager
def serving(app, at_end=lambda: None):
    """The address of the running application; `at_end` lets go of what would keep it from stopping."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the server did not start")
        threading.Event().wait(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        at_end()
        server.should_exit = True
        thread.join(10)
