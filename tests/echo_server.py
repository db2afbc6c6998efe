"""A server of http or https on a thread, which answers with what it was asked."""

import ssl
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CERTIFICATE = Path(__file__).parent / "server" / "localhost.pem"
"""Of `localhost` and 127.0.0.1, signed by itself."""


@dataclass(slots=True, eq=False)
class EchoServer:
    """Its port, and the paths that it was asked for."""

    port: int
    paths: list[str] = field(default_factory=list[str])


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A handshake that the client ends is no fault."""


@contextmanager
def echoing(host: str = "127.0.0.1", *, is_secure: bool = False) -> Generator[EchoServer]:
    """Answers with the path and the key."""

    class Echo(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found.paths.append(self.path)
            body = f"{self.path} {self.headers.get('authorization')}".encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is printed."""

    server = _QuietServer((host, 0), Echo)
    found = EchoServer(server.server_address[1])
    if is_secure:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(CERTIFICATE)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
