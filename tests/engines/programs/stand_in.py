"""A server that behaves as a test tells it to, by the words in STAND_IN; it takes the options of a real one.

Every process of it says its id in the folder STAND_IN_FOLDER.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"env": dict(os.environ), "data": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def say_id(role):
    Path(os.environ["STAND_IN_FOLDER"], f"{role}.pid").write_text(str(os.getpid()))


def ignore_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def sleep_on(role, behaviour):
    """A helper of the server; a `stubborn` one cannot be asked to end, a `stray` one has left session and parent."""
    if behaviour == "stray" and os.fork():
        return
    if behaviour == "stray":
        os.setsid()
    if behaviour in ("stray", "stubborn"):
        ignore_sigterm()
    say_id(role)
    time.sleep(3600)


def serve(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    for behaviour in ("plain", "stubborn", "stray"):
        if f"{behaviour}-helper" in words:
            subprocess.Popen([sys.executable, __file__, "helper", behaviour])
            until_there = Path(os.environ["STAND_IN_FOLDER"], f"{behaviour}-helper.pid")
            while not until_there.exists() or not until_there.read_text():
                time.sleep(0.01)
    say_id("server")
    print("loading a model", flush=True)
    if "ignores-sigterm" in words:
        ignore_sigterm()
    if "fails" in words:
        sys.exit("no such model: the folder is empty")
    if "never-ready" in words:
        time.sleep(3600)
    server = ThreadingHTTPServer((options.host, options.port), Answers)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "helper":
        sleep_on(f"{sys.argv[2]}-helper", sys.argv[2])
    else:
        serve(os.environ["STAND_IN"].split())
