"""Formats of strings as exact patterns: what each allows is valid, though not all that is valid is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_DAY: Final = (
    r"(?:(?:\d{4})-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_CLOCK: Final = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_ALNUM: Final = "[A-Za-z0-9]"


def _label(most: int) -> str:
    """A label of at most so many characters, of which the third and fourth are not both hyphens."""
    rest = "(?:[A-Za-z0-9-]{0,%d}[A-Za-z0-9])?"
    third = f"{_ALNUM}{rest % (most - 4)}|-{_ALNUM}{rest % (most - 5)}"
    return f"{_ALNUM}(?:{_ALNUM}|[A-Za-z0-9-](?:{third}))?"


_POINTER: Final = "(?:/(?:[^/~]|~[01])*)*"  # RFC 6901, section 3

# RFC 3986, appendix A, without addresses in brackets.
_ESCAPED: Final = "%[0-9A-Fa-f]{2}"
_PLAIN: Final = "A-Za-z0-9._~!$&'()*+,;="
_CHAR: Final = f"(?:[{_PLAIN}:@-]|{_ESCAPED})"
_NO_COLON: Final = f"(?:[{_PLAIN}@-]|{_ESCAPED})"
_PATH: Final = f"(?:/{_CHAR}*)*"
_AUTHORITY: Final = f"//(?:(?:[{_PLAIN}:-]|{_ESCAPED})*@)?(?:[{_PLAIN}-]|{_ESCAPED})*(?::[0-9]*)?{_PATH}"
_ABSOLUTE: Final = f"/(?:{_CHAR}+{_PATH})?"
_WITH_SCHEME: Final = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|{_ABSOLUTE}|{_CHAR}+{_PATH}|)"
_WITHOUT_SCHEME: Final = f"{_AUTHORITY}|{_ABSOLUTE}|{_NO_COLON}+{_PATH}|"
_END: Final = rf"(?:\?(?:{_CHAR}|[/?])*)?(?:#(?:{_CHAR}|[/?])*)?"

# RFC 6570, section 2, of ASCII alone.
_LETTER: Final = f"(?:[A-Za-z0-9_]|{_ESCAPED})"
_VARIABLE: Final = rf"{_LETTER}(?:\.?{_LETTER})*(?:\*|:[1-9][0-9]{{0,3}})?"
_TEMPLATE: Final = rf"(?:[!#$&(-;=?-\[\]_a-z~]|{_ESCAPED}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"

# Expressions of ECMA-262 whose groups are not within others, and which refer to nothing.
_MEMBER: Final = r"(?:[A-Za-z0-9_ .,:;/@]|a-z|A-Z|0-9|\\[dDwWsS.\\/\[\]-])"
_ATOM: Final = rf"(?:[A-Za-z0-9_ ,:;/@!#%&=<>~'.-]|\\[dDwWsSnrt.*+?()\[\]{{}}|^$\\/]|\[\^?{_MEMBER}+\])"
_TIMES: Final = r"(?:[*+?]\??|\{[0-9]{1,2},?\})?"
_CHAIN: Final = f"(?:{_ATOM}{_TIMES})*"
_GROUP: Final = rf"\((?:\?:)?{_CHAIN}(?:\|{_CHAIN})*\)"
_SEQUENCE: Final = rf"\^?(?:(?:{_ATOM}|{_GROUP}){_TIMES})*\$?"

PATTERNS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "date": f"^{_DAY}$",
        "time": f"^{_CLOCK}$",
        "date-time": f"^{_DAY}T{_CLOCK}$",
        "hostname": rf"^(?:{_label(63)}(?:\.{_label(63)}){{0,2}}|{_label(31)}(?:\.{_label(31)}){{0,6}})$",
        "json-pointer": f"^{_POINTER}$",
        "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
        "uri-reference": f"^(?:{_WITH_SCHEME}|{_WITHOUT_SCHEME}){_END}$",
        "iri-reference": f"^(?:{_WITH_SCHEME}|{_WITHOUT_SCHEME}){_END}$",
        "iri": f"^{_WITH_SCHEME}{_END}$",
        "uri-template": f"^{_TEMPLATE}$",
        "regex": rf"^{_SEQUENCE}(?:\|{_SEQUENCE})*$",
    }
)
"""Dates of RFC 3339 without leap seconds, names of RFC 1123 without labels in Punycode, and what stands above."""
SAME: Final[Mapping[str, str]] = MappingProxyType({"idn-email": "email"})
"""Formats all of whose members another one has that are written in ASCII."""
