"""Access control of the server: API keys, Host headers, and cross-site requests."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

log = logging.getLogger(__name__)
REREAD_S = 1.0


class KeyRing:
    """The API keys of a file, reloaded when the file changes. If the new file is invalid, this is
    reported and the previous keys stay valid."""

    def __init__(self, path: str, read: Callable[[str], list[str]]) -> None:
        """
        Args:
            path: A file with one key per line.
            read: Reads the keys of a file; raises ValueError or OSError for a file without keys.
        """
        self._path = Path(path)
        self._read = read
        self._seen: tuple[float, ...] = ()
        self._checked = 0.0
        self._owners: dict[bytes, str] = {}
        self._reload()

    def __len__(self) -> int:
        return len(self._owners)

    def owner(self, key: bytes) -> str | None:
        """The owner of a key, or None for an unknown key. Compares with every key in constant
        time."""
        if time.monotonic() - self._checked > REREAD_S:
            self._reload()
        digest = hashlib.sha256(key).digest()
        result = None
        for other, owner in self._owners.items():  # without a break: the time is constant
            if hmac.compare_digest(other, digest):
                result = owner
        return result

    def _reload(self) -> None:
        self._checked = time.monotonic()
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)
            if seen == self._seen:
                return
            self._seen = seen
            if status.st_mode & 0o077:
                log.warning("others can read %s; chmod 600 keeps its keys secret", self._path)
            keys = self._read(str(self._path))
        except (OSError, ValueError) as error:
            log.warning("%s: %s; the previous keys stay valid", self._path, error)
            return
        self._owners = {hashlib.sha256(key.encode()).digest(): owner_name(key) for key in keys}


def owner_name(key: str) -> str:
    """A name that identifies a key's sessions without revealing the key."""
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:16]


class OriginCheck:
    """For servers without keys: rejects requests of web pages, which arrive through DNS rebinding
    (a foreign host name that resolves to this address), or from a form or script of another
    site."""

    def __init__(self, host: str, allowed_hosts: Sequence[str] = ()) -> None:
        """
        Args:
            host: Address that the server listens on.
            allowed_hosts: Additional host names that clients use.
        """
        self._names = {"localhost", host.lower(), *(name.lower() for name in allowed_hosts)}

    def refusal(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Reason for rejecting a request; None if it is accepted."""
        host = headers.get(b"host", b"").decode("latin1")
        if not self._is_own(host_name(host)):
            return f"Host {host[:256]!r} is not a name of this server; add it to --allowed-hosts"
        if b"origin" in headers:
            origin = headers[b"origin"].decode("latin1")
            if not self._is_own(host_name(origin.partition("://")[2])):
                return f"cross-site request from {origin[:256]!r}"
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            return "cross-site request"
        return None

    def _is_own(self, name: str | None) -> bool:
        return name is not None and (name.lower() in self._names or _is_loopback(name))


def host_name(host: str) -> str | None:
    """The name in a Host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
