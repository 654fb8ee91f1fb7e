"""Messages of the Open Inference Protocol's gRPC service, declared from its published names and numbers.

A pool of descriptors of its own: whatever else a process loads under these names does not meet them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE: Final = "inference"
SERVICE: Final = f"{PACKAGE}.GRPCInferenceService"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
    "float": _Field.TYPE_FLOAT,
    "double": _Field.TYPE_DOUBLE,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}
_NAMED: Final = "name:1:string version:2:string"
_INFER: Final = "model_name:1:string model_version:2:string id:3:string parameters:4:map"
_TENSOR: Final = "name:1:string datatype:2:string shape:3:*int64"
# A field is name:number:kind, with * where it is repeated; map is one from names to InferParameter.
MESSAGES: Mapping[str, str] = MappingProxyType(
    {
        "ServerLiveRequest": "",
        "ServerLiveResponse": "live:1:bool",
        "ServerReadyRequest": "",
        "ServerReadyResponse": "ready:1:bool",
        "ModelReadyRequest": _NAMED,
        "ModelReadyResponse": "ready:1:bool",
        "ServerMetadataRequest": "",
        "ServerMetadataResponse": "name:1:string version:2:string extensions:3:*string",
        "ModelMetadataRequest": _NAMED,
        "TensorMetadata": _TENSOR,
        "ModelMetadataResponse": "name:1:string versions:2:*string platform:3:string inputs:4:*TensorMetadata "
        "outputs:5:*TensorMetadata",
        "InferParameter": "bool_param:1:bool int64_param:2:int64 string_param:3:string double_param:4:double "
        "uint64_param:5:uint64",
        "InferTensorContents": "bool_contents:1:*bool int_contents:2:*int32 int64_contents:3:*int64 "
        "uint_contents:4:*uint32 uint64_contents:5:*uint64 fp32_contents:6:*float fp64_contents:7:*double "
        "bytes_contents:8:*bytes",
        "InferInputTensor": f"{_TENSOR} parameters:4:map contents:5:InferTensorContents",
        "InferRequestedOutputTensor": "name:1:string parameters:2:map",
        "ModelInferRequest": f"{_INFER} inputs:5:*InferInputTensor outputs:6:*InferRequestedOutputTensor "
        "raw_input_contents:7:*bytes",
        "InferOutputTensor": f"{_TENSOR} parameters:4:map contents:5:InferTensorContents",
        "ModelInferResponse": f"{_INFER} outputs:5:*InferOutputTensor raw_output_contents:6:*bytes",
        "ModelStreamInferResponse": "error_message:1:string infer_response:2:ModelInferResponse",
    }
)
_ONE_OF: Final = {"InferParameter": "parameter_choice"}


def _file() -> descriptor_pb2.FileDescriptorProto:
    """The declarations as protobuf has them."""
    file = descriptor_pb2.FileDescriptorProto(name="open_inference_grpc.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        if name in _ONE_OF:
            message.oneof_decl.add(name=_ONE_OF[name])
        for field in fields.split():
            _add_field(message, *field.split(":"))
    return file


def _add_field(message: descriptor_pb2.DescriptorProto, name: str, number: str, kind: str) -> None:
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind == "map":
        entry = message.nested_type.add(name="ParametersEntry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
        value = f".{PACKAGE}.InferParameter"
        entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_MESSAGE, type_name=value)
        kind = f"*{message.name}.ParametersEntry"
    if kind.startswith("*"):
        field.label, kind = _Field.LABEL_REPEATED, kind[1:]
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    if message.name in _ONE_OF:
        field.oneof_index = 0


_POOL: Final = descriptor_pool.DescriptorPool()
_POOL.Add(_file())


def message(name: str) -> Any:
    """The class of a message."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


_LENGTH_DELIMITED, _VARINT = 2, 0
_FIXED: Final = {1: 8, 5: 4}
_INNER: Final[Mapping[str, Mapping[int, str]]] = MappingProxyType(
    {
        "ModelInferRequest": {4: "entry", 5: "InferInputTensor", 6: "InferRequestedOutputTensor"},
        "InferInputTensor": {4: "entry", 5: "InferTensorContents"},
        "InferRequestedOutputTensor": {2: "entry"},
    }
)


def count_fields(raw: bytes, most: int) -> int:
    """How many fields a ModelInferRequest has, those of its tensors too; counting ends above `most`.

    What a few bytes may stand for is so known before anything is made of them.

    Raises:
        ValueError: it is no message.
    """
    count, waiting = 0, [(0, len(raw), "ModelInferRequest")]
    while waiting:
        at, end, name = waiting.pop()
        while at < end:
            count += 1
            if count > most:
                return count
            key, at = _varint(raw, at, end)
            if key & 7 == _LENGTH_DELIMITED:
                size, at = _varint(raw, at, end)
                if (inner := _INNER.get(name, {}).get(key >> 3)) is not None:
                    waiting.append((at, at + size, inner))
                at += size
            elif key & 7 == _VARINT:
                at = _varint(raw, at, end)[1]
            else:
                at += _FIXED[key & 7] if key & 7 in _FIXED else end - at + 1
            if at > end:
                raise ValueError("a field ends behind its message")
    return count


def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("a number has no end")
