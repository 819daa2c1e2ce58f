"""As much of a wandb server as its real client asks for when it logs in and saves a workspace or a report.

The real one cannot be had in a test. This one keeps what it was sent; it answers nothing that it was not asked.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0123456789abcdef0123456789abcdef01234567"
"""Looks like an API key."""


@dataclass
class Server:
    """Address and what came."""

    url: str = ""
    views: list[dict[str, Any]] = field(default_factory=list)


def answers(server: Server, query: str, variables: dict[str, Any]) -> dict[str, Any]:
    """GraphQL data for one request."""
    data: dict[str, Any] = {}
    if "viewer" in query:
        teams = {"edges": []}
        data["viewer"] = {"id": "u1", "entity": "team", "username": "u", "email": "", "flags": "{}", "teams": teams}
    if "upsertView" in query:
        server.views.append(variables)
        data["upsertView"] = {"view": {"id": "VmlldzoxMjM=", "name": variables["name"], "type": "x"}, "inserted": True}
    if "internalId" in query:
        data["project"] = {"id": "p1", "internalId": "UHJvamVjdDox"}
    if "models(" in query:
        project = {"id": "p1", "name": "project-x", "entityName": "team", "createdAt": "2026-01-01T00:00:00"}
        project |= {"isBenchmark": False, "user": None}
        page = {"hasNextPage": False, "endCursor": ""}
        data["models"] = {"edges": [{"node": project, "cursor": ""}], "pageInfo": page}
    return data


@contextmanager
def serving() -> Iterator[Server]:
    """Serve on a free port of the loopback interface."""
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path.endswith("/graphql"):
                asked = json.loads(body)
                self._answer({"data": answers(server, asked["query"], asked.get("variables") or {})})
            else:
                self._answer({})

        def _answer(self, value: dict[str, Any]) -> None:
            text = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{listening.server_port}"
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()
