"""A hostile template can neither reach Python nor use up time or memory; it ends with a TemplateError."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.config import limits
from penstock.config.errors import TemplateError
from penstock.text.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]
NS = "{% set ns = namespace(x=[1], s='ab', l=[], n=99999) %}{% for i in range(1000) %}"
END = "{% endfor %}{{ ns.x }}{{ ns.s }}{{ ns.n }}{{ ns.l|length }}"
UP = "{% endfor %}{{ ns.x|upper|length }}"
LONG = "{% set a = 'x' * 10**6 ~ '1' %}{% set b = 'x' * 10**6 ~ '2' %}"

BOMBS = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "string times": "{{ 'a' * 10**10 }}",
    "string times, twice": "{% set x = 'a' * 10**6 %}{{ (x * 1000)|length }}",
    "list times": "{{ ([1] * 10**9)|length }}",
    "recursive macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "doubling by ~": NS + "{% set ns.s = ns.s ~ ns.s %}" + END,
    "doubling by +": NS + "{% set ns.s = ns.s + ns.s %}" + END,
    "doubling by set": NS + "{% set y %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = y %}" + END,
    "doubling by format": NS + "{% set ns.s = '{}{}'.format(ns.s, ns.s) %}" + END,
    "doubling by %": NS + "{% set ns.s = '%s%s' % (ns.s, ns.s) %}" + END,
    "nested lists": NS + "{% set ns.x = [ns.x, ns.x] %}" + END,
    "nested dicts": NS + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}" + END,
    "nested dict calls": NS + "{% set ns.x = dict(a=ns.x, b=ns.x) %}" + END,
    "nested namespaces": NS + "{% set ns.x = namespace(a=ns.x, b=ns.x) %}" + END,
    "set namespaces": NS + "{% set n = namespace() %}{% set n.a = ns.x %}{% set n.b = ns.x %}{% set ns.x = n %}" + UP,
    "listed namespaces": NS
    + "{% set n = namespace() %}{% set n.a = ns.x %}{% set n.b = ns.x %}{% set ns.x = [n] %}"
    + UP,
    "dict calls in a filter": NS + "{% set ns.x = dict(a=ns.x, b=ns.x) %}" + UP,
    "namespace calls in a filter": NS + "{% set ns.x = [namespace(a=ns.x, b=ns.x)] %}" + UP,
    "mapped default": NS + "{% set ns.x = ['', '']|map('default', ns.x, true)|list %}" + UP,
    "sorted default": NS + "{% set ns.x = ['', '']|map('default', ns.x, true)|sort %}" + UP,
    "batch filling": NS + "{% set ns.x = [1]|batch(100, ns.x)|list %}" + UP,
    "fromkeys": NS + "{% set ns.x = {}.fromkeys([1, 2], ns.x) %}" + UP,
    "varargs": NS + "{% macro f() %}{% set ns.x = varargs %}{% endmacro %}{{ f(ns.x, ns.x) }}" + UP,
    "kwargs": NS + "{% macro f() %}{% set ns.x = kwargs %}{% endmacro %}{{ f(a=ns.x, b=ns.x) }}" + UP,
    "refusal of nested": NS + "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ raise_exception(ns.x) }}",
    "tojson of nested": NS + "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x|tojson }}",
    "many copies": NS + "{% set ns.l = ns.l + ['x' * 10**6 ~ i] %}" + END,
    "many slices": "{% set b = 'x' * 10**7 %}" + NS + "{% set ns.l = ns.l + [b[1:]] %}" + END,
    "squaring": NS + "{% set ns.n = ns.n * ns.n %}" + END,
    "power": "{{ 10 ** (10 ** 10) }}",
    "huge integer": "{{ ('f' * 10**7)|int(base=16) % 7 }}",
    "join filter": "{{ ('a' * 10**6)|join('b' * 10**6) }}",
    "join method": "{{ ('b' * 10**6).join(range(99999)|map('string')) }}",
    "replace filter": "{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}",
    "replace method": "{{ ('a' * 10**6).replace('', 'b' * 10**6) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**10) }}",
    "format width": "{{ '{:>9999999999}'.format('x') }}",
    "format given width": "{{ '{:{w}}'.format('x', w=10**10) }}",
    "format_map width": "{{ '{x:>9999999999}'.format_map({'x': 1}) }}",
    "printf width": "{{ '%9999999999d' % 1 }}",
    "printf star": "{{ '%*d'|format(10**9, 1) }}",
    "indent": "{{ 'a\nb'|indent(10**10) }}",
    "tojson indent": "{{ [1]|tojson(indent=10**10) }}",
    "round": "{{ 1|round(10**9) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "to_bytes": "{{ (1).to_bytes(10**10) }}",
    "split": "{{ ('ab ' * 5000000).split(' ')|length }}",
    "list of characters": "{{ ('ab' * 5000000)|list|length }}",
    "title": "{{ ('a ' * 5000000)|title|length }}",
    "constant text in a loop": "{% set x %}{% for i in range(99999) %}" + "y" * 10**5 + "{% endfor %}{% endset %}",
    "output": "{% for i in range(99999) %}" + "y" * 1000 + "{% endfor %}",
    "cycler items": NS + "{% set ns.x = cycler(cycler(ns.x).items).items %}{% endfor %}{{ {ns.x: 1}|length }}",
    "equality of cycler items": NS + "{% set ns.x = cycler(ns.x, ns.x).items %}{% endfor %}{{ ns.x == ns.x[0] }}",
    "deep batches": NS + "{% for b in 'x'|batch(2, ns.x) %}{% set ns.x = b %}{% endfor %}{% endfor %}{{ ns.x }}",
    "deep groups": "{% set m = namespace(a=1) %}{% set l = [m] %}{% for i in range(1000) %}"
    "{% set m.a = (l|groupby('a'))[0] %}{% endfor %}",
    "member of a list": LONG + "{{ a in [b] * 300000 }}",
    "member of an iterator": LONG + "{{ a in ([b] * 300000)|map('default') }}",
    "member by a test": LONG + "{{ a is in([b] * 300000) }}",
    "joined numbers": "{{ ([10 ** 1000] * 10**6)|join|length }}",
    "repeated format": LONG + "{{ ('{0}' * 1500).format(a)|length }}",
    "repeated format_map": LONG + "{{ ('{a}' * 1500).format_map({'a': a})|length }}",
    "repeated width": "{{ ('{0:>9999}' * 150000).format('x')|length }}",
    "repeated printf": LONG + "{{ (('%(a)s' * 1500) % {'a': a})|length }}",
    "repeated printf filter": LONG + "{{ ('%(a)s' * 1500)|format(a=a)|length }}",
    "repeated printf width": "{{ ('%(a)9999d' * 150000)|format(a=1)|length }}",
    "printf width after a key": "{{ ('%(a)9999999999d' % {'a': 1})|length }}",
    "tojson separators": LONG + "{{ ([1] * 1500)|tojson(separators=(a, a))|length }}",
    "sort": LONG + "{{ ([a, b] * 20000)|sort|length }}",
    "unique": LONG + "{{ ([a, b] * 20000)|unique|list|length }}",
    "min": LONG + "{{ ([a, b] * 20000)|map('default')|min|length }}",
    "groupby": LONG + "{{ ([[a], [b]] * 20000)|groupby(0)|length }}",
    "unique, colliding": "{{ range(0, 99999 * (2**61 - 1), 2**61 - 1)|unique|list|length }}",
    "strip": LONG + "{{ ('a' * 300000).strip('b' + a + 'a')|length }}",
    "trim": LONG + "{{ ('a' * 300000)|trim('b' + a + 'a')|length }}",
    "rfind": LONG + "{{ ('a' * 10**6).rfind('ab' ~ 'a' * 500000) }}",
    "startswith": LONG + "{{ a.startswith((b,) * 300000) }}",
    "count in a list": LONG + "{{ ([b] * 300000).count(a) }}",
    "split by keyword": "{{ ('ab ' * 5000000).split(sep=' ')|length }}",
    "rsplit by keyword": LONG + "{{ ('a' * 10**6).rsplit(sep='b' ~ 'a' * 500000)|length }}",
    "split of bytes": "{{ ('ab ' * 5000000).encode().split()|length }}",
    "split of bytes by a mark": "{{ ('ab ' * 5000000).encode().split(' '.encode())|length }}",
    "lines of bytes": "{{ ('ab\n' * 5000000).encode().splitlines()|length }}",
    "split at wide spaces": "{{ ('a\u3000' * 5000000).split()|length }}",
    "lines at odd breaks": "{{ ('a\u2028' * 5000000).splitlines()|length }}",
    "codec that grows": "{{ ('\u3042' * 10**6).encode('ascii', 'namereplace')|length }}",
    "codec that grows, by keyword": "{{ ('\u3042' * 10**6).encode('ascii', errors='xmlcharrefreplace')|length }}",
    "quadratic codec": "{{ ('\u3042' * 10**6).encode('punycode')|length }}",
    "quadratic codec, by keyword": "{{ ('\u3042' * 10**6).encode(encoding='idna')|length }}",
    "dict, colliding": "{{ dict(range(0, 99999 * (2**61 - 1), 2**61 - 1)|batch(2))|length }}",
    "namespace, colliding": "{% set n = namespace(range(0, 99999 * (2**61 - 1), 2**61 - 1)|batch(2)) %}",
    "literal, colliding": "{% set m = 2**61 - 1 %}{{ {" + ",".join(f"m*{n}:0" for n in range(3_000)) + "}|length }}",
    "constants, colliding": "{{ [" + ",".join(str(n * (2**61 - 1)) for n in range(40_000)) + "]|length }}",
    "tojson escapes": "{% set a = '\x00' * 4000000 %}{% for i in range(12) %}{{ (a|tojson)[:1] }}{% endfor %}",
    "tojson escapes, ASCII": "{% set a = '\U0001f600' * 4000000 %}{% for i in range(6) %}"
    "{{ (a|tojson(ensure_ascii=true))[:1] }}{% endfor %}",
    "path in map": "{{ (['x'] * 50)|map(attribute='0.' * 500000 ~ '0')|list|length }}",
    "path in selectattr": "{{ (['x'] * 50)|selectattr('0.' * 500000 ~ '0')|list|length }}",
    "path in sort": "{{ (['x'] * 50)|sort(attribute='0.' * 500000 ~ '0')|length }}",
    "deep expression": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "deep list": "{{ " + "[" * 5_000 + "]" * 5_000 + " }}",
    "deep blocks": "{% if true %}" * 3_000 + "{% endif %}" * 3_000,
}


def use(source: str) -> str:
    return ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_with_a_template_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In another thread than the main one, as servers render. The timeout is shortened to keep the suite fast."""
    monkeypatch.setattr(limits, "TEMPLATE_TIMEOUT_S", 0.2)
    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(1) as pool, pytest.raises(TemplateError):
        pool.submit(use, BOMBS[name]).result(timeout=60)


@pytest.mark.parametrize("name", ["split by keyword", "split of bytes", "tojson escapes", "tojson escapes, ASCII"])
def test_work_is_charged_before_the_deadline(name: str) -> None:
    with pytest.raises(TemplateError, match="characters in all"):
        use(BOMBS[name])


def test_the_deadline_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def thread_time() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr(time, "thread_time", thread_time)
    with pytest.raises(TemplateError, match="2 s"):
        use(BOMBS["nested loops"])
    assert limits.TEMPLATE_TIMEOUT_S <= now[0] < limits.TEMPLATE_TIMEOUT_S + 0.1


def test_time_in_which_the_machine_did_other_things_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def monotonic() -> float:
        now[0] += 3600.0
        return now[0]

    monkeypatch.setattr(time, "monotonic", monotonic)
    assert ChatTemplate("{% for n in range(100) %}{{ n }}{% endfor %}").render(MESSAGES).startswith("0123")


def test_an_earlier_bomb_does_not_spoil_later_renderings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TEMPLATE_TIMEOUT_S", 0.1)
    template = ChatTemplate("{% if n == 1 %}" + BOMBS["nested loops"] + "{% endif %}ok")
    with pytest.raises(TemplateError):
        template.render(MESSAGES, n=1)
    assert template.render(MESSAGES, n=2) == "ok"


@pytest.mark.parametrize("given", [5, True, [5], {"default": 5}])
def test_a_template_of_another_type_is_refused(given: object) -> None:
    with pytest.raises(TemplateError, match=r"chat_template is of type .* allowed: a string"):
        ChatTemplate.from_config({"chat_template": given})


def test_comparisons_mean_what_they_say() -> None:
    assert use("{{ 1 < 2 < 3 }} {{ 1 < 2 > 3 }} {{ 'a' in 'ba' }} {{ 2 not in [1] }} {{ 1 in [2, 1]|map('int') }}") == (
        "True False True True True"
    )
    assert use("{{ messages == [] }} {{ messages != none }} {{ 'role' in messages[0] }} {{ x == 1 }}") == (
        "False True True False"
    )


def test_texts_are_taken_apart_and_encoded_as_in_python() -> None:
    assert use("{{ 'a b'.split(sep=' ') }}{{ 'a b c'.rsplit(maxsplit=1) }}") == "['a', 'b']['a b', 'c']"
    assert use("{{ 'é'.encode('UTF_8').decode(errors='replace') }}{{ 'é'.encode('latin-1')|length }}") == "é1"
    assert use("{{ dict([('a', 1), (2, 3)], b=4) }}{{ dict({'c': 5}) }}") == "{'a': 1, 2: 3, 'b': 4}{'c': 5}"
    assert use("{% set n = namespace({'a': 1}, b=2) %}{{ n.a + n.b }}{{ '\x00'|tojson }}") == '3"\\u0000"'
    with pytest.raises(TemplateError, match="encode with encoding 'idna'; allowed: utf-8"):
        use("{{ 'a'.encode('idna') }}")


def test_threads_do_not_share_a_budget() -> None:
    template = ChatTemplate("{% for i in range(n) %}{{ i % 10 }}{% endfor %}")
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda n: template.render([], n=n), [100, 200, 300, 400] * 5))
    assert [len(text) for text in texts] == [100, 200, 300, 400] * 5


SEEN_AT_LOAD = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages['__class__'] }}",
    "{{ ''|attr('x') }}",
    "{{ []|map(attribute='__class__')|list }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ raise_exception.__globals__['os'] }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% from 'x' import y %}",
    "{% extends 'x' %}",
    "{% if false %}{{ ''.__class__ }}{% endif %}",
    "{{ 'a'|wordwrap(1) }}",
    "{{ messages['__cl' ~ 'ass__'] }}",
    "{{ messages['__cl' + 'ass__'] }}",
    "{{ messages[bos_token ~ '__cl' ~ ('a' + 'ss__')] }}",
    "{{ ('{0.__cl' ~ 'ass__}').format(1) }}",
]


@pytest.mark.parametrize("source", SEEN_AT_LOAD)
def test_what_can_be_seen_is_refused_at_load(source: str) -> None:
    with pytest.raises(TemplateError, match=r"line 1.*not allowed"):
        ChatTemplate(source)


SEEN_AT_RENDER = [
    "{{ ''[A ~ 'ass__'] }}",
    "{{ cycler(1)['items'] }}",
    "{{ ('{0.' ~ A ~ 'ass__}').format(1) }}",
    "{{ ('{x.' ~ A ~ 'ass__}').format_map({'x': 1}) }}",
    "{{ ['']|map(attribute=A ~ 'ass__')|list }}",
    "{{ ['']|map('at' ~ 'tr', A ~ 'ass__')|list }}",
    "{{ raise_exception[B ~ 'bals__'] }}",
    "{{ namespace(**{A ~ 'ass__': 1}) }}",
    "{{ messages.append(1) }}",
    "{{ messages.__getitem__(0).update(a=1) if false else messages[0].update(a=1) }}"[:0]
    + "{{ messages[0].update(a=1) }}",
    "{{ lipsum() }}",
    "{{ ['']|groupby(A ~ 'ass__')|list }}",
    "{{ messages|selectattr(A ~ 'ass__')|list }}",
]


@pytest.mark.parametrize("source", SEEN_AT_RENDER)
def test_what_is_hidden_is_refused_at_rendering(source: str) -> None:
    template = ChatTemplate("{% set A = '__cl' %}{% set B = '__glo' %}" + source)
    with pytest.raises(TemplateError):
        template.render(MESSAGES)


def test_a_templates_own_refusal_keeps_its_words() -> None:
    with pytest.raises(TemplateError, match=r"^Only user and assistant roles!$"):
        use("{{ raise_exception('Only user and assistant roles!') }}")


def test_errors_name_line_or_cause() -> None:
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("a\n{% if %}")
    with pytest.raises(TemplateError, match="'who' is undefined"):
        use("{{ who.name }}")
    with pytest.raises(TemplateError, match="1048577 characters"):
        ChatTemplate("x" * (limits.MAX_TEMPLATE_SOURCE_CHARS + 1))


def test_long_ordinary_conversations_are_within_the_budget() -> None:
    source = (
        "{% for m in messages %}{% set content = m.content|trim %}{% if m.role == 'user' %}"
        "{{ '<|user|>' + content + '<|end|>' }}{% else %}{{ '<|assistant|>' ~ content.split('</think>')[-1] }}"
        "{% endif %}{% endfor %}"
    )
    long = [{"role": role, "content": "word " * 400} for role in ("user", "assistant")] * 1000
    assert len(ChatTemplate(source).render(long)) > 3_900_000
    assert len(ChatTemplate(source).render([{"role": "user", "content": "x" * 12_000_000}])) > 12_000_000
