"""What is done to a chat template's syntax tree before it is compiled: refuse what is unsafe, charge what can grow."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final, cast

from jinja2 import Environment, nodes
from jinja2.visitor import NodeTransformer

from penstock.config.errors import TemplateError

_INTERNALS: Final = re.compile(
    r"__(?:class|mro|base|bases|subclasses|globals|builtins|init|import|dict|code|func|self|module|reduce|reduce_ex"
    r"|getattribute|getattr|loader|spec|closure|call|wrapped)__"
)

_MAX_NUMBER_KEYS: Final = 256  # numbers can have one hash, texts cannot
_MAX_BITS: Final = 60  # below, each has a hash of its own


def check_tree(tree: nodes.Template, removed_filters: Collection[str]) -> None:
    """Refuses what can be seen to be unsafe.

    Raises:
        TemplateError: names the line and what stands there.
    """
    for node in tree.find_all(nodes.Node):
        if isinstance(node, (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            _refuse(node, f"the {type(node).__name__.lower()} statement")
        elif isinstance(node, (nodes.Getattr, nodes.NSRef)) and node.attr.startswith("_"):
            _refuse(node, f"the attribute {node.attr!r}")
        elif isinstance(node, nodes.Filter) and node.name in removed_filters:
            _refuse(node, f"the filter {node.name!r}")
        elif isinstance(node, nodes.Dict) and sum(not _is_text(pair.key) for pair in node.items) > _MAX_NUMBER_KEYS:
            _refuse(node, f"a dictionary with more than {_MAX_NUMBER_KEYS} keys that are no texts")
        elif isinstance(node, nodes.Const) and isinstance(node.value, int) and node.value.bit_length() > _MAX_BITS:
            _refuse(node, f"a number of more than {_MAX_BITS} bits")
        elif isinstance(node, (nodes.Const, nodes.Concat, nodes.Add)):
            for text in _constants(node):
                if _INTERNALS.search(text):
                    _refuse(node, f"the string {text[:80]!r}")


def _is_text(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str)


def _constants(node: nodes.Expr) -> list[str]:
    """The strings that stand in an expression, its neighbouring constants put together."""
    runs = [""]
    stack: list[nodes.Expr] = [node]
    while stack:
        part = stack.pop()
        if isinstance(part, nodes.Concat):
            stack.extend(reversed(part.nodes))
        elif isinstance(part, nodes.Add):
            stack.extend((part.right, part.left))
        elif isinstance(part, nodes.Const):
            runs[-1] += str(part.value)
        else:
            runs.append("")
    return runs


def _refuse(node: nodes.Node, what: str) -> None:
    raise TemplateError(
        f"the chat template, line {node.lineno}, uses {what}, which is not allowed. "
        "Use another template, or the one of the model's own publisher."
    )


def instrument(tree: nodes.Template, environment: Environment) -> nodes.Template:
    """Inserts calls of the sandbox's `tick`, `checked`, `compared`, `container`, `charged` and `joined`."""
    _Instrument().visit(tree)
    tree.set_environment(environment)
    return tree


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=line)


def _constant_chars(body: Sequence[nodes.Node]) -> int:
    return sum(len(data.data) for node in body for data in node.find_all(nodes.TemplateData))


class _Instrument(NodeTransformer):
    def _visit_body(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        size: nodes.Expr = nodes.Const(_constant_chars(node.body), lineno=node.lineno)
        self.generic_visit(node)
        tick = nodes.ExprStmt(_call("tick", [size], node.lineno), lineno=node.lineno)
        node.body.insert(0, tick)
        return node

    visit_Macro = _visit_body
    visit_CallBlock = _visit_body

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._visit_body(node)
        if node.test is not None:
            node.test = _call("checked", [cast(nodes.Expr, node.test)], node.lineno)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        rest = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
        return _call("compared", [node.expr, *rest], node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice) and node.ctx == "load":
            return _call("charged", [node], node.lineno)
        return node

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        if node.name in ("varargs", "kwargs") and node.ctx == "load":
            return _call("container", [node], node.lineno)
        return node

    def _visit_literal(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node, nodes.Tuple) and node.ctx != "load":
            return node
        if all(isinstance(part, nodes.Const) for part in node.iter_child_nodes()):
            return node
        return _call("container", [node], node.lineno)

    visit_List = _visit_literal
    visit_Dict = _visit_literal
    visit_Tuple = _visit_literal
