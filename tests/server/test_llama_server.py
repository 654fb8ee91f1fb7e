"""llama-server's own API, by exchanges that its documents and tests show: bodies, whole answers, streams and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.constraint import GrammarKind
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions, ServerOptions
from penstock.engine.frontend import Frontend
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.dialects.llama_embeddings import scaled
from penstock.server.dialects.llama_server.reply import nested_fields
from penstock.server.dialects.llama_server.schema import LlamaCompletionBody
from penstock.server.dialects.llama_server.translate import grammar_of
from penstock.server.serve import http_side, run
from penstock.text.tokenizer import Tokenizer
from penstock.weights.readers.gguf_file import read_gguf_file
from tests.server.support import ANSWER, Running, running, script_of

TIMINGS = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
}
FINAL = {
    *("index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated"),
    *("generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached"),
    "timings",
}
PARTIAL = {"index", "content", "tokens", "id_slot", "stop", "tokens_predicted", "tokens_evaluated"}


def post(server: Running, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def completion(server: Running, **body: Any) -> Any:
    answer = post(server, "/completion", {"prompt": "Hello there", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = post(server, path, {"stream": True, **body})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def refusal(server: Running, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    answer = post(server, path, body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] == status
    assert set(error) == {"code", "message", "type"}
    return error


def script(server: Running, text: TextPipeline, answer: str) -> None:
    server.runner.script = script_of(text, answer)


@pytest.fixture(autouse=True)
def as_usual(server: Running, text: TextPipeline) -> Iterator[None]:
    script(server, text, ANSWER)
    yield
    script(server, text, ANSWER)


def test_a_whole_answer(server: Running) -> None:
    told = completion(server, n_predict=5)
    assert set(told) == FINAL
    assert (told["stop"], told["stop_type"], told["stopping_word"]) == (True, "limit", "")
    assert (told["tokens_predicted"], told["timings"]["predicted_n"], told["tokens"]) == (5, 5, [])
    assert set(told["timings"]) == TIMINGS | {"cache_miss"}
    assert told["timings"]["cache_miss"] == "first_seen"
    assert told["timings"]["prompt_n"] + told["timings"]["cache_n"] == told["tokens_evaluated"] == 2
    assert told["tokens_cached"] == 2 + 5 - 1
    assert (told["prompt"], told["truncated"], told["has_new_line"]) == ("Hello there", False, False)
    assert ANSWER.startswith(told["content"])
    assert told["generation_settings"]["n_predict"] == told["generation_settings"]["max_tokens"] == 5


def test_an_answer_to_its_end(server: Running, text: TextPipeline) -> None:
    told = completion(server, return_tokens=True)
    assert (told["content"], told["stop_type"]) == (ANSWER, "eos")
    assert tuple(told["tokens"]) == script_of(text)


def test_a_stream(server: Running) -> None:
    *parts, last = events(server, "/completion", prompt="Hello there", n_predict=5)
    assert all(set(part) == PARTIAL and part["stop"] is False and part["tokens"] for part in parts)
    assert set(last) == FINAL
    assert (last["stop"], last["content"], last["tokens"]) == (True, "", [])
    assert "".join(part["content"] for part in parts) == completion(server, n_predict=5)["content"]
    assert [part["tokens_predicted"] for part in parts] == list(range(1, 6))


def test_what_a_stream_tells_besides(server: Running) -> None:
    asked = {"prompt": "Hello there", "n_predict": 3, "return_progress": True, "timings_per_token": True, "n_probs": 2}
    first, *parts, last = events(server, "/completion", **asked)
    assert set(first["prompt_progress"]) == {"total", "cache", "processed", "time_ms"}
    assert (first["prompt_progress"]["total"], first["prompt_progress"]["processed"]) == (2, 2)
    assert (first["content"], first["tokens"]) == ("", [])
    assert all(set(part["timings"]) == TIMINGS for part in parts)
    assert all(len(part["completion_probabilities"]) == 1 for part in parts)
    assert "completion_probabilities" not in last


def test_probabilities(server: Running) -> None:
    told = completion(server, n_predict=2, n_probs=3)["completion_probabilities"]
    assert len(told) == 2
    for entry in told:
        assert set(entry) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert [set(other) for other in entry["top_logprobs"]] == [{"id", "token", "bytes", "logprob"}] * 3
    drawn = completion(server, n_predict=1, n_probs=3, post_sampling_probs=True, temperature=0)
    (entry,) = drawn["completion_probabilities"]
    assert entry["prob"] == 1.0
    assert entry["top_probs"] == [{name: entry[name] for name in ("id", "token", "bytes", "prob")}]
    told = refusal(server, "/completion", {"prompt": "a", "n_probs": 2, "post_sampling_probs": True})["message"]
    assert "post_sampling_probs is true; allowed: false, or true with temperature 0" in told


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ["Hi"]),
        ([3, 4], ["<tool_call></tool_call>"]),
        ([3, "Hi", 4], ["<tool_call>Hi</tool_call>"]),
        (["Hi", 3], ["Hi<tool_call>"]),
        (["Hi", [3, 4]], ["Hi", "<tool_call></tool_call>"]),
        ([[3], [4], "Hi", {"prompt_string": "x"}], ["<tool_call>", "</tool_call>", "Hi", "x"]),
        ({"prompt_string": "Hi", "multimodal_data": []}, ["Hi"]),
        (["Hi"], ["Hi"]),
    ],
)
def test_shapes_of_prompts(server: Running, prompt: Any, prompts: list[str]) -> None:
    """As README and test_completion of llama-server have them; a single one is answered by an object."""
    told = post(server, "/completion", {"prompt": prompt, "n_predict": 2}).json()
    told = told if isinstance(told, list) else [told]
    assert [one["prompt"] for one in told] == prompts
    assert [one["index"] for one in told] == list(range(len(prompts)))


@pytest.mark.parametrize(
    "prompt", [None, True, 3, [], [True], [3.5], [[]], [["a", None]], {"multimodal_data": []}, [{"prompt": "a"}]]
)
def test_what_is_no_prompt(server: Running, prompt: Any) -> None:
    assert "prompt" in refusal(server, "/completion", {"prompt": prompt})["message"]


def test_media_are_refused(server: Running) -> None:
    body = {"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}
    assert "this model takes text" in refusal(server, "/completion", body)["message"]


def test_several_answers(server: Running) -> None:
    told = completion(server, prompt=["a", "b"], n_cmpl=2, n_predict=2)
    assert [one["index"] for one in told] == [0, 1, 2, 3]
    assert [one["prompt"] for one in told] == ["a", "a", "b", "b"]


def test_only_the_prompt_is_computed(server: Running) -> None:
    """llama-server's clients warm the cache so."""
    told = completion(server, prompt="a b c d", n_predict=0)
    assert (told["content"], told["tokens_predicted"], told["timings"]["predicted_n"]) == ("", 0, 0)
    assert told["tokens_cached"] == told["tokens_evaluated"]
    (only,) = events(server, "/completion", prompt="a b c d", n_predict=0)
    assert only["stop"] is True
    assert only["timings"]["cache_n"] > 0
    fresh = completion(server, prompt="a b c d", n_predict=1, cache_prompt=False)
    assert fresh["timings"]["cache_n"] == 0


def test_stop_words(server: Running) -> None:
    told = completion(server, stop=[" table", ""])
    assert (told["stop_type"], told["stopping_word"], told["content"]) == ("word", " table", "Hello! A")


def test_the_context_ends_an_answer(server: Running, text: TextPipeline) -> None:
    server.runner.script = script_of(text)[:-1]
    told = completion(server, prompt=[9] * 2040, n_predict=500)
    assert (told["truncated"], told["stop_type"], told["tokens_predicted"]) == (True, "limit", 8)
    assert completion(server, prompt=[9] * 2040, n_predict=4)["truncated"] is False


def test_a_prompt_that_is_too_long(server: Running) -> None:
    error = refusal(server, "/completion", {"prompt": [9] * 2048})
    assert error["type"] == "exceed_context_size_error"
    assert "2048 tokens" in error["message"]


def test_indentation_ends_an_answer(server: Running, text: TextPipeline) -> None:
    script(server, text, "if x:\n    y = 1\n    z = 2\nprint(y)\n")
    told = completion(server, n_indent=4)
    assert (told["content"], told["stop_type"], told["has_new_line"]) == (
        "if x:\n    y = 1\n    z = 2\n",
        "limit",
        True,
    )
    parts = events(server, "/completion", prompt="a", n_indent=4)
    assert "".join(part["content"] for part in parts) == told["content"]
    assert completion(server, n_indent=0)["content"] == "if x:\n    y = 1\n    z = 2\nprint(y)\n"


def test_time_ends_an_answer_behind_a_line(server: Running, text: TextPipeline) -> None:
    script(server, text, "a b c d e f g\nh i j k l m n o p q r s t u v w x y z " * 3)
    server.runner.delay = 0.01
    told = completion(server, t_max_predict_ms=1)
    assert (told["stop_type"], told["has_new_line"]) == ("limit", True)
    assert told["content"].startswith("a b c d e f g\n")
    assert told["tokens_predicted"] < 30
    server.until_idle()


def test_biases(server: Running, text: TextPipeline) -> None:
    """Their three shapes, by id and by text."""
    hello = text.tokenizer.encode("Hello", add_special_tokens=False)
    for bias in ([["Hello", -3], [5, False]], [[hello[0], -3], [5, False]], {"Hello": -3, "5": False}):
        server.runner.seen.clear()
        told = completion(server, n_predict=1, logit_bias=bias)["generation_settings"]["logit_bias"]
        assert told == [{"bias": -3.0, "token": hello[0]}, {"bias": -100.0, "token": 5}]
        (row,) = server.runner.seen
        assert (row.sampling.logit_bias, row.sampling.bad_words_ids) == (((hello[0], -3.0),), ((5,),))
    for large in (1e9, 10**400):
        for much in ([[5, large]], [["Hello", -large]], {"5": large}):
            (told,) = completion(server, n_predict=1, logit_bias=much)["generation_settings"]["logit_bias"]
            assert abs(told["bias"]) == 100
    for wrong in ("a", [[1]], [[1, True]], [[None, 1]], {"a": "b"}, [[10**9, 1]]):
        assert "logit_bias" in refusal(server, "/completion", {"prompt": "a", "logit_bias": wrong})["message"]


def test_an_end_that_is_ignored_is_never_taken(server: Running, text: TextPipeline) -> None:
    completion(server, n_predict=1, ignore_eos=True)
    (row,) = server.runner.seen
    assert row.sampling.ignore_eos
    assert set(row.sampling.bad_words_ids) == {(token,) for token in text.eos_ids}


def test_sampling(server: Running, text: TextPipeline) -> None:
    """What is sent counts for more than what the model's files say, and those for more than llama-server's values."""
    completion(server, n_predict=1)
    sampling = server.runner.seen[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (text.defaults["temperature"], text.defaults.get("top_k", 40))
    assert (sampling.min_p, sampling.top_p) == (text.defaults.get("min_p", 0.05), text.defaults.get("top_p", 0.95))
    told = completion(server, n_predict=1, temperature=-1, top_k=0, repeat_penalty=1.2, typical_p=0.9, seed=7)
    sampling = server.runner.seen[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0, 0, 1.2)
    assert (sampling.typical_p, sampling.seed, told["generation_settings"]["seed"]) == (0.9, 7, 7)
    for seed in (-1, 4294967295, None):
        assert completion(server, n_predict=1, seed=seed)["generation_settings"]["seed"] == 4294967295
        assert server.runner.seen[-1].sampling.seed is None


def test_forms_of_the_answer(server: Running) -> None:
    """Objects of a schema have the properties that it names alone; a grammar counts for more."""
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}}
    held = grammar_of(LlamaCompletionBody(prompt="a", json_schema=schema))
    assert held is not None
    assert held.kind is GrammarKind.JSON_SCHEMA
    closed = json.loads(held.source)
    assert (closed["additionalProperties"], closed["properties"]["a"]["additionalProperties"]) == (False, False)
    held = grammar_of(LlamaCompletionBody(prompt="a", json_schema=schema, grammar='root ::= "a"'))
    assert held is not None
    assert (held.kind, held.source) == (GrammarKind.GBNF, 'root ::= "a"')
    assert grammar_of(LlamaCompletionBody(prompt="a", grammar="")) is None
    assert refusal(server, "/completion", {"prompt": "a", "json_schema": "{"})["type"] == "invalid_request_error"
    completion(server, n_predict=1, grammar="")


def test_what_each_answer_tells_again_is_bounded(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar or schema stands in the settings of each; a prompt's text is made once for all of its own."""
    grammar = 'root ::= "a" # ' + "x" * 40_000
    for field, value in (("grammar", grammar), ("json_schema", {"type": "string", "description": "x" * 40_000})):
        body = {"prompt": ["a", "b"], "n_cmpl": 16, field: value}
        message = refusal(server, "/completion", body)["message"]
        assert message.startswith(f"{field} is ") and "at most 32768 with 32 answers" in message
    texts: list[Sequence[int]] = []
    detokenize = Frontend.detokenize

    def counted(self: Frontend, ids: Sequence[int]) -> str:
        texts.append(ids)
        return detokenize(self, ids)

    monkeypatch.setattr(Frontend, "detokenize", counted)
    biases = [[token, 1] for token in range(600)]  # enough for settings that are written out in a thread
    body = {"prompt": ["a", "b"], "n_predict": 1, "n_cmpl": 3, "logit_bias": biases}
    told = post(server, "/completion", body).json()
    assert [one["prompt"] for one in told] == ["a"] * 3 + ["b"] * 3 and len(texts) == 2
    *_, last = events(server, "/completion", **body | {"prompt": "a", "n_cmpl": 1})
    assert (last["prompt"], len(last["generation_settings"]["logit_bias"])) == ("a", 600)


def test_fields_of_the_answer(server: Running) -> None:
    fields = ["content", "generation_settings/n_predict", "prompt", "timings/nothing", "nothing"]
    told = completion(server, n_predict=2, response_fields=fields)
    assert set(told) == {"content", "generation_settings/n_predict", "prompt"}
    assert told["generation_settings/n_predict"] == 2
    assert set(completion(server, n_predict=2, response_fields=[])) == FINAL
    assert nested_fields({"a": {"b": 0, "c": None}}, ["a/b", "a/c", "a/b/d"]) == {"a/b": 0}


@pytest.mark.parametrize(
    "harmless",
    [
        *(
            {"lora": []},
            {"n_keep": 5},
            {"id_slot": 3},
            {"mirostat": 0, "mirostat_tau": 9.0},
            {"samplers": ["top_k", "temperature"]},
            {"min_keep": 0},
        ),
        *({"unknown": 1}, {"n_predict": None, "temperature": None}, {"cache_prompt": True}),
        *({"max_tokens": 2}, {"sse_ping_interval": -1}, {"speculative.n_max": 4}),
    ],
)
def test_fields_that_ask_for_nothing(server: Running, harmless: dict[str, Any]) -> None:
    completion(server, **harmless)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("lora", [{"id": 0, "scale": 1.0}], "the id of an adapter"),
        ("min_keep", 3, "send 0"),
        ("n_predict", -2, "at least -1"),
        ("top_p", 1.5, "at most 1"),
        ("n_probs", 50, "at most 20"),
        ("grammar_lazy", True, "first token"),
    ],
)
def test_fields_that_are_refused(server: Running, field: str, value: Any, said: str) -> None:
    message = refusal(server, "/completion", {"prompt": "a", field: value})["message"]
    assert message.startswith(f"{field} is ")
    assert said in message


def test_a_stream_that_fails(server: Running) -> None:
    server.runner.die_after = 2
    *_, last = events(server, "/completion", prompt="a")
    assert last["error"]["code"] == 500
    assert last["error"]["type"] == "server_error"


def test_infilling_needs_a_model_that_can(server: Running) -> None:
    error = refusal(server, "/infill", {"input_prefix": "a", "input_suffix": "b"}, 501)
    assert error["type"] == "not_supported_error"
    assert "prefix token" in error["message"]


def test_infilling(text: TextPipeline, shared_data: Path) -> None:
    file = read_gguf_file(shared_data / "tokenizers" / "ggml-vocab-starcoder.gguf")
    tokenizer = Tokenizer.from_gguf(file.metadata)
    coder = replace(text, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=(0,))
    with running(coder) as server:
        body = {"input_prefix": "def f(", "input_suffix": "):", "prompt": "x", "n_predict": 3}
        told = post(server, "/infill", body).json()
        assert told["prompt"] == "<fim_prefix>def f(x<fim_suffix>):<fim_middle>"
        assert told["tokens_predicted"] == 3
        assert 4 in server.runner.seen[-1].sampling.stop_token_ids  # padding ends what is filled in
        extra = [{"text": "y = 1", "filename": "y.py"}, {"text": "z"}]
        parts = events(server, "/infill", **body, input_extra=extra)
        assert parts[-1]["prompt"].startswith("\n\n--- snippet ---\n\ny = 1\n\n--- snippet ---\n\nz<fim_prefix>")
        long = post(server, "/infill", {**body, "input_prefix": "a " * 5000}).json()
        assert (long["tokens_evaluated"], long["truncated"]) == (2048 - 3, True)
        error = refusal(server, "/infill", {"input_prefix": "a"})
        assert error["message"] == "input_suffix is required."
        assert "input_extra" in refusal(server, "/infill", {**body, "input_extra": [{"filename": "x"}]})["message"]


def test_properties(server: Running) -> None:
    told = httpx.get(f"{server.url}/props").json()
    assert told["default_generation_settings"]["n_ctx"] == 2048
    assert told["default_generation_settings"]["params"]["n_predict"] == -1
    assert told["total_slots"] == server.client.info.max_num_seqs
    assert told["chat_template"].startswith("{%-")
    assert told["modalities"] == {"vision": False, "audio": False}
    assert "/secret" not in json.dumps(told)
    assert refusal(server, "/props", {}, 501)["type"] == "not_supported_error"


def test_slots(server: Running) -> None:
    slots = httpx.get(f"{server.url}/slots").json()
    assert len(slots) == server.client.info.max_num_seqs
    assert slots[0] == {"id": 0, "id_task": -1, "n_ctx": 2048, "speculative": False, "is_processing": False}
    assert httpx.get(f"{server.url}/slots?fail_on_no_slot=1").status_code == 200
    for action in ("save", "restore", "erase"):
        assert "--slot-save-path" in refusal(server, f"/slots/0?action={action}", {"filename": "x"}, 501)["message"]


def test_adapters(server: Running) -> None:
    assert httpx.get(f"{server.url}/lora-adapters").json() == []
    assert post(server, "/lora-adapters", []).json() == {"success": True}
    assert "id of an adapter" in refusal(server, "/lora-adapters", [{"id": 0, "scale": 0.5}])["message"]
    assert "must be a list" in refusal(server, "/lora-adapters", {})["message"]


def test_health(server: Running) -> None:
    for path in ("/health", "/v1/health"):
        assert httpx.get(server.url + path).json() == {"status": "ok"}


def test_tokens(server: Running, text: TextPipeline) -> None:
    """`content` asks in llama-server's way, `prompt` in vLLM's; answers of /detokenize have the names of both."""
    ids = text.tokenizer.encode("Hi á", add_special_tokens=False)
    assert post(server, "/tokenize", {"content": "Hi á"}).json() == {"tokens": ids}
    pieces = post(server, "/tokenize", {"content": "Hi á", "with_pieces": True}).json()["tokens"]
    assert [entry["id"] for entry in pieces] == ids
    assert [entry["piece"] for entry in pieces][-2:] == [[0xC3], [0xA1]]
    plain = post(server, "/tokenize", {"content": "<|im_end|>", "parse_special": False}).json()["tokens"]
    assert plain != post(server, "/tokenize", {"content": "<|im_end|>"}).json()["tokens"] == [text.eos_ids[0]]
    assert post(server, "/tokenize", {"content": ""}).json() == {"tokens": []}
    assert post(server, "/tokenize", {"prompt": "Hi á"}).json()["tokens"] == ids
    told = post(server, "/detokenize", {"tokens": ids}).json()
    assert told == {"content": "Hi á", "prompt": "Hi á"}
    for content, told in (([5, "Hi á"], [5, *ids]), (["Hi á", 5], [*ids, 5]), ([5, 6], [5, 6]), ([], [])):
        assert post(server, "/tokenize", {"content": content}).json() == {"tokens": told}
    plain = text.tokenizer.encode("<|im_end|>", add_special_tokens=False, parse_special=False)
    mixed = {"content": [5, "<|im_end|>"], "parse_special": False, "with_pieces": True}
    assert [entry["id"] for entry in post(server, "/tokenize", mixed).json()["tokens"]] == [5, *plain]
    for wrong in (3, {}, [None], [True], [["a"]], [10**9], [-1], ["a"] * 2000):
        refused = post(server, "/tokenize", {"content": wrong})
        assert refused.status_code == 400 and "content" in refused.json()["error"]["message"]


def test_embeddings(server: Running) -> None:
    for body in ({"content": "a b"}, {"input": "a b"}, {"content": [3, "a"]}):
        for path in ("/embedding", "/embeddings"):
            (told,) = post(server, path, body).json()
            assert told["index"] == 0
            assert len(told["embedding"]) == 1
    told = post(server, "/embedding", {"input": ["a", "b", [3]]}).json()
    assert [entry["index"] for entry in told] == [0, 1, 2]
    assert "exactly one" in refusal(server, "/embedding", {})["message"]


def test_norms() -> None:
    """As common_embd_normalize of llama.cpp: the largest becomes 32760, else the norm becomes 1."""
    values = [3.0, -4.0]
    assert list(scaled(values, -1)) == values
    assert list(scaled(values, 0)) == pytest.approx([24570.0, -32760.0])
    assert list(scaled(values, 1)) == pytest.approx([3 / 7, -4 / 7])
    assert list(scaled(values, 2)) == pytest.approx([0.6, -0.8])
    assert sum(abs(value) ** 5 for value in scaled(values, 5)) == pytest.approx(1)
    for norm in (0, 1, 2, 3, 64):
        assert list(scaled([0.0, 0.0], norm)) == [0.0, 0.0]
        assert all(map(float("inf").__gt__, scaled([3e38, 3e38], norm)))


def test_ranking_in_the_form_of_text_embeddings_inference(server: Running) -> None:
    """A list without a name around it; `documents` are ranked in Jina's form."""
    body = {"query": "a", "texts": ["b", "c", "d"]}
    for path in ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"):
        told = post(server, path, body).json()
        assert [set(entry) for entry in told] == [{"index", "score"}] * 3
        assert [entry["score"] for entry in told] == sorted((entry["score"] for entry in told), reverse=True)
    told = post(server, "/rerank", {**body, "top_n": 1, "return_text": True}).json()
    assert [entry["text"] for entry in told] == [body["texts"][told[0]["index"]]]
    jina = post(server, "/reranking", {"query": "a", "documents": ["b", "c"]}).json()
    assert (jina["object"], len(jina["results"])) == ("list", 2)


def test_chats_under_their_bare_path(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    bare, usual = (post(server, f"{prefix}/chat/completions", body).json() for prefix in ("", "/v1"))
    assert bare["choices"] == usual["choices"]
    assert set(bare["timings"]) - {"cache_miss"} == TIMINGS
    assert bare["timings"]["predicted_n"] == 3
    assert refusal(server, "/chat/completions", {"messages": []})["type"] == "invalid_request_error"
    assert httpx.get(f"{server.url}/models").json()["data"][0]["id"] == "scripted"


def test_what_llama_servers_page_sends(server: Running) -> None:
    """Its chats bring these fields, and read times and progress from the chunks."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "return_progress": True,
        "reasoning_format": "auto",
        "backend_sampling": False,
        "timings_per_token": True,
        "max_tokens": -1,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "presence_penalty": 0,
        "frequency_penalty": 0,
    }
    first, *chunks = events(server, "/v1/chat/completions", **body)
    assert set(first["prompt_progress"]) == {"total", "cache", "processed", "time_ms"}
    assert all(set(chunk["timings"]) == TIMINGS for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_times_of_a_chat_come_at_its_end(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    chunks = events(server, "/v1/chat/completions", **body)
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    *_, ending, usage = events(server, "/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert usage["timings"] == ending["timings"]


def test_a_chats_reasoning_stays_in_the_text_where_that_is_asked(server: Running, text: TextPipeline) -> None:
    script(server, text, "<think>\nWell.\n</think>\n\nYes.")
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    raw = post(server, "/v1/chat/completions", {**body, "reasoning_format": "none"}).json()["choices"][0]["message"]
    assert raw["content"].startswith("<think>")
    assert "reasoning_content" not in raw


@pytest.mark.parametrize(
    "harmless",
    [
        *({"spaces_between_special_tokens": True}, {"truncate_prompt_tokens": None}, {"echo": False}),
        *({"mm_processor_kwargs": {"a": 1}}, {"media_io_kwargs": {}}, {"kv_transfer_params": None}),
        *({"vllm_xargs": {}}, {"logits_processors": []}, {"top_logprobs": 0}, {"stream_interval": 3}),
        *({"id_slot": -1}, {"cache_prompt": True}, {"lora": []}, {"session_id": "a"}, {"min_keep": 0}),
    ],
)
def test_fields_of_other_engines_that_ask_for_nothing(server: Running, harmless: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    assert post(server, "/v1/chat/completions", body | harmless).status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("kv_transfer_params", {"a": 1}, "not handed"),
        ("vllm_xargs", {"a": 1}, "not here"),
        ("custom_logit_processor", "x", "bring no code"),
        ("return_mm_kwargs", 0, "Media"),
    ],
)
def test_fields_of_other_engines_that_ask_for_something(server: Running, field: str, value: Any, said: str) -> None:
    """A number is not taken for false."""
    body = {"messages": [{"role": "user", "content": "Hi"}], field: value}
    error = post(server, "/v1/chat/completions", body).json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert said in error["message"]


def test_names_that_are_mistyped(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "vllm_xarg": {}}
    assert 'Did you mean "vllm_xargs"?' in post(server, "/v1/chat/completions", body).json()["error"]["message"]


def test_what_the_server_is_started_with(text: TextPipeline) -> None:
    """Any name is answered, others are listed, and what slots do and properties are is told as the flags say."""
    options = ServerOptions(aliases=("b", "c"), slots=False, props=True)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    with running(text, options) as server:
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [(one["id"], one["root"]) for one in listed] == [(name, "scripted") for name in ("scripted", "b", "c")]
        statuses = {name: post(server, "/v1/chat/completions", {**body, "model": name}).status_code for name in "bcd"}
        assert statuses == {"b": 200, "c": 200, "d": 404}
        assert httpx.get(f"{server.url}/slots").status_code == 501
        assert post(server, "/props", {}).json() == {"success": True}
    with running(text, ServerOptions(any_model=True)) as server:
        assert post(server, "/v1/chat/completions", {**body, "model": "gpt-4o"}).json()["model"] == "scripted"
        assert post(server, "/completion", {"prompt": "a", "model": "x", "n_predict": 1}).status_code == 200


def test_defaults_and_template_of_a_server(shared_data: Path) -> None:
    model = str(shared_data / "models" / "penstock-concierge")
    template = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
    options = ServerOptions(default_sampling=(("temperature", 0.25), ("top_k", 3)), chat_template=template)
    text, _ = http_side(EngineOptions(model=model), options)
    assert (text.defaults["temperature"], text.defaults["top_k"]) == (0.25, 3)
    assert text.template is not None
    assert text.template.render([{"role": "user", "content": "Hi"}]) == "<s>Hi"
    assert text.answers.calls is None
    with pytest.raises(ConfigError, match="temperature is -1"):
        run(ServerOptions(default_sampling=(("temperature", -1),)), None)  # type: ignore[arg-type]
