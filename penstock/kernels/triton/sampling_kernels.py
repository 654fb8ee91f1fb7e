"""The sampling chain on the device: masks and penalties, filters without a sort, a counter-based draw.

A filter keeps the tokens whose key, the logit's bits and behind them the id, is at or above one threshold, which is
found by bisection: no two keys are equal, so that ties fall to lower ids as everywhere. Only candidates take part:
tokens above a bound that the largest logits of each CHUNK of the vocabulary, or a nucleus' mass, give. Probabilities
are float64.

Rows of the table of settings hold FIELDS numbers of 64 bits, floats and integers, in the order of the constants below.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.noise import noise, score
from penstock.kernels.triton.numbers import wide

CHUNK = tl.constexpr(1024)
FIELDS = tl.constexpr(18)
SCALE = tl.constexpr(0)  # 1 / temperature, or 0: take the largest
TOP_P = tl.constexpr(1)  # the mass to reach; above 1 where there is no such filter, here and in TYPICAL_P
TYPICAL_P = tl.constexpr(2)
MIN_P = tl.constexpr(3)  # logarithm, or -inf
BOUND = tl.constexpr(4)  # least scaled distance from the largest logit that can matter, but for TOP_K
REPETITION = tl.constexpr(5)
PRESENCE = tl.constexpr(6)
FREQUENCY = tl.constexpr(7)
SEED = tl.constexpr(8)
SEQUENCE = tl.constexpr(9)
POSITION = tl.constexpr(10)
TOP_K = tl.constexpr(11)
COUNTS = tl.constexpr(12)  # address of [V] int32, 2 · times generated + whether in the prompt; or 0
BIAS = tl.constexpr(13)  # address of [V] float64, or 0
MASK = tl.constexpr(14)  # row of the masks, or -1
FILTERED = tl.constexpr(15)  # whether any filter is on
DRAFTS = tl.constexpr(16)  # address of the row's drafts, int64; or 0: `choose` counts the token
AHEAD = tl.constexpr(17)  # how many of them are taken as generated before this one's place

_LARGEST = tl.constexpr(3.4028234663852886e38)
_NOT_FINITE = tl.constexpr(1)
_NOTHING_ALLOWED = tl.constexpr(2)
_NEVER = tl.constexpr(-(2**63))  # below every key


@triton.jit
def _to_logit(value):
    """float64 → float32; what overflows stays finite."""
    bounded = tl.minimum(tl.maximum(value, -_LARGEST), _LARGEST).to(tl.float32)
    return tl.where(value == float("-inf"), float("-inf"), bounded)


@triton.jit
def prepare(
    logits, ints, floats, masks, out, largest, places, wrong, vocab, stride, words, chunks, MASKED: tl.constexpr
):
    """Logits after bias, masks and penalties; of every chunk the largest, its token, and whether one is NaN or inf."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    value = wide(tl.load(logits + row * stride + token, mask=inside, other=float("-inf")))
    fine = tl.min((value < float("inf")).to(tl.int32), axis=0)  # neither NaN nor infinite
    tl.store(wrong + row * chunks + chunk, (1 - fine) * 2 + tl.max((value > float("-inf")).to(tl.int32), axis=0))
    bias = tl.load(ints + row * FIELDS + BIAS)
    if bias != 0:
        added = tl.load(bias.to(tl.pointer_type(tl.float64)) + token, mask=inside, other=0.0)
        value = tl.where(added == 0.0, value, _to_logit(value.to(tl.float64) + added))
    if MASKED:
        which = tl.load(ints + row * FIELDS + MASK)
        if which >= 0:
            word = tl.load(masks + which * words + token // 32, mask=inside, other=0)
            value = tl.where(((word >> (token % 32)) & 1) != 0, value, float("-inf"))
    counts = tl.load(ints + row * FIELDS + COUNTS)
    if counts != 0:
        count = tl.load(counts.to(tl.pointer_type(tl.int32)) + token, mask=inside, other=0)
        drafts = tl.load(ints + row * FIELDS + DRAFTS).to(tl.pointer_type(tl.int64))
        for draft in range(tl.load(ints + row * FIELDS + AHEAD)):
            count += tl.where(token == tl.load(drafts + draft), 2, 0)
        repetition = tl.load(floats + row * FIELDS + REPETITION)
        exact = value.to(tl.float64)
        exact = tl.where(exact > 0, exact / repetition, exact * repetition)
        times = (count // 2).to(tl.float64)
        exact_once = exact - tl.load(floats + row * FIELDS + FREQUENCY) * times
        once = exact_once - tl.load(floats + row * FIELDS + PRESENCE)
        exact = tl.where(count > 1, once, exact)
        value = tl.where(count != 0, _to_logit(exact), value)
    value = tl.where(value == 0.0, 0.0, value)  # -0 ranks as 0
    tl.store(out + row * vocab + token, value, mask=inside)
    best = tl.max(value, axis=0)
    tl.store(largest + row * chunks + chunk, best)
    tl.store(places + row * chunks + chunk, tl.min(tl.where(value == best, token, vocab), axis=0))


@triton.jit
def _chunk_values(values, row, chunks, other, CHUNKS: tl.constexpr):
    number = tl.arange(0, CHUNKS)
    return tl.load(values + row * chunks + number, mask=number < chunks, other=other)


@triton.jit
def weigh(logits, ints, floats, largest, sums, numbers, winners, cuts, vocab, chunks, CHUNKS: tl.constexpr):
    """Of each chunk the sum of weights, exp of scaled distances from the largest logit, and the count of candidates.

    Where there is no filter, the largest score of each chunk instead, and as the number the token that has it.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = _chunk_values(largest, row, chunks, float("-inf"), CHUNKS)
    most = tl.max(best, axis=0)
    scale = tl.load(floats + row * FIELDS + SCALE)
    cut = tl.load(floats + row * FIELDS + BOUND)
    top_k = tl.load(ints + row * FIELDS + TOP_K)
    if (top_k > 0) & (top_k <= chunks):  # so many chunks have one at least as large
        above = tl.sum((best[None, :] >= best[:, None]).to(tl.int32), axis=1)
        least = tl.max(tl.where(above >= top_k, best, float("-inf")), axis=0)
        cut = (least.to(tl.float64) - most.to(tl.float64)) * scale
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
    distance = (value.to(tl.float64) - most.to(tl.float64)) * scale
    possible = value > float("-inf")
    if tl.load(ints + row * FIELDS + FILTERED) == 0:
        best_score, drawn = _drawn(ints + row * FIELDS, token, distance, possible)
        tl.store(winners + row * chunks + chunk, best_score)
        tl.store(numbers + row * chunks + chunk, drawn.to(tl.int32))
        return
    tl.store(sums + row * chunks + chunk, tl.sum(tl.where(possible, tl.exp(distance), 0.0), axis=0))
    tl.store(numbers + row * chunks + chunk, tl.sum((possible & (distance >= cut)).to(tl.int32), axis=0))
    if chunk == 0:
        tl.store(cuts + row, cut)


@triton.jit
def mass(logits, largest, sums, vocab, chunks):
    """Of each chunk of a row of float32 logits the sum of exp(logit - the row's largest)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
    distance = value.to(tl.float64) - tl.load(largest + row).to(tl.float64)
    tl.store(sums + row * chunks + chunk, tl.sum(tl.exp(distance), axis=0))


@triton.jit
def total(sums, out, chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, tl.sum(_chunk_values(sums, row, chunks, 0.0, CHUNKS), axis=0))


@triton.jit
def _key(value, token):
    """int64 that sorts as (logit, lower id first)."""
    bits = value.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) + (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _value(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _token(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def gather(logits, ints, floats, largest, numbers, cuts, keys, vocab, chunks, CHUNKS: tl.constexpr):
    """The keys of candidates, by rising ids."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(ints + row * FIELDS + FILTERED) == 0:
        return
    most = tl.max(_chunk_values(largest, row, chunks, float("-inf"), CHUNKS), axis=0)
    number = _chunk_values(numbers, row, chunks, 0, CHUNKS)
    first = tl.sum(tl.where(tl.arange(0, CHUNKS) < chunk, number, 0), axis=0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
    distance = (value.to(tl.float64) - most.to(tl.float64)) * tl.load(floats + row * FIELDS + SCALE)
    taken = (value > float("-inf")) & (distance >= tl.load(cuts + row))
    place = first + tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(keys + row * vocab + place, _key(value, token), mask=taken)


@triton.jit
def _middle(low, high):
    """The average, rounded up, of integers whose difference may overflow."""
    return (low >> 1) + (high >> 1) + ((low | high) & 1)


@triton.jit
def _above(keys, count, threshold, most, scale, WEIGHS: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys are at or above a threshold, or their weight; float64."""
    total = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        key = tl.load(keys + place, mask=place < count, other=0)
        kept = (place < count) & (key >= threshold)
        distance = (_value(key).to(tl.float64) - most) * scale if WEIGHS else tl.zeros((BLOCK,), tl.float64)
        total += tl.where(kept, tl.exp(distance), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _threshold(keys, count, low, high, wanted, most, scale, WEIGHS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest threshold, from `low` to `high`, above which there is as much as wanted; else `low`."""
    while low < high:
        middle = _middle(low, high)
        enough = _above(keys, count, middle, most, scale, WEIGHS, BLOCK) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _strangeness(key, most, scale, logarithm, entropy):
    """How far the surprise of a token is from the entropy."""
    return tl.abs(logarithm - (_value(key).to(tl.float64) - most) * scale - entropy)


@triton.jit
def _ordinary(keys, count, low, most, scale, logarithm, entropy, far, last, BLOCK: tl.constexpr):
    """The weight of keys from `low` that are less strange than `far`, or as strange with an id up to `last`."""
    total = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        key = tl.load(keys + place, mask=place < count, other=0)
        distance = (_value(key).to(tl.float64) - most) * scale
        strange = _strangeness(key, most, scale, logarithm, entropy)
        kept = (strange < far) | ((strange == far) & (_token(key) <= last))
        total += tl.where((place < count) & (key >= low) & kept, tl.exp(distance), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _keep_typical(keys, count, low, most, scale, mass, BLOCK: tl.constexpr):
    """Strikes out the keys from `low` that are not of the locally typical set (Meister et al. 2022, 2202.00666)."""
    total = _above(keys, count, low, most, scale, True, BLOCK)
    logarithm = tl.log(total)
    spread = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        key = tl.load(keys + place, mask=place < count, other=0)
        distance = (_value(key).to(tl.float64) - most) * scale
        share = tl.where((place < count) & (key >= low), tl.exp(distance) / total, 0.0)
        spread += tl.where(share > 0, share * (logarithm - distance), 0.0)
    entropy = tl.sum(spread, axis=0)
    least = tl.zeros((), tl.int64)
    most_bits = tl.full((), 0x7FF0000000000000, tl.int64)  # of infinity
    while least < most_bits:
        middle = least + ((most_bits - least) >> 1)
        far = middle.to(tl.float64, bitcast=True)
        enough = _ordinary(keys, count, low, most, scale, logarithm, entropy, far, 0x7FFFFFFF, BLOCK) >= mass * total
        most_bits = tl.where(enough, middle, most_bits)
        least = tl.where(enough, least, middle + 1)
    far = least.to(tl.float64, bitcast=True)
    first, last = tl.zeros((), tl.int64), tl.full((), 0x7FFFFFFF, tl.int64)
    while first < last:
        middle = (first + last) >> 1
        enough = _ordinary(keys, count, low, most, scale, logarithm, entropy, far, middle, BLOCK) >= mass * total
        last = tl.where(enough, middle, last)
        first = tl.where(enough, first, middle + 1)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        key = tl.load(keys + place, mask=place < count, other=0)
        strange = _strangeness(key, most, scale, logarithm, entropy)
        kept = (key >= low) & ((strange < far) | ((strange == far) & (_token(key) <= last)))
        tl.store(keys + place, tl.where(kept, key, _NEVER), mask=place < count)
    tl.debug_barrier()  # other threads may read what this one struck out


@triton.jit
def _probable(keys, count, low, most, scale, limit, BLOCK: tl.constexpr):
    """The least key from `low` whose distance to the largest of them is at least `limit`."""
    top = tl.full((), _NEVER, tl.int64)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        key = tl.load(keys + place, mask=place < count, other=0)
        top = tl.maximum(top, tl.max(tl.where((place < count) & (key >= low), key, _NEVER), axis=0))
    nearest = (_value(top).to(tl.float64) - most) * scale
    least = top
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        key = tl.load(keys + place, mask=place < count, other=0)
        distance = (_value(key).to(tl.float64) - most) * scale - nearest
        kept = (place < count) & (key >= low) & (distance >= limit)
        least = tl.minimum(least, tl.min(tl.where(kept, key, top), axis=0))
    return least


@triton.jit
def _drawn(ints, token, distance, possible):
    """The largest score among possible tokens, and the token that has it; of equal ones the lower id."""
    drawn = noise(tl.load(ints + SEED), tl.load(ints + SEQUENCE), tl.load(ints + POSITION), token)
    scores = tl.where(possible, score(distance, drawn), _NEVER)
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, token, 0x7FFFFFFF).to(tl.int64), axis=0)


@triton.jit
def _from_kept(keys, count, ints, low, most, scale, BLOCK: tl.constexpr):
    """The token drawn from the keys from `low` on."""
    best, found = tl.full((), _NEVER, tl.int64), tl.full((), 0x7FFFFFFF, tl.int64)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        key = tl.load(keys + place, mask=place < count, other=0)
        distance = (_value(key).to(tl.float64) - most) * scale
        here, token = _drawn(ints, _token(key), distance, (place < count) & (key >= low))
        found = tl.where(here > best, token, found)  # keys lie by rising ids
        best = tl.maximum(best, here)
    return found


@triton.jit
def _filtered(keys, ints, floats, count, all_weight, best, first, scale, BLOCK: tl.constexpr):
    """The token drawn from what top_k, typical_p, top_p and min_p leave, in this order."""
    most = best.to(tl.float64)
    low, high = tl.full((), _NEVER + 1, tl.int64), _key(best, first)
    top_k, typical = tl.load(ints + TOP_K), tl.load(floats + TYPICAL_P)
    total = all_weight
    if top_k > 0:
        if top_k < count:
            low = _threshold(keys, count, low, high, top_k.to(tl.float64), most, scale, False, BLOCK)
        total = _above(keys, count, low, most, scale, True, BLOCK)
    if typical <= 1.0:
        _keep_typical(keys, count, low, most, scale, typical, BLOCK)
        total = _above(keys, count, low, most, scale, True, BLOCK)
    top_p = tl.load(floats + TOP_P)
    if top_p <= 1.0:
        top_p = tl.maximum(top_p, 1e-300)  # one token is left at least
        low = _threshold(keys, count, low, high, top_p * total, most, scale, True, BLOCK)
    limit = tl.load(floats + MIN_P)
    if limit > float("-inf"):
        low = _probable(keys, count, low, most, scale, limit, BLOCK)
    return _from_kept(keys, count, ints, low, most, scale, BLOCK)


@triton.jit
def choose(
    ints, floats, largest, places, wrong, sums, numbers, winners, keys, tokens, errors, vocab, chunks,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token a row, or -1 and a code of ROW_ERRORS; counts the token as generated, unless there are drafts."""
    row = tl.program_id(0).to(tl.int64)
    ints, floats = ints + row * FIELDS, floats + row * FIELDS
    best = _chunk_values(largest, row, chunks, float("-inf"), CHUNKS)
    flags = _chunk_values(wrong, row, chunks, 0, CHUNKS)
    most = tl.max(best, axis=0)
    infinite = (tl.max(flags, axis=0) >= 2) | (tl.max(flags & 1, axis=0) == 0)
    error = tl.where(infinite, _NOT_FINITE, tl.where(most == float("-inf"), _NOTHING_ALLOWED, 0))
    place = _chunk_values(places, row, chunks, vocab, CHUNKS)
    token = tl.min(tl.where(best == most, place, vocab), axis=0).to(tl.int64)
    scale = tl.load(floats + SCALE)
    if (scale > 0) & (error == 0):
        if tl.load(ints + FILTERED) != 0:
            count = tl.sum(_chunk_values(numbers, row, chunks, 0, CHUNKS), axis=0)
            weight = tl.sum(_chunk_values(sums, row, chunks, 0.0, CHUNKS), axis=0)
            token = _filtered(keys + row * vocab, ints, floats, count, weight, most, token, scale, BLOCK)
        else:
            scores = _chunk_values(winners, row, chunks, _NEVER, CHUNKS)
            drawn = _chunk_values(numbers, row, chunks, vocab, CHUNKS)
            token = tl.min(tl.where(scores == tl.max(scores, axis=0), drawn, vocab), axis=0).to(tl.int64)
    counts = tl.load(ints + COUNTS)
    if (counts != 0) & (error == 0) & (tl.load(ints + DRAFTS) == 0):
        counted = counts.to(tl.pointer_type(tl.int32)) + token
        tl.store(counted, tl.load(counted) + 2)
    tl.store(tokens + row, tl.where(error == 0, token, -1))
    tl.store(errors + row, error.to(tl.uint8))


@triton.jit(do_not_specialize_on_alignment=["starts", "counts", "drafts"])
def accept(starts, counts, drafts, tokens, errors, last):
    """Programs (row): keeps the tokens of a row's places up to the first that is not the draft, and counts them.

    Where a row has no drafts, `choose` has counted. What is behind the last place that is reached is no error.
    """
    row = tl.program_id(0)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    held = tl.load(counts + row)
    going, newest = begin < end, tl.full((), -1, tl.int64)
    for place in range(begin, end):
        token = tl.load(tokens + place)
        tl.store(errors + place, tl.where(going, tl.load(errors + place), 0))
        going = going & (token >= 0)
        newest = tl.where(going, token, newest)
        if going & (held != 0) & (end - begin > 1):
            counted = held.to(tl.pointer_type(tl.int32)) + token
            tl.store(counted, tl.load(counted) + 2)
        tl.store(tokens + place, tl.where(going, token, -1))
        going = going & (token == tl.load(drafts + place))
    tl.store(last + row, newest)
