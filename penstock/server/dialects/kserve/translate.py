"""KServe bodies to the completion that they ask for. Pure: no engine, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.config.errors import ParameterError, RequestError, param_names
from penstock.server.body import validate
from penstock.server.dialects.kserve.schema import KserveGenerateBody, KserveInferBody, KserveParameters
from penstock.server.dialects.kserve.tensors import BinaryTensors
from penstock.server.dialects.openai.schema import CompletionBody
from penstock.server.dialects.openai.translate import OpenAICall, completion_call
from penstock.server.errors import bad_value
from penstock.server.strict_json import parse_json

_OURS: Mapping[str, str] = MappingProxyType({"stop_words": "stop", "random_seed": "seed", "min_length": "min_tokens"})
_OWN = ("stream", "exclude_input_in_output")
_PROTOCOL = frozenset({"binary_data_output", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout"})
SENT: Mapping[str, str] = MappingProxyType({"prompt": "text_input", "prompt_ids": "text_input"})


@dataclass(frozen=True, slots=True)
class KserveCall:
    """A translated call.

    Attributes:
        completion: what to run.
        prompts: the texts that it continues.
        echo: whether outputs begin with them.
        binary: whether outputs are told in binary.
        id: the request's own.
    """

    completion: OpenAICall
    prompts: tuple[str, ...]
    echo: bool
    binary: bool = False
    id: str | None = None


def generate_call(body: KserveGenerateBody, defaults: Mapping[str, Any]) -> KserveCall:
    """Translates a body of the generate extension; `parameters` count for more than what stands at its top.

    Raises:
        RequestError: a value that is not served.
    """
    top = body.model_dump(exclude_none=True, exclude={"text_input", "parameters", "id"})
    inner = body.parameters.model_dump(exclude_none=True) if body.parameters else {}
    return _call((body.text_input,), KserveParameters.model_validate(top | inner), defaults, name=body.id)


def infer_call(body: KserveInferBody, tail: bytes | memoryview, defaults: Mapping[str, Any]) -> KserveCall:
    """Translates a body of tensors, with the bytes behind it.

    Raises:
        RequestError: a tensor that is not there, not known, or not of its form.
    """
    prompts, given, binary = tensors_of(body, tail)
    return _call(prompts, validate(KserveParameters, given), defaults, binary=binary, name=body.id)


def tensors_of(body: KserveInferBody, tail: bytes | memoryview) -> tuple[tuple[str, ...], dict[str, Any], bool]:
    """The texts of a body of tensors, its parameters by name, and whether outputs are wanted in binary.

    Raises:
        RequestError: as `infer_call`.
    """
    tensors, binary = BinaryTensors(tail), False
    found: dict[str, list[Any]] = {}
    for tensor in body.inputs:
        if tensor.name in found:
            raise ParameterError("inputs", tensor.name, "each input once")
        found[tensor.name] = tensors.values(tensor)
    prompts = found.pop("text_input", [])
    if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("inputs must have text_input, a tensor of BYTES.", param="inputs", code="invalid_value")
    given = {name: value for name, value in (body.parameters or {}).items() if name not in _PROTOCOL}
    for name, values in found.items():
        given |= _parameter(name, values)
    binary = (body.parameters or {}).get("binary_data_output") is True
    for output in body.outputs or ():
        if output.name != "text_output":
            raise bad_value("outputs", output.name, '"text_output"')
        binary = (output.parameters or {}).get("binary_data", binary) is True
    return tuple(prompts), given, binary


def _parameter(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """What a tensor says besides the texts: all parameters as JSON, texts, or one value."""
    if name == "sampling_parameters":
        return parse_json(str(values[0]).encode()) if values else {}
    if name in ("stop_words", "stop", "bad_words"):
        return {name: [word for word in values if word != ""]}
    if len(values) != 1:
        raise bad_value(f"inputs.{name}.shape", [len(values)], "one element, which holds for all texts")
    return {name: values[0]}


def _call(
    prompts: tuple[str, ...],
    params: KserveParameters,
    defaults: Mapping[str, Any],
    *,
    binary: bool = False,
    name: str | None = None,
) -> KserveCall:
    said = params.model_dump(exclude_none=True, exclude=set(_OWN) | {"model"})
    sent = {ours: theirs for theirs, ours in _OURS.items() if theirs in said}
    for theirs, ours in _OURS.items():
        if theirs in said and ours in said:
            raise ParameterError(theirs, said[theirs], f"one of {theirs} and {ours}, which say the same; leave one out")
        if theirs in said:
            said[ours] = said.pop(theirs)
    with param_names(sent):
        completion = completion_call(validate(CompletionBody, {**said, "prompt": list(prompts)}), defaults)
    return KserveCall(completion, prompts, params.exclude_input_in_output is False, binary, name)
