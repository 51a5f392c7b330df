"""Keys that change, names of the server, requests of other sites, and what one key may hold."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from arguments.rules.server import valid_keys
from slime_like.origin_check import OriginCheck
from slime_like.tinker import access
from slime_like.tinker.access import KeyRing
from slime_like.tinker.model_registry import Quota


def test_keys_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that is added is taken and one that is removed is not, without a restart; a file that
    became wrong is reported and changes nothing; so is one that others can read."""
    monkeypatch.setattr(access, "REREAD_S", 0.0)
    path = tmp_path / "keys"
    path.write_text("tml-first-key-000\n")
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        ring = KeyRing(str(path), valid_keys)
        assert "others can read" in caplog.text
        assert ring.owner(b"tml-first-key-000") and ring.owner(b"tml-second-key-00") is None
        path.write_text("tml-second-key-00\ntml-third-key-0000\n")
        assert ring.owner(b"tml-first-key-000") is None and ring.owner(b"tml-second-key-00")
        assert len(ring) == 2
        path.write_text("secret\n")
        assert ring.owner(b"tml-second-key-00") and "must begin with tml-" in caplog.text
        path.unlink()
        assert ring.owner(b"tml-second-key-00") and "stay valid" in caplog.text


@pytest.mark.parametrize(
    ("headers", "taken"),
    [
        ({b"host": b"127.0.0.1:8000"}, True),
        ({b"host": b"localhost"}, True),
        ({b"host": b"[::1]:8000"}, True),
        ({b"host": b"0.0.0.0:8000"}, True),
        ({b"host": b"[::]:8000"}, True),
        ({b"host": b"127.3.2.1"}, True),
        ({b"host": b"[::ffff:127.0.0.1]:8000"}, True),
        ({b"host": b"[::ffff:10.0.0.1]:8000"}, False),
        ({b"host": b"10.0.0.1"}, False),
        ({b"host": b"0.0.0.0", b"origin": b"https://site.example"}, False),
        ({b"host": b"0.0.0.0", b"sec-fetch-site": b"cross-site"}, False),
        ({b"host": b"train.example:8000"}, True),
        ({b"host": b"TRAIN.example"}, True),
        ({b"host": b"rebound.example"}, False),
        ({b"host": b"[::1"}, False),
        ({b"host": b"\xff"}, False),
        ({}, False),
        ({b"host": b"localhost", b"origin": b"http://localhost:3000"}, True),
        ({b"host": b"localhost", b"origin": b"https://site.example"}, False),
        ({b"host": b"localhost", b"origin": b"null"}, False),
        ({b"host": b"localhost", b"origin": b"http://[::1"}, False),
        ({b"host": b"localhost", b"sec-fetch-site": b"cross-site"}, False),
        ({b"host": b"localhost", b"sec-fetch-site": b"same-origin"}, True),
    ],
)
def test_origins(headers: dict[bytes, bytes], taken: bool) -> None:
    why = OriginCheck("127.0.0.1", ["train.example"]).refusal(headers)
    assert (why is None) == taken, why


def test_what_one_key_may_hold() -> None:
    """Of several keys each leaves as much as it takes; a flag says otherwise; one key takes all."""
    quota = Quota("models", 8, None)

    def taken_by(owner: str, owners: list[str], *, several: bool = True) -> list[str]:
        while quota.refusal(owners, owner, several=several) is None:
            owners = [*owners, owner]
        return owners

    first = taken_by("a", [])
    assert len(first) == 4 and len(taken_by("b", first)) == 6
    assert "--max-models-per-key" in str(quota.refusal(first, "a", several=True))
    assert len(taken_by("a", [], several=False)) == 8
    assert "--max-models" in str(quota.refusal(["b"] * 8, "a", several=True))
    one = Quota("models", 8, 1)
    assert one.refusal(["b"], "a", several=True) is None
    assert one.refusal(["a"], "a", several=False)


def test_reading_waits_a_moment(tmp_path: Path) -> None:
    """The file is looked at once a second, not at every request."""
    path = tmp_path / "keys"
    path.write_text("tml-first-key-000\n")
    path.chmod(0o600)
    ring = KeyRing(str(path), valid_keys)
    path.write_text("tml-second-key-00\n")
    ring._checked = time.monotonic() + 60
    assert ring.owner(b"tml-first-key-000")
