"""The Open Inference Protocol and Triton's extensions: tensors in JSON and in binary, generate, health and errors."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import httpx
import pytest

from penstock.config.errors import RequestError
from penstock.server.dialects.kserve.schema import Tensor
from penstock.server.dialects.kserve.tensors import BinaryTensors
from tests.server.support import ANSWER, Running

MODEL = "/v2/models/scripted"


def post(server: Running, path: str, body: Any, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, **more)


def tensor(name: str, datatype: str, *data: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [len(data)], "data": list(data)}


def binary(body: dict[str, Any], *tails: bytes) -> tuple[bytes, dict[str, str]]:
    head = json.dumps(body).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    return head + b"".join(tails), headers


def test_health_and_what_there_is(server: Running) -> None:
    assert httpx.get(f"{server.url}/v2").json()["name"] == "penstock"
    for path in ("/v2/health/live", "/v2/health/ready", f"{MODEL}/ready", f"{MODEL}/versions/1/ready"):
        assert httpx.get(server.url + path).status_code == 200
    for path in (MODEL, f"{MODEL}/versions/1"):
        told = httpx.get(server.url + path).json()
        assert (told["name"], told["versions"]) == ("scripted", ["1"])
        assert told["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [-1]}]
    for path in ("/v2/models/other", "/v2/models/a/b/ready", f"{MODEL}/versions/2", f"{MODEL}/versions/2/ready"):
        answer = httpx.get(server.url + path)
        assert answer.status_code == 404 and set(answer.json()) == {"error"}


@pytest.mark.parametrize("path", [f"{MODEL}/generate", f"{MODEL}/versions/1/generate"])
def test_the_generate_extension(server: Running, path: str) -> None:
    told = post(server, path, {"text_input": "Hello", "max_tokens": 100, "id": "mine"}).json()
    assert told == {"id": "mine", "model_name": "scripted", "model_version": "1", "text_output": ANSWER}
    asked = {"text_input": "Hello", "parameters": {"max_tokens": 3, "exclude_input_in_output": False, "stream": False}}
    assert post(server, path, asked).json()["text_output"].startswith("HelloHello")
    assert len(post(server, path, {"text_input": "Hello", "n": 2}).json()["text_output"]) == 2


def test_a_stream_is_of_one_answer(server: Running) -> None:
    answer = post(server, f"{MODEL}/generate_stream", {"text_input": "Hello", "n": 2})
    assert answer.status_code == 400 and "n is 2" in answer.json()["error"]


def test_parameters_by_all_their_names(server: Running) -> None:
    asked = {"stop_words": ["x"], "random_seed": 7, "min_length": 1, "temperature": 0.5, "parameters": {"top_k": 4}}
    post(server, f"{MODEL}/generate", {"text_input": "Hello", "max_tokens": 2, **asked})
    sampling = server.runner.seen[-1].sampling
    assert (sampling.stop, sampling.seed, sampling.min_tokens, sampling.top_k) == (("x",), 7, 1, 4)
    asked = {"structured_outputs": {"regex": "[0-9]+"}}
    post(server, f"{MODEL}/generate", {"text_input": "Hello", "parameters": asked})


def test_a_stream(server: Running) -> None:
    answer = post(server, f"{MODEL}/generate_stream", {"text_input": "Hello", "max_tokens": 100, "stream": True})
    parts = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert "".join(part["text_output"] for part in parts) == ANSWER
    assert len(parts) > 5


def test_tensors_in_json(server: Running) -> None:
    inputs = [tensor("text_input", "BYTES", "Hello", "Good evening"), tensor("max_tokens", "INT32", 2)]
    told = post(server, f"{MODEL}/infer", {"id": "7", "inputs": inputs}).json()
    (output,) = told["outputs"]
    assert (told["id"], output["name"], output["datatype"], output["shape"]) == ("7", "text_output", "BYTES", [2])
    assert output["data"] == ["Hello!", "Hello!"]
    settings = tensor("sampling_parameters", "BYTES", json.dumps({"max_tokens": 1, "temperature": 0.5}))
    inputs = [{**tensor("text_input", "BYTES", ["Hello"]), "shape": [1, 1]}, settings]
    assert post(server, f"{MODEL}/infer", {"inputs": inputs}).json()["outputs"][0]["data"] == ["Hello"]
    assert server.runner.seen[-1].sampling.temperature == 0.5


def test_tensors_in_binary(server: Running) -> None:
    raw = b"".join(struct.pack("<I", len(text)) + text for text in ("Grüße".encode(), b"Hello"))
    text = {"name": "text_input", "datatype": "BYTES", "shape": [2, 1], "parameters": {"binary_data_size": len(raw)}}
    most = {"name": "max_tokens", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": 4}}
    wanted = {"parameters": {"binary_data_output": True}}
    body, headers = binary({"inputs": [text, most], **wanted}, raw, struct.pack("<i", 2))
    answer = httpx.post(f"{server.url}{MODEL}/infer", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    size = int(answer.headers["inference-header-content-length"])
    (output,) = json.loads(answer.content[:size])["outputs"]
    assert output["parameters"] == {"binary_data_size": len(answer.content) - size}
    assert answer.content[size:] == (struct.pack("<I", 6) + b"Hello!") * 2
    outputs = [{"name": "text_output", "parameters": {"binary_data": False}}]
    body, headers = binary({"inputs": [text, most], "outputs": outputs}, raw, struct.pack("<i", 2))
    answer = httpx.post(f"{server.url}{MODEL}/infer", content=body, headers=headers)
    assert answer.json()["outputs"][0]["data"] == ["Hello!", "Hello!"]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([tensor("max_tokens", "INT32", 2)], "text_input"),
        ([tensor("text_input", "INT32", 2)], "text_input"),
        ([tensor("text_input", "BYTES", 2)], "elements of BYTES"),
        ([{**tensor("text_input", "BYTES", "a"), "shape": [2]}], "its 1 elements"),
        ([tensor("text_input", "BYTES", "a"), tensor("text_input", "BYTES", "a")], "each input once"),
        ([tensor("text_input", "BYTES", "a"), tensor("max_tokens", "INT32", 1, 2)], "one element"),
        ([tensor("text_input", "BYTES", "a"), tensor("temprature", "FP32", 1)], "temperature"),
        ([tensor("text_input", "BYTES", "a"), tensor("temperature", "FP16", 1)], "datatype"),
        ([{**tensor("text_input", "BYTES"), "parameters": {"binary_data_size": 9}}], "binary_data_size"),
    ],
    ids=str,
)
def test_tensors_that_are_none(server: Running, inputs: list[Any], said: str) -> None:
    answer = post(server, f"{MODEL}/infer", {"inputs": inputs})
    assert answer.status_code == 400, answer.text
    assert set(answer.json()) == {"error"} and said in answer.json()["error"]


@pytest.mark.parametrize("raw", [b"\x05\x00\x00\x00ab", b"\x05\x00", b"\x02\x00\x00\x00\xff\xff", b"\xff\xff\xff\xff"])
def test_binary_that_is_none(server: Running, raw: bytes) -> None:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(raw)}}
    body, headers = binary({"inputs": [text]}, raw)
    answer = httpx.post(f"{server.url}{MODEL}/infer", content=body, headers=headers)
    assert answer.status_code == 400 and "text_input" in answer.json()["error"]
    headers["Inference-Header-Content-Length"] = "-1"
    assert httpx.post(f"{server.url}{MODEL}/infer", content=body, headers=headers).status_code == 400


@pytest.mark.parametrize(
    ("datatype", "shape", "said"),
    [
        ("BYTES", [1], "1 elements"),
        ("INT8", [1], "1 whole elements"),
        ("INT8", [400_000], "at most"),
        ("BYTES", [2**31] * 8, "at most"),
    ],
    ids=str,
)
def test_binary_of_more_than_its_shape_is_not_unpacked(datatype: str, shape: list[int], said: str) -> None:
    raw = bytes(400_000)
    given = Tensor(name="x", datatype=datatype, shape=shape, parameters={"binary_data_size": len(raw)})  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=said):
            BinaryTensors(raw).values(given)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(raw)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "headers",
    [{"Content-Type": "text/plain"}, {}, {"Content-Type": "application/json", "Content-Encoding": "gzip"}],
    ids=str,
)
def test_bodies_that_a_foreign_page_could_send(server: Running, headers: dict[str, str]) -> None:
    body = json.dumps({"inputs": [tensor("text_input", "BYTES", "Hello")]})
    answer = httpx.post(f"{server.url}{MODEL}/infer", content=body.encode(), headers=headers)
    assert answer.status_code == 415 and set(answer.json()) == {"error"}


def test_refusals_of_generate(server: Running) -> None:
    for body, said in (
        ({}, "text_input is required"),
        ({"text_input": "a", "stop": "x", "stop_words": "y"}, "which say the same"),
        ({"text_input": "a", "max_tokens": 10**6}, "context"),
        ({"text_input": "a", "nothing": 1}, "nothing"),
    ):
        answer = post(server, f"{MODEL}/generate", body)
        assert answer.status_code == 400 and said in answer.json()["error"], answer.text
    assert post(server, "/v2/models/other/generate", {"text_input": "a"}).status_code == 404
