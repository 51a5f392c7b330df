"""Frames come back as they were; bytes of another encoding are told apart."""

from __future__ import annotations

import json
import struct
import time

import pytest

from slime_like.tinker import codec, schemas
from slime_like.tinker.futures import Request
from slime_like.tinker.service import save_request


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        -0.5,
        "é\ud800",
        b"",
        [b"\x00\xff", [b"x" * 1000]],
        {"a": {"b": b"1", "c": [1, None, True]}},
    ],
)
def test_frames_come_back(value: object) -> None:
    assert codec.decode(codec.encode(value)) == value


def test_what_is_not_plain_is_not_framed() -> None:
    with pytest.raises(TypeError):
        codec.encode({"a": object()})


def test_metadata_may_hold_integers_of_any_size() -> None:
    body = schemas.SaveWeights(model_id="m", seq_id=1, path="p", user_metadata={"n": 10**30})
    request = codec.decode(codec.encode(save_request("training", body, overwrite=False)))
    assert request["user_metadata"] == {"n": str(10**30)}


def test_a_waiting_request_in_a_journal_of_another_version_is_refused() -> None:
    """Before msgpack: the size of JSON, JSON, and the byte strings that it refers to."""
    head = json.dumps([{"model": "m", "tokens": {"$bytes": 0}}, [3]]).encode()
    body = struct.pack("<Q", len(head)) + head + b"abc"
    record = Request("m/1", "op", "m", 1, "me", "digest", time.time()).record()
    restored = Request.from_journal(record, body, None)
    assert restored.state == "waiting" and "send it again" in restored.body["refusal"]
