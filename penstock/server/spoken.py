"""Which dialect a request speaks: that of its path, or of its body where one path belongs to several dialects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from starlette.datastructures import Headers
from starlette.types import Scope

SPOKEN = "penstock.dialect"
"""Key, in a request's ASGI scope, of the dialect that its body has told."""


class Dialect(str, Enum):
    """Whose API a route follows, which decides what its errors look like."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"
    LLAMA_SERVER = "llama-server"
    TGI = "tgi"
    SGLANG = "sglang"
    KSERVE = "kserve"
    KOBOLD = "kobold"


_LLAMA_SERVER = re.compile(
    r"/(completions?|infill|props|slots(/[^/]*)?|lora-adapters|embeddings?|(v1/)?reranking|chat/completions|models"
    r"|(v1/)?health|v1/chat/completions/control|v1/stream|v1/streams/lookup|tools)"
)
_KOBOLD = re.compile(r"/api/(?:(?:v1|latest)/(?:generate|model|info/[^/]*|config/[^/]*)|extra/.*)")
_PATHS: Mapping[str, Dialect] = MappingProxyType(
    {
        **dict.fromkeys(("/generate_stream", "/info", "/chat_tokenize"), Dialect.TGI),
        **dict.fromkeys(("/generate", "/encode", "/abort_request", "/health_generate"), Dialect.SGLANG),
        "/vertex_generate": Dialect.SGLANG,
        **dict.fromkeys(("/get_model_info", "/model_info", "/get_server_info", "/server_info"), Dialect.SGLANG),
    }
)
ALSO: Mapping[str, tuple[Dialect, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("/tokenize", "/v1/tokenize", "/generate", "/invocations"), (Dialect.TGI,)),
        **dict.fromkeys(("/classify", "/v1/classify"), (Dialect.SGLANG,)),
    }
)
"""Further dialects that requests to a path may speak."""


def dialect_of(path: str, method: str = "GET") -> Dialect:
    """The dialect of a path, whether or not there is such a route."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return Dialect.ANTHROPIC
    if path in _PATHS or (path == "/" and method == "POST"):
        return _PATHS.get(path, Dialect.TGI)
    if path == "/v2" or path.startswith(("/v2/models/", "/v2/health/", "/v2/repository")):
        return Dialect.KSERVE
    if _KOBOLD.fullmatch(path):
        return Dialect.KOBOLD
    if _LLAMA_SERVER.fullmatch(path):
        return Dialect.LLAMA_SERVER
    ollama = path == "/" or (path.startswith("/api/") and not path.startswith("/api/v1/"))  # which is LM Studio's
    return Dialect.OLLAMA if ollama else Dialect.OPENAI


def dialect_of_scope(scope: Scope) -> Dialect:
    """The dialect of a request; of the list of models, which two have, the one its headers name."""
    if SPOKEN in scope:
        return Dialect(scope[SPOKEN])
    path = str(scope["path"])
    if path.startswith("/v1/models") and "anthropic-version" in Headers(scope=scope):
        return Dialect.ANTHROPIC
    return dialect_of(path, str(scope["method"]))
