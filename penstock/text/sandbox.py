"""The sandbox chat templates run in: Jinja2's immutable one, with a budget of time and memory for every rendering.

A template comes with a downloaded model, so it is untrusted code. Jinja2's sandbox keeps it away from Python's
internals; it bounds neither time nor memory. Here each loop turn, call, filter, operator and literal is charged to a
budget before it can grow anything, by rewriting the template's syntax tree; no thread, signal or process is needed.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Namespace

from penstock.config.errors import TemplateError
from penstock.text.template_budget import Budget
from penstock.text.template_methods import MEMCMP, PIECE_COST, SCAN, charge_join, charge_replace, check_method
from penstock.text.template_rewrite import check_tree, instrument

_MAX_INT_BITS: Final = 4096
_MAX_INDENT: Final = 16
_PIECEWISE_FILTERS: Final = frozenset(  # they take a text apart
    [
        "title",
        "wordcount",
        "truncate",
        "sort",
        "unique",
        "groupby",
        "map",
        "select",
        "reject",
        "min",
        "max",
        "reverse",
        "list",
        "batch",
    ]
)
_REMOVED_FILTERS: Final = frozenset(
    [
        "attr",
        "center",
        "filesizeformat",
        "pprint",
        "random",
        "slice",
        "striptags",
        "urlencode",
        "urlize",
        "wordwrap",
        "xmlattr",
    ]
)
_REMOVED_METHODS: Final = frozenset(
    ("translate", "expandtabs", "to_bytes", "maketrans", "from_bytes", "fromhex", "fromkeys")
)
_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda value, items: value in items,
    "notin": lambda value, items: value not in items,
}
_COMPARING_TESTS: Final = frozenset(
    ("==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ne", "lt", "lessthan", "le", "gt", "greaterthan", "ge", "in")
)
_COMPARING_FILTERS: Final = frozenset(("sort", "unique", "min", "max", "groupby", "dictsort"))
_KEY_COST: Final = 256  # one item's key, and its part of the sorting
_PATH_AT: Final = {
    "selectattr": 1,
    "rejectattr": 1,
    "groupby": 1,
    "sum": 1,
    "unique": 2,
    "min": 2,
    "max": 2,
    "join": 2,
    "sort": 3,
    "map": 9,
}
_PRINTF_WIDTH: Final = re.compile(r"[%)][-#+ ]*(?:\d*\.)?(?:\*|\d{5})")  # after a key as well: %(key)9d
_PRINTF_WIDTHS: Final = re.compile(r"[%).][-#+ ]*(\d+)")
_DIGITS: Final = re.compile(r"\d+")
_FORMAT_WIDTH: Final = re.compile(r"\d{5}")


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant says, for training; rendering takes its body as it is."""

    tags: set[str] = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body, lineno=line)]


class _PublicNamespace(Namespace):
    """`namespace()` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name, value in attributes.items():
            _check_public(name, value)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name, value)
        super().__setitem__(name, value)


def _check_public(name: object, value: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the namespace attribute {name!r} begins with an underscore")
    if isinstance(value, Namespace):
        raise jinja2.exceptions.SecurityError(f"the namespace attribute {name!r} is itself a namespace")


class _BoundedFormatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if _FORMAT_WIDTH.search(format_spec):
            raise TemplateError(f"the chat template formats with {format_spec[:40]!r}; allowed: widths below 10000.")
        budget: Budget = self._env._budget  # type: ignore[attr-defined]
        budget.spend(_widths(_DIGITS, format_spec))
        budget.spend_deep(value)
        return str(super().format_field(value, format_spec))


def _widths(pattern: re.Pattern[str], text: str) -> int:
    return sum(int(digits) for digits in pattern.findall(text) if digits)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A Jinja2 environment for chat templates. Rendering must happen inside `budget()`."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_GenerationTag, loopcontrols],
            finalize=_finalize,
        )
        self._active = threading.local()
        names = ("range", "cycler", "joiner")
        self.globals = {name: self.globals[name] for name in names}
        self.globals.update(
            namespace=_PublicNamespace, dict=_make_dict, raise_exception=_raise_exception, strftime_now=_strftime_now
        )
        filters: dict[str, Callable[..., Any]] = {**self.filters, "tojson": _tojson}
        self.filters = {
            name: self._bounded(name, function) for name, function in filters.items() if name not in _REMOVED_FILTERS
        }
        tests: Mapping[str, Any] = self.tests
        self.tests = {name: self._bounded(name, function) for name, function in tests.items()}

    @contextmanager
    def budget(self) -> Iterator[Budget]:
        """Opens a fresh budget for what this thread renders inside."""
        outer = getattr(self._active, "budget", None)
        self._active.budget = Budget()
        try:
            yield self._active.budget
        finally:
            self._active.budget = outer

    @property
    def _budget(self) -> Budget:
        budget: Budget = self._active.budget
        return budget

    # Called from rewritten templates ----------------------------------------------------------------------------

    def tick(self, amount: int) -> None:
        """One more turn of a loop or macro whose body holds `amount` characters of plain text."""
        self._budget.spend(1 + amount // 8)

    def checked(self, value: Any) -> Any:
        """The outcome of a loop's condition."""
        self._budget.spend(1)
        return value

    def compared(self, value: Any, *rest: Any) -> bool:
        """`value` compared by each operator in `rest` with the operand after it."""
        for name, other in zip(rest[::2], rest[1::2], strict=True):
            if not _COMPARISONS[name](value, self._charge_comparison(value, other, name in ("in", "notin"))):
                return False
            value = other
        return True

    def container(self, value: Any) -> Any:
        """A list, tuple or dict just put together: where values get nested, and could double at every level."""
        self._budget.spend_deep(value)
        return value

    def charged(self, value: Any) -> Any:
        """A fresh copy of something, for example a slice."""
        self._charge(value)
        return value

    def joined(self, *parts: Any) -> str:
        """The `~` operator."""
        for part in parts:
            self._budget.spend_deep(part)
        return "".join(map(str, parts))

    # Hooks of Jinja2 --------------------------------------------------------------------------------------------

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        check_tree(tree, _REMOVED_FILTERS)
        return instrument(tree, self)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Cycler) and attr == "items":
            return False  # a tuple around the arguments, at no charge
        return attr not in _REMOVED_METHODS and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise jinja2.exceptions.SecurityError(
            f"access to {attribute!r} of a {type(obj).__name__} is not allowed in a template"
        )

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        formatter = _BoundedFormatter(self)
        text = str(value.__self__)
        is_map = value.__name__ == "format_map"

        def wrapper(*args: Any, **kwargs: Any) -> str:
            self._budget.spend((text.count("{") + text.count("}")) * PIECE_COST)
            if is_map:
                if len(args) != 1 or kwargs:
                    raise TypeError("format_map() takes exactly one argument")
                return formatter.vformat(text, (), args[0])
            return formatter.vformat(text, args, kwargs)

        return functools.update_wrapper(wrapper, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)
        __self._budget.spend(1)
        if __obj in (_make_dict, _PublicNamespace, _raise_exception):
            for part in (*args, *kwargs.values()):
                __self._budget.spend_deep(part)
        if __obj in (_make_dict, _PublicNamespace) and args:
            args = (__self._keyed(args[0]), *args[1:])
        if isinstance(owner, (str, bytes)):
            args = check_method(__self._budget, owner, __obj.__name__, args, kwargs)
        elif isinstance(owner, (list, tuple)) and args and __obj.__name__ in ("index", "count"):
            __self._charge_comparison(args[0], owner, True)
        result = super().call(__context, __obj, *args, **kwargs)
        __self._charge(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._budget.spend(1)
        if operator == "**":
            _check_power(left, right)
        for one, other in ((left, right), (right, left)):
            if isinstance(one, int) and one.bit_length() > _MAX_INT_BITS:
                raise TemplateError(f"the chat template computes with numbers of more than {_MAX_INT_BITS} bits.")
            if isinstance(one, (str, bytes, list, tuple)):
                if operator == "*" and isinstance(other, int):
                    self._budget.spend(len(one) * max(0, other) * (1 if isinstance(one, (str, bytes)) else 8))
                elif operator == "%" and one is left:
                    self._check_printf(left, right)
        result = super().call_binop(context, operator, left, right)
        self._charge(result)
        return result

    # Charges ----------------------------------------------------------------------------------------------------

    def _charge(self, result: object) -> None:
        if isinstance(result, (str, bytes, list, tuple, dict)):
            self._budget.spend(len(result))
        elif isinstance(result, int) and result.bit_length() > _MAX_INT_BITS:
            raise TemplateError(f"the chat template computes a number of more than {_MAX_INT_BITS} bits.")

    def _charge_comparison(self, value: Any, other: Any, member: bool = False) -> Any:
        """Charges what a comparison may walk over; returns `other`, or for an iterator one that charges as it goes."""
        if isinstance(other, (str, bytes)):
            self._budget.spend(1 + (len(other) if member else min(len(other), _size(value))) // MEMCMP)
        elif not member:
            unequal = isinstance(other, list) and isinstance(value, list) and not (other and value)
            self._budget.spend(1) if unequal else self._budget.spend_deep(value if _size(other) else 1)
        else:
            each = 1 + (len(value) // MEMCMP if isinstance(value, (str, bytes)) else self._budget.spend_deep(value))
            if isinstance(other, Iterator):
                return self._metered(other, each)
            self._budget.spend(each * (_size(other) if isinstance(other, (list, tuple)) else 1))
        return other

    def _charge_items(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Charges a filter that looks up a path in each item or compares the items; returns what it shall take."""
        value, at = (args[0] if args else None), _PATH_AT.get(name, len(args))
        path = kwargs.get("attribute", args[at] if at < len(args) else "")
        steps = 1 + (path.count(".") + path.count(",") if isinstance(path, str) else 0)
        self._budget.spend(steps * PIECE_COST)
        if not value or not isinstance(value, Iterable):
            return value
        if name in _COMPARING_FILTERS or name == "join":
            items = value if isinstance(value, (Mapping, str)) else list(self._metered(value, 1))
            if name in _COMPARING_FILTERS:
                self._budget.spend_deep(items)
            self._budget.spend(
                _size(items)
                * ((_KEY_COST if name in _COMPARING_FILTERS else 1) + len(str(path)[:1]) * steps * PIECE_COST)
            )
            return self._metered(items, 1) if name == "unique" else items  # its numbers may all have one hash
        return self._metered(value, 1 + (steps - 1) * PIECE_COST)

    def _metered(self, items: Iterable[Any], each: int) -> Iterator[Any]:
        for item in items:
            self._budget.spend(each)
            yield item

    def _keyed(self, items: Any) -> dict[Any, Any]:
        """A dictionary, in the making of which keys that are no texts may all have one hash."""
        made: dict[Any, Any] = {}
        for key, value in items.items() if isinstance(items, Mapping) else items:
            self._budget.spend(1 if isinstance(key, str) else 1 + len(made))
            made[key] = value
        return made

    def _check_printf(self, form: Any, value: object) -> None:
        """Charges what `form % value` may write; a mapping's values may each stand in every field."""
        size = self._budget.spend_deep(value)
        text = form.decode("latin-1") if isinstance(form, bytes) else form
        if not isinstance(text, str):
            return
        if _PRINTF_WIDTH.search(text):
            raise TemplateError("the chat template formats with a width; allowed: literal widths below 10000.")
        repeated = size * text.count("%(") if isinstance(value, Mapping) else 0
        self._budget.spend(repeated + text.count("%") + _widths(_PRINTF_WIDTHS, text))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            passed, own = args[:first], args[first:]
            result = function(*passed, *self._check_filter(name, own, kwargs), **kwargs)
            fresh = name == "groupby" or (own and not isinstance(own[0], (list, tuple, dict, str)))
            if fresh and isinstance(result, (list, tuple, dict)):
                self._budget.spend_deep(result)  # a generator's parts may be new, so they are counted too
            else:
                self._charge(result)
            return result

        return bounded

    def _check_filter(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Charges a filter or test for its worst case, before it runs."""
        value = args[0] if args else None
        self._budget.spend(1)
        if isinstance(value, str) and name in _PIECEWISE_FILTERS:
            self._budget.spend(len(value) * PIECE_COST)
        if name in _COMPARING_TESTS and len(args) == 2:
            return (value, self._charge_comparison(value, args[1], name == "in"))
        if name in _PATH_AT or name == "dictsort":
            args = (self._charge_items(name, args, kwargs), *args[1:])
            value = args[0]
        if name == "batch":
            for part in (*args[2:], *kwargs.values()):
                self._budget.spend_deep(part)  # nested one level deeper
        if name == "tojson":
            indent = kwargs.get("indent", args[2] if len(args) > 2 else None)
            marks = kwargs.get("separators", args[3] if len(args) > 3 else None)
            escape = (
                12 if kwargs.get("ensure_ascii", args[1] if len(args) > 1 else False) else 6
            )  # \\u0000, twice at most
            self._budget.spend_deep(value, _check_width(indent, _MAX_INDENT), sum(map(_size, marks or ())), escape)
        elif name == "string":
            self._budget.spend_deep(value)
        elif name == "join" and value is not None and not isinstance(value, Undefined):
            items = list(value)
            charge_join(self._budget, kwargs.get("d", args[1] if len(args) > 1 else ""), items)
            return (items, *args[1:])
        elif name == "replace":
            old = kwargs.get("old", args[1] if len(args) > 1 else None)
            new = kwargs.get("new", args[2] if len(args) > 2 else None)
            charge_replace(self._budget, value, old, new)
        elif name == "trim":
            chars = kwargs.get("chars", args[1] if len(args) > 1 else None)
            self._budget.spend(len(str(value)) * _size(chars) // SCAN)
        elif name == "indent":
            width = _check_width(kwargs.get("width", args[1] if len(args) > 1 else 4), 10_000)
            self._budget.spend(width * (str(value).count("\n") + 1))
        elif name == "format":
            self._check_printf(value, kwargs or args[1:])
        elif name in ("round", "batch", "sum"):
            for part in (*args[1:], *kwargs.values()):
                number = isinstance(part, (int, float)) and abs(part) <= 1000
                if not (number or part is None or isinstance(part, str)):
                    raise TemplateError(f"the chat template's filter {name} has an argument too large or of no use.")
        return args


def _size(value: object) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _check_width(width: object, most: int) -> int:
    """The number of characters a width or an indent string stands for."""
    size = len(width) if isinstance(width, str) else width
    if size is None:
        return 0
    if not isinstance(size, int) or size > most:
        raise TemplateError(f"the chat template indents by {str(width)[:40]!r}; allowed: at most {most}.")
    return max(0, size)


def _check_power(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_INT_BITS:
        raise TemplateError(f"the chat template computes a power of more than {_MAX_INT_BITS} bits.")


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Charges every value that is written out. Needing the context, it also keeps Jinja2 from folding constants."""
    if isinstance(value, Namespace) or not isinstance(value, (Undefined, bool, type(None))):
        context.environment._budget.spend_deep(value)  # type: ignore[attr-defined]
    return value
