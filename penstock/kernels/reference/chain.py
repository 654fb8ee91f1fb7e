"""Chains of samplers in plain numpy and float64, one function a sampler: what every other implementation must equal.

Each takes the tokens still possible and changes their logits, or takes some away. Where it says so in the parameters
of `config.samplers.SamplerParams` it is off, and not in a chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from penstock.config.token_mask import masked_tokens
from penstock.kernels.reference.noise import noise, random_bits, scores
from penstock.kernels.sampling import CHAIN_BOUND, MASS_SLACK, XTC_TOKEN, RowSettings

Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_LEAST_TEMPERATURE = 1e-30
_MIROSTAT_TOKENS = 100  # that the exponent of the distribution is estimated from
_LARGEST_EXPONENT = 88.7228391  # of e, of a float32: what DRY's penalty is held to


@dataclass(slots=True, eq=False)
class Candidates:
    """The tokens still possible, and what a sampler may know beside them.

    Attributes:
        ids: [n], ascending.
        values: [n] logits, finite.
        settings: the row's.
        history: prompt and generated tokens.
        position: absolute, of the token that is drawn.
        state: what the row's last sampler has learned: Mirostat's mu, or adaptive-p's sum and weight; [] at first.
        before: [n] probabilities of which adaptive-p learns; None for those of the draw.
    """

    ids: Ids
    values: Doubles
    settings: RowSettings
    history: Sequence[int]
    position: int
    state: list[float] = field(default_factory=list)
    before: Doubles | None = None

    def keep(self, chosen: npt.NDArray[np.bool_] | Ids) -> None:
        self.ids, self.values = self.ids[chosen], self.values[chosen]

    def change(self, values: Doubles) -> None:
        self.values = np.clip(values, -CHAIN_BOUND, CHAIN_BOUND)

    def probabilities(self) -> Doubles:
        weights = np.exp(self.values - self.values.max())
        return np.asarray(weights / weights.sum())

    def order(self) -> Ids:
        """Places by falling logit; of equal ones the lower id comes first."""
        return np.argsort(-self.values, kind="stable")

    def keep_mass(self, order: Ids, mass: float) -> None:
        """Keeps the shortest beginning of `order` with this probability."""
        reached = np.cumsum(self.probabilities()[order]) >= mass - MASS_SLACK
        count = int(np.argmax(reached)) + 1 if reached.any() else len(order)
        self.keep(np.sort(order[:count]))

    def entropy(self) -> float:
        p = self.probabilities()
        return float(-np.sum(np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0)))

    def penalise(self, penalties: Mapping[int, float]) -> None:
        """Takes these off the logits of tokens."""
        where = {int(token): at for at, token in enumerate(self.ids)}
        values = self.values.copy()
        for token, penalty in penalties.items():
            if token in where:
                values[where[token]] -= penalty
        self.change(values)


@dataclass(slots=True)
class Said:
    """Of a token that was said: the strength of its last occurrence, and the sum and largest of those generated."""

    strength: float
    times: float = 0.0
    once: float = 0.0


def penalties(c: Candidates, repetition: float, presence: float, frequency: float, last: float, decay: float) -> None:
    """Keskar et al. 2019 (1909.05858) and OpenAI's. Range and decay are ExLlamaV2's: over the `decay` tokens before
    the last ones strength falls to nothing, and a token's is that of its last occurrence. As elsewhere here
    repetition looks at prompt and output, the other two at the output."""
    prompt = len(c.settings.prompt_ids)
    sustain = len(c.history) if last < 0 else int(last)
    said: dict[int, Said] = {}
    for back, token in enumerate(reversed(c.history)):
        fade = 0.0 if back < sustain else (back - sustain) / decay if decay else 1.0
        if fade >= 1.0:
            break
        found = said.setdefault(token, Said(1.0 - fade))
        if len(c.history) - 1 - back >= prompt:
            found.times += 1.0 - fade
            found.once = max(found.once, 1.0 - fade)
    values = c.values.copy()
    for at, token in enumerate(c.ids.tolist()):
        if token in said:
            factor = 1.0 + (repetition - 1.0) * said[token].strength
            value = values[at] / factor if values[at] > 0 else values[at] * factor
            values[at] = value - frequency * said[token].times - presence * said[token].once
    c.change(values)


def repeats(history: Sequence[int], longest: int) -> list[int]:
    """[n]: by k, how many tokens before the last k are those at the end, up to `longest` (Z-algorithm, backwards)."""
    tokens = list(reversed(history))
    found = [0] * len(tokens)
    left = right = 0  # the box [left, right) that reaches farthest and repeats the beginning
    for k in range(1, len(tokens)):
        length = min(found[k - left], right - k) if k < right else 0
        if k + length >= right:
            while k + length < len(tokens) and tokens[length] == tokens[k + length]:
                length += 1
            left, right = k, k + length
        found[k] = length
    return [min(length, longest) for length in found]


def no_repeat_ngram(c: Candidates, size: float) -> None:
    """Paulus et al. 2017 (1705.04304), as in fairseq and transformers: the last token of an n-gram that there is."""
    found = repeats(c.history, int(size) - 1)
    banned = {c.history[-k] for k, length in enumerate(found) if k and length >= size - 1}
    if size == 1:
        banned.update(c.history)
    chosen = np.array([token not in banned for token in c.ids.tolist()], bool)
    if chosen.any():  # what nothing else is left of stays, so that an answer can end
        c.keep(chosen)


def dry(c: Candidates, multiplier: float, base: float, allowed: float, last: float) -> None:
    """DRY, "don't repeat yourself" (p-e-w; text-generation-webui pull request 5677, as in llama.cpp)."""
    window = list(c.history if last < 0 else c.history[-int(last) :])
    limit = _unbroken(window, c.settings)
    if len(window) <= allowed or limit < allowed:
        return
    longest: dict[int, int] = {}
    for k, length in enumerate(repeats(window, limit)):
        if k and length >= allowed:
            token = window[-k]
            longest[token] = max(longest.get(token, 0), length)
    most = math.floor(_LARGEST_EXPONENT / math.log(base)) if base > 1.000001 else math.inf
    free = _single(c.settings)
    c.penalise(
        {
            token: multiplier * base ** min(length - allowed, most)
            for token, length in longest.items()
            if token not in free
        }
    )


def _single(settings: RowSettings) -> set[int]:
    """Tokens that are sequence breakers by themselves."""
    return masked_tokens(settings.breaker_mask) | {s[0] for s in settings.breaker_sequences if len(s) == 1}


def _unbroken(window: Sequence[int], settings: RowSettings) -> int:
    """How many tokens at the end are behind the last sequence breaker, which are all that a repetition may have."""
    single = _single(settings)
    for back in range(len(window)):
        at = len(window) - 1 - back
        lengths = [len(s) for s in settings.breaker_sequences if tuple(window[at : at + len(s)]) == s]
        if window[at] in single:
            lengths.append(1)
        if lengths:
            return back + 1 - max(lengths)
    return len(window)


def watermark(c: Candidates, gamma: float, delta: float, key: float) -> None:
    """Kirchenbauer et al. 2023 (2301.10226), left hashing of one token; the list's members are told one by one."""
    before = c.history[-1] if c.history else 0
    c.change(c.values + delta * is_green(c.ids, before, gamma, int(key)))


def is_green(tokens: Ids, before: int, gamma: float, key: int) -> npt.NDArray[np.bool_]:
    """Which tokens [n] are of the list behind the token `before`."""
    return np.asarray(random_bits(key, before, 2**63, tokens) < np.uint64(int(gamma * 2.0**32)))


def top_n_sigma(c: Candidates, n: float) -> None:
    """Tang et al. 2024 (2411.07641)."""
    spread = float(np.sqrt(np.mean((c.values - c.values.mean()) ** 2)))
    c.keep(c.values >= c.values.max() - n * spread)


def temperature(c: Candidates, middle: float, reach: float, exponent: float) -> None:
    """Temperature; with a range, by the entropy (kalomaze's dynamic temperature, as in llama.cpp)."""
    if reach > 0 and len(c.ids) > 1:
        low, high = max(0.0, middle - reach), middle + reach
        share = min(max(c.entropy() / math.log(len(c.ids)), 0.0), 1.0)
        middle = low + (high - low) * share**exponent
    if middle == 0.0:
        c.keep(c.order()[:1])
    else:
        c.change(c.values * (1.0 / max(middle, _LEAST_TEMPERATURE)))


def smoothing(c: Candidates, factor: float, curve: float) -> None:
    """kalomaze's quadratic sampling, as in text-generation-webui and KoboldCpp."""
    distance = c.values - c.values.max()
    square, cube = factor * (3.0 - curve) / 2.0, factor * (curve - 1.0) / 2.0
    c.change(c.values.max() + (cube * distance - square) * distance * distance)


def top_k(c: Candidates, k: float) -> None:
    """The k largest logits."""
    c.keep(np.sort(c.order()[: int(k)]))


def top_a(c: Candidates, a: float) -> None:
    """BlinkDL's, as in KoboldAI."""
    p = c.probabilities()
    c.keep(p >= a * p.max() ** 2)


def typical_p(c: Candidates, mass: float) -> None:
    """The locally typical set (Meister et al. 2022, 2202.00666): surprise nearest to the entropy first."""
    distances = c.values - c.values.max()
    surprise = math.log(float(np.exp(distances).sum())) - distances
    c.keep_mass(np.argsort(np.abs(surprise - c.entropy()), kind="stable"), mass)


def tfs(c: Candidates, z: float) -> None:
    """Tail free sampling (Phénix and Egan 2019), as in KoboldAI: one more than the curvature reaches, and not the
    last."""
    if len(c.ids) < 3:
        return
    order = c.order()
    curvature = np.abs(np.diff(np.diff(c.probabilities()[order])))
    total = curvature.sum()
    shares = curvature / total if total > 1e-6 else np.full(len(curvature), 1.0 / len(curvature))
    c.keep(np.sort(order[: 1 + int(np.sum(np.cumsum(shares) <= z + MASS_SLACK))]))


def top_p(c: Candidates, mass: float) -> None:
    """Holtzman et al. 2019 (1904.09751)."""
    c.keep_mass(c.order(), mass)


def epsilon_cutoff(c: Candidates, parts: float) -> None:
    """Hewitt et al. 2022 (2210.15191), in units of 1e-4."""
    p = c.probabilities()
    c.keep(p >= min(parts * 1e-4, p.max()))


def eta_cutoff(c: Candidates, parts: float) -> None:
    """Hewitt et al. 2022 (2210.15191), in units of 1e-4."""
    p, epsilon = c.probabilities(), parts * 1e-4
    c.keep(p >= min(epsilon, math.sqrt(epsilon) * math.exp(-c.entropy()), p.max()))


def min_p(c: Candidates, share: float) -> None:
    """Nguyen et al. 2024 (2407.01082)."""
    c.keep(c.values - c.values.max() >= math.log(share))


def xtc(c: Candidates, probability: float, threshold: float) -> None:
    """Exclude top choices (p-e-w; text-generation-webui pull request 6335); its chance is a number of the row's own
    random stream."""
    s = c.settings
    chance = int(random_bits(s.seed, s.sequence, c.position, np.array([XTC_TOKEN]))[0])
    if chance >= int(probability * 2.0**32):
        return
    p, order = c.probabilities(), c.order()
    count = int(np.sum(p >= threshold))
    if count > 1 and not set(c.ids[order[: count - 1]].tolist()) & set(s.protected_ids):
        c.keep(np.sort(order[count - 1 :]))


def adaptive_p(c: Candidates, target: float, decay: float) -> None:
    """Adaptive-p (MrJackSpade; llama.cpp pull request 17927)."""
    if not c.state:
        c.state = [target / (1.0 - decay), 1.0 / (1.0 - decay)]
    wanted = min(max(2.0 * target - c.state[0] / c.state[1], 0.0), 1.0)
    c.before = c.probabilities()
    distance = np.abs(c.before - wanted) / 0.3
    c.change(5.0 - 10.0 * distance * distance / (1.0 + distance))


def mirostat(c: Candidates, version: float, tau: float, eta: float) -> None:
    """Basu et al. 2020 (2007.14966), both versions as in llama.cpp; surprise is in bits."""
    if not c.state:
        c.state = [2.0 * tau]
    order = c.order()
    p = c.probabilities()[order]
    if version == 1:
        count = _mirostat_count(p, c.state[0], c.settings.vocab_size)
    else:
        count = int(np.sum(_surprise(c)[order] <= c.state[0]))
    c.keep(np.sort(order[: max(count, 1)]))


def _surprise(c: Candidates) -> Doubles:
    """[n], in bits."""
    distances = c.values - c.values.max()
    return np.asarray((math.log(float(np.exp(distances).sum())) - distances) / math.log(2.0))


def _mirostat_count(p: Doubles, mu: float, vocab: int) -> int:
    """How many tokens the first version keeps, from the exponent of Zipf's law that the first tokens follow."""
    head = p[: min(_MIROSTAT_TOKENS, len(p))]
    head = head[head > 1e-300]
    ranks = np.arange(1, len(head))
    t, b = np.log((ranks + 1) / ranks), np.log(head[:-1] / head[1:])
    squares = float(np.sum(t * t))
    exponent = float(np.sum(t * b)) / squares if squares > 0 else 0.0
    epsilon = exponent - 1.0
    if exponent <= 0.0:
        return 1 if squares == 0 else len(p)
    part = epsilon / (1.0 - vocab**-epsilon) if abs(epsilon) > 1e-9 else 1.0 / math.log(max(vocab, 2))
    power = (math.log(part) + mu * math.log(2.0)) / exponent
    return len(p) if power >= math.log(len(p)) else int(math.exp(power))


SAMPLERS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {
        sampler.__name__: sampler
        for sampler in (
            penalties, no_repeat_ngram, dry, watermark, top_n_sigma, temperature, smoothing, top_k, top_a, typical_p,
            tfs, top_p, epsilon_cutoff, eta_cutoff, min_p, xtc, adaptive_p, mirostat,
        )
    }
)  # fmt: skip


def left_by_chain(
    logits: npt.NDArray[np.float32],
    settings: RowSettings,
    history: Sequence[int],
    position: int,
    state: Sequence[float],
) -> Candidates:
    """What a row's chain leaves of logits [V], masks applied; at least one is above -inf."""
    ids = np.flatnonzero(logits > -np.inf)
    found = Candidates(ids, logits[ids].astype(np.float64), settings, history, position, list(state))
    for name, values in settings.chain:
        SAMPLERS[name](found, *values)
    return found


def draw(c: Candidates) -> int:
    """The token drawn from what a chain left, from which its last sampler learns."""
    drawn = noise(c.settings.seed, c.settings.sequence, c.position, c.ids)
    at = int(np.argmax(scores(c.values - c.values.max(), drawn)))
    name, values = c.settings.chain[-1]
    if name == "mirostat":
        c.state[0] -= values[2] * (float(_surprise(c)[at]) - values[1])
    if name == "adaptive_p" and c.before is not None:
        c.state = [float(c.before[at]) + values[1] * c.state[0], 1.0 + values[1] * c.state[1]]
    return int(c.ids[at])
