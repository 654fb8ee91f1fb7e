"""Embeddings and classification over a real socket, by OpenAI's client, from models that really run."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers
import torch
import transformers

from penstock.config.options import EngineOptions
from penstock.engine.api import EngineState
from penstock.engine.build import build_engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from tests.models import tiny
from tests.server.support import serving, until

TEXTS = ["one two three", "two", "seven six five four three two one " * 5]
LABELS = {0: "dull", 1: "fine", 2: "great"}


@dataclass
class Served:
    """A server, and transformers' model of the same weights."""

    url: str
    model: Any
    tokenizer: tokenizers.Tokenizer

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def states(self, text: str) -> torch.Tensor:
        """transformers' final hidden states of a text."""
        ids = torch.tensor([self.tokenizer.encode(text).ids])
        with torch.no_grad():
            return self.model.base_model(ids).last_hidden_state[0]


WORDS = ("<pad>", "one", "two", "three", "four", "five", "six", "seven", "yes", "no", "[CLS]", "[SEP]")


def words(template: bool = False) -> tokenizers.Tokenizer:
    """A token a word; with the `template` of BERT's pairs."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = tokenizers.decoders.Fuse()
    if template:
        tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
        )
    return tokenizer


def serve(folder: Path, model: Any, tokenizer: tokenizers.Tokenizer | None = None, **options: Any) -> Iterator[Served]:
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    tokenizer = tokenizer or words()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"max_model_len": 64, "kv_blocks": 64, "kv_cache_dtype": "float32", "threads": 1, **options}
    chosen = EngineOptions(model=str(folder), **settings)
    client = ThreadClient(functools.partial(build_engine, chosen))
    with serving(client, TextPipeline.of(chosen)) as server:
        until(lambda: client.state is EngineState.READY)
        yield Served(server.url, model, tokenizer)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("embedder"), tiny.make("qwen3", dtype=torch.float32))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = transformers.Qwen3Config(**tiny.SIZES, id2label=LABELS, dtype=torch.float32)
    torch.manual_seed(1)
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    yield from serve(tmp_path_factory.mktemp("classifier"), model)


@pytest.fixture
def api(embedder: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0)


def unit(states: torch.Tensor) -> torch.Tensor:
    return states / states.norm()


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_openai_client(api: openai.OpenAI, embedder: Served, encoding: Any) -> None:
    answer = api.embeddings.create(model="scripted", input=TEXTS, encoding_format=encoding)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    for text, entry in zip(TEXTS, answer.data, strict=True):
        found = entry.embedding
        ours = np.frombuffer(base64.b64decode(found), np.float32) if isinstance(found, str) else np.array(found)
        theirs = unit(embedder.states(text)[-1]).numpy()
        assert float(ours @ theirs) >= 0.9999
        assert abs(float(ours @ ours) - 1) < 1e-5
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 3 + 1 + 35


def test_batches_equal_single_texts(api: openai.OpenAI) -> None:
    together = [entry.embedding for entry in api.embeddings.create(model="scripted", input=TEXTS).data]
    assert together == [api.embeddings.create(model="scripted", input=text).data[0].embedding for text in TEXTS]


def test_token_ids_and_dimensions(api: openai.OpenAI, embedder: Served) -> None:
    ids = embedder.tokenizer.encode(TEXTS[0]).ids
    by_text = api.embeddings.create(model="scripted", input=TEXTS[0], dimensions=8).data[0].embedding
    assert api.embeddings.create(model="scripted", input=ids, dimensions=8).data[0].embedding == by_text
    torch.testing.assert_close(torch.tensor(by_text), unit(embedder.states(TEXTS[0])[-1][:8]), rtol=1e-4, atol=1e-4)


def test_cohere(tmp_path_factory: pytest.TempPathFactory, api: openai.OpenAI) -> None:
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "one two "}}))
    served = serve(folder, tiny.make("qwen3", dtype=torch.float32))
    forms = ["float", "base64", "binary", "ubinary"]
    body = {"texts": ["three", "two"], "embedding_types": forms, "output_dimension": 12}
    server = next(served)
    answer = server.post("/v2/embed", **body, input_type="search_query").json()
    expected = api.embeddings.create(model="scripted", input=[TEXTS[0], "one two two"], dimensions=12)
    found = answer["embeddings"]
    assert found["float"] == [entry.embedding for entry in expected.data]
    exact = [np.frombuffer(base64.b64decode(text), np.float32).tolist() for text in found["base64"]]
    assert exact == found["float"]
    bits = np.packbits(np.array(found["float"]) > 0, axis=1)
    assert found["ubinary"] == bits.tolist()
    assert found["binary"] == (bits.astype(int) - 128).tolist()
    assert answer["texts"] == ["three", "two"]
    assert answer["meta"]["billed_units"] == {"input_tokens": 6}
    plain = server.post("/v2/embed", texts=["three"], input_type="clustering").json()["embeddings"]
    assert plain["float"][0] == api.embeddings.create(model="scripted", input="three").data[0].embedding
    served.close()  # type: ignore[attr-defined]


def test_a_prompt_stands_before_each_text(api: openai.OpenAI) -> None:
    asked = api.embeddings.create(model="scripted", input="three", extra_body={"prompt": "one two "})
    assert asked.data[0].embedding == api.embeddings.create(model="scripted", input=TEXTS[0]).data[0].embedding


def test_pooling_gives_a_state_a_token(embedder: Served) -> None:
    (entry,) = embedder.post("/pooling", input=TEXTS[0], normalize=False).json()["data"]
    torch.testing.assert_close(torch.tensor(entry["data"]), embedder.states(TEXTS[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [1, "a"]}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/pooling", {"input": ["one", ""]}, "input"),
        ("/v1/embeddings", {"input": "one", "dimensions": 37}, "dimensions"),
        ("/v1/embeddings", {"input": "one", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "one", "prompt_name": "query"}, "prompt_name"),
        ("/v1/embeddings", {"input": "one", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "one " * 65}, "input"),
        ("/v1/embeddings", {"input": ["one", [1_000_000]]}, "input"),
        ("/classify", {"input": "one"}, "model"),
        ("/v2/embed", {"texts": ["one"], "input_type": "image"}, "input_type"),
        ("/v2/embed", {"texts": ["one"], "images": ["data:"]}, "images"),
        ("/v1/embeddings", {"input": "one", "messages": [{"role": "user", "content": "one"}]}, "input"),
        ("/v1/embeddings", {"input": "one", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "one", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "one", "padding": "max_length"}, "padding"),
        ("/v1/embeddings", {"input": "one", "embed_dtype": "fp8_e4m3"}, "embed_dtype"),
        ("/v2/embed", {"texts": [], "input_type": "clustering"}, "texts"),
        ("/v2/embed", {"texts": ["one"], "input_type": "clustering", "embedding_types": ["int8"]}, "embedding_types"),
        ("/v2/embed", {"texts": ["one"], "input_type": "clustering", "truncate": "MIDDLE"}, "truncate"),
        ("/v2/embed", {"texts": ["one"], "input_type": "clustering", "output_dimension": 37}, "output_dimension"),
        ("/v2/embed", {"texts": ["one", "one " * 65], "truncate": "NONE"}, "texts"),
    ],
)
def test_refusals(embedder: Served, path: str, body: dict[str, Any], param: str) -> None:
    answer = embedder.post(path, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert str(error["param"]).startswith(param)
    assert error["message"].startswith(param) or "prompt" not in error["message"]


def test_classify(classifier: Served) -> None:
    answer = classifier.post("/classify", input=TEXTS).json()
    for text, entry in zip(TEXTS, answer["data"], strict=True):
        with torch.no_grad():
            ids = torch.tensor([classifier.tokenizer.encode(text).ids])
            theirs = classifier.model(ids).logits[0].softmax(0)
        torch.testing.assert_close(torch.tensor(entry["probs"]), theirs, rtol=1e-4, atol=1e-5)
        assert entry["label"] == LABELS[int(theirs.argmax())]
        assert entry["num_classes"] == 3


def test_a_classifier_embeds_nothing(classifier: Served) -> None:
    answer = classifier.post("/v1/embeddings", input="one")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_task")


LONG = "one two three four five six seven " * 10


def embedding(embedder: Served, path: str = "/v1/embeddings", **body: Any) -> list[float]:
    answer = embedder.post(path, **body)
    assert answer.status_code == 200, answer.text
    found: list[float] = answer.json()["data"][0]["embedding"]
    return found


def test_what_is_too_long_is_cut_where_that_is_asked(embedder: Served) -> None:
    words = LONG.split()
    first, last = (embedding(embedder, input=" ".join(part)) for part in (words[:5], words[-5:]))
    assert embedding(embedder, input=LONG, truncate_prompt_tokens=5) == first
    assert embedding(embedder, input=LONG, truncate_prompt_tokens=5, truncation_side="left") == last
    ids = embedder.tokenizer.encode(LONG).ids
    assert embedding(embedder, input=[ids], truncate_prompt_tokens=5, truncation_side="right") == first
    whole = embedding(embedder, input=" ".join(words[:64]))
    assert embedding(embedder, input=LONG, truncate_prompt_tokens=-1) == whole
    cohere = {"texts": [LONG], "embedding_types": ["float"]}
    for more, kept in (({}, whole), ({"max_tokens": 5}, first), ({"max_tokens": 5, "truncate": "START"}, last)):
        told = embedder.post("/v2/embed", **cohere, **more).json()
        assert told["embeddings"]["float"] == [kept]


def test_types_and_orders_of_bytes(embedder: Served) -> None:
    exact = np.array(embedding(embedder, input="one two"), np.float32)

    def sent(**form: str) -> bytes:
        found: Any = embedding(embedder, input="one two", encoding_format="base64", **form)
        return base64.b64decode(found)

    assert (np.frombuffer(sent(endianness="little"), "<f4") == exact).all()
    assert (np.frombuffer(sent(endianness="big"), ">f4") == exact).all()
    assert (np.frombuffer(sent(embed_dtype="float16"), "<f2") == exact.astype(np.float16)).all()
    halves = torch.frombuffer(bytearray(sent(embed_dtype="bfloat16")), dtype=torch.bfloat16)
    assert torch.equal(halves, torch.tensor(exact).bfloat16())


def test_vectors_and_scores_without_the_last_function(embedder: Served, classifier: Served) -> None:
    raw = torch.tensor(embedding(embedder, input=TEXTS[0], use_activation=False))
    torch.testing.assert_close(raw, embedder.states(TEXTS[0])[-1], rtol=1e-4, atol=1e-4)
    ids = torch.tensor([classifier.tokenizer.encode(TEXTS[0]).ids])
    with torch.no_grad():
        theirs = classifier.model(ids).logits[0]
    for path in ("/classify", "/pooling"):
        (entry,) = classifier.post(path, input=TEXTS[0], use_activation=False).json()["data"]
        found = entry["probs"] if path == "/classify" else entry["data"]
        torch.testing.assert_close(torch.tensor(found), theirs, rtol=1e-4, atol=1e-4)


def test_a_chat_is_embedded_in_the_models_template(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("chats")
    template = "{% for message in messages %}one {{ message.content }} {% endfor %}{{ 'six' if add_generation_prompt }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    served = serve(folder, tiny.make("qwen3", dtype=torch.float32))
    server = next(served)
    chat = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "three"}]
    expected = embedding(server, input="one two one three")
    assert embedding(server, messages=chat) == expected
    assert embedding(server, messages=chat, add_generation_prompt=True) == embedding(
        server, input="one two one three six"
    )
    assert embedding(server, messages=chat, truncate_prompt_tokens=2) == embedding(server, input="one two")
    served.close()  # type: ignore[attr-defined]


def test_names_of_other_services(embedder: Served) -> None:
    """Jina's, Voyage's and NVIDIA's fields say what ours do."""
    first = embedding(embedder, input=TEXTS[0], dimensions=8, normalize=True)
    for other in (
        {"output_dimension": 8, "input_type": "query", "output_dtype": "float", "truncation": True},
        {"dimensions": 8, "normalized": True, "task": "retrieval.query", "embedding_type": "float"},
        {"dimensions": 8, "output_dimension": 8, "embedding_type": ["float"], "truncate": "NONE"},
    ):
        assert embedding(embedder, input=TEXTS[0], **other) == first
    bits = np.packbits(np.array(first) > 0)
    for form in ({"output_dtype": "ubinary"}, {"embedding_type": ["ubinary"]}):
        assert embedding(embedder, input=TEXTS[0], dimensions=8, **form) == bits.tolist()
    told: Any = embedding(embedder, input=TEXTS[0], dimensions=8, output_dtype="float", encoding_format="base64")
    assert np.frombuffer(base64.b64decode(told), np.float32).tolist() == first
    whole = embedding(embedder, input=" ".join(LONG.split()[:64]))
    for cut in ({"truncation": True}, {"truncate": True}, {"truncate": "END"}):
        assert embedding(embedder, input=LONG, **cut) == whole
    assert embedding(embedder, input=LONG, truncate="START") == embedding(embedder, input=" ".join(LONG.split()[-64:]))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"dimensions": 8, "output_dimension": 9}, "dimensions"),
        ({"output_dimension": 37}, "output_dimension"),
        ({"normalize": True, "normalized": False}, "normalize"),
        ({"output_dtype": "binary", "encoding_format": "base64"}, "output_dtype"),
        ({"output_dtype": "int8"}, "output_dtype"),
        ({"input_type": "qeury"}, "input_type"),
        ({"late_chunking": True, "return_multivector": True}, "late_chunking"),
        ({"truncation": "yes"}, "truncation"),
    ],
)
def test_what_other_services_say_and_is_refused(embedder: Served, body: dict[str, Any], param: str) -> None:
    answer = embedder.post("/v1/embeddings", input="one two", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_texts_are_embedded_from_their_place_in_all(embedder: Served) -> None:
    texts = ["one two three", "four five", "six"]
    states = embedder.states(" ".join(texts))
    data = embedder.post("/v1/embeddings", input=texts, late_chunking=True).json()
    expected = [unit(states[start:end].mean(0)) for start, end in ((0, 3), (3, 5), (5, 6))]
    for entry, mean in zip(data["data"], expected, strict=True):
        torch.testing.assert_close(torch.tensor(entry["embedding"]), mean, rtol=1e-4, atol=1e-4)
    assert data["usage"]["prompt_tokens"] == 6
    assert embedder.post("/v1/embeddings", input=[LONG[:120], LONG[:200]], late_chunking=True).status_code == 400


def test_a_vector_for_every_token(embedder: Served, classifier: Served) -> None:
    (entry,) = embedder.post("/v1/embeddings", input=TEXTS[0], return_multivector=True).json()["data"]
    expected = torch.stack([unit(state) for state in embedder.states(TEXTS[0])])
    torch.testing.assert_close(torch.tensor(entry["embeddings"]), expected, rtol=1e-4, atol=1e-4)
    (entry,) = classifier.post("/pooling", input=TEXTS[0], task="token_classify").json()["data"]
    with torch.no_grad():
        theirs = classifier.model.score(classifier.states(TEXTS[0])).softmax(-1)
    torch.testing.assert_close(torch.tensor(entry["data"]), theirs, rtol=1e-4, atol=1e-5)


CHUNKED = {"pooling_type": "MEAN", "enable_chunked_processing": True, "max_embed_len": 100, "dimensions": 8}


def test_texts_beyond_the_context_are_embedded_in_chunks(tmp_path: Path) -> None:
    served = serve(tmp_path, tiny.make("qwen3", dtype=torch.float32), words(template=True), pooler_config=CHUNKED)
    server = next(served)
    long = LONG.split()  # 70 words; with what is around a text there is room for 62 in a chunk
    parts = [" ".join(long[:62]), " ".join(long[62:])]
    means = [server.states(part)[:, :8].double().mean(0) for part in parts]
    expected = unit((means[0] * 62 + means[1] * 8) / 70).float()
    answer = server.post("/v1/embeddings", input=[LONG, "one"]).json()
    torch.testing.assert_close(torch.tensor(answer["data"][0]["embedding"]), expected, rtol=1e-4, atol=1e-4)
    assert answer["usage"]["prompt_tokens"] == 62 + 2 + 8 + 2 + 3
    assert len(answer["data"][1]["embedding"]) == 8
    assert len(embedding(server, input=LONG, dimensions=36)) == 36
    refused = server.post("/v1/embeddings", input="one " * 99)  # and what is around it
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert "at most 100" in refused.json()["error"]["message"]
    assert server.post("/pooling", input=LONG, task="token_embed").status_code == 400
    served.close()  # type: ignore[attr-defined]


def test_pooling_as_the_operator_says(tmp_path: Path) -> None:
    settings = {"pooling_type": "ALL", "use_activation": False}
    served = serve(tmp_path, tiny.make("qwen3", dtype=torch.float32), pooler_config=settings)
    server = next(served)
    found: Any = embedding(server, input=TEXTS[0])
    torch.testing.assert_close(torch.tensor(found), server.states(TEXTS[0]), rtol=1e-4, atol=1e-4)
    for path, body in (
        ("/v2/embed", {"texts": ["one"]}),
        ("/score", {"text_1": "one", "text_2": "two"}),
        ("/api/embed", {"model": "scripted", "input": "one"}),
    ):
        assert server.post(path, **body).status_code == 400, path
    served.close()  # type: ignore[attr-defined]
