"""KServe over gRPC, with Triton's own client: tensors, streams, keys, limits, leaving, and what is no message."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from penstock.config.options import ServerOptions
from penstock.server.kserve_grpc import service
from penstock.server.kserve_grpc.messages import MESSAGES, SERVICE, count_fields, message
from penstock.server.kserve_grpc.translate import MAX_FIELDS, parsed
from tests.server.support import ANSWER, Running, running

KEYS = {"authorization": "Bearer right"}
TYPES: dict[str, Any] = {"INT32": np.int32, "BOOL": np.bool_}


@pytest.fixture(scope="module")
def both(text: Any) -> Iterator[tuple[Running, str]]:
    """A server that wants a key, and the address of its gRPC service."""
    said: list[str] = []
    options = ServerOptions(api_keys=("right",), grpc_port=0)
    with running(text, options, said=said) as server:
        yield server, f"127.0.0.1:{said[0].rpartition(' ')[2].rstrip('.')}"


@pytest.fixture
def server(both: tuple[Running, str]) -> Running:
    both[0].until_idle()
    both[0].runner.reset()
    return both[0]


@pytest.fixture
def client(both: tuple[Running, str], server: Running) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(both[1]) as client:
        yield client


def texts(*values: str, name: str = "text_input") -> triton.InferInput:
    made = triton.InferInput(name, [len(values)], "BYTES")
    made.set_data_from_numpy(np.array([value.encode() for value in values], dtype=np.object_))
    return made


def tensor(name: str, datatype: str, value: Any) -> triton.InferInput:
    made = triton.InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value], dtype=TYPES[datatype]))
    return made


def inferred(client: triton.InferenceServerClient, *inputs: Any, **more: Any) -> list[str]:
    result = client.infer("scripted", [*inputs], headers=KEYS, **more)
    return [value.decode() for value in result.as_numpy("text_output")]


def refused(call: Any, *arguments: Any, **more: Any) -> tuple[str, str]:
    with pytest.raises(triton.InferenceServerException) as error:
        call(*arguments, **more)
    return str(error.value.status()), str(error.value.message())


def test_health_and_what_there_is(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("scripted", headers=KEYS) and client.is_model_ready("scripted", "1", headers=KEYS)
    assert client.get_server_metadata(headers=KEYS).name == "penstock"
    told = client.get_model_metadata("scripted", headers=KEYS)
    assert (told.name, list(told.versions), told.inputs[0].datatype) == ("scripted", ["1"], "BYTES")
    assert refused(client.is_model_ready, "other", headers=KEYS)[0] == "StatusCode.NOT_FOUND"
    assert refused(client.get_model_metadata, "scripted", "2", headers=KEYS)[0] == "StatusCode.NOT_FOUND"


def test_tensors_in_and_out(client: triton.InferenceServerClient) -> None:
    long = tensor("max_tokens", "INT32", 100)
    assert inferred(client, texts("Hello", "Hi"), long) == [ANSWER, ANSWER]
    assert inferred(client, texts("Hello"), parameters={"max_tokens": 100}, request_id="mine") == [ANSWER]
    told = client.infer("scripted", [texts("Hello"), long], headers=KEYS, request_id="mine").get_response()
    assert (told.id, told.model_name, told.model_version) == ("mine", "scripted", "1")
    outputs = [triton.InferRequestedOutput("text_output")]
    echo = tensor("exclude_input_in_output", "BOOL", False)
    assert inferred(client, texts("Hello "), long, echo, outputs=outputs) == [f"Hello {ANSWER}"]


def stream(client: triton.InferenceServerClient, *requests: Any, **more: Any) -> list[Any]:
    """What comes back for requests on one stream."""
    found: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: found.put(error or result), headers=KEYS)
    for inputs in requests:
        client.async_stream_infer("scripted", inputs, **more)
    client.stop_stream()
    return list(found.queue)


def text_of(results: list[Any]) -> str:
    tensors = [result.as_numpy("text_output") for result in results]
    return b"".join(value for found in tensors if found is not None for value in found).decode()


def test_streams(client: triton.InferenceServerClient) -> None:
    asked = [texts("Hello"), tensor("max_tokens", "INT32", 100)]
    pieces = stream(client, asked)
    assert text_of(pieces) == ANSWER and len(pieces) > 3
    ended = stream(client, asked, enable_empty_final_response=True)
    finals = [result.get_response().parameters["triton_final_response"].bool_param for result in ended]
    assert text_of(ended) == ANSWER and finals == [False] * (len(finals) - 1) + [True]
    whole = stream(client, [*asked, tensor("stream", "BOOL", False)], request_id="one")
    assert text_of(whole) == ANSWER and len(whole) == 1 and whole[0].get_response().id == "one"


def test_a_refusal_does_not_end_a_stream(client: triton.InferenceServerClient) -> None:
    good = [texts("Hello"), tensor("max_tokens", "INT32", 100)]
    bad = [texts("Hello"), tensor("max_tokens", "INT32", -1)]
    found = stream(client, bad, [texts("a", "b")], good)
    errors = [result for result in found if isinstance(result, triton.InferenceServerException)]
    assert ["max_tokens" in str(errors[0]), "one text" in str(errors[1]), len(errors)] == [True, True, 2]
    assert text_of([result for result in found if result not in errors]) == ANSWER


def test_keys_and_names(client: triton.InferenceServerClient) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        assert refused(client.infer, "scripted", [texts("x")], headers=headers)[0] == "StatusCode.UNAUTHENTICATED"
    status, told = refused(client.infer, "other", [texts("x")], headers=KEYS)
    assert status == "StatusCode.NOT_FOUND" and "other" in told
    assert client.infer("scripted", [texts("x")], headers={"x-api-key": "right"}).as_numpy("text_output") is not None


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ([texts("x", name="other")], "text_input"),
        ([texts("x"), texts("y")], "each input once"),
        ([texts("x"), tensor("max_tokens", "INT32", 0)], "max_tokens"),
        ([texts("x"), tensor("no_such", "INT32", 0)], "no_such"),
        ([texts(*"abc" * 400)], "at most 1024"),
        ([texts("x")] * 65, "at most 64"),
    ],
)
def test_refusals(client: triton.InferenceServerClient, inputs: list[Any], told: str) -> None:
    status, text = refused(client.infer, "scripted", inputs, headers=KEYS)
    assert (status, told in text) == ("StatusCode.INVALID_ARGUMENT", True), text


def test_a_call_that_is_given_up_ends(client: triton.InferenceServerClient, server: Running) -> None:
    """By its client, by its deadline, or with its stream."""
    server.runner.endless = True
    for how in ("cancel", "deadline", "stream"):
        cancelled, found = server.cancelled, queue.Queue[Any]()
        server.runner.hold(drawn=3)
        asked = [texts("Hello"), tensor("max_tokens", "INT32", 400)]

        def put(result: Any, error: Any, found: queue.Queue[Any] = found) -> None:
            found.put(error or result)

        if how == "stream":
            client.start_stream(put, headers=KEYS)
            client.async_stream_infer("scripted", asked)
        else:
            limit = 2.0 if how == "deadline" else None
            call = client.async_infer("scripted", asked, put, headers=KEYS, client_timeout=limit)
        assert server.runner.held.wait(60)
        if how == "stream":
            client.stop_stream(cancel_requests=True)
        elif how == "cancel":
            call.cancel()
        if how != "stream":
            assert isinstance(found.get(timeout=60), triton.InferenceServerException)
        server.until_told()
        server.runner.go()
        server.until_idle()
        assert server.cancelled == cancelled + 1


def call(address: str, name: str, raw: bytes) -> grpc.StatusCode:
    """What becomes of bytes that no client would send."""
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        try:
            channel.unary_unary(f"/{SERVICE}/{name}")(raw, metadata=[*KEYS.items()], timeout=60)
        except grpc.RpcError as error:
            return error.code()  # type: ignore[no-any-return]
    return grpc.StatusCode.OK


def test_bytes_that_are_no_message(both: tuple[Running, str], server: Running) -> None:
    request = message("ModelInferRequest")
    deep = request(model_name="scripted")
    for _ in range(MAX_FIELDS):
        deep.inputs.add()
    for raw in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x2a\x05\x0a", b"\x0b" * 9, deep.SerializeToString(), b""):
        assert call(both[1], "ModelInfer", raw) in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), raw
    large = request(model_name="scripted", raw_input_contents=[b"x" * service.MAX_MESSAGE_BYTES])
    assert call(both[1], "ModelInfer", large.SerializeToString()) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert call(both[1], "RepositoryIndex", b"") is grpc.StatusCode.UNIMPLEMENTED
    assert call(both[1], "ServerLive", b"") is grpc.StatusCode.OK


def test_fields_are_counted_as_protobuf_reads_them() -> None:
    request = message("ModelInferRequest")(model_name="m", id="x")
    request.inputs.add(name="a", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1.0] * 9)
    request.parameters["p"].int64_param = -1
    raw = request.SerializeToString()
    # Of the message 4, of the tensor 4, its packed contents, and the parameter's name and value.
    assert count_fields(raw, 99) == 4 + 4 + 1 + 2
    assert parsed(raw) == request
    assert count_fields(raw, 3) == 4


def test_messages_are_those_that_tritons_client_has() -> None:
    from tritonclient.grpc import service_pb2

    theirs = service_pb2.DESCRIPTOR.message_types_by_name
    for name in MESSAGES:
        found = theirs.get(name) or theirs[_OUTER[name]].nested_types_by_name[name]
        ours = message(name).DESCRIPTOR
        assert [(one.name, one.number, one.type) for one in ours.fields] == [
            (one.name, one.number, one.type) for one in found.fields
        ], name


_OUTER = {
    "TensorMetadata": "ModelMetadataResponse",
    "InferInputTensor": "ModelInferRequest",
    "InferRequestedOutputTensor": "ModelInferRequest",
    "InferOutputTensor": "ModelInferResponse",
}
