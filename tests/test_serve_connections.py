"""Connections that bring nothing, bring it slowly or bring nonsense; on both of uvicorn's parsers."""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serve_harness import Harness

from slimserve.serve.connections import Patience, bounded_protocol

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"prompt": "say:fine|", "max_tokens": 32}).encode()
PARSERS = {"h11": "h11_impl:H11Protocol", "httptools": "httptools_impl:HttpToolsProtocol"}


@pytest.fixture(scope="module", params=sorted(PARSERS))
def server(request: pytest.FixtureRequest) -> Iterator[Harness]:
    module, _, name = PARSERS[request.param].partition(":")
    base = getattr(importlib.import_module(f"uvicorn.protocols.http.{module}"), name)
    running = Harness(
        http=bounded_protocol(Patience(head=1.5, silence=1.5, body=5.0, unread=1.0), base), step_seconds=0.01
    )
    yield running
    running.close()


@pytest.fixture(autouse=True)
def plain_request_succeeds_afterwards(server: Harness) -> Iterator[None]:
    yield
    reply = httpx.post(server.url + "/v1/completions", content=BODY, timeout=60)
    assert reply.json()["choices"][0]["text"] == "fine"
    server.wait_idle()


def connect(server: Harness, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(data)
    return connection


def rest(connection: socket.socket) -> bytes:
    """What still comes until the server closes; fails where it does not."""
    found = b""
    try:
        while piece := connection.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    finally:
        connection.close()
    return found


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"POST /v1/compl",
        HEAD,
        HEAD + b"Content-Length: 500\r\n\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
    ],
    ids=["nothing", "half a line", "half a head", "half a body", "no chunk"],
)
def test_a_client_that_falls_silent_is_let_go(server: Harness, data: bytes) -> None:
    started = time.monotonic()
    assert b" 200 " not in rest(connect(server, data))
    assert 1.0 < time.monotonic() - started < 30


def test_a_client_that_dribbles_is_let_go(server: Harness) -> None:
    for beginning in (b"GET /health HTTP/1.1\r\nX: ", HEAD + b"Content-Length: 500\r\n\r\n"):
        connection = connect(server, beginning)
        started = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - started < 40:
                connection.sendall(b"x")
                time.sleep(0.1)
        connection.close()


def test_slow_but_steady_bodies_and_long_replies_are_served(server: Harness) -> None:
    connection = connect(server, HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY))
    for start in range(0, len(BODY), 12):
        connection.sendall(BODY[start : start + 12])
        time.sleep(0.2)
    assert b'"text":"fine"' in rest(connection)
    long = {"prompt": "endless", "max_tokens": 200}
    assert httpx.post(server.url + "/v1/completions", json=long, timeout=60).status_code == 200
    with httpx.Client(base_url=server.url, timeout=60) as client:  # idle between two requests, for longer than a head
        assert client.get("/health").status_code == 200
        time.sleep(2.2)
        assert client.get("/health").status_code == 200


NONSENSE: dict[str, Any] = {
    "bytes": b"\x00\x01\x02\xff\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "negative length": HEAD + b"Content-Length: -5\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    "bad chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "tunnel": b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "length of the universe": HEAD + b"Content-Length: 99999999999999\r\n\r\n{",
    "upgrade": b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
}


@pytest.mark.parametrize("name", sorted(NONSENSE))
def test_nonsense_is_refused(server: Harness, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = rest(connect(server, NONSENSE[name]))
    assert found.startswith(b"HTTP/1.1 4") and b"Traceback" not in found, found
    assert "pip install" not in capfd.readouterr().err


def test_a_hundred_clients_that_leave_at_any_moment(server: Harness) -> None:
    body = json.dumps({"prompt": "endless", "max_tokens": 400, "n": 2, "stream": True}).encode()
    for number in range(100):
        whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        connection = connect(server, whole[: len(whole) if number % 3 else len(whole) - 9])
        if number % 5 == 0:
            connection.recv(200)
        if number % 2:  # reset instead of an orderly end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    server.wait_idle()


@pytest.mark.parametrize("beginning", [b"GET /health HTTP/1.1\r\nX: ", b"GET /", b"GET /health HTTP/1.1\r\n"])
def test_a_head_without_end_is_refused(server: Harness, beginning: bytes) -> None:
    connection = connect(server, beginning)
    piece = b"a: b\r\n" * 1024 if beginning.endswith(b"\n") else b"a" * 8192
    with contextlib.suppress(OSError):
        for _ in range(1000):
            connection.sendall(piece)
        raise AssertionError("eight megabytes of head were taken")
    with contextlib.suppress(OSError):
        found = connection.recv(65536)
        assert found == b"" or (found.startswith(b"HTTP/1.1 4") and b'"error"' in found)
    connection.close()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_with_a_second_request_waiting(server: Harness, stream: bool) -> None:
    body = json.dumps({"prompt": "endless", "max_tokens": 4000, "stream": stream}).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    connection = connect(server, request)
    server.wait_for(lambda stats: stats.num_running == 1)
    connection.sendall(request * 3)
    server.wait_for(lambda stats: stats.num_running == 1)
    connection.close()
    server.wait_idle(25)  # the reply alone would take 40 seconds


def test_a_large_body_that_is_refused_early_gets_its_answer(server: Harness) -> None:
    body = b'{"prompt": "' + b"x" * 40_000_000 + b'"}'
    reply = httpx.post(server.url + "/v1/completions", content=body, timeout=60)
    assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_large"
    connection = connect(server, HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
    with contextlib.suppress(OSError):
        connection.sendall(body)
    assert connection.recv(65536).startswith(b"HTTP/1.1 413")
    connection.close()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_never_reads_is_let_go(server: Harness, stream: bool) -> None:
    # More than the system holds for a connection, so that the rest waits in the server.
    body = json.dumps({"prompt": ["say:" + "x" * 4000 + "|"] * 256, "n": 1, "echo": True, "stream": stream}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    with contextlib.suppress(OSError):  # let go while it still sends
        for _ in range(8):
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    server.wait_for(lambda _: not server.connections)
    server.wait_idle()
    connection.close()


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)


def replies(connection: socket.socket, count: int) -> list[int]:
    """The statuses of as many replies, and nothing of the server's after them."""
    reader, found = connection.makefile("rb"), []
    for _ in range(count):
        found.append(int(reader.readline().split()[1]))
        length = 0
        while (line := reader.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        reader.read(length)
    return found


@pytest.mark.parametrize("size", [1, 7, 60, 1000], ids=lambda size: f"{size} bytes at a time")
def test_an_offer_to_speak_http2_loses_no_body(server: Harness, size: int) -> None:
    """As clients of Java's standard library make it, with every request of a connection."""
    chunked = b"Transfer-Encoding: chunked\r\n\r\n5\r\n" + BODY[:5] + b"\r\n%x\r\n" % (len(BODY) - 5)
    data = HEAD + OFFER + LENGTH + BODY + HEAD + OFFER + chunked + BODY[5:] + b"\r\n0\r\n\r\n"
    data += b"GET /health HTTP/1.1\r\nHost: x\r\n" + OFFER + b"\r\n" + HEAD + LENGTH + BODY
    with contextlib.closing(connect(server)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), size):
            connection.sendall(data[start : start + size])
        assert replies(connection, 4) == [200, 200, 200, 200]


def test_many_offers_in_one_piece_cost_no_stack(server: Harness) -> None:
    data = (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + OFFER + b"\r\n") * 400
    with contextlib.closing(connect(server, data)) as connection:
        assert replies(connection, 400) == [200] * 400


@pytest.mark.parametrize("piece", [b"X-Trailer: y\r\n" * 4000, b"x" * 60000], ids=["many", "one"])
def test_trailers_without_end_take_no_memory(server: Harness, piece: bytes) -> None:
    beginning = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nX-First: " % (len(BODY), BODY)
    connection = connect(server, beginning)
    taken = 0
    with contextlib.suppress(OSError):
        while taken < 30_000_000:
            connection.sendall(piece)
            taken += len(piece)
    assert taken < 30_000_000
    with contextlib.suppress(ConnectionResetError):  # what was sent after the end may cost the answer its way
        answer = rest(connection)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:200]


def test_trailers_are_no_headers(server: Harness) -> None:
    data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    data += b"X-Request-Id: late\r\nContent-Encoding: gzip\r\n\r\n"
    with contextlib.closing(connect(server, data)) as connection:
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200") and b"late" not in answer


def test_nonsense_after_a_request_does_not_stand_in_its_reply(server: Harness) -> None:
    body = json.dumps({"prompt": "endless", "max_tokens": 100, "stream": True}).encode()
    connection = connect(server, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert connection.recv(100).startswith(b"HTTP/1.1 200")
    connection.sendall(b"\x00\x01 nonsense\r\n\r\n")
    reply, _, after = rest(connection).partition(b"\r\n0\r\n\r\n")
    assert b"HTTP/1.1" not in reply and (after == b"" or after.startswith(b"HTTP/1.1 400"))
