"""Whom a server without a key answers: the names by which its own machine calls it, and no web page from elsewhere."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_harness import Harness, harness

from slimserve.serve.hosts import is_loopback, own_names

OURS = (
    "localhost",
    "LocalHost",
    "localhost.",
    "api.localhost",
    "a.b.LOCALHOST",
    "127.0.0.1",
    "127.0.0.1.",
    "127.8.9.10",
    "127.1",
    "127.0.1",
    "2130706433",
    "0x7f000001",
    "0x7F.1",
    "0177.0.0.1",
    "017700000001",
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[0000::0001]",
    "[::ffff:127.0.0.1]",
    "[::FFFF:7f00:1]",
    "::1",
)
FOREIGN = (
    "evil.example",
    "localhost.evil.example",
    "evillocalhost",
    "127.0.0.1.evil.example",
    "127.0.0.1.nip.io",
    "192.168.1.5",
    "128.1",
    "[2001:db8::1]",
    "[::ffff:10.0.0.1]",
    "localhost@evil.example",
    "evil.example,localhost",
    "localhost:80:80",
    "localhost:port",
    "localhost/evil.example",
    "[::1].evil.example",
    "[::1",
    "[]",
    "127.0.0.1 evil.example",
    "127.0.0.\xb9",
    "0x",
    "." * 60,
    "1" * 5000,
)
PLAIN = {"prompt": "say:fine|", "max_tokens": 8}


@pytest.fixture(scope="module")
def server() -> Iterator[Harness]:
    with harness(own_names=frozenset({"box.lan"})) as running:
        yield running


def ask(port: int, hosts: tuple[str, ...], path: str = "/v1/models", body: Any = None) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.putrequest("GET" if body is None else "POST", path, skip_host=True)
        for host in hosts:
            connection.putheader("Host", host.encode("latin-1"))
        data = b"" if body is None else json.dumps(body).encode()
        if data:
            connection.putheader("Content-Length", str(len(data)))
        connection.endheaders(data)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


@pytest.mark.parametrize("host", [*OURS, "box.lan", "BOX.lan."])
def test_names_of_this_machine_are_answered(server: Harness, host: str) -> None:
    for suffix in ("", ":", f":{server.port}") if host != "::1" else ("",):
        assert ask(server.port, (host + suffix,))[0] == 200, host + suffix


@pytest.mark.parametrize("host", FOREIGN, ids=lambda host: ascii(host)[:30])
def test_a_name_that_was_bound_to_this_machine_by_somebody_else_is_refused(server: Harness, host: str) -> None:
    for path, body in (("/v1/models", None), ("/health", None), ("/v1/completions", PLAIN), ("/nowhere", None)):
        status, found = ask(server.port, (host,), path, body)
        assert (status, found["error"]["code"]) == (403, "foreign_host"), host
        assert host[:8] in found["error"]["message"] and "--api-key" in found["error"]["message"]
    assert server.state.num_inside == 0


def test_every_host_header_counts_and_none_is_none(server: Harness) -> None:
    for hosts in (("evil.example", "localhost"), ("localhost", "evil.example")):
        assert ask(server.port, hosts)[0] in (400, 403)  # one of uvicorn's parsers takes only one
    assert ask(server.port, ("",))[0] == 200
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert b" 200 " in connection.makefile("rb").readline()


def test_a_page_that_renamed_this_machine_is_refused_though_it_is_of_one_origin(server: Harness) -> None:
    place = f"evil.example:{server.port}"
    status, found = ask(server.port, (place,), "/v1/completions", PLAIN)
    headers = {"host": place, "origin": f"http://{place}"}
    reply = httpx.post(server.url + "/v1/completions", json=PLAIN, headers=headers)
    assert status == reply.status_code == 403 and reply.json() == found


def test_a_key_or_an_open_address_allows_every_name() -> None:
    with harness(own_names=frozenset(), api_key="sesame") as locked:
        headers = {"host": "evil.example", "authorization": "Bearer sesame"}
        assert httpx.get(locked.url + "/v1/models", headers=headers).status_code == 200
        assert httpx.get(locked.url + "/v1/models", headers={"host": "evil.example"}).status_code == 401
    with harness(own_names=None) as public:
        assert ask(public.port, ("gpu-box.example",), "/v1/completions", PLAIN)[0] == 200


def test_what_a_server_is_bound_to_decides() -> None:
    assert own_names("127.0.0.1", "Localhost.") == {"localhost"}
    assert own_names("127.0.1.1", "Box") == {"box"}
    assert own_names("::1", "[::1]") == {"::1"}
    for address in ("0.0.0.0", "::", "192.168.1.5", "fe80::1"):
        assert own_names(address, "localhost") is None
    assert all(is_loopback(name) for name in OURS) and not any(is_loopback(name) for name in FOREIGN)


@pytest.mark.parametrize("origin", ["http://app.localhost:3000", "http://127.0.0.2", f"http://[::1]:{8080}"])
def test_pages_of_this_machine_are_no_foreign_pages(server: Harness, origin: str) -> None:
    reply = httpx.post(server.url + "/v1/completions", json=PLAIN, headers={"origin": origin}, timeout=60)
    assert reply.status_code == 200, origin


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; x=y", None])
def test_a_form_in_a_sandboxed_frame_is_a_foreign_page(server: Harness, kind: str | None) -> None:
    headers = {"origin": "null", **({} if kind is None else {"content-type": kind})}
    content = json.dumps(PLAIN).encode()
    reply = httpx.post(server.url + "/v1/completions", content=content, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "foreign_origin")
    headers["content-type"] = "application/json; charset=utf-8"  # an application's, or a page's that asked before
    assert httpx.post(server.url + "/v1/completions", content=content, headers=headers, timeout=60).status_code == 200
    asked = httpx.options(server.url + "/v1/completions", headers={"origin": "null"})
    assert asked.status_code == 405 and not [name for name in asked.headers if name.startswith("access-control")]


def test_the_command_sets_its_own_names() -> None:
    script = Path(__file__).with_name("fake_server.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    process = subprocess.Popen(
        [sys.executable, str(script), "0", "1", "{}"], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        assert ask(port, ("evil.example",))[1]["error"]["code"] == "foreign_host"
        assert ask(port, (f"localhost:{port}",))[0] == 200
    finally:
        process.kill()
        process.communicate()
