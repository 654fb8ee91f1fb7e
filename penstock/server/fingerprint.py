"""What answers depend on besides the request, as a word."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from penstock.config.arithmetic import ARITHMETIC_VERSION

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend


def fingerprint(frontend: Frontend) -> str:
    """Names what answers depend on besides the request: build, model and arithmetic."""
    info = frontend.info
    model = (frontend.served_name, info.architecture, info.dtype, info.device, info.determinism, info.numbers)
    facts = (ARITHMETIC_VERSION, *model)
    return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
