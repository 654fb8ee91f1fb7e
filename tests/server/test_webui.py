"""text-generation-webui's routes and fields, by what SillyTavern sends to it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import ANSWER, Running

INTERNAL = "/v1/internal"
# What SillyTavern's text completions send to a server of this kind with its settings untouched, all names included.
SILLYTAVERN: dict[str, Any] = {
    "prompt": "Hello",
    "model": "",
    "max_new_tokens": 350,
    "max_tokens": 350,
    "temperature": 0.7,
    "top_p": 0.5,
    "typical_p": 1,
    "typical": 1,
    "sampler_seed": -1,
    "min_p": 0,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_k": 40,
    "skew": 0,
    "min_length": 0,
    "min_tokens": 0,
    "num_beams": 1,
    "length_penalty": 1,
    "early_stopping": False,
    "add_bos_token": True,
    "smoothing_factor": 0,
    "smoothing_curve": 1,
    "dry_allowed_length": 2,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_sequence_breakers": '["\\n",":","\\"","*"]',
    "dry_penalty_last_n": 0,
    "max_tokens_second": 0,
    "sampler_priority": ["repetition_penalty", "temperature", "top_k", "top_p", "min_p"],
    "stopping_strings": ["\nYou:"],
    "stop": ["\nYou:"],
    "truncation_length": 2048,
    "ban_eos_token": False,
    "skip_special_tokens": True,
    "top_a": 0,
    "tfs": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "custom_token_bans": "",
    "banned_strings": [],
    "api_type": "ooba",
    "api_server": "http://127.0.0.1:5000/",
    "legacy_api": False,
    "xtc_threshold": 0.1,
    "xtc_probability": 0,
    "rep_pen": 1.2,
    "rep_pen_range": 0,
    "repetition_penalty_range": 0,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "penalty_alpha": 0,
    "temperature_last": True,
    "do_sample": True,
    "seed": -1,
    "guidance_scale": 1,
    "negative_prompt": "",
    "grammar_string": "",
    "repeat_penalty": 1.2,
    "tfs_z": 1,
    "repeat_last_n": 0,
    "n_predict": 350,
    "num_predict": 350,
    "num_ctx": 2048,
    "mirostat": 0,
    "ignore_eos": False,
    "rep_pen_slope": 1,
}


def post(server: Running, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=20)


def completed(server: Running, **fields: Any) -> httpx.Response:
    return post(server, "/v1/completions", {"prompt": "Hello", **fields})


def sampling(server: Running) -> Any:
    return server.runner.seen[-1].sampling


def test_sillytavern(server: Running) -> None:
    body = {name: value for name, value in SILLYTAVERN.items() if name != "model"}
    answer = post(server, "/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == ANSWER
    drawn = sampling(server)
    assert (drawn.max_tokens, drawn.repetition_penalty, drawn.top_k, drawn.tfs) == (350, 1.2, 40, 1.0)
    assert drawn.repeat_last_n == -1, "0 is the whole context there"


def test_dynamic_temperature(server: Running) -> None:
    pair = {"dynatemp_low": 0.5, "dynatemp_high": 1.5}
    assert completed(server, **pair, temperature=0.9, dynamic_temperature=False).status_code == 200
    assert (sampling(server).temperature, sampling(server).dynatemp_range) == (0.9, 0.0)
    said = {"temperature": 1.0, "dynatemp_range": 0.5, "dynatemp_exponent": 1}
    assert completed(server, **pair, **said, dynamic_temperature=True).status_code == 200
    assert (sampling(server).temperature, sampling(server).dynatemp_range) == (1.0, 0.5)
    assert completed(server, **pair, dynatemp_range=0.2, dynamic_temperature=True).status_code == 400
    assert completed(server, dynatemp_low=2, dynatemp_high=1, dynamic_temperature=True).status_code == 400


def test_names_of_one_thing(server: Running) -> None:
    told = completed(server, max_new_tokens=3).json()
    assert told["usage"]["completion_tokens"] == 3
    assert completed(server, n_predict=2).json()["usage"]["completion_tokens"] == 2
    assert completed(server, stopping_strings=["table"]).json()["choices"][0]["text"] == ANSWER.partition("table")[0]
    assert completed(server, do_sample=False, temperature=0.9).status_code == 200
    assert sampling(server).temperature == 0
    assert completed(server, ban_eos_token=True, max_tokens=40).json()["usage"]["completion_tokens"] == 40
    for differing in ({"max_new_tokens": 3, "max_tokens": 4}, {"repeat_penalty": 1.1, "repetition_penalty": 1.3}):
        answer = completed(server, **differing)
        assert answer.status_code == 400 and "which say the same" in answer.json()["error"]["message"]


def test_the_prompt_is_cut_to_what_the_context_leaves(server: Running) -> None:
    assert completed(server, prompt="Hello there " * 100, truncation_length=64, max_tokens=16).status_code == 200
    assert len(server.runner.seen[-1].prompt_ids) == 48
    for most in (4096, 10**6):  # more than the model has: all it has is meant
        assert completed(server, prompt="Hello", truncation_length=most, max_tokens=4).status_code == 200
        chat = {"messages": [{"role": "user", "content": "Hello"}], "truncation_length": most}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).status_code == 200


def test_chats(server: Running, text: TextPipeline) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Well"}]
    body = {"messages": messages, "mode": "instruct", "name1": "You", "continue_": True, "enable_thinking": False}
    assert post(server, "/v1/chat/completions", body).status_code == 200
    assert text.tokenizer.decode(list(server.runner.seen[-1].prompt_ids)).endswith("Well")
    prompt = post(server, f"{INTERNAL}/chat-prompt", body).json()["prompt"]
    assert prompt.endswith("Well")
    refused = post(server, "/v1/chat/completions", {**body, "mode": "chat"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "mode"


@pytest.mark.parametrize("name", ["chat_template", "chat_template_str", "instruction_template_str"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/apply-template", f"{INTERNAL}/chat-prompt"])
def test_a_template_of_the_client_is_refused_under_every_name(server: Running, name: str, path: str) -> None:
    answer = post(server, path, {"messages": [{"role": "user", "content": "Hello"}], name: "{{ 1 }}"})
    assert answer.status_code == 400 and "--trust-request-chat-template" in answer.text


def test_what_is_not_here_is_refused_by_name(server: Running) -> None:
    for name, value in (("encoder_repetition_penalty", 2), ("penalty_alpha", 0.6), ("skew", 1)):
        answer = completed(server, **{name: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name
    assert post(server, f"{INTERNAL}/stop-generation", {}).status_code == 501


def test_tokens(server: Running, text: TextPipeline) -> None:
    ids = list(text.tokenizer.encode("Hello there"))
    assert post(server, f"{INTERNAL}/encode", {"text": "Hello there"}).json() == {"tokens": ids, "length": len(ids)}
    assert post(server, f"{INTERNAL}/token-count", {"text": "Hello there"}).json() == {"length": len(ids)}
    assert post(server, f"{INTERNAL}/token-count", {"text": ""}).json() == {"length": 0}
    assert post(server, f"{INTERNAL}/decode", {"tokens": ids}).json() == {"text": "Hello there"}
    assert post(server, f"{INTERNAL}/decode", {"tokens": [2**31 - 1]}).status_code == 400


@pytest.mark.parametrize(("asked", "told"), [(3, 3), (500, 20), (None, 20)])
def test_next_tokens(server: Running, asked: int | None, told: int) -> None:
    server.runner.likelier = 20
    answer = post(server, f"{INTERNAL}/logits", {"prompt": "Hello", "top_logits": asked, "use_samplers": False})
    found = answer.json()["logits"]
    assert 0 < len(found) <= told and all(0 <= share <= 1 for share in found.values())


def test_models(server: Running) -> None:
    def got(path: str) -> Any:
        return httpx.get(f"{server.url}{INTERNAL}{path}", timeout=20).json()

    assert got("/health") == {"status": "ok"}
    names = got("/model/list")["model_names"]
    assert got("/model/info")["model_name"] == names[0]
    assert got("/lora/list") == {"lora_names": []}


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/chat/completions", {"chat_template_str": "{% x %}"}, "chat_template_str"),
        ("/v1/chat/completions", {"instruction_template_str": "{% x %}"}, "instruction_template_str"),
        ("/v1/chat/completions", {"max_new_tokens": 100_000}, "max_new_tokens"),
        ("/v1/completions", {"n_predict": 100_000}, "n_predict"),
        ("/v1/completions", {"max_tokens": 100_000}, "max_tokens"),
        ("/v1/completions", {"grammar_string": "root ::="}, "grammar_string"),
        ("/v2/models/scripted/generate", {"min_length": 100_000}, "min_length"),
        ("/v2/models/scripted/generate", {"parameters": {"min_length": 100_000}}, "min_length"),
    ],
)
def test_refusals_name_the_field_that_was_sent(server: Running, path: str, fields: dict[str, Any], field: str) -> None:
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]} if "chat" in path else {"prompt": "Hi"}
    said = {"text_input": "Hi"} if path.startswith("/v2") else said
    answer = httpx.post(server.url + path, json={**said, **fields}, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error.startswith(f"{field} is") if isinstance(error, str) else error["param"] == field
