"""What `--speculative-config` says: which drafter proposes tokens, and how many of them a step verifies at most."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.config.errors import ConfigError, format_value

MOST_DRAFTS: Final = 32  # of a sequence in a step
# Which read the target's hidden states.
HEADS: Final = ("eagle3", "mtp", "medusa", "p-eagle", "eagle", "mlp_speculator", "redrafter")
METHODS: Final = ("draft_model", *HEADS, "self", "ngram", "suffix", "lookahead")
_NOT_HERE: Final = ("dflash",)
_MTP: Final = ("deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "ernie_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
_LLAMA_CPP: Final = {
    "draft-simple": "draft_model",
    "draft-eagle3": "eagle3",
    "draft-mtp": "mtp",
    "ngram-simple": "ngram",
    "ngram-map-k": "ngram",
    "ngram-map-k4v": "suffix",
}
_ALIASES: Final = {"p_eagle": "p-eagle", **dict.fromkeys(_MTP, "mtp"), **_LLAMA_CPP}  # vLLM's and llama.cpp's
_DEFAULT_DRAFTS: Final = 12
_LEAST_COMMON: Final = 2  # tokens
_GRAM: Final = 3  # tokens; of lookahead
_GUESSES: Final = 8  # drafts of lookahead
_MODEL_DRAFTS: Final = 4  # of a draft model, each of which is a step of it
_FIELDS: Final = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "adaptive")
_LOOKAHEAD_FIELDS: Final = ("method", "num_speculative_tokens", "max_ngram_size", "adaptive")
_SELF_FIELDS: Final = ("method", "layers", "num_speculative_tokens", "draft_min", "draft_p_min", "adaptive")
_MODEL_FIELDS: Final = ("method", "model", "num_speculative_tokens", "draft_min", "draft_p_min", "adaptive")
_OWN_FIELDS: Final = {"self": _SELF_FIELDS, "lookahead": _LOOKAHEAD_FIELDS}


@dataclass(frozen=True, slots=True)
class Speculation:
    """How answers are speculated about.

    Attributes:
        method: one of METHODS.
        num_speculative_tokens: most drafts of a sequence in a step.
        prompt_lookup_min, prompt_lookup_max: tokens that an earlier place has in common with the end, for "ngram"; the
            least is that of "suffix" too, which takes as many as there are.
        adaptive: no more drafts are verified than pay; else all that there are.
        model: folder, .gguf file or name in the library of the draft model or head; None where there is none, and for
            "mtp", whose layers are in the target's own files then.
        draft_min: drafts of a sequence below which none of them is verified.
        layers: of the target that draft for it, the first ones, for "self"; None for a quarter.
        max_ngram_size: tokens of an n-gram that is kept, for "lookahead".
        draft_p_min: probability that the draft model gives a draft, below which it and those behind are left out.
    """

    method: str
    num_speculative_tokens: int = _DEFAULT_DRAFTS
    prompt_lookup_min: int = _LEAST_COMMON
    prompt_lookup_max: int = 4
    adaptive: bool = True
    model: str | None = None
    draft_min: int = 0
    draft_p_min: float = 0.0
    layers: int | None = None
    max_ngram_size: int = _GRAM

    @property
    def loads(self) -> bool:
        """Whether it computes with weights."""
        return self.method in ("draft_model", "self", *HEADS)


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
    if "method" not in found and "model" in found:
        found["method"] = "draft_model"
    method = found.get("method")
    if isinstance(method, str):
        method = _ALIASES.get(method, method)
    if method == "none":  # llama.cpp's
        return None
    if method in _NOT_HERE:
        raise _refused(text, f"method {' or '.join(METHODS)}; {method} is not here yet")
    if method not in METHODS:
        raise _refused(text, f"method {' or '.join(METHODS)}, but method is {format_value(method)}")
    weights = method in ("draft_model", "self", *HEADS)
    fields = _OWN_FIELDS.get(method, _MODEL_FIELDS if weights else _FIELDS)
    if unknown := sorted(set(found) - set(fields)):
        raise _refused(text, f"{', '.join(fields)} for {method}, but not {', '.join(unknown)}")
    adaptive = found.get("adaptive", True)
    if not isinstance(adaptive, bool):
        raise _refused(text, f"adaptive true or false, but it is {format_value(adaptive)}")
    if weights:
        return _of_model(text, method, found, adaptive)
    if method == "lookahead":
        guesses = _whole(text, found, "num_speculative_tokens", 1, MOST_DRAFTS, _GUESSES)
        gram = _whole(text, found, "max_ngram_size", 2, MOST_DRAFTS + 1, _GRAM)
        return Speculation(method, guesses, adaptive=adaptive, max_ngram_size=gram)
    made = Speculation(method)
    drafts = _whole(text, found, "num_speculative_tokens", 1, MOST_DRAFTS, made.num_speculative_tokens)
    least = _whole(text, found, "prompt_lookup_min", 1, 8, min(made.prompt_lookup_min, _given(found)))
    most = _whole(text, found, "prompt_lookup_max", least, 64, max(least, made.prompt_lookup_max))
    return Speculation(method, drafts, least, most, adaptive)


def _of_model(text: str, method: str, found: dict[str, Any], adaptive: bool) -> Speculation:
    model, least = found.get("model"), found.get("draft_p_min", 0.0)
    if (not isinstance(model, str) or not model) and (model is not None or method not in ("mtp", "self")):
        raise _refused(text, f"model, the draft model's folder, .gguf file or name, but it is {format_value(model)}")
    drafts = _whole(text, found, "num_speculative_tokens", 1, MOST_DRAFTS, _MODEL_DRAFTS)
    fewest = _whole(text, found, "draft_min", 0, drafts, 0)
    if isinstance(least, bool) or not isinstance(least, (int, float)) or not 0.0 <= least <= 1.0:
        raise _refused(text, f"draft_p_min from 0 to 1, but it is {format_value(least)}")
    made = Speculation(method, drafts, adaptive=adaptive, model=model, draft_min=fewest, draft_p_min=float(least))
    if found.get("layers") is None:
        return made
    return replace(made, layers=_whole(text, found, "layers", 1, 1024, 1))


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
