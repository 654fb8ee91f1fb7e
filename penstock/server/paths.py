"""Names within paths that are told by their form, so that other paths beside them are no routes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from starlette.convertors import StringConvertor, register_url_convertor


class _ResponseId(StringConvertor):
    """`/v1/responses/nothing`, say, is then not found, instead of a response for which the method is wrong."""

    regex = "resp_[^/]+"


class _ConversationId(StringConvertor):
    regex = "conv_[^/]+"


class _ChatId(StringConvertor):
    """`/v1/chat/completions/render` stays what it is."""

    regex = "chatcmpl-[^/]+"


register_url_convertor("completion_id", _ChatId())
register_url_convertor("response_id", _ResponseId())
register_url_convertor("conversation_id", _ConversationId())
RESPONSE = "/v1/responses/{response_id:response_id}"
CHAT = "/v1/chat/completions/{completion_id:completion_id}"
CONVERSATION = "/v1/conversations/{conversation_id:conversation_id}"


class _KserveModel(StringConvertor):
    """A model's name, which may have slashes, up to what KServe's routes have behind it."""

    regex = "[^/]+(?:/(?!(?:infer|ready|generate|generate_stream)$|versions/)[^/]+)*"


register_url_convertor("kserve_model", _KserveModel())
KSERVE_MODEL = "{model:kserve_model}"
FORMS: Mapping[str, str] = MappingProxyType(
    {"response_id": "^resp_[^/]+$", "conversation_id": "^conv_[^/]+$", "completion_id": "^chatcmpl-[^/]+$"}
)
"""Patterns of these names, as the document tells them."""
