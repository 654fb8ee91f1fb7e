"""Names within paths that are told by their form, so that other paths beside them are no routes."""

from __future__ import annotations

from starlette.convertors import StringConvertor, register_url_convertor


class _ResponseId(StringConvertor):
    """`/v1/responses/compact`, say, is then not found, instead of a response for which the method is wrong."""

    regex = "resp_[^/]+"


register_url_convertor("response_id", _ResponseId())
RESPONSE = "/v1/responses/{response_id:response_id}"
