"""Access control of the server: API keys."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

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
