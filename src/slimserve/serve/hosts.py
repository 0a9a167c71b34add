"""Whose name a request carries: a web page's origin, and the host that a client believes it talks to.

A web page can point its own name at 127.0.0.1 after it was loaded (DNS rebinding). A browser then takes a server of
this machine for a part of that page, and only the Host header still tells them apart.
"""

from __future__ import annotations

import ipaddress
import re
import socket

_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]*)(?::[0-9]*)?")
"""`host[:port]`: an IPv6 address stands in brackets."""

_NUMBERS = re.compile(r"[0-9a-fx.]+")


def plain_name(host: str) -> str:
    """A host as it is compared: lower case, without the brackets of IPv6 and the dot of a full name."""
    name = host.lower().removesuffix(".")
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone: `localhost`, a name below it, or a loopback address in any spelling."""
    name = plain_name(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True  # no DNS answers for these names (RFC 6761)
    address = _address(name)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address is not None and address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        pass
    if _NUMBERS.fullmatch(name) is None:
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(name))  # 127.1, 2130706433, 0x7f.1, 0177.0.0.1
    except OSError:
        return None


def own_names(address: str, given: str) -> frozenset[str] | None:
    """Names of a server that is bound to `address`, beside those of `is_loopback`; None where it may have any.

    Others reach a server that is not bound to a loopback address, by names that it cannot know. `given` is what its
    owner called the address.
    """
    return frozenset({plain_name(given)}) if is_loopback(address) else None


def names_us(authority: bytes, names: frozenset[str]) -> bool:
    """Whether `host[:port]`, as a Host header or an origin has it, is this machine or one of `names`."""
    text = authority.decode("latin-1").strip(" \t")
    match = _AUTHORITY.fullmatch(text)
    host = text if match is None else match.group(1)  # an IPv6 address that lost its brackets, or nonsense
    return plain_name(host) in names or is_loopback(host)


def is_foreign_page(headers: dict[bytes, bytes], names: frozenset[str]) -> bool:
    """Whether a browser sends this for a page that did not come from here.

    No reply of this server lets such a page read it, but a plain form could still keep the engine busy. A sandboxed
    frame hides its origin (`null`), as some applications do; but without asking first, which no reply here allows, a
    browser lets it send everything except what is declared as JSON.
    """
    origin = headers.get(b"origin", b"").lower()
    if origin == b"null":
        return headers.get(b"content-type", b"").lower().partition(b";")[0].strip() != b"application/json"
    if not origin.startswith((b"http://", b"https://")):
        return False  # no page, or one of an application on this machine
    place = origin.partition(b"://")[2]
    return place != headers.get(b"host", b"").lower() and not names_us(place, names)
