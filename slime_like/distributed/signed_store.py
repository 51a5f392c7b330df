"""Signed values in the store of the process group.

torch's store has no authentication: anyone who can reach its port can read and write. Values
without a valid signature of this job's key are treated as absent. It only uses operations that
cannot block or fail for any stored bytes: `add` on a value that is not a number would close the
connection, and `get` of a deleted key would wait for it.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

PREFIX = "slime_like"
KEY_VARIABLE = "SLIME_LIKE_JOB_KEY"  # equal on all ranks; if unset, rank 0 generates a key
_ABSENT = "-"  # never a signed value


class SignedStore:
    """Signed text values by name. Every method raises RuntimeError if the process that holds the
    store is gone.

    Args:
        store: torch's store.
        key: Known only to the ranks of this job.
    """

    def __init__(self, store: Any, key: bytes) -> None:
        self._store = store
        self._key = key

    def clone(self) -> SignedStore:
        """The same values over a separate connection, for another thread."""
        return SignedStore(self._store.clone(), self._key)

    def put(self, name: str, text: str) -> None:
        self._store.set(_path(name), self._signed(name, text))

    def read(self, name: str) -> str | None:
        """The value; None if there is none or no rank of this job wrote it."""
        # compare_set with a value that never matches reads in one request, without waiting
        return self._verified(name, self._store.compare_set(_path(name), _ABSENT, _ABSENT))

    def claim(self, name: str, text: str) -> str:
        """Set `name` to `text` unless a rank has set it; returns its value."""
        first = self._verified(
            name, self._store.compare_set(_path(name), "", self._signed(name, text))
        )
        if first is None:  # another program wrote there
            self.put(name, text)
        return text if first is None else first

    def _signed(self, name: str, text: str) -> str:
        return f"{self._signature(name, text.encode())} {text}"

    def _signature(self, name: str, text: bytes) -> str:
        return hmac.new(self._key, name.encode() + b"\n" + text, hashlib.sha256).hexdigest()

    def _verified(self, name: str, raw: bytes) -> str | None:
        signature, _, text = raw.partition(b" ")
        if not hmac.compare_digest(signature, self._signature(name, text).encode()):
            return None
        return text.decode()


def _path(name: str) -> str:
    return f"{PREFIX}/{name}"
