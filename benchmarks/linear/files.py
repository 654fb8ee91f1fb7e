"""Readers of a model's files, and of a server's requests, with inputs that could make them slow."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.linear.scanners import Scanner, refusing, repeated
from penstock.server.auth import HostRule
from penstock.server.conversation import checked_messages, checked_tools
from penstock.server.strict_json import parse_json
from penstock.server.structured import asked
from penstock.server.tool_calls import arguments_of
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.mistral import mistral_template
from penstock.text.parsers.format import choose
from penstock.text.ranked import read_tekken, read_tiktoken
from penstock.text.sentencepiece_model import read_sentencepiece
from penstock.text.spelling import read_spelling
from penstock.text.stop_patterns import PatternSearch, stop_patterns
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.text.tokenizer_json import read_tokenizer_json
from penstock.text.vocabulary import implied_merges
from penstock.weights.readers.files import parse_object
from penstock.weights.readers.gguf_file import read_gguf_file
from penstock.weights.readers.safetensors import read_safetensors_file

Make = Callable[[int], Any]
_WORDS = [f"w{i}" for i in range(300)]


def file_readers(folder: Path) -> Iterator[Scanner]:
    """What reads a model's files; inputs are written to a folder, all to the same few files."""

    def written(name: str, data: Callable[[int], bytes]) -> Make:
        def make(size: int) -> Path:
            path = folder / f"{size}_{name}"
            path.write_bytes(data(size))
            return path

        return make

    tekken = {"tokens": written("tekken.json", _tekken), "version": written("version.json", lambda n: b"[" * n)}
    yield Scanner("text.ranked tekken", refusing(read_tekken), tekken)
    yield Scanner("text.mistral", refusing(mistral_template), tekken)
    lines = {"lines": written("a.tiktoken", _tiktoken), "spaces": written("b.tiktoken", lambda n: b"YQ== " + b" " * n)}
    config = {"tokenizer_class": "QWenTokenizer"}
    yield Scanner("text.ranked tiktoken", refusing(lambda path: read_tiktoken(path, config)), lines)
    pieces = {"pieces": written("a.model", _sentencepiece), "varints": written("b.model", lambda n: b"\xff" * n)}
    yield Scanner("text.sentencepiece_model", refusing(lambda path: read_sentencepiece(path, {})), pieces)
    metadata = {"keys": written("a.gguf", _gguf_keys), "strings": written("b.gguf", _gguf_strings)}
    yield Scanner("weights.readers.gguf_file", refusing(read_gguf_file), metadata)
    headers = {"tensors": written("a.safetensors", _safetensors)}
    yield Scanner("weights.readers.safetensors", refusing(read_safetensors_file), headers)


def text_readers(tokenizer: Tokenizer) -> Iterator[Scanner]:
    """What reads vocabularies, templates and a model's tokens."""
    objects = {
        "members": lambda n: json.dumps({f"k{i}": i for i in range(n // 8)}).encode(),
        "repeated": lambda n: b'{"a":1' + b',"b":1,"b":2' * (n // 12) + b"}",
        "nested": lambda n: b'{"a":' * (n // 5),
    }
    yield Scanner("weights.readers.files", refusing(lambda data: parse_object(data, "file")), objects)
    vocabularies = {
        "tokens": lambda n: [f"{i:x}" for i in range(n // 4)],
        "one token": lambda n: ["a", "a" * n],
        "tokens of tokens": lambda n: ["a" * i for i in range(1, 64)] * (n // 1024),
    }
    yield Scanner("text.vocabulary", lambda tokens: implied_merges(tokens, dict.fromkeys(tokens, 0)), vocabularies)
    yield Scanner("text.tokenizer_json", refusing(read_tokenizer_json), {"merges": _bpe})
    steps = {"steps": lambda n: {"decoders": [{"type": "Replace"}] * (n // 8)}}
    yield Scanner("text.spelling", read_spelling, steps)
    templates = repeated(
        "{% if a %}", "{{ 'a' ~ ", "{{ a.b", "{{ '", "{#", "{% for a in b %}{% endfor %}", "{{ [", "a", "{%"
    )
    yield Scanner("text.template", refusing(_template), templates)
    yield Scanner("text.parsers.format choose", choose, templates)
    ids = {
        "words": lambda n: tokenizer.encode(" ".join(_WORDS) * (n // 1000 + 1), add_special_tokens=False)[:n],
        "spaces": lambda n: tokenizer.encode(" a" * n, add_special_tokens=False)[:n],
    }
    stops = ["a" * size + "b" for size in (1, 8, 64, 512)]
    yield Scanner("text.detokenizer", lambda tokens: IncrementalDetokenizer(tokenizer, stop=stops).push(tokens), ids)
    wild = repeated("a", "ab", "c", "\n")
    yield Scanner("text.stop_patterns", _search, wild)
    yield Scanner("text.stop_patterns read", refusing(lambda text: stop_patterns((text,))), _expressions())
    pieces = repeated("a", " ", "w1 ", "é", "\U0001f388", "a b", "\n", "<|im_start|>", "<")
    yield Scanner("text.tokenizer encode", tokenizer.encode, pieces)


def _search(text: str) -> None:
    """Looks for a pattern on which going back would take for ever."""
    search = PatternSearch(stop_patterns(("(a|aa|a*b?)*(c|a.*b)d",)))
    for char in text:
        search.take(char)


def _expressions() -> dict[str, Callable[[int], str]]:
    """Patterns that nest, repeat and list."""
    return repeated("a", "(", "(a", "a|", "[", "[a-", "a{2}", "(a){9}", "{", "{1", "\\", "|", "a*")


def request_readers() -> Iterator[Scanner]:
    """What reads a server's requests."""
    bodies = {
        "members": lambda n: json.dumps({f"k{i}": i for i in range(n // 8)}).encode(),
        "repeated at last": lambda n: (
            json.dumps({f"k{i}": i for i in range(n // 8)}).encode()[:-1] + b', "k1": 0, "k1": 1}'
        ),
        "nested": lambda n: b'{"a":' + b"[" * n,
        "lists": lambda n: b'{"a":[' + b"[]," * (n // 4) + b"[]]}",
        "surrogates": lambda n: b'{"a":"' + b"\\ud800" * (n // 6) + b'"}',
        "quotes": lambda n: b'{"a":"' + b'\\"' * (n // 2),
        "digits": lambda n: b'{"a":' + b"1" * n + b"}",
        "floats": lambda n: b'{"a":1.' + b"1" * n + b"}",
    }
    yield Scanner("server.strict_json parse_json", refusing(parse_json), bodies)
    yield Scanner("server.tool_calls", refusing(arguments_of), repeated("[", '{"a":', '"', '{"a":"…\\', '{"a":…1'))
    hosts = repeated("a", "a.", "[", "[…:", "[…::", "a:…1", " ", "-")
    yield Scanner("server.auth hosts", refusing(lambda host: HostRule("127.0.0.1").check("1.1", [host])), hosts)
    parts = {"parts": lambda n: [{"role": "user", "content": [{"type": "text", "text": "a"}] * (n // 8)}]}
    calls = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = {"turns": lambda n: [{"role": "assistant", "content": None, "tool_calls": [calls]}] * (n // 16)}
    yield Scanner("server.conversation messages", refusing(checked_messages), {**parts, **turns})
    declared = {
        "tools": lambda n: [
            {"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(n // 8)
        ],
        "schema": lambda n: [_tool({"properties": {f"p{i}": {"type": "string"} for i in range(n // 8)}})],
        "list": lambda n: [_tool({"anyOf": [{"type": "string"}] * (n // 4)})],
    }
    yield Scanner("server.conversation tools", refusing(checked_tools), declared)
    wishes = {
        "choices": lambda n: {"guided_choice": [str(i) for i in range(n // 4)]},
        "schema": lambda n: {"guided_json": {"properties": {f"p{i}": {"type": "string"} for i in range(n // 8)}}},
        "closed": lambda n: {"structured_outputs": {"json": {"items": [{"properties": {}}] * (n // 8)},
                                                    "disable_additional_properties": True}},
        "text": lambda n: {"guided_json": "[" * n},
    }  # fmt: skip
    yield Scanner("server.structured", refusing(asked), wishes)


def _tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}


def _template(source: str) -> str:
    return ChatTemplate(source).render([{"role": "user", "content": "hi"}])


def _tekken(size: int) -> bytes:
    count = 256 + size // 32
    tokens = [bytes([i]) if i < 256 else b"%d" % i for i in range(count)]
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)]
    config = {"pattern": "x", "default_vocab_size": count + 3, "default_num_special_tokens": 3, "version": "v3"}
    return json.dumps({"config": config, "vocab": vocab}).encode()


def _tiktoken(size: int) -> bytes:
    tokens = [bytes([i]) if i < 256 else b"%d" % i for i in range(256 + size // 16)]
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _sentencepiece(size: int) -> bytes:
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *(f"{i:x}" for i in range(size // 16))]
    kinds = [2, 3, 3, *[6] * 256]
    pieces = (
        _field(1, text.encode())
        + b"\x15"
        + struct.pack("<f", -i)
        + b"\x18"
        + bytes([kinds[i] if i < len(kinds) else 1])
        for i, text in enumerate(texts)
    )
    return b"".join(_field(1, piece) for piece in pieces) + _field(2, b"\x18\x01")


def _bpe(size: int) -> bytes:
    letters = [chr(ord("a") + i) for i in range(26)]
    pairs = [(a, b) for a in letters for b in letters]
    pairs += [(f"{a}{b}", c) for a, b in pairs for c in letters]
    pairs = pairs[: max(1, size // 32)]
    vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in pairs)])}
    model = {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in pairs]}
    return json.dumps({"version": "1.0", "model": model, "added_tokens": []}).encode()


def _gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _gguf_keys(size: int) -> bytes:
    count = min(size // 16, 60_000)
    keys = b"".join(_gguf_text(b"key.%d" % i) + struct.pack("<II", 4, i) for i in range(count))
    return b"GGUF" + struct.pack("<IQQ", 3, 0, count) + keys


def _gguf_strings(size: int) -> bytes:
    strings = b"".join(_gguf_text(b"%x" % i) for i in range(size // 8))
    value = struct.pack("<IIQ", 9, 8, size // 8) + strings
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _gguf_text(b"tokens") + value


def _safetensors(size: int) -> bytes:
    count = max(1, size // 32)
    tensors = {f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(count)}
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header + bytes(count)
