"""What goes over the wire: our protobuf table is the SDK's, frames come back as they were, bad
bodies of bytes are told apart."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2
from tinker.proto import tinker_public_pb2

from slime_like.tinker import codec, proto
from slime_like.tinker.data import parse_request
from slime_like.tinker.errors import HttpError

REQUESTS_IN_JSON = {
    "SamplingParams",
    "StopStrings",
    "StopTokens",
}  # which the SDK has and never sends


def test_the_messages_are_those_of_the_sdk() -> None:
    theirs = descriptor_pb2.FileDescriptorProto()
    tinker_public_pb2.DESCRIPTOR.CopyToProto(theirs)
    ours = {message.name: message for message in proto.file_of_messages().message_type}
    assert {message.name for message in theirs.message_type} - ours.keys() == REQUESTS_IN_JSON
    for message in theirs.message_type:
        for field in [*message.field, *(f for entry in message.nested_type for f in entry.field)]:
            field.ClearField("json_name")
        if message.name in ours:
            assert message == ours[message.name]
    assert list(theirs.enum_type) == list(proto.file_of_messages().enum_type)


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
    with pytest.raises(ValueError, match="has the key"):
        codec.encode({codec.BYTES: 0})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"\xff\xff\xff", "not a ForwardBackwardRequest"),
        (b"", "model_id is missing"),
        (proto.ForwardBackwardRequest(model_id="a").SerializeToString(), "seq_id is 0"),
        (proto.ForwardBackwardRequest(model_id="a", seq_id=-3).SerializeToString(), "seq_id is -3"),
    ],
)
def test_bytes_that_are_no_request(body: bytes, expected: str) -> None:
    with pytest.raises(HttpError, match=expected) as caught:
        parse_request(body)
    assert caught.value.status == 400
