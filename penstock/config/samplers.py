"""The samplers there are: their parameters, neutral values, names elsewhere, and the order in which they run.

One sampler is one entry of SAMPLERS, its parameters one line each of `SamplerParams` and of RANGES, and a function in
`kernels/reference/chain.py` and `csrc/ops/chain.cpp`, which say what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.config import limits
from penstock.config.errors import ParameterError
from penstock.config.logprobs import LogprobParams


class Step(NamedTuple):
    """One sampler of a request's chain: its name, and its parameters' values in the order of SAMPLERS."""

    name: str
    values: tuple[float, ...]


class Range(NamedTuple):
    """What a parameter may be: numbers from low to high, whole ones alone, without low itself if `above`."""

    low: float
    high: float
    whole: bool = False
    above: bool = False


RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "temperature": Range(0, limits.MAX_TEMPERATURE),
        "top_k": Range(-1, limits.MAX_TOP_K, whole=True),
        "top_p": Range(0, 1, above=True),
        "min_p": Range(0, 1),
        "typical_p": Range(0, 1, above=True),
        "repetition_penalty": Range(0, limits.MAX_REPETITION_PENALTY, above=True),
        "presence_penalty": Range(-limits.MAX_PENALTY, limits.MAX_PENALTY),
        "frequency_penalty": Range(-limits.MAX_PENALTY, limits.MAX_PENALTY),
        "repeat_last_n": Range(-1, limits.MAX_TOKENS, whole=True),
        "repetition_decay": Range(0, limits.MAX_TOKENS, whole=True),
        "no_repeat_ngram_size": Range(0, limits.MAX_NGRAM, whole=True),
        "dry_multiplier": Range(0, 100),
        "dry_base": Range(0, 100),
        "dry_allowed_length": Range(0, limits.MAX_TOKENS, whole=True),
        "dry_penalty_last_n": Range(-1, limits.MAX_TOKENS, whole=True),
        "watermark_gamma": Range(0, 1, above=True),
        "watermark_delta": Range(0, limits.MAX_BIAS),
        "watermark_key": Range(0, limits.MAX_WATERMARK_KEY, whole=True),
        "top_n_sigma": Range(-1, 1000),
        "dynatemp_range": Range(0, limits.MAX_TEMPERATURE),
        "dynatemp_exponent": Range(0, 100),
        "smoothing_factor": Range(0, 100),
        "smoothing_curve": Range(1, 100),
        "top_a": Range(0, 1),
        "tfs": Range(0, 1),
        "epsilon_cutoff": Range(0, 10_000),
        "eta_cutoff": Range(0, 10_000),
        "xtc_probability": Range(0, 1),
        "xtc_threshold": Range(0, 1),
        "adaptive_target": Range(-1, 1),
        "adaptive_decay": Range(0, 0.99),
        "mirostat": Range(0, 2, whole=True),
        "mirostat_tau": Range(0, 100),
        "mirostat_eta": Range(0, 1),
    }
)


class Sampler(NamedTuple):
    """A sampler.

    Attributes:
        name: its name here.
        parameters: the fields of SamplerParams that its step has.
        runs: whether they have other than their neutral values; a neutral sampler is left out of a chain.
        filters: whether it takes tokens away by their probability: Mirostat does that in the place of all others.
        ends: whether it is the last of its chain wherever an order names it, since what it learns from is the draw.
        names: what it is called elsewhere.
    """

    name: str
    parameters: tuple[str, ...]
    runs: Callable[[SamplerParams], bool]
    filters: bool = False
    ends: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplerParams(LogprobParams):
    """How the model's distribution is changed before a token is drawn. Defaults leave it as it is.

    Samplers run in the order of SAMPLERS, or of `samplers`. What looks at tokens so far looks at those of the prompt
    and those generated, never at drafts that were not accepted.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens with this cumulated probability (Holtzman et al. 2019, 1904.09751).
        min_p: drop tokens below min_p times the largest probability (Nguyen et al. 2024, 2407.01082).
        typical_p: keep the locally typical set with this mass (Meister et al. 2022, 2202.00666).
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output
            (Keskar et al. 2019, 1909.05858).
        presence_penalty: subtracted once from logits of tokens already generated.
        frequency_penalty: subtracted once per occurrence from logits of tokens already generated.
        repeat_last_n: these three look at so many last tokens of prompt and output; -1 for all, 0 for none.
        repetition_decay: over so many tokens before those their strength falls to nothing (ExLlamaV2).
        no_repeat_ngram_size: no sequence of so many tokens appears twice; 0 for no limit (Paulus et al. 2017,
            1705.04304).
        dry_multiplier, dry_base, dry_allowed_length: a token that would go on with a repetition of n tokens loses
            multiplier · base^(n - allowed_length), if n is at least allowed_length; multiplier 0 is off (DRY, p-e-w).
        dry_penalty_last_n: DRY looks at so many last tokens; -1 for all, 0 switches it off.
        dry_sequence_breakers: texts over which no repetition is followed; the frontend turns them into tokens.
        dry_breaker_ids: tokens that are breakers.
        dry_breaker_sequences: tokens that are one together, where no single one is; empty ones are left out.
        watermark: prefer tokens of a list that depends on the token before (Kirchenbauer et al. 2023, 2301.10226).
        watermark_gamma, watermark_delta, watermark_key: share of such tokens, what is added to their logits, and the
            number by which they are recognised; `limits.WATERMARK_KEY` stands for the engine's own.
        top_n_sigma: keep tokens whose logit is within so many standard deviations of the largest (Tang et al. 2024,
            2411.07641); 0 or -1 keeps all.
        dynatemp_range, dynatemp_exponent: the temperature is from `temperature` less the range to `temperature` and
            the range, by the normalised entropy to the power of the exponent (kalomaze); range 0 is off.
        smoothing_factor, smoothing_curve: distances from the largest logit become a quadratic, or with a curve above
            1 a cubic, of themselves (kalomaze); factor 0 is off.
        top_a: drop tokens below top_a times the square of the largest probability (BlinkDL).
        tfs: keep tokens up to where so much of the curvature of the sorted probabilities is (tail free sampling,
            Phénix and Egan 2019); 1 keeps all.
        epsilon_cutoff, eta_cutoff: drop tokens below this probability, or below what it is for the entropy (Hewitt
            et al. 2022, 2210.15191), both in units of 1e-4.
        xtc_probability, xtc_threshold: with this probability all but the last of the tokens that have the threshold's
            probability or more are dropped (XTC, p-e-w); a threshold above 0.5 never has two.
        xtc_protected_ids: tokens that are not dropped so: the frontend names line breaks and ends of answers.
        adaptive_target, adaptive_decay: prefer tokens near a probability such that the average of those drawn, whose
            memory is 1 / (1 - decay) tokens, is the target (adaptive-p); a negative target is off.
        mirostat, mirostat_tau, mirostat_eta: version 1 or 2 of drawing so that the surprise, in bits, stays at tau,
            with learning rate eta (Basu et al. 2020, 2007.14966). All filters are left out then.
        temperature_last: the temperature comes behind all filters.
        samplers: names of the samplers to run, in this order; those not named do not run. None for the usual order.
        dry_breaker_mask: tokens that are breakers too, as `config.token_mask` has them: the frontend fills in those
            that hold a text of `dry_sequence_breakers`.

    Raises:
        ParameterError: a value is outside its documented range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = -1
    repetition_decay: int = 0
    no_repeat_ngram_size: int = 0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    dry_breaker_ids: tuple[int, ...] = ()
    dry_breaker_sequences: tuple[tuple[int, ...], ...] = ()
    watermark: bool = False
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    watermark_key: int = limits.WATERMARK_KEY
    top_n_sigma: float = 0.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    smoothing_factor: float = 0.0
    smoothing_curve: float = 1.0
    top_a: float = 0.0
    tfs: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_protected_ids: tuple[int, ...] = ()
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    temperature_last: bool = False
    samplers: tuple[str, ...] | None = None
    dry_breaker_mask: bytes = b""

    def check_samplers(self) -> None:
        """Raises ParameterError for a value outside its range; lists become tuples, and names those used here."""
        for name, allowed in RANGES.items():
            check = check_integer if allowed.whole else check_number
            check(name, getattr(self, name), allowed.low, allowed.high, above=allowed.above)
        check_switches(self, "watermark", "temperature_last")
        for name in ("dry_sequence_breakers", "dry_breaker_ids", "dry_breaker_sequences", "xtc_protected_ids"):
            object.__setattr__(self, name, as_tuple(name, getattr(self, name)))
        _check_breakers(self.dry_sequence_breakers)
        check_token_ids("dry_breaker_ids", self.dry_breaker_ids, limits.MAX_BREAKER_IDS)
        check_token_ids("xtc_protected_ids", self.xtc_protected_ids, limits.MAX_PROTECTED_IDS)
        object.__setattr__(self, "dry_breaker_sequences", _breaker_sequences(self.dry_breaker_sequences))
        _check_mask(self.dry_breaker_mask)
        if self.samplers is not None:
            object.__setattr__(self, "samplers", sampler_names(self.samplers))

    def chain(self) -> tuple[Step, ...] | None:
        """The samplers that run, in order; None where they are those that a row's own settings name, in that order."""
        running = [sampler for sampler in self._ordered() if sampler.runs(self)]
        usual = self.samplers is None and not self.temperature_last and (self.repeat_last_n or _neutral(self))
        if usual and all(sampler.name in _USUAL and _plain(self, sampler) for sampler in running):
            return None
        return tuple(
            Step(sampler.name, tuple(float(getattr(self, name)) for name in sampler.parameters)) for sampler in running
        )

    def _ordered(self) -> list[Sampler]:
        """All samplers that an order has, those that end a chain at its end."""
        named = tuple(BY_NAME) if self.samplers is None else self.samplers
        if self.mirostat:
            needed = dict.fromkeys(("penalties", *named, "temperature", "mirostat"))
            named = tuple(name for name in needed if not BY_NAME[name].filters)
        found = [BY_NAME[name] for name in named]
        if self.temperature_last:
            found.sort(key=lambda sampler: sampler.name == "temperature")
        return sorted(found, key=lambda sampler: sampler.ends)


def _neutral(p: SamplerParams) -> bool:
    return (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.0, 0.0, 0.0)


def _penalised(p: SamplerParams) -> bool:
    return not _neutral(p) and (p.repeat_last_n != 0 or p.repetition_decay != 0)


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "repeat_last_n", "repetition_decay")
_DRY = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n")
_TEMPERATURES = ("temperature", "dynatemp_range", "dynatemp_exponent")
_WATERMARK = ("watermark_gamma", "watermark_delta", "watermark_key")
_MIROSTAT = ("mirostat", "mirostat_tau", "mirostat_eta")

SAMPLERS: tuple[Sampler, ...] = (
    Sampler(
        "penalties",
        _PENALTIES,
        _penalised,
        names=("repetition_penalty", "presence_penalty", "frequency_penalty", "rep_pen", "repetition"),
    ),
    Sampler("no_repeat_ngram", ("no_repeat_ngram_size",), lambda p: p.no_repeat_ngram_size > 0),
    Sampler("dry", _DRY, lambda p: p.dry_multiplier > 0 and p.dry_base >= 1 and p.dry_penalty_last_n != 0),
    Sampler("watermark", _WATERMARK, lambda p: p.watermark and p.watermark_delta > 0),
    Sampler("top_n_sigma", ("top_n_sigma",), lambda p: p.top_n_sigma > 0, filters=True, names=("nsigma",)),
    Sampler(
        "temperature",
        _TEMPERATURES,
        lambda p: p.temperature != 1 or p.dynatemp_range > 0,
        names=("temp", "dynamic_temperature", "dynatemp"),
    ),
    Sampler(
        "smoothing",
        ("smoothing_factor", "smoothing_curve"),
        lambda p: p.smoothing_factor > 0,
        names=("quadratic_sampling", "quadratic"),
    ),
    Sampler("top_k", ("top_k",), lambda p: p.top_k > 0, filters=True),
    Sampler("top_a", ("top_a",), lambda p: p.top_a > 0, filters=True),
    Sampler("typical_p", ("typical_p",), lambda p: p.typical_p < 1, filters=True, names=("typ_p", "typical", "typ")),
    Sampler("tfs", ("tfs",), lambda p: p.tfs < 1, filters=True, names=("tfs_z", "tail_free", "tail_free_sampling")),
    Sampler("top_p", ("top_p",), lambda p: p.top_p < 1, filters=True, names=("nucleus",)),
    Sampler("epsilon_cutoff", ("epsilon_cutoff",), lambda p: p.epsilon_cutoff > 0, filters=True),
    Sampler("eta_cutoff", ("eta_cutoff",), lambda p: p.eta_cutoff > 0, filters=True),
    Sampler("min_p", ("min_p",), lambda p: p.min_p > 0, filters=True),
    Sampler(
        "xtc",
        ("xtc_probability", "xtc_threshold"),
        lambda p: p.xtc_probability > 0 and p.xtc_threshold <= 0.5,
        filters=True,
    ),
    Sampler(
        "adaptive_p", ("adaptive_target", "adaptive_decay"), lambda p: p.adaptive_target >= 0, filters=True, ends=True
    ),
    Sampler("mirostat", _MIROSTAT, lambda p: p.mirostat > 0, ends=True),
)
"""In the usual order."""

BY_NAME: Mapping[str, Sampler] = MappingProxyType({sampler.name: sampler for sampler in SAMPLERS})
_CALLED: Mapping[str, str] = MappingProxyType(
    {name: sampler.name for sampler in SAMPLERS for name in (sampler.name, *sampler.names)}
)
LOOK_BACK = frozenset(("penalties", "no_repeat_ngram", "dry", "watermark"))
"""Those that look at the tokens so far, those of the prompt included."""
LEARNING = frozenset(("adaptive_p", "mirostat"))
"""Those whose next draw depends on what the last ones were like; they end their chains."""
_USUAL = frozenset(("penalties", "temperature", "top_k", "typical_p", "top_p", "min_p"))
_LETTERS: Mapping[str, str] = MappingProxyType(
    {
        "e": "penalties",
        "d": "dry",
        "s": "top_n_sigma",
        "k": "top_k",
        "y": "typical_p",
        "p": "top_p",
        "m": "min_p",
        "x": "xtc",
        "t": "temperature",
        "a": "adaptive_p",
    }
)
"""What llama.cpp calls them in `--sampling-seq`."""
_KOBOLD: tuple[tuple[str, ...], ...] = (
    ("top_k",),
    ("top_a",),
    ("top_p", "min_p"),
    ("tfs",),
    ("typical_p",),
    ("temperature", "smoothing"),
    ("penalties",),
)
"""By the numbers of KoboldAI's and KoboldCpp's `sampler_order`, what each runs."""


def _plain(params: SamplerParams, sampler: Sampler) -> bool:
    """Whether a usual sampler has no more than its usual parameters."""
    if sampler.name == "penalties":
        return params.repeat_last_n < 0 and params.repetition_decay == 0
    return sampler.name != "temperature" or params.dynatemp_range == 0


def check_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """Raises ParameterError unless value is a finite number in [low, high] ((low, high] if `above`)."""
    right = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not right or (above and value == low):
        raise ParameterError(name, value, f"a finite number in {'(' if above else '['}{low:g}, {high:g}]")


def check_integer(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """Raises ParameterError unless value is an int (not bool) in [low, high] ((low, high] if `above`)."""
    if isinstance(value, bool) or not isinstance(value, int) or not low + above <= value <= high:
        raise ParameterError(name, value, f"an integer from {int(low) + above} to {int(high)}")


def check_switches(params: object, *names: str) -> None:
    """Raises ParameterError for one of these fields that is neither true nor false."""
    for name in names:
        if not isinstance(value := getattr(params, name), bool):
            raise ParameterError(name, value, "true or false")


def check_texts(name: str, texts: tuple[Any, ...], most: int, chars: int = limits.MAX_STOP_CHARS) -> None:
    """Raises ParameterError for texts that are too many, too long, empty or no strings."""
    if len(texts) > most:
        raise ParameterError(name, f"{len(texts)} strings", f"at most {most}")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= chars:
            raise ParameterError(name, text, f"non-empty strings of at most {chars} characters")


def check_banned(texts: tuple[Any, ...]) -> None:
    """Raises ParameterError for banned strings that are too many, too long, empty or no strings."""
    name = "banned_strings"
    check_texts(name, texts, limits.MAX_BANNED_STRINGS, limits.MAX_BANNED_STRING_CHARS)
    if sum(map(len, texts)) > limits.MAX_BANNED_CHARS:
        raise ParameterError(name, "too long", f"at most {limits.MAX_BANNED_CHARS} characters in all")


def as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """A list or tuple as a tuple, and of no value for None; raises ParameterError for anything else."""
    if value is not None and not isinstance(value, (list, tuple)):
        raise ParameterError(name, value, "a list or tuple")
    return tuple(value or ())


def check_token_ids(name: str, ids: tuple[int, ...], most: int) -> None:
    """Raises ParameterError unless these are at most so many ints (not bool) from 0 on."""
    if len(ids) > most:
        raise ParameterError(name, f"{len(ids)} entries", f"at most {most} token ids")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= limits.MAX_TOKEN_ID:
            raise ParameterError(name, token, f"token ids from 0 to {limits.MAX_TOKEN_ID}")


def _check_breakers(breakers: tuple[str, ...]) -> None:
    name, most = "dry_sequence_breakers", limits.MAX_BREAKER_CHARS
    if len(breakers) > limits.MAX_BREAKERS:
        raise ParameterError(name, f"{len(breakers)} strings", f"at most {limits.MAX_BREAKERS}")
    for text in breakers:
        if not isinstance(text, str) or not 0 < len(text) <= most:
            raise ParameterError(name, text, f"non-empty strings of at most {most} characters")


def _check_mask(mask: object) -> None:
    most = limits.MAX_ALLOWED_TOKEN_IDS // 8
    if not isinstance(mask, bytes) or len(mask) > most:
        raise ParameterError("dry_breaker_mask", type(mask).__name__, f"bytes, at most {most}")


def _breaker_sequences(sequences: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    name, most = "dry_breaker_sequences", limits.MAX_BREAKER_TOKENS
    if len(sequences) > limits.MAX_BREAKER_SEQUENCES:
        raise ParameterError(name, f"{len(sequences)} sequences", f"at most {limits.MAX_BREAKER_SEQUENCES}")
    checked = tuple(filter(None, (as_tuple(name, sequence) for sequence in sequences)))
    if sum(map(len, checked)) > most:
        raise ParameterError(name, "too long", f"at most {most} tokens in all")
    for sequence in checked:
        check_token_ids(name, sequence, most)
    return checked


def _plain_name(name: object) -> str:
    """A name as `_CALLED` has it; "" for what is none, or too long to be one."""
    named = isinstance(name, str) and len(name) <= limits.MAX_SAMPLER_CHARS
    return name.strip().lower().replace("-", "_") if named else ""  # type: ignore[attr-defined]


def _called(param: str, name: object) -> str:
    """The name that a sampler has here."""
    plain = _plain_name(name)
    if plain in _CALLED:
        return _CALLED[plain]
    near = get_close_matches(plain, _CALLED, 1)
    hint = f"; the nearest to it is {near[0]}" if near else ""
    raise ParameterError(param, name, f"names of samplers ({', '.join(BY_NAME)}){hint}")


def _check_count(param: str, names: Sequence[object]) -> None:
    if len(names) > limits.MAX_SAMPLERS:
        raise ParameterError(param, f"{len(names)} samplers", f"at most {limits.MAX_SAMPLERS}")


def sampler_names(samplers: object, param: str = "samplers") -> tuple[str, ...]:
    """An order as names, from names or from llama.cpp's letters ("edskypmxt"); each counts where it is first.

    Raises:
        ParameterError: a name or letter that no sampler has.
    """
    if isinstance(samplers, str) and _plain_name(samplers) in _CALLED:
        samplers = (samplers,)
    if isinstance(samplers, str) and ";" in samplers:
        samplers = samplers.split(";", limits.MAX_SAMPLERS)
    if isinstance(samplers, str):
        _check_count(param, samplers)
        for letter in samplers:
            if letter not in _LETTERS:
                allowed = ", ".join(f"{one} ({name})" for one, name in _LETTERS.items())
                raise ParameterError(param, letter, f"a string of the letters {allowed}, or a list of names")
        return tuple(dict.fromkeys(_LETTERS[letter] for letter in samplers))
    names = as_tuple(param, samplers)
    _check_count(param, names)
    return tuple(dict.fromkeys(_called(param, name) for name in names))


def priority_names(priority: object, param: str = "sampler_priority") -> tuple[str, ...]:
    """The order that text-generation-webui's `sampler_priority` stands for: samplers it leaves out run first.

    It is a list of names, or a text of one a line. encoder_repetition_penalty, which needs an encoder, says nothing.

    Raises:
        ParameterError: a name that no sampler has.
    """
    if isinstance(priority, str):
        priority = [name for name in priority.replace(",", "\n").splitlines() if name.strip()]
    names = [name for name in as_tuple(param, priority) if name != "encoder_repetition_penalty"]
    named = sampler_names(names, param)
    return (*(name for name in BY_NAME if name not in named), *named)


def order_names(order: object, param: str = "sampler_order") -> tuple[str, ...]:
    """The order that KoboldAI's `sampler_order` stands for, a list of numbers from 0 to 6.

    DRY, n-grams and watermarks come first and top-n-sigma, cut-offs, XTC and adaptive-p last, as in KoboldCpp.

    Raises:
        ParameterError: another number.
    """
    numbers = as_tuple(param, order)
    _check_count(param, numbers)
    for number in numbers:
        check_integer(param, number, 0, len(_KOBOLD) - 1)
    named = dict.fromkeys(name for number in numbers for name in _KOBOLD[number])
    before = ("no_repeat_ngram", "dry", "watermark")
    after = ("top_n_sigma", "epsilon_cutoff", "eta_cutoff", "xtc", "adaptive_p", "mirostat")
    return (*before, *named, *after)
