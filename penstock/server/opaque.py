"""Texts that clients keep unread and send back: summaries of conversations, reasoning. They are no secrets."""

from __future__ import annotations

import base64
import binascii
from typing import Final

from penstock.config.errors import RequestError

_KIND: Final = "penstock1."  # what contents begin with, so that those of other servers are told


def content_of(text: str) -> str:
    """The opaque content of an item that stands for a text."""
    return _KIND + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode()


def text_of(where: str, content: str) -> str:
    """The text in an item's opaque content.

    Raises:
        RequestError: it cannot be read as such a content, or says nothing. Whether a server wrote it is not found out.
    """
    try:
        if not content.startswith(_KIND):
            raise ValueError
        text = base64.b64decode(content[len(_KIND) :].encode("ascii"), altchars=b"-_", validate=True).decode()
        if not text:
            raise ValueError
    except (ValueError, binascii.Error) as error:
        message = (
            f"{where}.encrypted_content cannot be read as such a content, or says nothing; allowed: the item as it was "
            "answered here. Send what it stands for in full instead."
        )
        raise RequestError(message, param=f"{where}.encrypted_content", code="invalid_encrypted_content") from error
    return text
