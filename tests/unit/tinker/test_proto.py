"""What goes over the wire: our protobuf table is the SDK's, and bad bodies are told apart."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2
from tinker.proto import tinker_public_pb2

from slime_like.tinker import proto
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
