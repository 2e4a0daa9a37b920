"""The server's side of a WebSocket (RFC 6455), as far as `exec` needs it: whole binary messages to the client."""

import base64
import hashlib
import struct
from contextlib import suppress
from http.server import BaseHTTPRequestHandler

from http_server import Refused

EXEC_PROTOCOL = "v4.channel.k8s.io"
"""Each message begins with the number of its stream: 1 stdout, 2 stderr, 3 how it ended. Kubernetes,
staging/src/k8s.io/apimachinery/pkg/util/remotecommand/constants.go."""
GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
BINARY, CLOSE = 0x2, 0x8


def accept(request: BaseHTTPRequestHandler, protocol: str) -> None:
    """Switch the connection to this protocol. Raises Refused if the client does not ask for it."""
    key = request.headers.get("Sec-WebSocket-Key")
    if request.headers.get("Upgrade", "").lower() != "websocket" or key is None:
        raise Refused(400, "Upgrade request required")
    if protocol not in (request.headers.get("Sec-WebSocket-Protocol") or "").replace(" ", "").split(","):
        raise Refused(403, "unable to upgrade: unable to negotiate protocol")
    answer = base64.b64encode(hashlib.sha1((key + GUID).encode()).digest()).decode()
    request.send_response(101)
    for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", answer),
                        ("Sec-WebSocket-Protocol", protocol)):  # fmt: skip
        request.send_header(name, value)
    request.end_headers()


def send(request: BaseHTTPRequestHandler, data: bytes, opcode: int = BINARY) -> None:
    """Send one message in one frame."""
    length = bytes([len(data)]) if len(data) < 126 else struct.pack("!BH", 126, len(data))
    request.wfile.write(bytes([0x80 | opcode]) + length + data)


def finish(request: BaseHTTPRequestHandler) -> None:
    """Close the connection after the client has read everything."""
    request.close_connection = True
    with suppress(OSError):
        send(request, struct.pack("!H", 1000), CLOSE)
        request.connection.settimeout(5)
        request.rfile.read(1)  # the client's own close
