"""A hub of one model over loopback: the few endpoints that fetching needs, and a list of requests.

Owns the wire format of those endpoints. Knows no checkpoint: files are bytes by commit and path.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

NAME = "someone/tiny-model"


@dataclass(eq=False)
class FakeHub:
    """`refs` names a commit for each branch; the default `refuse` answers everything."""

    refs: dict[str, str]
    files: Mapping[str, Mapping[str, bytes]]
    refuse: str | None = None
    moves_after_lookup: str | None = None
    requests: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if self.refuse is not None:
            status = {"GatedRepo": 403, "RepoNotFound": 401, "broken": 500}[self.refuse]
            return status, {"X-Error-Code": self.refuse}, b"{}"
        lookup, _, revision = path.partition(f"/api/models/{NAME}/revision/")
        if not lookup and revision:
            return self._describe(unquote(revision))
        _, _, rest = path.partition(f"/{NAME}/resolve/")
        revision, _, name = unquote(rest).partition("/")
        commit = self.refs.get(revision, revision)
        if name not in self.files.get(commit, {}):
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        body = self.files[commit][name]
        tag = hashlib.sha256(body).hexdigest()
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{tag}"'}, body

    def _describe(self, revision: str) -> tuple[int, dict[str, str], bytes]:
        commit = self.refs.get(revision, revision)
        if commit not in self.files:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        siblings = [{"rfilename": name, "size": len(b)} for name, b in self.files[commit].items()]
        if self.moves_after_lookup is not None:
            self.refs[revision] = self.moves_after_lookup
        described = {"id": NAME, "sha": commit, "siblings": siblings}
        return 200, {"Content-Type": "application/json"}, json.dumps(described).encode()


@contextmanager
def serving(hub: FakeHub) -> Iterator[str]:
    """The endpoint of `hub` while it serves."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            status, headers, body = hub.answer(path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the requests are kept in a list."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
