"""What every sampler does to a distribution, worked out from its definition alone, in plain Python.

None of it is shared with the package: tests compare draws with what comes out here.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.kernels.reference.chain import is_green

Weights = dict[int, float]
"""Token → logit."""


def softmax(z: Weights) -> Weights:
    most = max(z.values())
    total = math.fsum(math.exp(v - most) for v in z.values())
    return {t: math.exp(v - most) / total for t, v in z.items()}


def ranked(z: Weights) -> list[int]:
    return sorted(z, key=lambda t: (-z[t], t))


def kept(z: Weights, keep: Callable[[int], bool]) -> Weights:
    return {t: v for t, v in z.items() if keep(t)}


def entropy(z: Weights) -> float:
    return -math.fsum(p * math.log(p) for p in softmax(z).values())


def top_n_sigma(z: Weights, n: float) -> Weights:
    values = list(z.values())
    return kept(z, lambda t: z[t] >= max(values) - n * float(np.std(values)))


def top_a(z: Weights, a: float) -> Weights:
    p = softmax(z)
    return kept(z, lambda t: p[t] >= a * max(p.values()) ** 2)


def tail_free(z: Weights, mass: float) -> Weights:
    if len(z) < 3:
        return z
    p, order = softmax(z), ranked(z)
    first = [p[a] - p[b] for a, b in itertools.pairwise(order)]
    second = [abs(a - b) for a, b in itertools.pairwise(first)]
    reached, count = 0.0, 1
    for bend in second:
        reached += bend / sum(second)
        if reached > mass:
            break
        count += 1
    return kept(z, lambda t: t in order[:count])


def eta(z: Weights, epsilon: float) -> Weights:
    p, limit = softmax(z), min(epsilon, math.sqrt(epsilon) * math.exp(-entropy(z)))
    return kept(z, lambda t: p[t] >= limit or p[t] == max(p.values()))


def top_p(z: Weights, mass: float) -> Weights:
    p, chosen, reached = softmax(z), set(), 0.0
    for token in ranked(z):
        chosen.add(token)
        reached += p[token]
        if reached >= mass:
            break
    return kept(z, lambda t: t in chosen)


def dynamic(z: Weights, low: float, high: float, exponent: float) -> Weights:
    heat = low + (high - low) * (entropy(z) / math.log(len(z))) ** exponent
    return {t: v / heat for t, v in z.items()}


def smooth(z: Weights, factor: float, curve: float) -> Weights:
    most, k, s = max(z.values()), (3 - curve) / 2, (curve - 1) / 2
    return {t: -k * factor * (v - most) ** 2 + s * factor * (v - most) ** 3 + most for t, v in z.items()}


def excluded(z: Weights, threshold: float) -> Weights:
    p, order = softmax(z), ranked(z)
    choices = [t for t in order if p[t] >= threshold]
    return kept(z, lambda t: t not in choices[:-1])


def adapted(z: Weights, wanted: float) -> Weights:
    distance = {t: abs(p - wanted) / 0.3 for t, p in softmax(z).items()}
    return {t: 5 - 10 * d * d / (1 + d) for t, d in distance.items()}


def surprising(z: Weights, most: float) -> Weights:
    p = softmax(z)
    return kept(z, lambda t: -math.log2(p[t]) <= most or t == ranked(z)[0])


def zipf(z: Weights, mu: float, vocab: int) -> Weights:
    p, order = softmax(z), ranked(z)
    t = [math.log((i + 2) / (i + 1)) for i in range(len(order) - 1)]
    b = [math.log(p[one] / p[other]) for one, other in itertools.pairwise(order)]
    s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
    k = ((s - 1) * 2**mu / (1 - vocab ** -(s - 1))) ** (1 / s)
    return kept(z, lambda token: token in order[: max(int(k), 1)])


def min_p(z: Weights, share: float) -> Weights:
    return kept(z, lambda t: math.exp(z[t] - max(z.values())) >= share)


def top_k(z: Weights, k: int) -> Weights:
    return kept(z, lambda t: t in ranked(z)[:k])


def typical(z: Weights, mass: float) -> Weights:
    p, h = softmax(z), entropy(z)
    chosen, reached = set(), 0.0
    for token in sorted(z, key=lambda t: abs(-math.log(p[t]) - h)):
        chosen.add(token)
        reached += p[token]
        if reached >= mass:
            break
    return kept(z, lambda t: t in chosen)


def epsilon(z: Weights, least: float) -> Weights:
    p = softmax(z)
    return kept(z, lambda t: p[t] >= least or t == ranked(z)[0])


def heated(z: Weights, heat: float) -> Weights:
    return {ranked(z)[0]: 0.0} if heat == 0 else {t: v / heat for t, v in z.items()}


def penalised(z: Weights, prompt: Sequence[int], output: Sequence[int], p: dict[str, Any]) -> Weights:
    """Strength is 1 for the last `repeat_last_n` tokens and falls to nothing over the `repetition_decay` before."""
    said = [*prompt, *output]
    last, decay = p.get("repeat_last_n", -1), p.get("repetition_decay", 0)

    def strength(back: int) -> float:
        if last < 0 or back < last:
            return 1.0
        return max(0.0, 1 - (back - last) / decay) if decay else 0.0

    backs = {t: [b for b, one in enumerate(reversed(said)) if one == t and strength(b) > 0] for t in set(said)}
    out = dict(z)
    for t, places in backs.items():
        if t not in out or not places:
            continue
        factor = 1 + (p.get("repetition_penalty", 1.0) - 1) * strength(min(places))
        out[t] = out[t] / factor if out[t] > 0 else out[t] * factor
        generated = [strength(b) for b in places if b < len(output)]
        out[t] -= p.get("frequency_penalty", 0.0) * sum(generated)
        out[t] -= p.get("presence_penalty", 0.0) * max(generated, default=0.0)
    return out


def without_ngrams(z: Weights, said: Sequence[int], size: int) -> Weights:
    end = tuple(said[len(said) - size + 1 :])
    banned = {said[i + size - 1] for i in range(len(said) - size + 1) if tuple(said[i : i + size - 1]) == end}
    return kept(z, lambda t: t not in banned) or z


def dried(z: Weights, said: Sequence[int], multiplier: float, base: float, allowed: int) -> Weights:
    """By trying every length at every token."""
    out = dict(z)
    for t in z:
        longest = max(
            (
                n
                for n in range(1, len(said))
                for i in range(n, len(said))
                if said[i] == t and said[i - n : i] == said[-n:]
            ),
            default=0,
        )
        if longest >= allowed and longest:
            out[t] -= multiplier * base ** (longest - allowed)
    return out


def green(z: Weights, before: int, gamma: float, delta: float, key: int) -> Weights:
    """The list itself is the package's: nothing else says who is in it."""
    listed = is_green(np.array(list(z)), before, gamma, key)
    return {t: v + delta * bool(one) for (t, v), one in zip(z.items(), listed, strict=True)}


Branches = list[tuple[float, Weights]]
"""Chances, and what is left with each: XTC acts now and then."""


def _mixed(name: str, p: dict[str, Any], z: Weights) -> Branches:
    """Both ways that XTC may go; one of all others."""
    if name == "xtc":
        return [(p["xtc_probability"], excluded(z, p["xtc_threshold"])), (1 - p["xtc_probability"], z)]
    return [(1.0, z)]


def step(name: str, p: dict[str, Any], z: Weights, prompt: Sequence[int], output: Sequence[int], vocab: int) -> Weights:
    """What a sampler of a chain leaves of a distribution."""
    said = [*prompt, *output]
    middle, reach = p.get("temperature", 1.0), p.get("dynatemp_range", 0.0)
    known: dict[str, Callable[[], Weights]] = {
        "penalties": lambda: penalised(z, prompt, output, p),
        "no_repeat_ngram": lambda: without_ngrams(z, said, p["no_repeat_ngram_size"]),
        "dry": lambda: dried(z, said, p["dry_multiplier"], p["dry_base"], p["dry_allowed_length"]),
        "watermark": lambda: green(z, said[-1], p["watermark_gamma"], p["watermark_delta"], p["watermark_key"]),
        "top_n_sigma": lambda: top_n_sigma(z, p["top_n_sigma"]),
        "temperature": lambda: (
            dynamic(z, max(0.0, middle - reach), middle + reach, p["dynatemp_exponent"])
            if reach and len(z) > 1
            else heated(z, middle)
        ),
        "smoothing": lambda: smooth(z, p["smoothing_factor"], p["smoothing_curve"]),
        "top_k": lambda: top_k(z, p["top_k"]),
        "top_a": lambda: top_a(z, p["top_a"]),
        "typical_p": lambda: typical(z, p["typical_p"]),
        "tfs": lambda: tail_free(z, p["tfs"]),
        "top_p": lambda: top_p(z, p["top_p"]),
        "epsilon_cutoff": lambda: epsilon(z, p["epsilon_cutoff"] * 1e-4),
        "eta_cutoff": lambda: eta(z, p["eta_cutoff"] * 1e-4),
        "min_p": lambda: min_p(z, p["min_p"]),
        "xtc": lambda: z,
        "adaptive_p": lambda: adapted(z, p["adaptive_target"]),
        "mirostat": lambda: (
            zipf(z, 2 * p["mirostat_tau"], vocab)
            if p["mirostat"] == 1 and len(z) > 1
            else z
            if len(z) == 1
            else surprising(z, 2 * p["mirostat_tau"])
        ),
    }
    return known[name]()


def exact(
    chain: Sequence[str], p: dict[str, Any], z: Weights, prompt: Sequence[int], output: Sequence[int]
) -> dict[int, float]:
    """The probabilities of a first draw after a chain of samplers, by token."""
    branches: Branches = [(1.0, z)]
    for name in chain:
        branches = [
            (chance * share, step(name, p, one, prompt, output, len(z)))
            for chance, left in branches
            for share, one in _mixed(name, p, left)
        ]
    found: Counter[int] = Counter()
    for chance, left in branches:
        for token, probability in softmax(left).items():
            found[token] += chance * probability  # type: ignore[assignment]
    return dict(found)
