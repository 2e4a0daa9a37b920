"""Shared by the test servers: HTTP on a free port, error answers, and bodies checked against models."""

import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAMESPACE = "lyric-professor"
SIMPLE = {"str": str, "int": int, "bool": bool, "float": (int, float)}


class Refused(Exception):
    """Answers a request with an error and its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpServer(ABC):
    """Passes every request to `answer`, each in its own thread."""

    def __init__(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else every answer takes 40 ms: its body waits for the headers' ACK

            def log_message(self, *args: Any) -> None:
                pass

            def handle_all(self) -> None:
                outer.answer(self)

            do_GET = do_POST = do_DELETE = do_PUT = do_PATCH = handle_all

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @abstractmethod
    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request."""

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


def send_json(request: BaseHTTPRequestHandler, status: int, answer: Any, **headers: str) -> None:
    """Answer a request; a client that has disconnected is no error."""
    content = json.dumps(answer).encode()
    with suppress(BrokenPipeError, ConnectionResetError):
        request.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)


def check_fields(value: Any, kind: str, models: Sequence[Any], path: str = "") -> None:
    """Raise Refused for a field that the model of this kind does not have, or of another type.

    `models` are the modules of generated clients, where a class has the kind's name.
    """
    if match := re.fullmatch(r"list\[(.*)\]", kind):
        for i, element in enumerate(value or []):
            check_fields(element, match[1], models, f"{path}[{i}]")
        return
    if match := re.fullmatch(r"dict\((?:str), (.*)\)", kind):
        for key, element in (value or {}).items():
            check_fields(element, match[1], models, f"{path}.{key}")
        return
    model = next((getattr(module, kind) for module in models if hasattr(module, kind)), None)
    if not getattr(model, "attribute_map", None):  # text, numbers, and enumerations, whose values are text
        if kind in SIMPLE and not isinstance(value, SIMPLE[kind]):
            raise Refused(422, f"{path}: Invalid value: {value!r}: must be of type {kind}")
        return
    if not isinstance(value, dict):
        raise Refused(422, f"{path}: must be an object")
    names = {json_name: name for name, json_name in model.attribute_map.items()}
    for key, field in value.items():
        if key not in names:
            raise Refused(400, f'strict decoding error: unknown field "{f"{path}.{key}".lstrip(".")}"')
        if field is not None:
            check_fields(field, model.openapi_types[names[key]], models, f"{path}.{key}")
