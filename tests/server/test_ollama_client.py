"""The ollama package against the real application, over a socket, and a real engine with a scripted runner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime

import httpx
import ollama
import pytest

from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import ANSWER, Running, running, script_of

HELLO = [{"role": "user", "content": "Hello"}]
LIBRARY = [("POST", name) for name in ("pull", "push", "create", "copy", "blobs/sha256:0")] + [("DELETE", "delete")]


@pytest.fixture
def api(server: Running) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as api:
        yield api


def test_chat(api: ollama.Client, server: Running) -> None:
    answer = api.chat(model="scripted", messages=HELLO)
    assert (answer.model, answer.done, answer.done_reason) == ("scripted", True, "stop")
    assert (answer.message.role, answer.message.content) == ("assistant", ANSWER)
    assert answer.prompt_eval_count == len(server.runner.seen[0].prompt_ids)
    assert answer.eval_count == len(server.runner.script)
    assert answer.total_duration >= answer.load_duration + answer.prompt_eval_duration + answer.eval_duration > 0
    assert datetime.fromisoformat(answer.created_at).tzinfo is not None


def test_a_stream_is_the_whole(api: ollama.Client) -> None:
    whole = api.chat(model="scripted:latest", messages=HELLO)
    parts = list(api.chat(model="scripted:latest", messages=HELLO, stream=True))
    assert whole.model == "scripted:latest"
    assert "".join(part.message.content for part in parts) == whole.message.content == ANSWER
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].done_reason == "stop"
    assert (parts[-1].eval_count, parts[-1].prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)


def test_a_stream_on_the_wire(server: Running) -> None:
    """Streams unless told not to, in lines of JSON; a body of any type is read if no web page sent it."""
    body = json.dumps({"model": "scripted", "messages": HELLO}).encode()
    answer = httpx.post(f"{server.url}/api/chat", content=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert len(lines) > 2
    assert answer.text.endswith("\n")
    assert lines[-1]["done"]
    refused = httpx.post(f"{server.url}/api/chat", content=body, headers={"origin": "http://elsewhere.example"})
    assert refused.status_code == 415
    assert list(refused.json()) == ["error"]


def test_generate(api: ollama.Client, server: Running) -> None:
    answer = api.generate(model="scripted", prompt="Hello", system="Be kind.")
    assert (answer.response, answer.done_reason) == (ANSWER, "stop")
    parts = list(api.generate(model="scripted", prompt="Hello", system="Be kind.", stream=True))
    assert "".join(part.response for part in parts) == ANSWER
    chat = [{"role": "system", "content": "Be kind."}, *HELLO]
    assert api.chat(model="scripted", messages=chat).prompt_eval_count == answer.prompt_eval_count
    assert list(answer.context) == [*server.runner.seen[0].prompt_ids, *server.runner.script]


def test_a_context_goes_before_the_prompt(api: ollama.Client, server: Running) -> None:
    first = api.generate(model="scripted", prompt="Hello")
    again = api.generate(model="scripted", prompt="And now?", context=first.context)
    prompts = [request.prompt_ids for request in server.runner.seen]
    assert prompts[1][: len(first.context)] == tuple(first.context)
    alone = api.generate(model="scripted", prompt="And now?")
    assert again.prompt_eval_count == len(first.context) + alone.prompt_eval_count


def test_a_raw_prompt_is_taken_as_it_is(api: ollama.Client, server: Running, text: TextPipeline) -> None:
    answer = api.generate(model="scripted", prompt="Hello", raw=True)
    assert server.runner.seen[0].prompt_ids == tuple(text.tokenizer.encode("Hello"))
    assert (answer.response, answer.context) == (ANSWER, None)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_to_answer_only_loads(api: ollama.Client, server: Running, stream: bool) -> None:
    asked = [api.generate(model="scripted", keep_alive=0, stream=stream), api.chat(model="scripted", stream=stream)]
    for answer in asked:
        last = list(answer)[-1] if stream else answer
        assert (last.done, last.done_reason) == (True, "load")
    assert not server.runner.seen


def test_options(api: ollama.Client, server: Running) -> None:
    options: dict[str, object] = {"temperature": 0.25, "top_k": 7.0, "top_p": 0.5, "min_p": 0.1, "seed": 3}
    options |= {"num_predict": 2, "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    options |= {"stop": ["zzz"], "num_ctx": 10**6, "num_gpu": 99, "mirostat": 1, "never_heard_of": True}
    answer = api.chat(model="scripted", messages=HELLO, options=options)
    assert (answer.done_reason, answer.eval_count) == ("length", 2)
    sampling = server.runner.seen[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.25, 7, 0.5, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.5, 0.25)
    assert (sampling.seed, sampling.stop) == (3, ("zzz",))


def test_defaults(api: ollama.Client, server: Running) -> None:
    """The model's own, then Ollama's; numbers that mean no limit, any seed or the likeliest token mean that here."""
    api.chat(model="scripted", messages=HELLO)
    api.chat(model="scripted", messages=HELLO, options={"num_predict": -1, "seed": -1, "top_p": 0})
    first, second = (request.sampling for request in server.runner.seen)
    assert (first.temperature, first.top_p, first.top_k) == (0.6, 0.95, 40)
    assert (second.seed, second.max_tokens) == (None, first.max_tokens)
    assert 0 < second.top_p < 1e-6


def test_stop_strings(api: ollama.Client) -> None:
    answer = api.generate(model="scripted", prompt="Hello", options={"stop": [" for"]})
    assert (answer.response, answer.done_reason) == (ANSWER.split(" for")[0], "stop")


@pytest.mark.parametrize("given", [0, -1, 1.5, "0", "5m", "-1m", "1h30m", "1.5h", ".5s", "100µs", None])
def test_keep_alive_is_a_duration_as_go_writes_them(server: Running, given: object) -> None:
    body = {"model": "scripted", "keep_alive": given}
    assert httpx.post(f"{server.url}/api/generate", json=body).json()["done_reason"] == "load"


def test_more_tokens_than_fit_end_with_the_context(api: ollama.Client, server: Running) -> None:
    end = server.runner.script[-1:]
    server.runner.script = server.runner.script[:-1]  # never ends by itself
    try:
        answer = api.generate(model="scripted", prompt="Hello", options={"num_predict": 10**9})
    finally:
        server.runner.script += end
    assert answer.done_reason == "length"
    assert answer.eval_count + answer.prompt_eval_count == server.client.info.max_model_len


def test_logprobs(api: ollama.Client, server: Running) -> None:
    answer = api.chat(model="scripted", messages=HELLO, logprobs=True, top_logprobs=2)
    assert len(answer.logprobs) == answer.eval_count == len(server.runner.script)
    assert "".join(entry.token for entry in answer.logprobs[:-1]) == ANSWER
    assert all(len(entry.top_logprobs) == 2 for entry in answer.logprobs)
    parts = list(api.chat(model="scripted", messages=HELLO, logprobs=True, stream=True))
    assert sum(len(part.logprobs or ()) for part in parts) == answer.eval_count


def test_embeddings(api: ollama.Client, server: Running) -> None:
    both = api.embed(model="scripted", input=["one", "two"])
    alone = api.embed(model="scripted", input="one", dimensions=2)
    assert (len(both.embeddings), len(alone.embeddings)) == (2, 1)
    assert both.prompt_eval_count > alone.prompt_eval_count > 0
    assert api.embed(model="scripted", input=[]).embeddings == []
    assert len(api.embeddings(model="scripted", prompt="one").embedding) == len(both.embeddings[0])


def test_models(api: ollama.Client, server: Running) -> None:
    info = server.client.info
    listed = api.list().models
    assert [model.model for model in listed] == ["scripted:latest"]
    assert len(listed[0].digest) == 64
    loaded = api.ps().models[0]
    assert (loaded.model, loaded.context_length) == ("scripted:latest", info.max_model_len)
    assert loaded.expires_at.year == 9999
    shown = api.show("scripted")
    assert {"completion", "tools"} <= set(shown.capabilities)
    assert "im_start" in shown.template
    family = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{family}.context_length"] == info.max_model_len
    assert "temperature 0.6" in shown.parameters
    assert "/secret" not in shown.model_dump_json()


def test_the_size_of_what_is_on_disk(text: TextPipeline, tmp_path_factory: pytest.TempPathFactory) -> None:
    from pathlib import Path

    from penstock.server.dialects.ollama.models.about import _weights

    folder = tmp_path_factory.mktemp("model")
    (folder / "a.safetensors").write_bytes(bytes(10))
    (folder / "config.json").write_bytes(bytes(5))
    (folder / "b.gguf").write_bytes(bytes(3))
    assert _weights(folder)[0] == 13
    assert _weights(folder / "b.gguf")[0] == 3
    assert _weights(Path("nowhere")) == (0, "1970-01-01T00:00:00Z")


def test_signs_of_life(server: Running) -> None:
    for method in ("GET", "HEAD"):
        for path in ("/", "/api/version", "/api/tags"):
            assert httpx.request(method, server.url + path).status_code == 200
    assert httpx.get(server.url).text == "Ollama is running"
    assert set(httpx.get(f"{server.url}/api/version").json()) == {"version", "penstock"}


@pytest.mark.parametrize(("method", "name"), LIBRARY)
def test_the_library_is_not_there_yet(server: Running, method: str, name: str) -> None:
    answer = httpx.request(method, f"{server.url}/api/{name}", json={"model": "x"} if method == "POST" else None)
    assert answer.status_code == 501
    assert "is not available: this server keeps the one model" in answer.json()["error"]


@pytest.mark.parametrize(
    ("route", "change", "said"),
    [
        ("chat", {"messages": [{"role": "", "content": "x"}]}, 'messages[0].role is ""'),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["AA"]}]}, "messages[0].images is"),
        ("chat", {"messages": [{"role": "user", "content": "x", "thinking": 1}]}, "messages[0].thinking is 1"),
        ("chat", {"tools": [{"function": {}}]}, "tools[0] is"),
        ("chat", {"format": "yaml"}, 'format is "yaml"; allowed: "" or "json" or an object'),
        ("chat", {"options": {"temperature": "hot"}}, 'options.temperature is "hot"; allowed: a number'),
        ("chat", {"options": {"num_predict": -3}}, "options.num_predict is -3; allowed: at least -2"),
        ("chat", {"options": {"top_k": 1.5}}, "options.top_k is 1.5; allowed: an integer"),
        ("chat", {"think": "a lot"}, 'think is "a lot"'),
        ("chat", {"top_logprobs": 21, "logprobs": True}, "top_logprobs is 21; allowed: at most 20"),
        ("chat", {"keep_alive": "forever"}, 'keep_alive is "forever"; allowed: a number or a duration with its unit'),
        ("generate", {"keep_alive": "-1"}, 'keep_alive is "-1"'),
        ("embed", {"keep_alive": "5 m"}, 'keep_alive is "5 m"'),
        ("generate", {"keep_alive": True}, "keep_alive is true"),
        ("generate", {"images": ["AA"]}, "images is"),
        (
            "generate",
            {"suffix": "x"},
            "suffix cannot be followed: this model's vocabulary has no prefix",
        ),
        ("generate", {"suffix": "x", "system": "y"}, 'suffix is "x"; allowed: only without system'),
        ("generate", {"template": "{{ .Prompt }}"}, "template is not one of the model's own"),
        ("generate", {"raw": True, "system": "x"}, "raw is true"),
        ("generate", {"context": [10**9]}, "context is 1000000000; allowed: token ids"),
        ("generate", {"prompt": 5}, "prompt is 5; allowed: a string"),
        ("embed", {"input": 5}, "input is 5; allowed: a string or a list"),
        ("embed", {"input": "x " * 5000}, "at most 2048 are taken"),
        ("embed", {"input": ["x"] * 1025}, "at most 1024 entries"),
        ("show", {"model": 5}, "model is 5"),
    ],
)
def test_refusals(server: Running, route: str, change: dict[str, object], said: str) -> None:
    body = {"model": "scripted", "messages": HELLO, "prompt": "Hello", "input": "Hello", **change}
    answer = httpx.post(f"{server.url}/api/{route}", json=body)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert said in answer.json()["error"]
    assert not server.runner.seen


def test_an_unknown_model(api: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as refused:
        api.chat(model="llama3", messages=HELLO)
    assert refused.value.status_code == 404
    assert '"llama3" is not served here' in refused.value.error


def test_a_failure_within_a_stream_is_its_last_line(api: ollama.Client, server: Running) -> None:
    server.runner.die_after = 2
    with pytest.raises(ollama.ResponseError, match="The engine stopped"):
        list(api.chat(model="scripted", messages=HELLO, stream=True))


def test_a_context_stands_before_a_whole_answer(text: TextPipeline) -> None:
    with running(text, ServerOptions(api_keys=("secret",))) as server:
        refused = httpx.get(f"{server.url}/api/tags")
        assert (refused.status_code, list(refused.json())) == (401, ["error"])
        with ollama.Client(host=server.url, headers={"authorization": "Bearer secret"}) as api:
            assert api.generate(model="scripted", prompt="Hello").response == ANSWER
        assert server.runner.script == script_of(text)


def test_routes_that_are_not_there(server: Running) -> None:
    answer = httpx.get(f"{server.url}/api/nothing")
    assert answer.status_code == 404
    assert "There is no route" in answer.json()["error"]


def test_a_context_has_one_beginning(server: Running, text: TextPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose chats begin with the beginning of text; the context holds it already."""
    monkeypatch.setattr(text.tokenizer, "begins_chats", True)
    monkeypatch.setattr(text.tokenizer, "bos_id", 0)
    body = {"model": "scripted", "prompt": "Hello", "stream": False}
    first = httpx.post(f"{server.url}/api/generate", json=body).json()
    assert first["context"][0] == 0
    httpx.post(f"{server.url}/api/generate", json={**body, "context": first["context"]})
    ids = server.runner.seen[1].prompt_ids
    assert ids[: len(first["context"])] == tuple(first["context"])
    assert ids.count(0) == 1
