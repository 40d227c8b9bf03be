"""An object store on loopback: moto's S3 server in a thread, which tests can make fail or kill its client."""

import os
import signal
import threading
from contextlib import contextmanager

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

WRITES = ("PUT", "POST", "DELETE")


class Quiet(WSGIRequestHandler):
    def log(self, *_):
        pass


class ObjectStore:
    """S3 at `endpoint`. `on_write` is called with the number and the path of each write before it takes effect."""

    def __init__(self):
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=Quiet)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.on_write = None
        self.refuses_all = False
        self.writes = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _serve(self, environ, start_response):
        refused = "403" if self.refuses_all else None
        if environ["REQUEST_METHOD"] in WRITES:
            with self._lock:
                self.writes += 1
                number = self.writes
            if self.on_write is not None:
                refused = refused or self.on_write(number, environ["PATH_INFO"])
        if refused:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{refused} Refused", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>not now</Message></Error>"]
        return self._moto(environ, start_response)

    def env(self):
        """Variables with which fsspec finds this store."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def client(self):
        return boto3.client("s3", endpoint_url=self.endpoint, aws_access_key_id="test", aws_secret_access_key="test")

    def names(self, bucket):
        found = self.client().list_objects_v2(Bucket=bucket)
        return [one["Key"] for one in found.get("Contents", ())]

    @contextmanager
    def doing(self, on_write):
        """Call `on_write` for each write, which are counted from 1 again."""
        self.writes, self.on_write = 0, on_write
        try:
            yield
        finally:
            self.on_write = None

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def kill(pid):
    os.kill(pid, signal.SIGKILL)
