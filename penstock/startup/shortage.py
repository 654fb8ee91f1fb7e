"""Recognises that the system refused memory while an engine was made, and says so in a sentence."""

from __future__ import annotations

import errno
from typing import Final

from penstock.config.errors import CheckpointError, MemoryPlanError, PenstockError

_REFUSALS: Final = (errno.ENOMEM, errno.EAGAIN)  # ENOMEM: no memory; EAGAIN: no memory for a thread
_WORDS: Final = (  # in messages of libraries that raise plain errors
    "allocate memory",
    "bad_alloc",
    "can't start new thread",
    "resource temporarily unavailable",
    "failed to map segment",
)


def is_shortage(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, says that memory ran out."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _REFUSALS):
        return True
    if isinstance(error, (RuntimeError, OSError, ImportError)) and any(word in str(error).lower() for word in _WORDS):
        return True
    cause = error.__cause__ if isinstance(error, CheckpointError) else None
    return cause is not None and is_shortage(cause)


def shortage_as_plan_error(error: BaseException) -> BaseException:
    """A MemoryPlanError where memory ran out; any other error unchanged."""
    if not is_shortage(error) or (isinstance(error, PenstockError) and not isinstance(error, CheckpointError)):
        return error
    why = str(error).partition("\n")[0].rstrip(".") or "the system gave none"
    return MemoryPlanError(
        f"memory ran out while the engine was made: {why}. Free memory or raise the limit that this process runs under "
        "(`ulimit -v`, `ulimit -d`, the container's); or ask for less: a smaller --max-model-len, --max-num-seqs or "
        "--kv-cache-memory, fewer --threads, or weights of fewer bits with --quantize."
    )
