"""A small local server that behaves well or badly, for tests of the real clients."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Reply:
    """The answer to requests of one path. Each request takes the next entry of `statuses` and of `cuts`."""

    body: bytes
    etag: str | None = '"v1"'
    ranges: bool = True
    if_range: bool = True
    """Whether If-Range is supported; if not, a range of the current content is sent."""
    statuses: list[int] = field(default_factory=list)
    """Statuses of the first answers; 200 or 206 afterwards."""
    cuts: list[int] = field(default_factory=list)
    """Bytes after which the first answers with a body are cut."""
    pause_after: int | None = None
    """Bytes after which the answer stalls until the client disconnects."""
    content_type: str = "application/octet-stream"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Server:
    url: str
    replies: dict[str, Reply] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    """What stood after the `?` of each request."""
    """(method, path, headers in lower case) of every request."""

    def ranges(self, path: str) -> list[str | None]:
        """The Range header of every GET of a path, in order."""
        return [headers.get("range") for method, at, headers in self.requests if (method, at) == ("GET", path)]

    def add_repo(
        self,
        kind: str,
        name: str,
        files: dict[str, bytes],
        *,
        refuse: tuple[int, str] | None = None,
        commit: str = COMMIT,
        card: dict[str, Any] | None = None,
    ) -> None:
        """Add a repository of the hub's API, or a commit to one: the branch main is then this commit.

        `refuse` is the status and X-Error-Code of its files. `card` is the front matter of its README.md, which the hub
        parses: huggingface_hub's `DatasetInfo` reads it from `cardData` (hf_api.py).
        """
        siblings: list[dict[str, Any]] = []
        for file, body in files.items():
            lfs = file.endswith((".safetensors", ".bin", ".parquet"))
            digest = hashlib.sha256(body).hexdigest()
            pointer = {"lfs": {"size": len(body), "sha256": digest, "pointerSize": 1}} if lfs else {}
            siblings.append({"rfilename": file, "size": len(body), "blobId": digest[:40], **pointer})
            prefix = "" if kind == "models" else f"/{kind}"
            headers = {"X-Repo-Commit": commit} | ({"X-Error-Code": refuse[1]} if refuse else {})
            self.replies[f"{prefix}/{name}/resolve/{commit}/{file}"] = Reply(
                body,
                etag=f'"{digest if lfs else digest[:40]}"',
                headers=headers,
                statuses=[refuse[0]] * 99 if refuse else [],
            )
        info = {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0}
        info |= {"cardData": card} if card else {}
        tree = [
            {"type": "file", "path": file["rfilename"], "size": file["size"], "oid": file["blobId"]}
            | ({"lfs": {"oid": file["lfs"]["sha256"], **file["lfs"]}} if "lfs" in file else {})
            for file in siblings
        ]
        for revision in ("", "/revision/main", f"/revision/{commit}"):
            self.replies[f"/api/{kind}/{name}{revision}"] = Reply(
                json.dumps(info).encode(), content_type="application/json"
            )
        self.replies[f"/api/{kind}/{name}/tree/{commit}"] = Reply(
            json.dumps(tree).encode(), content_type="application/json"
        )


@contextmanager
def serve() -> Iterator[Server]:
    """Run a server on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else every answer takes 40 ms: its body waits for the headers' ACK

        def do_HEAD(self) -> None:
            self._answer(send_body=False)

        def do_GET(self) -> None:
            self._answer(send_body=True)

        def _answer(self, send_body: bool) -> None:
            path = self.path.partition("?")[0]
            headers = {name.lower(): value for name, value in self.headers.items()}
            server.requests.append((self.command, path, headers))
            server.queries.append(self.path.partition("?")[2])
            reply = server.replies.get(path)
            if reply is None:
                return self._finish(404, b"", {"X-Error-Code": _not_found(path)}, send_body)
            status = reply.statuses.pop(0) if reply.statuses else 200
            answer_headers = {"Content-Type": reply.content_type, **reply.headers}
            if reply.etag:
                answer_headers["ETag"] = reply.etag
            if status >= 400:
                return self._finish(status, b"", answer_headers, send_body)
            body = reply.body
            requested_range = headers.get("range")
            same_version = not reply.if_range or headers.get("if-range", reply.etag) == reply.etag
            if requested_range and reply.ranges and same_version:
                start = int(requested_range.removeprefix("bytes=").partition("-")[0])
                if start >= len(body):
                    return self._finish(416, b"", answer_headers, send_body)
                answer_headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                status, body = 206, body[start:]
            cut = reply.cuts.pop(0) if reply.cuts and send_body else None
            return self._finish(status, body, answer_headers, send_body, cut, reply.pause_after)

        def _finish(
            self,
            status: int,
            body: bytes,
            headers: dict[str, str],
            send_body: bool,
            cut: int | None = None,
            pause_after: int | None = None,
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if send_body:
                self.wfile.write(body[: pause_after or cut])
            if pause_after:
                self.rfile.read(1)  # returns when the client closes the connection
                self.close_connection = True
            if cut is not None:
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            pass  # these tests make clients disconnect

    httpd = Quiet(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    server = Server(url=f"http://127.0.0.1:{httpd.server_address[1]}")
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()


def _not_found(path: str) -> str:
    """Return the hub's X-Error-Code for an unknown path."""
    if "/resolve/" in path:
        return "EntryNotFound"
    return "RevisionNotFound" if "/revision/" in path and "missing" not in path else "RepoNotFound"
