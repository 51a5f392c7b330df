"""The protobuf messages of the Tinker API, as in SDK 0.38: only numbers and types of fields matter
on the wire.

The messages are in a separate descriptor pool, so that the SDK, which uses the same names, can be
imported into the same process. A test compares the table with the SDK's.
"""

from __future__ import annotations

import re

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

PACKAGE = "tinker_public"
ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
STOP_REASON_STOP, STOP_REASON_LENGTH = range(2)
DTYPE_FLOAT32 = 1
DTYPE_INT64 = 2
DTYPE_INT32 = 3
# One message per unindented line: its fields, numbered from 1, as name:type. * is repeated,
# ? optional, {...} a map with string keys, |name a member of that oneof.
MESSAGES = """
SampleResponse sequences:SampledSequence* prompt_logprobs:bytes?
    topk_prompt_logprobs:TopkLogprobs? prompt_cache_hit_tokens:int32
    target_prompt_logprobs:Tensor? prompt_alt_tokens:PromptAltTokens?
PromptAltTokens tokens:Tensor logprobs:Tensor
SampledSequence stop_reason:StopReason tokens:bytes logprobs:bytes?
    topk_sampled_logprobs:TopkLogprobs?
TopkLogprobs token_ids:bytes logprobs:bytes k:uint32 length:uint32
SparseCsr values:bytes crow_indices:bytes col_indices:bytes
Tensor dense:bytes|encoding sparse_csr:SparseCsr|encoding dtype:DType shape:int64*
BatchedTensor data:bytes offsets:bytes dtype:DType trailing_shape:int64*
ArrayRecord type_tag:string fields:{BatchedTensor} num_datums:int64
ForwardBackwardOutput loss_fn_output_type:string loss_fn_outputs:ArrayRecord* metrics:{double}
ForwardBackwardRequest model_id:string seq_id:int32 data:Datum* loss_fn:string
    loss_fn_config:{double} forward_only:bool loss_fn_config_v2:{LossConfigValue}
LossConfigValue number:double|value text:string|value
Datum model_input:Chunk* loss_fn_inputs:{Tensor} model_input_spans:ProvenanceSpan*
    loss_fn_input_spans:ProvenanceSpan*
ProvenanceSpan prompt_tokens:PromptProvenanceSpan|span sampled_tokens:SampledProvenanceSpan|span
PromptProvenanceSpan sequence_id:string offset:int64 length:int64
SampledProvenanceSpan sequence_id:string offset:int64 length:int64
Chunk encoded_text:EncodedTextChunk|chunk image:ImageChunk|chunk dmel:DmelChunk|chunk
EncodedTextChunk tokens:bytes
ImageChunk data:bytes format:string expected_tokens:int32? override_dimensions:ImageDimensions?
ImageDimensions width:uint32 height:uint32
DmelChunk dmel:bytes
"""
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _Field.TYPE_BYTES,
    "string": _Field.TYPE_STRING,
    "bool": _Field.TYPE_BOOL,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
}


def file_of_messages() -> descriptor_pb2.FileDescriptorProto:
    """The descriptor that protoc would generate for the table."""
    file = descriptor_pb2.FileDescriptorProto(
        name="tinker_public.proto", package=PACKAGE, syntax="proto3"
    )
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for entry in re.split(r"\n(?! )", MESSAGES.strip()):
        name, *fields = entry.split()
        message = file.message_type.add(name=name)
        for number, text in enumerate(fields, start=1):
            _add_field(message, number, *text.split(":", 1))
        for field in message.field:  # protoc places these after the named oneofs
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")
    return file


def _add_field(message: descriptor_pb2.DescriptorProto, number: int, name: str, kind: str) -> None:
    kind, _, oneof = kind.partition("|")
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind.startswith("{"):
        entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
        _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind[1:-1])
        field.label = _Field.LABEL_REPEATED
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
        return
    if kind.endswith("*"):
        field.label = _Field.LABEL_REPEATED
    if kind.endswith("?"):
        field.proto3_optional = True
    _set_type(field, kind.rstrip("*?"))
    if oneof:
        names = [declared.name for declared in message.oneof_decl]
        if oneof not in names:
            message.oneof_decl.add(name=oneof)
            names.append(oneof)
        field.oneof_index = names.index(oneof)


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_ENUM if kind in ENUMS else _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"


_POOL = descriptor_pool.DescriptorPool()
_POOL.AddSerializedFile(file_of_messages().SerializeToString())


def message(name: str) -> type[Message]:
    """The generated class of a message."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


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
