"""Compiles grammars off the step loop, under limits of time and size, and keeps what was compiled."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.util import find_spec
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from penstock.config import limits
from penstock.config.errors import GRAMMAR_TOO_COMPLEX, OverloadedError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_log: Final = logging.getLogger(__name__)
_NICE: Final = 10  # a compiling thread stands back behind those that compute
_STACK_BYTES: Final = 256 * 2**20  # of a compiling thread: what compiles recurses, on a grammar's chains of rules
_STACK_SIZE: Final = threading.Lock()  # one engine must not restore the size that another has just set
_BYTES_A_GRAMMAR: Final = 128 * 2**10
_BYTES_A_CHAR: Final = 128
_BYTES_A_TOKEN: Final = 2**10  # a lexer adds states as it is used, at most _LEXER_STATES
_LEXER_STATES: Final = 16_000
_MOST_THREADS: Final = 8
_PROBED_TOKENS: Final = 6
_REPLAYED_TOKENS: Final = 8  # at a time
_ENCODED_BYTES: Final = 1024  # of a forced text at a time, since the step loop waits for it
_KEPT_TEXTS: Final = 4096  # forced texts whose tokens are kept: names of properties come again and again
_KEPT_BYTES: Final = 256  # the longest of them
_KEPT_LONG_TEXTS: Final = 64  # and of longer ones: the sequences of a request say the same


@cache
def unavailable_reason() -> str | None:
    """Why no grammar can be followed here, in a sentence with the remedy, or None if they can."""
    if find_spec("llguidance") is not None:
        return None
    return "structured output needs llguidance, which is not installed where the engine runs; `pip install llguidance`."


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What matchers know of a tokenizer.

    Attributes:
        size: logits a position; ids behind the tokenizer's have no bytes and are never allowed.
        token_bytes: the bytes of a token.
        encode: a text's tokens, control tokens in it read as plain text.
        special_ids: control tokens.
        eos_ids: tokens that end an answer, the usual one first.
    """

    size: int
    token_bytes: Callable[[int], bytes]
    encode: Callable[[str], list[int]]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]


class _Tokens:
    """A vocabulary as `TokenizerWrapper` wants it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.tokens = [vocabulary.token_bytes(token) for token in range(vocabulary.size)]
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._encode = vocabulary.encode
        special = vocabulary.special_ids
        self._ids = {text: token for token, text in enumerate(self.tokens) if text and token not in special}
        self._longest = max(map(len, self._ids), default=1)
        self._kept = lru_cache(_KEPT_TEXTS)(self._find)
        self._kept_long = lru_cache(_KEPT_LONG_TEXTS)(self._find)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens whose bytes are those a text begins with, the tokenizer's own choice where it has one."""
        data = text if isinstance(text, bytes) else text.encode()
        if len(data) > (end := _ENCODED_BYTES):
            while end > _ENCODED_BYTES - 4 and data[end] & 0xC0 == 0x80:  # within a character
                end -= 1
            data = data[:end]
        return list((self._kept if len(data) <= _KEPT_BYTES else self._kept_long)(data))

    def _find(self, data: bytes) -> Sequence[int]:
        plain = data.decode("utf-8", "replace")
        for before in ("", "\n"):  # some tokenizers put a space before a text; not so before what follows another
            ids = self._encode(before + plain)
            spelled = [self.tokens[token] for token in ids]
            while spelled and before and b"".join(spelled) != data:
                del spelled[0]
            if b"".join(spelled) == data:
                return ids[len(ids) - len(spelled) :]
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        ids, place = [], 0
        while place < len(data):
            for length in range(min(self._longest, len(data) - place), 0, -1):
                token = self._ids.get(data[place : place + length])
                if token is not None:
                    ids.append(token)
                    place += length
                    break
            else:
                break
        return ids


def parser_limits() -> LLParserLimits:
    """What one grammar may cost, to compile and in each step."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=10_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=_LEXER_STATES,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


@dataclass(slots=True, eq=False)
class Compilation:
    """A grammar to be compiled, or that was.

    Attributes:
        owner: whose requests have it.
        asked, began: when it was asked for, and when its compiling began (monotonic seconds).
        matcher: at the beginning of the grammar; never advanced itself, only copied. Copies share its lexer: once one
            has failed, all do.
        error: why it cannot be met.
        about: the field that is the cause.
        tokens: that the matcher has to have taken; such a one is nobody else's. None for a grammar's beginning.
        learnt: tokens its lexer has seen, up to the states it may have.
        counted: bytes it is counted with.
    """

    source: str
    asked: float
    owner: str = ""
    began: float | None = None
    matcher: LLMatcher | None = None
    error: str | None = None
    about: str = "grammar"
    tokens: tuple[int, ...] | None = None
    learnt: int = 0
    counted: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def key(self) -> tuple[str, str]:
        """What it is kept under."""
        return self.owner, self.source

    @property
    def limit_s(self) -> float:
        """How long it may take once it has begun."""
        return limits.GRAMMAR_TIMEOUT_S + limits.GRAMMAR_REPLAY_S * len(self.tokens or ())

    @property
    def cost(self) -> int:
        return _BYTES_A_GRAMMAR + _BYTES_A_CHAR * len(self.source) + _BYTES_A_TOKEN * self.learnt


class GrammarCompiler:
    """Compiles in threads of its own. Its methods belong to the thread of the step loop.

    Args:
        vocabulary: what the grammars' tokens are; called in a compiling thread, at the first grammar.
        threads: compiling at a time.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, threads: int = limits.GRAMMAR_THREADS) -> None:
        self._make = vocabulary
        self._lock = threading.Lock()
        self._wanted = threading.Condition(self._lock)
        self._news = threading.Event()
        self._queue: deque[Compilation] = deque()
        self._jobs: OrderedDict[tuple[str, str], Compilation] = OrderedDict()
        self._bytes = 0
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._count = threads
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def vocabulary(self) -> Vocabulary:
        """Only once something was compiled."""
        assert self._vocabulary is not None
        return self._vocabulary

    def want(self, source: str, owner: str = "") -> Compilation:
        """Asks for a grammar; an owner's equal ones are compiled once. Others' would tell who sent what before."""
        job = self._jobs.get((owner, source))
        if job is not None:
            self._jobs.move_to_end(job.key)
            return job
        job = Compilation(source, monotonic(), owner=owner)
        job.counted = job.cost
        self._jobs[job.key] = job
        self._bytes += job.counted
        self._shrink(job)
        self._enqueue(job)
        return job

    def renew(self, job: Compilation, tokens: tuple[int, ...]) -> Compilation:
        """Asks for a matcher of its own that has taken some tokens, in place of one of a grammar's that has failed.

        Whoever wants the grammar from now on has it compiled anew.
        """
        self._remove(job)
        renewed = Compilation(job.source, monotonic(), job.owner, tokens=tokens)
        self._enqueue(renewed)
        return renewed

    def _enqueue(self, job: Compilation) -> None:
        with self._wanted:
            self._queue.append(job)
            self._wanted.notify()
        self.warm()

    def warm(self) -> None:
        """Starts the threads, which load the vocabulary; nothing else runs in a part of that time."""
        if not self._threads:
            self._start(self._count)

    def _start(self, count: int) -> None:
        for _ in range(count):
            self._threads.append(threading.Thread(target=self._work, name="penstock-grammar", daemon=True))
            with _STACK_SIZE:
                before = threading.stack_size(_STACK_BYTES)  # of the whole process: Python knows no other way
                try:
                    self._threads[-1].start()
                finally:
                    threading.stack_size(before)

    def used(self, job: Compilation, tokens: int) -> None:
        """Counts what a grammar's lexer may have learnt with so many tokens."""
        job.learnt = min(job.learnt + tokens, _LEXER_STATES)
        if self._jobs.get(job.key) is job:
            self._bytes += job.cost - job.counted
            job.counted = job.cost
            self._shrink(job)

    def _shrink(self, keep: Compilation) -> None:
        """Drops what was used longest ago; what is being compiled is somebody's and stays."""
        while len(self._jobs) > limits.MAX_COMPILED_GRAMMARS or self._bytes > limits.MAX_COMPILED_BYTES:
            oldest = next((job for job in self._jobs.values() if job.done.is_set() and job is not keep), None)
            if oldest is None:
                return
            self._remove(oldest)

    def _remove(self, job: Compilation) -> None:
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
            self._bytes -= job.counted

    def outcome(self, job: Compilation) -> LLMatcher | RequestError | None:
        """The matcher, why there is none, or None as long as it is not known."""
        if job.matcher is not None:
            return job.matcher
        if job.error is not None:
            code = "invalid_grammar" if job.about == "grammar" else "invalid_function_parameters"
            return RequestError(job.error, param=job.about, code=code)
        now = monotonic()
        if job.began is not None and now - job.began > job.limit_s:
            job.error = f"the grammar takes longer to compile than the {job.limit_s:g} s allowed; simplify it."
            if len(self._threads) < _MOST_THREADS:  # the one that compiles it may never come back
                self._start(1)
            return self.outcome(job)
        if job.tokens is None and job.began is None and now - job.asked > limits.GRAMMAR_QUEUE_S:
            self.drop(job)
            return OverloadedError("Too many grammars wait to be compiled; retry later.")
        return None

    def drop(self, job: Compilation) -> None:
        """Nobody waits for it any more: if it has not begun, it never does."""
        with self._lock:
            if job.began is None and job in self._queue:
                self._queue.remove(job)
                job.done.set()
        if job.done.is_set() and job.matcher is None and job.error is None:
            self._remove(job)

    def wait(self, seconds: float) -> None:
        """Sleeps until something was compiled, at most so long."""
        if self._news.wait(seconds):
            self._news.clear()

    def close(self) -> None:
        """Ends the threads; one that compiles is waited for as long as compiling may take."""
        with self._wanted:
            self._closed = True
            self._queue.clear()
            self._wanted.notify_all()
        for thread in self._threads:
            thread.join(limits.GRAMMAR_TIMEOUT_S)

    # ---- below: the compiling threads

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread alone, on Linux
        with contextlib.suppress(Exception):  # which the first grammar is told
            self._load()
        while True:
            with self._wanted:
                while not self._queue and not self._closed:
                    self._wanted.wait()
                if self._closed:
                    return
                job = self._queue.popleft()
            try:
                tokenizer = self._load()
                job.began = monotonic()
                matcher = compile_grammar(tokenizer, job.source)
                replay(matcher, job.tokens or (), tokenizer.vocab_size)
                job.matcher = matcher  # even if too late for those who asked
            except RequestError as error:
                job.error, job.about = str(error), error.param or job.about
            except BaseException:  # a matcher reports the client's errors itself; a native panic is no Exception
                _log.exception("a grammar could not be compiled")
                job.error = _UNCOMPILED
            job.done.set()
            self._news.set()

    def _load(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                vocabulary = self._make()
                if not vocabulary.eos_ids:
                    raise RequestError("this model has no end-of-sequence token, which a grammar needs to end.")
                self._vocabulary = vocabulary
                self._tokenizer = matcher_tokenizer(vocabulary)
            return self._tokenizer


def matcher_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """A vocabulary as matchers take it."""
    from llguidance import LLTokenizer, TokenizerWrapper

    eos = [token for token in vocabulary.eos_ids if token < vocabulary.size]
    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)), eos_token=eos)


def compile_grammar(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """A matcher that allows something, and goes on for some tokens within the limits of a step.

    Raises:
        RequestError: the grammar is wrong, cannot be met, or costs too much.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, source, log_level=0, limits=parser_limits())
    row = np.zeros((tokenizer.vocab_size + 31) // 32, np.uint32)
    compute_mask(matcher, row)  # finds what is forced at first, which copies then need not find in the step loop
    probe = matcher.deep_copy()
    for _ in range(_PROBED_TOKENS):
        if probe.is_error() or not allows_more(compute_mask(probe, row), tokenizer.eos_tokens):
            break
        probe.consume_token(int(np.flatnonzero(row)[0]) * 32 + _lowest_bit(int(row[row != 0][0])))
    if probe.is_error():
        error, about = probe.get_error(), "grammar"
        if (place := _PLACE.match(error)) is not None and (field := _field_at(source, int(place[1]))) is not None:
            error, about = error[place.end() :], field
        raise RequestError(explained(error, "the grammar" if about == "grammar" else about), param=about)
    if not (probe.is_accepting() or allows_more(row, tokenizer.eos_tokens)):
        raise RequestError("the grammar cannot be met: no text fits it.", param="grammar")
    return matcher


def replay(matcher: LLMatcher, tokens: Sequence[int], vocab_size: int) -> None:
    """Has a matcher take tokens that were allowed.

    Raises:
        RequestError: it fails, as the one that took them before may have.
    """
    row = np.zeros((vocab_size + 31) // 32, np.uint32)
    for begin in range(0, len(tokens), _REPLAYED_TOKENS):
        compute_mask(matcher, row)  # by which its lexer gets the fuel of a step
        if not matcher.consume_tokens(list(tokens[begin : begin + _REPLAYED_TOKENS])):
            raise RequestError(GRAMMAR_TOO_COMPLEX, param="grammar")


def _lowest_bit(word: int) -> int:
    return (word & -word).bit_length() - 1


def allows_more(row: npt.NDArray[np.uint32], tokens: Sequence[int]) -> bool:
    """Whether a mask allows any token but these."""
    rest = row.copy()
    for token in tokens:
        rest[token // 32] &= ~np.uint32(1 << (token % 32))
    return bool(rest.any())


def compute_mask(matcher: LLMatcher, row: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Writes a matcher's mask into a row of words and returns it."""
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    return row


# How the library's messages begin that do not name the keyword they are about.
_KEYWORDS: Final = (("regex parse error", "pattern"), ("Resource ", "$ref"), ("Unknown format", "format"))
# What it says of its own parts and options, in words that help a client.
_INSTEAD: Final = MappingProxyType(
    {
        "oneOf constraints": (
            "oneOf: its options may overlap; tell them apart by type, or by different constants of a property that "
            'each requires, write anyOf, or let several fit with "x-guidance": {"coerce_one_of": true} in the schema.'
        ),
        "Unable to determine if regex": (
            "pattern: it cannot be told whether any text fits all the patterns and lengths that are joined; write one."
        ),
        "lexer error": "pattern: following it takes more work than allowed; write a simpler one, or smaller counts.",
        "Schema intersection": "$ref: it and allOf join more schemas than allowed; write out what they mean.",
        "schema too large": "it means too many symbols once $ref and allOf are written out; write a smaller one.",
    }
)
_OWN: Final = frozenset(("", "<non-verbose/>"))
_NO_TEXT: Final = "NoExtension"  # what the library says where nothing can follow
_EXCERPT: Final = re.compile(r"\s*(\d+ \| |\^\s*$)")  # of the rules, which mostly were written here, not by the client
_PLACE: Final = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
_FIELD: Final = re.compile(r"tools(\[\d+\][a-z_.]+)?")
_BROKEN: Final = re.compile(r"^\s*panic:|panicked at|stack backtrace:|RUST_BACKTRACE|\w\.rs:\d+", re.MULTILINE)
_UNCOMPILED: Final = (
    "the grammar could not be compiled, mostly for its size or its nesting; write it with fewer rules and smaller "
    "counts of repetition, or ask for JSON by a schema."
)


def _field_at(source: str, line: int) -> str | None:
    """The field a rule was made of, where comments before the rules say so; None for what the client wrote itself."""
    notes = (text[3:] for text in reversed(source.split("\n", line)[:line]) if text.startswith("// "))
    note = next(notes, "")
    return note if _FIELD.fullmatch(note) else None


def explained(error: str, what: str = "the grammar") -> str:
    """A library's message as a sentence for the client, the keyword named; what it says of itself is kept back."""
    if _BROKEN.search(error):
        _log.warning("a grammar broke its compiler: %s", error[:400])
        return _UNCOMPILED
    lines = [line.strip() for line in error.splitlines() if line.strip() not in _OWN and not _EXCERPT.match(line)]
    text = " ".join(lines)[:400]
    for begin, told in _INSTEAD.items():
        if text.startswith(begin):
            return f"{what} cannot be met: {told}"
    for begin, keyword in _KEYWORDS:
        if text.startswith(begin):
            text = f"{keyword}: {text}"
    return f"{what} cannot be met: {'no text fits it.' if text.startswith(_NO_TEXT) else text}"
