"""The server as a program: `python -m roost.app_world.serving --port 0`."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from roost.app_world.serving.command_line import arguments, limits_of


def main(argv: Sequence[str] | None = None) -> None:
    # The web server raises the signals that it caught once more when it ends; exit with 0 then.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    options = arguments(argv)
    try:
        limits = limits_of(options)

        from roost.app_world.serving.server import run

        run(limits, options.host, options.port)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
