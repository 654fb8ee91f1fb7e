"""Every error Penstock raises on purpose. A message names the value, what is allowed and the remedy."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

NO_TOKEN_ALLOWED: Final = "every token is banned: allowed_token_ids, bad_words, min_tokens and the grammar leave none."
GRAMMAR_TOO_COMPLEX: Final = "the grammar became too complex to follow within the limits; simplify it."
BANNED_TOO_OFTEN: Final = (
    "the answer came to hold one of banned_strings too often: 64 times at one place, or 1024 times in all; ban less."
)
BANNED_AND_HELD: Final = "banned_strings and what the answer is held to leave no token that could come next; ban less."
PROCESSOR_ARGUMENTS: Final = (
    "a logits processor does not take the arguments that it was given; correct args and kwargs in logits_processors."
)
RESULT_TOO_LARGE: Final = "the result is too large to be sent; ask for less in one request."
CLIENT_FAILURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        NO_TOKEN_ALLOWED: "no_token_allowed",
        GRAMMAR_TOO_COMPLEX: "grammar_too_complex",
        BANNED_TOO_OFTEN: "banned_strings",
        BANNED_AND_HELD: "banned_strings",
        PROCESSOR_ARGUMENTS: "logits_processors",
        RESULT_TOO_LARGE: "result_too_large",
    }
)
"""Why a sequence fails where the request itself is the cause, and the code told: the same request would fail again."""


class _Json(reprlib.Repr):
    """Values as JSON has them, cut short; those it does not have as Python does."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxlist = 4
        self.maxdict = 3
        self.maxother = 70
        self.maxlong = 40

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_str(self, value: str, level: int) -> str:
        cut = value if len(value) <= 70 else f"{value[:33]}...{value[-34:]}"
        return f'"{"".join(c if c.isprintable() and c not in _ESCAPED else json.dumps(c)[1:-1] for c in cut)}"'

    def repr_list(self, value: Sequence[Any], level: int) -> str:
        return f"[{self._some(len(value), self.maxlist, level, (self.repr1(item, level - 1) for item in value))}]"

    repr_tuple = repr_list  # type: ignore[assignment]

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        pairs = (f"{self.repr1(name, level - 1)}: {self.repr1(item, level - 1)}" for name, item in value.items())
        return f"{{{self._some(len(value), self.maxdict, level, pairs)}}}"

    def _some(self, count: int, most: int, level: int, items: Iterable[str]) -> str:
        most = most if level > 0 else 0
        return ", ".join([*islice(items, most), *(["..."] if count > most else [])])


_ESCAPED: Final = '"\\'


def format_value(value: object) -> str:
    """A value as it may appear in a message: in JSON's spelling, at most 80 characters, whatever its size."""
    text = _Json().repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class PenstockError(Exception):
    """Base of all deliberate errors; its text is written for the person who must act on it."""


class ConfigError(PenstockError):
    """An option, or a combination of options, that cannot be honoured."""


class CheckpointError(PenstockError):
    """A model file that is missing, damaged, hostile or of an unsupported kind."""


class MemoryPlanError(ConfigError):
    """The plan does not fit; the message names the missing bytes and one remedy."""


class TemplateError(PenstockError):
    """A chat template that is absent, unsafe, too slow or refuses the messages."""


class EngineDeadError(PenstockError):
    """The engine process ended (or was never there) while a request needed it."""


class RequestError(PenstockError):
    """A request that cannot be served as asked.

    Attributes:
        status: HTTP status that tells the client the same.
        param: name of the offending field, as the client spelled it, or None.
        code: short machine-readable reason (OpenAI's `error.code`), or None.
    """

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@contextmanager
def param_names(names: Mapping[str, str]) -> Iterator[None]:
    """Makes refusals within name the field that was sent: `names` gives it, for the fields that were made of it."""
    try:
        yield
    except RequestError as error:
        message, ours = str(error), error.param
        if ours is not None and ours in names:
            error.param = theirs = names[ours]
            told = message.startswith((f"{ours} ", f"{ours}:"))
            error.args = (theirs + message.removeprefix(ours) if told else message,)
        raise


class ParameterError(RequestError):
    """A sampling or request parameter outside its allowed values."""

    def __init__(self, param: str, value: object, allowed: str) -> None:
        super().__init__(f"{param} is {format_value(value)}; allowed: {allowed}.", param=param, code="invalid_value")
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.param, self.value, self.allowed))


class ContextLengthError(RequestError):
    """Prompt plus requested output is longer than the context; both counts are in the message."""

    def __init__(self, message: str, *, param: str = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ModelNotFoundError(RequestError):
    """The named model is not served here."""

    status = 404


class ModelUnavailableError(RequestError):
    """The named model is known, and cannot be used now; retry after `retry_after` seconds."""

    status = 503

    def __init__(self, message: str, *, retry_after: int = 1, code: str = "model_unavailable") -> None:
        super().__init__(message, param="model", code=code)
        self.retry_after = retry_after


class OverloadedError(RequestError):
    """Queue limits are reached; retry after `retry_after` seconds."""

    status = 429

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message, code="overloaded")
        self.retry_after = retry_after


class AbortedError(RequestError):
    """Whoever runs the server ended all requests there were; retry after `retry_after` seconds."""

    status = 503

    def __init__(self, *, retry_after: int = 1) -> None:
        told = "An operator of this server ended the request before it was complete; send it again."
        super().__init__(told, code="aborted")
        self.retry_after = retry_after


def quoted(text: str, most: int = 80) -> str:
    """A name from a file as it can stand in a message: quoted, printable, cut."""
    full = ascii(text)
    return full if len(full) <= most else full[: most - 4] + "...'"
