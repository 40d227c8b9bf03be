"""A real socket whose other side follows a script: answer, drop the connection, or say nothing."""

import asyncio
import contextlib

from tests.limits import HANG_S

OK = (200, '{"is": "fine"}')
DROP = "the connection is closed without an answer"
HANG = "no answer comes"


class ScriptedServer:
    """Answers each request with the next line of its script, and the last line for ever after."""

    def __init__(self, *script):
        self.script = list(script)
        self.asked = []  # the first line of each request
        self.connections = 0
        self.closed_by_client = asyncio.Event()
        self.hanging = asyncio.Semaphore(0)

    async def _serve(self, reader, writer):
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(x.split(":")[1]) for x in head.splitlines() if x.lower().startswith("content-l")), 0)
                await reader.readexactly(length)
                self.asked.append(head.splitlines()[0])
                line = self.script.pop(0) if len(self.script) > 1 else self.script[0]
                if line == DROP:
                    break
                if line == HANG:
                    self.hanging.release()
                    await reader.read()  # returns when the client closes the connection
                    self.closed_by_client.set()
                    break
                status, body, *headers = line
                headers = "".join(f"{header}\r\n" for header in (f"Content-Length: {len(body)}", *headers))
                writer.write(f"HTTP/1.1 {status} -\r\n{headers}\r\n{body}".encode())
                await writer.drain()
        writer.close()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.server.close()


def bounded(scenario):
    async def body():
        async with asyncio.timeout(HANG_S):
            return await scenario

    return asyncio.run(body())
