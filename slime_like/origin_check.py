"""Rejects requests of web pages to a server of the run, by their Host and Origin headers."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit


class OriginCheck:
    """Rejects requests of web pages, which arrive through DNS rebinding (a foreign host name that
    resolves to this address), or from a form or script of another site."""

    def __init__(
        self,
        host: str,
        allowed_hosts: Sequence[str] = (),
        *,
        remedy: str = "",
        any_name: bool = False,
    ) -> None:
        """
        Args:
            host: Address that the server listens on.
            allowed_hosts: Additional host names that clients use.
            remedy: Of a client with another host name, for the message.
            any_name: Clients may use any host name: those of other machines are not known here.
        """
        self._names = {"localhost", host.lower(), *(name.lower() for name in allowed_hosts)}
        self._remedy = remedy
        self._any_name = any_name

    def refusal(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Reason for rejecting a request; None if it is accepted."""
        host = headers.get(b"host", b"").decode("latin1")
        if not self._any_name and not self._is_own(host_name(host)):
            return f"Host {host[:256]!r} is not a name of this server{self._remedy}"
        if b"origin" in headers:
            origin = headers[b"origin"].decode("latin1")
            name = host_name(origin.partition("://")[2])
            if not self._is_own(name) and not (self._any_name and name == host_name(host)):
                return f"cross-site request from {origin[:256]!r}"
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            return "cross-site request"
        return None

    def _is_own(self, name: str | None) -> bool:
        return name is not None and (name.lower() in self._names or is_this_machine(name))


def host_name(host: str) -> str | None:
    """The name in a Host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def is_this_machine(name: str) -> bool:
    """Whether a client can only mean its own machine by this name: a loopback address in any
    spelling, or the unspecified address (0.0.0.0, ::), which connects to it as well."""
    if is_loopback(name):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_unspecified or (mapped is not None and mapped.is_loopback)


def is_loopback(name: str) -> bool:
    """Whether this is a loopback address, or the name of one."""
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
