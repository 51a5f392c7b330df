"""What goes over the wire: our protobuf messages are the SDK's, and bad bodies are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc
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
    ours = {message.name: message for message in proto.FILE.message_type}
    assert {message.name for message in theirs.message_type} - ours.keys() == REQUESTS_IN_JSON
    for message in theirs.message_type:
        if message.name in ours:
            assert without_json_names(message) == without_json_names(ours[message.name])
    assert list(theirs.enum_type) == list(proto.FILE.enum_type)


def without_json_names(message: descriptor_pb2.DescriptorProto) -> descriptor_pb2.DescriptorProto:
    copied = descriptor_pb2.DescriptorProto.FromString(message.SerializeToString())
    for part in (copied, *copied.nested_type):
        for field in part.field:
            field.ClearField("json_name")
    return copied


def test_the_compiled_messages_are_those_of_the_source(tmp_path: Path) -> None:
    source = proto.COMPILED.with_suffix(".proto")
    made = tmp_path / "made"
    arguments = ["protoc", f"-I{source.parent}", f"--descriptor_set_out={made}", str(source)]
    assert protoc.main(arguments) == 0
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file
    assert file == proto.FILE, "run `make proto`"


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
