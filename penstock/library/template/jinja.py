"""Go chat templates as Jinja.

Go's dot, variables and fields are followed through the tree with what each is (a message, a tool, a text, …), since
that decides how a field is called in Jinja and how a value is written. Templates that speak of .Messages are translated
as they are; others, of .System, .Prompt and .Response, are for one turn, and are repeated over a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from penstock.config.errors import TemplateError
from penstock.library.template.parse import Action, Block, Jump, Node, Operand, Pipeline, Text, parse_go
from penstock.library.template.source import literal


@dataclass(frozen=True, slots=True)
class Value:
    """A Jinja expression, and what it is."""

    code: str
    kind: str = "any"


_JSON: Final = (
    "calls",
    "call",
    "call function",
    "tools",
    "tool",
    "function",
    "parameters",
    "properties",
    "property",
    "json",
)
# Of each kind its fields: the expression, where X is the value, and the kind.
_FIELDS: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = MappingProxyType(
    {
        "root": {
            "Messages": ("messages", "messages"),
            "System": ("go_system", "text"),
            "Tools": ("(tools or [])", "tools"),
            "Prompt": ("go_prompt", "text"),
            "Response": ("go_response", "text"),
            "Suffix": ("''", "text"),
            "Think": ("(enable_thinking | default(false))", "bool"),
            "IsThinkSet": ("(enable_thinking is defined)", "bool"),
            "ThinkLevel": ("(reasoning_effort | default(''))", "text"),
        },
        "message": {
            "Role": ("X['role']", "text"),
            "Content": ("(X['content'] or '')", "text"),
            "Thinking": ("(X['reasoning_content'] or X['thinking'] or '')", "text"),
            "ToolCalls": ("(X['tool_calls'] or [])", "calls"),
            "ToolName": ("(X['name'] or '')", "text"),
            "ToolCallID": ("(X['tool_call_id'] or '')", "text"),
            "Images": ("[]", "any"),
        },
        "call": {"ID": ("X['id']", "text"), "Function": ("X['function']", "call function")},
        "call function": {"Name": ("X['name']", "text"), "Arguments": ("X['arguments']", "json")},
        "tool": {"Type": ("X['type']", "text"), "Function": ("X['function']", "function")},
        "function": {
            "Name": ("X['name']", "text"),
            "Description": ("(X['description'] or '')", "text"),
            "Parameters": ("(X['parameters'] or {})", "parameters"),
        },
        "parameters": {
            "Type": ("X['type']", "text"),
            "Required": ("(X['required'] or [])", "json"),
            "Properties": ("(X['properties'] or {})", "properties"),
        },
        "property": {
            "Type": ("X['type']", "text"),
            "Description": ("(X['description'] or '')", "text"),
            "Enum": ("(X['enum'] or [])", "json"),
        },
    }
)
_ELEMENTS: Final = MappingProxyType(
    {"messages": "message", "calls": "call", "tools": "tool", "properties": "property", "json": "any", "any": "any"}
)
_COMPARISONS: Final = MappingProxyType({"ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="})


def translate(source: str) -> str:
    """A Go chat template as Jinja.

    Raises:
        TemplateError: it uses what has no translation; the message names it.
    """
    nodes = parse_go(source)
    systems = "messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\\n\\n')"
    head = f"{{%- set go = namespace() %}}{{%- set go_system = {systems} %}}"
    if _mentions(nodes, "Messages"):
        return f"{head}{{%- set go_prompt = '' %}}{{%- set go_response = '' %}}{_Writer().write(nodes)}"
    if not _mentions(nodes, "Prompt"):
        raise TemplateError("the template speaks neither of .Messages nor of .Prompt; it is none of a chat.")
    if not _mentions(nodes, "Response"):
        nodes = (*nodes, Action(Pipeline(((Operand("field", "", ("Response",)),),))))
    return _turns(_Writer().write(nodes), _Writer().write(_cut(nodes)[0]))


def _turns(whole: str, last: str) -> str:
    """A template of one turn, over a conversation; `last` is the one that ends where an answer goes on."""
    names = "go_system, go_prompt, go_response"
    now = "go_turn(at.system, at.prompt, at.response)"
    spent = "{%- set at.system = '' %}{%- set at.prompt = '' %}{%- set at.response = '' %}"

    def told(condition: str) -> str:
        return f"{{%- if {condition} %}}{{{{ {now} }}}}{spent}{{%- endif %}}"

    return (
        "{%- set go = namespace() %}{%- set at = namespace(system='', prompt='', response='') %}"
        f"{{%- macro go_turn({names}) %}}{whole}{{%- endmacro %}}"
        f"{{%- macro go_last({names}) %}}{last}{{%- endmacro %}}"
        "{%- for message in messages %}"
        "{%- if message['role'] == 'system' %}"
        f"{told('at.prompt or at.response')}{{%- set at.system = message['content'] %}}"
        "{%- elif message['role'] == 'assistant' %}{%- set at.response = message['content'] or '' %}"
        f"{{%- else %}}{told('at.response')}{{%- set at.prompt = message['content'] %}}{{%- endif %}}"
        "{%- endfor %}{{ go_last(at.system, at.prompt, at.response) }}"
    )


def _operands(pipeline: Pipeline) -> Iterator[Operand]:
    for command in pipeline.commands:
        for operand in command:
            yield operand
            if operand.inner is not None:
                yield from _operands(operand.inner)


def _names(pipeline: Pipeline, name: str) -> bool:
    roots = (
        item for item in _operands(pipeline) if item.kind == "field" or (item.kind, item.text) == ("variable", "$")
    )
    return any(item.fields[:1] == (name,) for item in roots)


def _mentions(nodes: Sequence[Node], name: str) -> bool:
    """Whether a field of the root is used."""
    for node in nodes:
        if isinstance(node, Action) and _names(node.pipeline, name):
            return True
        if isinstance(node, Block) and (
            _names(node.pipeline, name) or _mentions(node.body, name) or _mentions(node.otherwise, name)
        ):
            return True
    return False


def _cut(nodes: Sequence[Node]) -> tuple[tuple[Node, ...], bool]:
    """The nodes up to the first that speaks of .Response, with it, and whether there was one."""
    kept: list[Node] = []
    for node in nodes:
        if isinstance(node, Action) and _names(node.pipeline, "Response"):
            return (*kept, node), True
        if isinstance(node, Block):
            if _names(node.pipeline, "Response"):
                return tuple(kept), True
            body, ended = _cut(node.body)
            otherwise, ended_otherwise = _cut(node.otherwise)
            node = Block(node.kind, node.pipeline, node.variables, body, otherwise)
            if ended or ended_otherwise:
                return (*kept, node), True
        kept.append(node)
    return tuple(kept), False


@dataclass(slots=True)
class _Writer:
    """Writes nodes as Jinja. `dot` is what a field alone is of; `variables` what Go's stand for."""

    dot: Value = field(default_factory=lambda: Value("", "root"))
    variables: dict[str, Value] = field(default_factory=dict)
    count: int = 0

    def write(self, nodes: Sequence[Node]) -> str:
        known, parts = dict(self.variables), []
        for node in nodes:
            if isinstance(node, Text):
                parts.append(f"{{{{ {literal(node.text)} }}}}")
            elif isinstance(node, Action):
                parts.append(self._action(node))
            elif isinstance(node, Jump):
                parts.append(f"{{%- {node.kind} %}}")
            else:
                parts.append(self._range(node) if node.kind == "range" else self._if(node))
        self.variables = known  # those declared here end here
        return "".join(parts)

    def _action(self, node: Action) -> str:
        value = self._value(node.pipeline)
        if not node.variable:
            return f"{{{{ {_written(value)} }}}}"
        if node.declares:
            self.count += 1
            self.variables[node.variable] = Value(f"go.{node.variable[1:]}_{self.count}", value.kind)
        known = self.variables.get(node.variable)
        if known is None or not known.code.startswith("go."):
            raise TemplateError(f"the template assigns {node.variable}, which is declared nowhere.")
        return f"{{%- set {known.code} = {value.code} %}}"

    def _if(self, node: Block) -> str:
        value, outside = self._value(node.pipeline), self.dot
        if node.variables:
            raise TemplateError(f"the template declares a variable in {{{{ {node.kind} }}}}, which has no translation.")
        self.dot = value if node.kind == "with" else outside
        body = self.write(node.body)
        self.dot = outside
        otherwise = f"{{%- else %}}{self.write(node.otherwise)}" if node.otherwise else ""
        return f"{{%- if {value.code} %}}{body}{otherwise}{{%- endif %}}"

    def _range(self, node: Block) -> str:
        value = self._value(node.pipeline)
        outside, known = self.dot, dict(self.variables)
        if value.kind not in _ELEMENTS:
            raise TemplateError(f"the template has a {{{{ range }}}} over {value.kind}, which is no list.")
        self.count += 1
        each, key = f"go_each{self.count}", f"go_key{self.count}"
        self.dot = Value(each, _ELEMENTS[value.kind])
        if node.variables:
            self.variables[node.variables[-1]] = self.dot
        if len(node.variables) > 1:
            self.variables[node.variables[0]] = Value(key, "any")
        if value.kind == "properties":
            head = f"{{%- for {key}, {each} in {value.code} | dictsort %}}"
        else:
            head = f"{{%- for {each} in {value.code} %}}{{%- set {key} = loop.index0 %}}"
        body = self.write(node.body)
        self.dot, self.variables = outside, known
        otherwise = f"{{%- else %}}{self.write(node.otherwise)}" if node.otherwise else ""
        return f"{head}{body}{otherwise}{{%- endfor %}}"

    def _value(self, pipeline: Pipeline) -> Value:
        value: Value | None = None
        for command in pipeline.commands:
            value = self._command(command, value)
        assert value is not None
        return value

    def _command(self, command: Sequence[Operand], piped: Value | None) -> Value:
        first, rest = command[0], [self._operand(item) for item in command[1:]]
        arguments = rest + ([piped] if piped is not None else [])
        if first.kind == "word" and first.text not in ("true", "false", "nil"):
            return _call(first.text, arguments)
        if arguments:
            raise TemplateError("the template gives a value arguments, as if it were a function.")
        return self._operand(first)

    def _operand(self, operand: Operand) -> Value:
        match operand.kind:
            case "string":
                return Value(literal(operand.text), "text")
            case "number":
                return Value(operand.text, "number")
            case "word":
                words = {"true": "true", "false": "false", "nil": "none"}
                if operand.text in words:
                    return Value(words[operand.text], "bool")
                return _call(operand.text, [])
            case "field":
                value = self.dot
            case "variable" if operand.text == "$":
                value = Value("", "root")
            case "variable" if operand.text in self.variables:
                value = self.variables[operand.text]
            case "pipeline" if operand.inner is not None:
                found = self._value(operand.inner)
                value = Value(f"({found.code})", found.kind)
            case _:
                raise TemplateError(f"the template uses {operand.text}, which is declared nowhere.")
        for name in operand.fields:
            value = _field(value, name)
        return value


def _field(value: Value, name: str) -> Value:
    found = _FIELDS.get(value.kind, {}).get(name)
    if found is None:
        raise TemplateError(
            f"the template uses .{name} of a {value.kind}, which has no translation; write it in Jinja."
        )
    return Value(found[0].replace("X", value.code), found[1])


def _written(value: Value) -> str:
    if value.kind in ("root", "messages", "message"):
        raise TemplateError(f"the template writes a whole {value.kind}, which has no translation.")
    if value.kind in _JSON:
        return f"{value.code} | tojson(separators=(',', ':'))"
    return f"('true' if {value.code} else 'false')" if value.kind == "bool" else value.code


def _call(name: str, given: Sequence[Value]) -> Value:
    """One of Go's functions, or of those that Ollama adds."""
    codes = [value.code for value in given]
    calls: dict[str, Callable[[], Value]] = {
        "eq": lambda: Value(f"({codes[0]} in [{', '.join(codes[1:])}])", "bool"),
        "and": lambda: Value(f"({' and '.join(codes)})", given[-1].kind),
        "or": lambda: Value(f"({' or '.join(codes)})", given[-1].kind),
        "not": lambda: Value(f"(not {codes[0]})", "bool"),
        "len": lambda: Value(f"({codes[0]} | length)", "number"),
        "slice": lambda: Value(f"{codes[0]}[{':'.join(codes[1:]) + (':' if len(codes) == 2 else '')}]", given[0].kind),
        "index": lambda: Value(f"{codes[0]}[{codes[1]}]", _ELEMENTS.get(given[0].kind, "any")),
        "json": lambda: Value(f"({codes[0]} | tojson(separators=(',', ':')))", "text"),
        "print": lambda: Value(f"({' ~ '.join(codes)})", "text"),
        "currentDate": lambda: Value("strftime_now('%Y-%m-%d')", "text"),
    }
    if name in _COMPARISONS and len(codes) == 2:
        return Value(f"({codes[0]} {_COMPARISONS[name]} {codes[1]})", "bool")
    least = {"eq": 2, "slice": 2, "index": 2, "currentDate": 0}.get(name, 1)
    if (
        name not in calls
        or len(codes) < least
        or (name in ("index", "slice") and len(codes) > least + (name == "slice"))
    ):
        raise TemplateError(f"the template uses the function {name}, which has no translation; write it in Jinja.")
    return calls[name]()
