"""`examples/clients.py` asks a server for its first model where none is named."""

import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "clients.py"


@pytest.fixture(scope="module")
def clients() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_clients", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def url() -> Iterator[str]:
    """A server with a key that lists two models."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_let_in = self.headers["Authorization"] == "Bearer a-key"
            models = [{"id": "somebody/first"}, {"id": "second"}]
            self.send_response(200 if is_let_in and self.path == "/v1/models" else 401)
            self.end_headers()
            self.wfile.write(json.dumps({"data": models}).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_model_is_the_first_that_the_server_lists(clients: ModuleType, url: str):
    server = clients.server_of([f"{url}/", "--api-key", "a-key"])
    assert (server.url, server.model) == (url, "somebody/first")


def test_a_model_that_is_named_is_taken(clients: ModuleType):
    server = clients.server_of(["http://127.0.0.1:1", "--model", "second"])
    assert server.model == "second"
