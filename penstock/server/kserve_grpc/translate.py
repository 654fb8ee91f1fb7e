"""Messages of the gRPC service to bodies of the HTTP routes, and answers back. Pure: no engine, no I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from penstock.config import limits
from penstock.config.errors import PenstockError, RequestError, param_names
from penstock.server.body import validate
from penstock.server.dialects.kserve.schema import MAX_TENSORS, KserveInferBody
from penstock.server.dialects.kserve.tensors import binary_texts
from penstock.server.dialects.kserve.translate import SENT, tensors_of
from penstock.server.errors import bad_value
from penstock.server.kserve_grpc.messages import count_fields, message

MAX_FIELDS: Final = 8192  # of one message; 64 tensors of 8 dimensions with a few parameters have far fewer
FINAL: Final = "triton_final_response"
_EMPTY_FINAL: Final = "triton_enable_empty_final_response"
_REQUEST: Final = message("ModelInferRequest")
_RESPONSE: Final = message("ModelInferResponse")
_STREAMED: Final = message("ModelStreamInferResponse")
_CONTENTS: Final[Mapping[str, str]] = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def parsed(raw: bytes) -> Any:
    """A ModelInferRequest.

    Raises:
        RequestError: it is none, or has too many parts.
    """
    try:
        many = count_fields(raw, MAX_FIELDS) > MAX_FIELDS
        made = None if many else _REQUEST.FromString(raw)
    except Exception:  # protobuf's own error, or ValueError
        raise RequestError("The message is no ModelInferRequest.", code="invalid_value") from None
    if made is None:
        raise RequestError(f"The message has more than {MAX_FIELDS} fields.", code="invalid_value")
    return made


def infer_body(asked: Any) -> tuple[bytes, int]:
    """The body of POST …/infer, which answers in binary, and how much of it is JSON.

    Raises:
        RequestError: contents that no tensor of its datatype has, or not as many as there are tensors.
    """
    tail, inputs = list[bytes](), []
    raw = list(asked.raw_input_contents)
    if len(asked.inputs) > MAX_TENSORS:
        raise bad_value("inputs", f"{len(asked.inputs)} tensors", f"at most {MAX_TENSORS}")
    if raw and len(raw) != len(asked.inputs):
        raise bad_value("raw_input_contents", f"{len(raw)} of them", f"one for each of the {len(asked.inputs)} inputs")
    for place, tensor in enumerate(asked.inputs):
        told: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        parameters = _parameters(tensor.parameters)
        parameters.pop("binary_data_size", None)
        if raw:
            tail.append(raw[place])
            parameters["binary_data_size"] = len(raw[place])
        else:
            told["data"] = _contents(tensor)
        inputs.append({**told, "parameters": parameters})
    parameters = _parameters(asked.parameters)
    parameters.pop(_EMPTY_FINAL, None)
    body: dict[str, Any] = {"inputs": inputs, "parameters": {**parameters, "binary_data_output": True}}
    if asked.id:
        body["id"] = asked.id
    if asked.outputs:
        body["outputs"] = [{"name": output.name, "parameters": {"binary_data": True}} for output in asked.outputs]
    head = json.dumps(body).encode("utf-8", "surrogatepass")
    return head + b"".join(tail), len(head)


def stream_body(asked: Any) -> bytes | None:
    """The body of POST …/generate_stream that asks the same; None where a whole answer is wanted (`stream` false).

    Raises:
        RequestError: a tensor that is not known or not of its form, or several texts.
    """
    raw, head = infer_body(asked)
    body = validate(KserveInferBody, json.loads(raw[:head]))
    with param_names(SENT):
        prompts, given, _ = tensors_of(body, memoryview(raw)[head:])
    if given.get("stream") is False:
        return None
    if len(prompts) != 1:
        raise bad_value("inputs.text_input.shape", [len(prompts)], "one text in a stream")
    told = {"text_input": prompts[0], "parameters": {**given, "stream": True}}
    return json.dumps({**told, "id": body.id} if body.id is not None else told).encode()


def wants_empty_final(asked: Any) -> bool:
    """Whether a stream's end is told by an answer without a text."""
    return bool(_parameters(asked.parameters).get(_EMPTY_FINAL, False))


def infer_answer(body: bytes, head: int) -> Any:
    """A ModelInferResponse of what …/infer has answered, of which so many bytes are JSON."""
    told = json.loads(body[:head])
    made = _RESPONSE(model_name=told["model_name"], model_version=told["model_version"], id=told.get("id", ""))
    for output in told["outputs"]:
        made.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
    made.raw_output_contents.append(body[head:])
    return made


def streamed_answer(event: Mapping[str, Any]) -> Any:
    """A ModelStreamInferResponse of one event of …/generate_stream."""
    if "error" in event:
        return failed(str(event["error"]))
    answer = _named(event)
    answer.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    answer.raw_output_contents.append(binary_texts([event["text_output"]]))
    answer.parameters[FINAL].bool_param = False
    return _STREAMED(infer_response=answer)


def final_answer(event: Mapping[str, Any]) -> Any:
    """What ends a stream where its end is told by an answer of its own."""
    answer = _named(event)
    answer.parameters[FINAL].bool_param = True
    return _STREAMED(infer_response=answer)


def whole_answer(answer: Any) -> Any:
    """A whole answer in a stream."""
    answer.parameters[FINAL].bool_param = True
    return _STREAMED(infer_response=answer)


def failed(text: str) -> Any:
    """What tells a stream's client of a failure of one request; further ones are answered."""
    return _STREAMED(error_message=text)


def _named(event: Mapping[str, Any]) -> Any:
    return _RESPONSE(
        model_name=event.get("model_name", ""), model_version=event.get("model_version", ""), id=event.get("id", "")
    )


def _parameters(given: Any) -> dict[str, Any]:
    """A map of InferParameter as an object."""
    kinds = ((name, one, one.WhichOneof("parameter_choice")) for name, one in given.items())
    return {name: getattr(one, kind) for name, one, kind in kinds if kind is not None}


def _contents(tensor: Any) -> list[Any]:
    """The elements of a tensor that brings them itself."""
    field = _CONTENTS.get(tensor.datatype)
    found = () if field is None else getattr(tensor.contents, field)
    if len(found) > limits.MAX_PROMPTS_PER_CALL:
        told = f"at most {limits.MAX_PROMPTS_PER_CALL}"
        raise bad_value(f"inputs.{tensor.name}.contents", f"{len(found)} elements", told)
    if tensor.datatype != "BYTES":
        return list(found)
    try:
        return [one.decode() for one in found]
    except UnicodeDecodeError:
        raise bad_value(f"inputs.{tensor.name}.contents", "bytes that are no text", "UTF-8") from None


def text_of(error: Exception) -> str:
    """What a client is told of a refusal that was found here."""
    param = getattr(error, "param", None)
    text = str(error) if isinstance(error, PenstockError) else "The server met an unexpected error."
    return text if not param or param in text else f"{param}: {text}"
