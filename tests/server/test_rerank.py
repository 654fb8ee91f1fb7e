"""Reranking and scores over a real socket: cross-encoders, judging language models, and embeddings compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers

from penstock.text.tokenizer import Tokenizer
from tests.models import encoders, tiny
from tests.server.test_embeddings import LABELS, WORDS, Served, serve, words

QUERY = "one two three"
DOCUMENTS = ["four five", "three two one " * 5, "six", "[SEP] seven"]
JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: {}\n<Query>: {}\n<Document>: {}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = encoders.make("bert", "ForSequenceClassification", num_labels=1)
    yield from serve(tmp_path_factory.mktemp("cross"), model, words(template=True))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("embedder"), encoders.make("modernbert"), words(template=True))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A language model under Qwen3-Reranker's name, with control tokens and a token a byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.models.BPE({letter: index for index, letter in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(backend)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<think>", "</think>"])
    tokenizer.add_tokens(["yes", "no"])
    size = tokenizer.get_vocab_size()
    model = tiny.make("qwen3", dtype=torch.float32, vocab_size=size, max_position_embeddings=512)
    yield from serve(tmp_path_factory.mktemp("models") / "tiny-Qwen3-Reranker", model, tokenizer, max_model_len=512)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = encoders.make("bert", "ForSequenceClassification", num_labels=3, id2label=LABELS)
    yield from serve(tmp_path_factory.mktemp("classifier"), model, words(template=True))


def pair_logit(served: Served, query: str, document: str) -> float:
    """transformers' logit; `[SEP]` in a text is a word like any other there too."""
    ids = [WORDS.index("[CLS]"), *map(id_of, query.split()), WORDS.index("[SEP]")]
    second = len(ids)
    ids += [*map(id_of, document.split()), WORDS.index("[SEP]")]
    with torch.no_grad():
        return float(served.model(**encoders.inputs("bert", ids, second)).logits[0, 0])


def id_of(word: str) -> int:
    return WORDS.index(word)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_cross_encoders_rank(cross_encoder: Served, path: str) -> None:
    answer = cross_encoder.post(path, model="scripted", query=QUERY, documents=DOCUMENTS).json()
    theirs = [torch.tensor(pair_logit(cross_encoder, QUERY, text)).sigmoid().item() for text in DOCUMENTS]
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -theirs[index])
    assert [entry["index"] for entry in answer["results"]] == order
    for entry in answer["results"]:
        assert entry["relevance_score"] == pytest.approx(theirs[entry["index"]], rel=1e-4, abs=1e-6)
        shown = {} if path == "/v2/rerank" else {"document": {"text": DOCUMENTS[entry["index"]]}}
        assert {key: value for key, value in entry.items() if key == "document"} == shown
    tokens = sum(len(QUERY.split()) + len(text.split()) + 3 for text in DOCUMENTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert answer["id"].startswith("rerank-")


def test_the_best_documents_and_documents_as_objects(cross_encoder: Served) -> None:
    documents = [{"text": text} for text in DOCUMENTS]
    whole = cross_encoder.post("/rerank", query=QUERY, documents=documents).json()["results"]
    best = cross_encoder.post("/rerank", query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=False).json()
    assert best["results"] == [{key: entry[key] for key in ("index", "relevance_score")} for entry in whole[:2]]
    many = cross_encoder.post("/rerank", query=QUERY, documents=DOCUMENTS, top_n=100).json()
    assert many["results"] == whole


def test_scores_of_pairs(cross_encoder: Served) -> None:
    """One with many, many with many; together as alone."""
    one = cross_encoder.post("/score", text_1=QUERY, text_2=DOCUMENTS).json()
    many = cross_encoder.post("/v1/score", text_1=[QUERY] * 4, text_2=DOCUMENTS).json()
    assert one["data"] == many["data"]
    assert [entry["index"] for entry in one["data"]] == [0, 1, 2, 3]
    for text, entry in zip(DOCUMENTS, one["data"], strict=True):
        (alone,) = cross_encoder.post("/score", text_1=QUERY, text_2=text).json()["data"]
        assert alone["score"] == entry["score"]
        theirs = torch.tensor(pair_logit(cross_encoder, QUERY, text)).sigmoid().item()
        assert entry["score"] == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_embeddings_are_compared(embedder: Served) -> None:
    """Models that only embed score by the cosine of their vectors."""
    answer = embedder.post("/score", text_1=QUERY, text_2=DOCUMENTS[:3]).json()
    means = [embedder.states(text).mean(0) for text in (QUERY, *DOCUMENTS[:3])]
    for entry, theirs in zip(answer["data"], means[1:], strict=True):
        cosine = torch.cosine_similarity(means[0], theirs, dim=0)
        assert entry["score"] == pytest.approx(float(cosine), abs=1e-5)
    ranked = embedder.post("/rerank", query=QUERY, documents=DOCUMENTS[:3]).json()["results"]
    assert [entry["relevance_score"] for entry in ranked] == sorted(
        (entry["score"] for entry in answer["data"]), reverse=True
    )


@pytest.mark.parametrize("instruction", [None, "Find rhymes"])
def test_judges_answer_yes_or_no(judge: Served, instruction: str | None) -> None:
    """The prompt of Qwen3-Reranker's model card, and the share of yes; control tokens in a text are letters."""
    documents = ["a b c", "no <|im_end|> yes"]
    wish = {} if instruction is None else {"instruction": instruction}
    answer = judge.post("/rerank", query="abc", documents=documents, **wish).json()
    default = "Given a web search query, retrieve relevant passages that answer the query"
    plain = tokenizers.Tokenizer.from_str(judge.tokenizer.to_str())
    plain.encode_special_tokens = True
    scores = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    for index, document in enumerate(documents):
        asked = plain.encode(JUDGE[1].format(instruction or default, "abc", document)).ids
        ids = [*judge.tokenizer.encode(JUDGE[0]).ids, *asked, *judge.tokenizer.encode(JUDGE[2]).ids]
        logits = tiny.reference_logits(judge.model, ids)[-1]
        choice = logits[[judge.tokenizer.token_to_id("no"), judge.tokenizer.token_to_id("yes")]].softmax(0)
        assert scores[index] == pytest.approx(float(choice[1]), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"query": "", "documents": ["one"]}, "query"),
        ("/rerank", {"query": 5, "documents": ["one"]}, "query"),
        ("/rerank", {"query": "one"}, "documents"),
        ("/rerank", {"query": "one", "documents": []}, "documents"),
        ("/rerank", {"query": "one", "documents": [""]}, "documents"),
        ("/rerank", {"query": "one", "documents": [{"image": "x"}]}, "documents"),
        ("/rerank", {"query": "one", "documents": ["one"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "one", "documents": ["one", "one " * 70]}, "documents"),
        ("/score", {"text_1": "one"}, "text_2"),
        ("/score", {"text_1": ["one", "two"], "text_2": ["one", "two", "three"]}, "text_1"),
        ("/score", {"text_1": "one", "text_2": []}, "text_2"),
        ("/score", {"text_1": "one", "text_2": "two " * 70}, "text_2"),
    ],
)
def test_refusals(cross_encoder: Served, path: str, body: dict[str, Any], param: str) -> None:
    answer = cross_encoder.post(path, **body)
    assert answer.status_code == 400, answer.text
    assert str(answer.json()["error"]["param"]).startswith(param)


def test_half_a_surrogate_pair_is_no_text(cross_encoder: Served) -> None:
    body = b'{"query": "one \\ud800", "documents": ["one"]}'
    answer = httpx.post(f"{cross_encoder.url}/rerank", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "surrogate" in answer.json()["error"]["message"]


def test_tasks_a_model_lacks(classifier: Served, cross_encoder: Served, embedder: Served) -> None:
    for served, path, body, message in (
        (classifier, "/rerank", {"query": "one", "documents": ["two"]}, "it tells 3 labels apart; use /classify"),
        (cross_encoder, "/v1/embeddings", {"input": "one"}, "it is a classifier"),
        (embedder, "/classify", {"input": "one"}, "ForSequenceClassification"),
        (embedder, "/v1/completions", {"prompt": "one"}, "cannot generate text"),
        (embedder, "/v1/chat/completions", {"messages": [{"role": "user", "content": "one"}]}, "cannot generate text"),
    ):
        answer = served.post(path, **body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_task", "model")
        assert message in error["message"]


def test_pairs_of_other_tokenizers_are_those_of_transformers(tmp_path: Any) -> None:
    """RoBERTa has two separators between the texts, which are of one type."""
    tokenizer = words()
    tokenizer.post_processor = tokenizers.processors.RobertaProcessing(("[SEP]", 11), ("[CLS]", 10))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode_pair(QUERY, "six") == (theirs(QUERY, "six").input_ids, 0)


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_sides_under_other_names(cross_encoder: Served, names: tuple[str, str]) -> None:
    expected = cross_encoder.post("/score", text_1=QUERY, text_2=DOCUMENTS).json()["data"]
    assert cross_encoder.post("/score", **{names[0]: QUERY, names[1]: DOCUMENTS}).json()["data"] == expected
    refused = cross_encoder.post("/score", **{names[0]: [QUERY, QUERY], names[1]: DOCUMENTS}).json()["error"]
    assert refused["param"] == names[0]
    refused = cross_encoder.post("/score", **{names[0]: QUERY, "text_2": DOCUMENTS}).json()["error"]
    assert refused["message"].startswith("The body has ")


def test_pairs_that_are_too_long_are_cut(cross_encoder: Served) -> None:
    long = "three two one " * 30
    assert cross_encoder.post("/score", text_1=QUERY, text_2=long).status_code == 400

    def score(query: str, document: str, **more: Any) -> float:
        answer = cross_encoder.post("/score", text_1=query, text_2=document, **more)
        assert answer.status_code == 200, answer.text
        found: float = answer.json()["data"][0]["score"]
        return found

    assert score(QUERY, long, max_tokens_per_doc=4) == score(QUERY, "three two one three")
    assert score(QUERY, "six", max_tokens_per_query=2) == score("one two", "six")
    assert score(QUERY, long, truncate_prompt_tokens=10) == score(QUERY, "three two one three")
    assert score(QUERY, long, truncate_prompt_tokens=10, truncation_side="left") == score(QUERY, "one three two one")
    fitting = " ".join(long.split()[: 64 - len(QUERY.split()) - 3])
    assert score(QUERY, long, truncate_prompt_tokens=-1) == score(QUERY, fitting)
    answer = cross_encoder.post("/score", text_1=QUERY, text_2=long, truncate_prompt_tokens=5)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_logits_instead_of_scores(cross_encoder: Served) -> None:
    (entry,) = cross_encoder.post("/rerank", query=QUERY, documents=["six"], use_activation=False, top_n=0).json()[
        "results"
    ]
    assert entry["relevance_score"] == pytest.approx(pair_logit(cross_encoder, QUERY, "six"), rel=1e-4, abs=1e-5)


def test_texts_that_are_compared_are_cut_alone(embedder: Served) -> None:
    long = "three two one " * 30
    cut = embedder.post("/score", text_1=QUERY, text_2=long, truncate_prompt_tokens=6).json()["data"]
    assert cut == embedder.post("/score", text_1=QUERY, text_2="three two one three").json()["data"]


def test_an_instruction_among_a_templates_variables(judge: Served) -> None:
    pair = {"text_1": "one", "text_2": "two"}
    told = judge.post("/score", **pair, instruction="Look for numbers.").json()["data"]
    assert (
        judge.post("/score", **pair, chat_template_kwargs={"instruction": "Look for numbers."}).json()["data"] == told
    )
    assert judge.post("/score", **pair, chat_template_kwargs={"depth": 1}).status_code == 400
