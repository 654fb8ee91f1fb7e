"""What `--speculative-config` says: which drafter proposes tokens, and how many of them a step verifies at most."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from penstock.config.errors import ConfigError, format_value

MOST_DRAFTS: Final = 32  # of a sequence in a step
METHODS: Final = ("ngram", "suffix")
_NOT_HERE: Final = (
    "draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "p_eagle", "lookahead", "dflash",
)  # fmt: skip
_DEFAULT_DRAFTS: Final = 12
_LEAST_COMMON: Final = 2  # tokens
_FIELDS: Final = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "adaptive")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How answers are speculated about.

    Attributes:
        method: one of METHODS.
        num_speculative_tokens: most drafts of a sequence in a step.
        prompt_lookup_min, prompt_lookup_max: tokens that an earlier place has in common with the end, for "ngram"; the
            least is that of "suffix" too, which takes as many as there are.
        adaptive: no more drafts are verified than pay; else all that there are.
    """

    method: str
    num_speculative_tokens: int = _DEFAULT_DRAFTS
    prompt_lookup_min: int = _LEAST_COMMON
    prompt_lookup_max: int = 4
    adaptive: bool = True


def speculation(text: str | None) -> Speculation | None:
    """Reads the option; None where it is not given.

    Raises:
        ConfigError: names what was found, and what is allowed.
    """
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _refused(text, 'a JSON object such as {"method": "suffix", "num_speculative_tokens": 8}')
    if "method" not in found and found.get("model") in ("ngram", "[ngram]"):  # as vLLM has it
        found["method"] = found.pop("model").strip("[]")
    method = found.get("method")
    if method in _NOT_HERE:
        raise _refused(text, f"method {' or '.join(METHODS)}; {method} is not here yet")
    if method not in METHODS:
        raise _refused(text, f"method {' or '.join(METHODS)}, but method is {format_value(method)}")
    if unknown := sorted(set(found) - set(_FIELDS)):
        raise _refused(text, f"{', '.join(_FIELDS)}, but not {', '.join(unknown)}")
    made = Speculation(method)
    drafts = _whole(text, found, "num_speculative_tokens", 1, MOST_DRAFTS, made.num_speculative_tokens)
    least = _whole(text, found, "prompt_lookup_min", 1, 8, min(made.prompt_lookup_min, _given(found)))
    most = _whole(text, found, "prompt_lookup_max", least, 64, max(least, made.prompt_lookup_max))
    adaptive = found.get("adaptive", True)
    if not isinstance(adaptive, bool):
        raise _refused(text, f"adaptive true or false, but it is {format_value(adaptive)}")
    return Speculation(method, drafts, least, most, adaptive)


def _given(found: dict[str, Any]) -> int:
    most = found.get("prompt_lookup_max")
    return most if isinstance(most, int) and most >= 1 else _LEAST_COMMON


def _whole(text: str, found: dict[str, Any], name: str, low: int, high: int, default: int) -> int:
    value = found.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refused(text, f"{name} from {low} to {high}, but it is {format_value(value)}")
    return value


def _refused(text: str, allowed: str) -> ConfigError:
    return ConfigError(f"--speculative-config is {format_value(text)}; allowed: {allowed}.")
