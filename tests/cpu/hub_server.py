# Owns: a stand-in for the model hub, on the loopback interface.
# Promises: the endpoints that `ratoon pull` uses, with byte ranges and faults on request.
# Never: leaves this machine.
"""`HubServer`: /api/models/ID/revision/REV and /ID/resolve/REV/FILE."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class HubServer:
    """Serves `files` of one repository. `cut_after`: bytes sent of a .safetensors body before the line breaks."""

    repo: str
    files: dict[str, bytes]
    cut_after: int | None = None
    corrupt: bool = False
    ranges: bool = True
    gated: bool = False
    requests: list[tuple[str, str | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fetched(self, name: str) -> list[str | None]:
        """The Range header of each request for a file."""
        return [wanted for path, wanted in self.requests if path.endswith(f"/{name}")]

    def info(self) -> dict[str, Any]:
        siblings = []
        for name, body in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(body), "blobId": hashlib.sha1(body).hexdigest()}
            if name.endswith(".safetensors"):
                entry["lfs"] = {"size": len(body), "sha256": hashlib.sha256(body).hexdigest(), "pointerSize": 130}
            siblings.append(entry)
        return {"id": self.repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            return None

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((path, self.headers.get("Range")))
            if path.startswith(f"/api/models/{hub.repo}"):
                return self._listing(path)
            prefix = f"/{hub.repo}/resolve/{COMMIT}/"
            name = path.removeprefix(prefix)
            if path.startswith(prefix) and name in hub.files:
                return self._file(name)
            return self._refuse(404, "RepoNotFound")

        def _listing(self, path: str) -> None:
            if hub.gated:
                return self._refuse(403, "GatedRepo")
            if "/revision/" in path and path.split("/revision/")[1] not in ("main", "v1", COMMIT):
                return self._refuse(404, "RevisionNotFound")
            self._answer(200, json.dumps(hub.info()).encode(), {"Content-Type": "application/json"})

        def _file(self, name: str) -> None:
            body = hub.files[name]
            if hub.corrupt and name.endswith(".safetensors"):
                body = bytes(reversed(body))
            wanted = self.headers.get("Range") if hub.ranges else None
            begin = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
            headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
            if wanted:
                headers["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
            cut = hub.cut_after if name.endswith(".safetensors") else None
            self._answer(206 if wanted else 200, body[begin:], headers, cut)

        def _refuse(self, status: int, code: str) -> None:
            self._answer(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

        def _answer(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            with suppress(ConnectionError):  # a client that was interrupted
                self.wfile.write(body if cut is None else body[:cut])
            self.close_connection = cut is not None and cut < len(body)

    return Handler
