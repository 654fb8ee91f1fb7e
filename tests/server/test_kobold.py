"""The APIs of KoboldAI and KoboldCpp, by what KoboldAI Lite and others call."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from penstock.config import limits
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.dialects.kobold.schema import KoboldBody
from penstock.server.dialects.kobold.translate import sampling_of
from tests.server.support import ANSWER, Running, until

GENERATE = "/api/v1/generate"


def post(server: Running, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def generated(server: Running, **body: Any) -> Any:
    answer = post(server, GENERATE, {"prompt": "Hello there", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["results"]


def test_a_whole_answer(server: Running) -> None:
    (told,) = generated(server)
    assert (told["text"], told["finish_reason"], told["prompt_tokens"]) == (ANSWER, "stop", 2)
    (told,) = generated(server, max_length=3)
    assert (told["finish_reason"], told["completion_tokens"]) == ("length", 3)
    assert len(generated(server, n=2, max_length=1)) == 2
    assert post(server, "/api/latest/generate", {"prompt": "Hello"}).json()["results"][0]["text"] == ANSWER


def test_a_stream(server: Running) -> None:
    answer = post(server, "/api/extra/generate/stream", {"prompt": "Hello", "max_length": 100})
    pieces = [piece.split("\n") for piece in answer.text.split("\n\n") if piece]
    assert {name for name, _ in pieces} == {"event: message"}
    *parts, last = [json.loads(data.removeprefix("data: ")) for _, data in pieces]
    assert "".join(part["token"] for part in parts) == ANSWER
    assert all(part["finish_reason"] is None for part in parts)
    assert last == {"token": "", "finish_reason": "stop"}


def test_stop_strings(server: Running) -> None:
    assert not generated(server, stop_sequence=["table", ""])[0]["text"].endswith("table")
    assert generated(server, stop_sequence=["table"], trim_stop=False)[0]["text"].endswith("table")


def test_the_prompt_is_cut_at_its_beginning_behind_the_memory(server: Running, text: TextPipeline) -> None:
    memory, prompt = "You answer the telephone.", "Good evening. " * 200 + "The end"
    generated(server, prompt=prompt, memory=memory, max_context_length=64, max_length=16)
    ids = list(server.runner.seen[-1].prompt_ids)
    kept, whole = list(text.tokenizer.encode(memory)), list(text.tokenizer.encode(prompt, add_special_tokens=False))
    assert (len(ids), ids[: len(kept)]) == (48, kept)
    assert ids[len(kept) :] == whole[-(48 - len(kept)) :]
    answer = post(server, GENERATE, {"prompt": "a", "memory": prompt, "max_context_length": 64, "max_length": 16})
    assert answer.status_code == 400 and "no room for the prompt" in answer.json()["detail"]["msg"]


def test_an_answer_as_long_as_the_context_leaves_room_for_the_prompt(server: Running) -> None:
    generated(server, prompt="Good evening. " * 50, max_context_length=64, max_length=64)
    request = server.runner.seen[-1]
    assert (len(request.prompt_ids), request.sampling.max_tokens) == (16, 48)


def test_more_stop_sequences_than_are_looked_for_are_cut(server: Running) -> None:
    generated(server, stop_sequence=[f"\n{number}:" for number in range(200)])
    assert len(server.runner.seen[-1].sampling.stop) == limits.MAX_STOP_STRINGS


def test_a_stream_is_of_one_answer(server: Running) -> None:
    answer = post(server, "/api/extra/generate/stream", {"prompt": "Hi", "n": 2})
    assert answer.status_code == 400 and "n is 2" in answer.json()["detail"]["msg"]


def test_sampling() -> None:
    sampling = sampling_of(KoboldBody(prompt="a"), {})
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repeat_last_n) == (0.75, 100, 0.92, 320)
    assert sampling_of(KoboldBody(prompt="a"), {"temperature": 0.3, "stop": ("x",)}).stop == ("x",)
    body = KoboldBody(
        prompt="a",
        rep_pen=1.1,
        rep_pen_range=0,
        typical=0.9,
        tfs=0.95,
        nsigma=1.5,
        sampler_seed=7,
        sampler_order=[6, 0, 1, 3, 4, 2, 5],
        bypass_eos=True,
        banned_tokens=["no"],
        stop_regex="a+",
        logit_bias={"5": -3.0},
    )
    sampling = sampling_of(body, {})
    assert (sampling.repetition_penalty, sampling.repeat_last_n, sampling.typical_p) == (1.1, -1, 0.9)
    assert (sampling.tfs, sampling.top_n_sigma, sampling.seed, sampling.ignore_eos) == (0.95, 1.5, 7, True)
    assert (sampling.banned_strings, sampling.logit_bias) == (("no",), ((5, -3.0),))
    assert sampling.stop_regex == ("a+",)
    assert sampling.samplers is not None and sampling.samplers.index("top_k") < sampling.samplers.index("temperature")


def test_an_answer_is_looked_at_and_ended_while_it_is_written(server: Running) -> None:
    server.runner.delay = 0.05
    told: list[Any] = []
    asked = {"genkey": "mine", "max_length": 1000, "bypass_eos": True}
    thread = threading.Thread(target=lambda: told.extend(generated(server, **asked)))
    thread.start()

    def so_far(genkey: str) -> str:
        body = post(server, "/api/extra/generate/check", {"genkey": genkey}).json()
        return str(body["results"][0]["text"])

    until(lambda: so_far("mine").startswith("Hello!"))
    assert so_far("other") == ""
    assert httpx.get(f"{server.url}/api/extra/generate/check").json() == {"results": [{"text": ""}]}
    assert post(server, "/api/extra/abort", {"genkey": "mine"}).json() == {"success": "true", "done": "true"}
    thread.join(60)
    assert told[0]["text"].startswith("Hello!") and told[0]["completion_tokens"] < 1000
    assert told[0]["finish_reason"] == "stop"
    assert post(server, "/api/extra/abort", {"genkey": "mine"}).json()["success"] == "false"
    assert so_far("mine") == ""
    server.until_idle()


def test_counting_tokens(server: Running, text: TextPipeline) -> None:
    told = post(server, "/api/extra/tokencount", {"prompt": "Hello there"}).json()
    assert told == {"value": 2, "ids": list(text.tokenizer.encode("Hello there"))}
    assert post(server, "/api/extra/tokencount", {"prompt": ""}).json() == {"value": 0, "ids": []}


def test_the_server_and_its_model(server: Running) -> None:
    def told(path: str) -> Any:
        return httpx.get(f"{server.url}{path}").json()

    assert told("/api/v1/model") == told("/api/latest/model") == {"result": "koboldcpp/scripted"}
    assert told("/api/v1/info/version") == {"result": "1.2.5"}
    assert told("/api/extra/version")["result"] == "KoboldCpp"
    most = told("/api/extra/true_max_context_length")
    assert most == told("/api/v1/config/max_context_length") and most["value"] > 0
    assert told("/api/v1/config/max_length")["value"] > 0
    assert told("/api/extra/perf")["idle"] == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "prompt is required"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1"),
        ({"prompt": "a", "rep_pen": 1.1, "repeat_penalty": 1.2}, "leave the other out"),
        ({"prompt": "a", "images": ["x"]}, "Media are not available"),
        ({"prompt": "a", "grammar": "root ::="}, "grammar"),
    ],
    ids=str,
)
def test_refusals(server: Running, body: dict[str, Any], said: str) -> None:
    for path in (GENERATE, "/api/extra/generate/stream"):
        answer = post(server, path, body)
        assert answer.status_code == 400, answer.text
        assert set(answer.json()) == {"detail"} and answer.json()["detail"]["type"] == "bad_input"
        assert said in answer.json()["detail"]["msg"]
