"""What a prefix is called: who may find it again, and what tells its tokens from others."""

from __future__ import annotations

from penstock.config.adapters import adapters_key, key_tags
from penstock.core.kv.node import Namespace
from penstock.core.request import PUBLIC, EngineRequest


def namespace_of(request: EngineRequest, *, caching: bool, shared: bool) -> Namespace:
    """Who finds again what a request computes: its owner, everybody if `shared`; without `caching` itself.

    A space is named by content, the digests of adapters and of what an encoder reads, which all later layers see,
    never by the slots that adapters happen to have. Activated adapters tell keys apart instead.
    """
    adapters = adapters_key(use for use in request.adapters if not use.invocation)
    space = adapters if request.encoder is None else (adapters, request.encoder.digest)
    if not caching:
        return Namespace(request.request_id)
    if request.owner == PUBLIC:
        return Namespace(space, None)
    return Namespace(space, (request.cache_salt, "" if shared else request.owner))


def media_key(digest: str, index: int) -> int:
    """The prefix key of one position of a medium: no token id, and another one for each digest and index."""
    return (int.from_bytes(b"\x01" + digest.encode(), "big") << 32 | index) << 32


def medium_of(key: int) -> tuple[str, int] | None:
    """The digest and index of a key that `media_key` made; None of a token."""
    digest = key >> 64
    if not digest:
        return None
    return digest.to_bytes((digest.bit_length() + 7) // 8, "big")[1:].decode(), key >> 32 & 0xFFFFFFFF


def prefix_keys(tokens: list[int], request: EngineRequest) -> tuple[list[int], int]:
    """The keys of these tokens, the list itself where all are plain so that both grow together; what later keys add."""
    tag, media = 0, request.media
    if not media and not any(use.invocation for use in request.adapters):
        return tokens, tag
    keys = list(tokens)
    for span in media:
        keys[span.start : span.end] = (media_key(span.digest, index) for index in range(span.length))
    for first, end, tag in key_tags(request.adapters, len(keys)):
        keys[first:end] = (tag + key for key in keys[first:end])
    return keys, tag
