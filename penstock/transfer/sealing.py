"""Encryption of what leaves memory: AES-256 in Galois/Counter Mode (NIST SP 800-38D), a random nonce for each message.

A message is bound to its name, so that one that was put in another's place is refused like one that was changed.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from functools import partial
from typing import Any, Final

from penstock.config.errors import ConfigError
from penstock.transfer.pieces import Bytes

_NONCE: Final = 12
_TAG: Final = 16
OVERHEAD: Final = _NONCE + _TAG
"""Bytes that a sealed message is longer."""


class Sealing:
    """The null form: messages stay as they are.

    Attributes:
        overhead: bytes that a sealed message is longer.
        key_id: tells keys apart without telling the key; "" for none.
    """

    overhead = 0
    key_id = ""

    def seal(self, parts: list[Bytes], name: bytes) -> list[Bytes]:
        """Parts of a message under a name, as they are kept."""
        return parts

    def unseal(self, data: Bytes, name: bytes) -> Bytes:
        """The message again. Raises ValueError if it is not what was sealed under this name with this key."""
        return data

    def seal_line(self, text: bytes) -> bytes:
        """A line of a journal, without line breaks."""
        return text

    def unseal_line(self, text: bytes) -> bytes:
        """The line again. Raises ValueError if it was not sealed with this key."""
        return text


PLAIN: Final = Sealing()


class Sealed(Sealing):
    """Messages that only who has the key can read or make."""

    overhead = OVERHEAD

    def __init__(self, key: bytes) -> None:
        """`key`: 32 bytes. Raises ConfigError where the package for it is missing."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigError(
                "PENSTOCK_KV_KEY asks for encryption, which needs a package that is not installed: "
                "pip install 'penstock-llm[encryption]', or unset it."
            ) from None
        keyed = partial(hashlib.blake2b, key=key, digest_size=32)
        self._invalid: Any = InvalidTag
        self._cipher = AESGCM(keyed(b"penstock kv blocks").digest())
        self.key_id = keyed(b"penstock kv key id").hexdigest()[:16]

    def seal(self, parts: list[Bytes], name: bytes) -> list[Bytes]:
        nonce = secrets.token_bytes(_NONCE)
        return [nonce, self._cipher.encrypt(nonce, b"".join(parts), name)]

    def unseal(self, data: Bytes, name: bytes) -> Bytes:
        view = memoryview(data)
        if len(view) < OVERHEAD:
            raise ValueError("it is too short to be sealed")
        try:
            return self._cipher.decrypt(bytes(view[:_NONCE]), view[_NONCE:], name)
        except self._invalid:
            raise ValueError("it was not sealed with this key, or is damaged") from None

    def seal_line(self, text: bytes) -> bytes:
        return base64.b64encode(b"".join(self.seal([text], b"line")))

    def unseal_line(self, text: bytes) -> bytes:
        return bytes(self.unseal(base64.b64decode(text, validate=True), b"line"))


def sealing_of(key: bytes | None) -> Sealing:
    """By a key; None for no encryption. Raises ConfigError where the package for it is missing."""
    return PLAIN if key is None else Sealed(key)
