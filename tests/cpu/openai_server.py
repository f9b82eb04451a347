# Owns: OpenAI-compatible servers for tests: a real one of the package transformers, and one that does as it is told.
# Promises: both answer over sockets; the scripted one writes down what it was asked.
# Never: shares code with the client under test.
"""Servers for tests of `ratoon bench --url`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import create_server
from typing import Any

import httpx2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.cpu import tiny

_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def save_model(folder: Path) -> Path:
    """A tiny random Llama over bytes, with a chat template."""
    names = ["<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return tiny.save(tiny.make("llama", vocab_size=len(names), bos_token_id=0, eos_token_id=1), folder)


@contextmanager
def transformers_serve(model: Path) -> Iterator[str]:
    """The address of `transformers serve`, in a thread of this process: its imports are there already."""
    from transformers.cli.serve import Serve

    with create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = Serve(
        force_model=str(model), device="cpu", host="127.0.0.1", port=port, log_level="error", non_blocking=True
    )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.kill_server()


def _wait_for(address: str, limit_s: float = 60) -> None:
    until = time.monotonic() + limit_s
    while True:
        try:
            httpx2.get(address)
            return
        except httpx2.TransportError:
            assert time.monotonic() < until, f"nothing answers at {address}"
            time.sleep(0.05)


def chunk(text: str, so_far: int | None = None, finish: str | None = None) -> dict[str, Any]:
    """A chunk of a completion; `so_far`: its usage."""
    usage = {} if so_far is None else {"usage": {"completion_tokens": so_far}}
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **usage}


ANSWER = (chunk("one"), chunk(" two"), chunk("", 4, "length"))


@dataclass
class Scripted:
    """What the server says, and what it was asked. A chunk that is a number is a pause in seconds."""

    models: Sequence[str] = ("toy",)
    chunks: Sequence[Any] = ANSWER
    key: str | None = None
    rejects: str | None = None  # a word that no request may hold
    dies_at: int | None = None  # after so many requests each answer is `dying`,
    dying: Sequence[Any] = ANSWER[:1]
    breaks: bool = False  # and its connection is cut where it ends, or closed in good order
    pages: dict[str, Any] = field(default_factory=dict)  # /metrics and the like: a text, or one after the other
    bodies: list[dict[str, Any]] = field(default_factory=list)
    active: int = 0
    most_active: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def page(self, path: str) -> tuple[int, str]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": name} for name in self.models]})
        found = self.pages.get(path)
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        return (404, "not here") if found is None else (200, found)


@contextmanager
def scripted(script: Scripted) -> Iterator[str]:
    """Its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            pass

        def _allowed(self) -> bool:
            if script.key in (None, self.headers.get("Authorization", "").removeprefix("Bearer ")):
                return True
            self._whole(401, json.dumps({"error": {"message": "no such key"}}))
            return False

        def do_GET(self) -> None:
            if self._allowed():
                self._whole(*script.page(self.path))

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            if not self._allowed():
                return
            if script.rejects and script.rejects in raw.decode():
                self._whole(400, json.dumps({"message": f"unknown field {script.rejects}"}))
                return
            with script.lock:
                script.bodies.append({"path": self.path, **json.loads(raw)})
                dying = script.dies_at is not None and len(script.bodies) > script.dies_at
                script.active += 1
                script.most_active = max(script.most_active, script.active)
            try:
                self._stream(script.dying if dying else script.chunks, dying and script.breaks)
            finally:
                with script.lock:
                    script.active -= 1

        def _stream(self, chunks: Sequence[Any], breaks: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in chunks:
                if isinstance(piece, float):
                    time.sleep(piece)
                    continue
                data = f"data: {json.dumps(piece)}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()
            self.close_connection = True
            if not breaks:
                self.wfile.write(b"0\r\n\r\n")

        def _whole(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
