"""The protobuf messages of the Tinker API: tinker_public.proto, compiled by `make proto`.

They are in a separate descriptor pool, so that the SDK, which uses the same names, can be imported
into the same process. Tests compare the messages with the SDK's, and the compiled file with its
source.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

COMPILED = Path(__file__).with_name("tinker_public.binpb")
STOP_REASON_STOP, STOP_REASON_LENGTH = range(2)
DTYPE_FLOAT32 = 1
DTYPE_INT64 = 2
DTYPE_INT32 = 3

(FILE,) = descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes()).file
_POOL = descriptor_pool.DescriptorPool()
_POOL.AddSerializedFile(FILE.SerializeToString())


def message(name: str) -> type[Message]:
    """The generated class of a message."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{FILE.package}.{name}"))


ForwardBackwardRequest = message("ForwardBackwardRequest")
ForwardBackwardOutput = message("ForwardBackwardOutput")
SampleResponse = message("SampleResponse")

__all__ = [
    "DecodeError",
    "ForwardBackwardOutput",
    "ForwardBackwardRequest",
    "Message",
    "SampleResponse",
    "message",
]
