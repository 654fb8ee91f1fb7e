"""Every implementation of an op takes what is declared for it, so that a model calls any of them."""

from __future__ import annotations

from types import ModuleType

from penstock.kernels import onednn, reference
from penstock.kernels.cpu import implementations as cpu
from penstock.kernels.registry import Implementation, functions_of
from tests.kernels.declarations import OPS, keeps_declaration

NAMES = [op for op in OPS if op != "sampling"]


def _wrong(offered: tuple[Implementation, ...]) -> list[str]:
    return [item.op for item in offered if item.op in NAMES and not keeps_declaration(item)]


def test_every_op_has_a_reference_of_the_declared_parameters() -> None:
    offered = reference.implementations(NAMES)
    assert {item.op for item in offered} >= set(NAMES)
    assert _wrong(offered) == []


def test_every_op_is_native_with_the_declared_parameters() -> None:
    offered = cpu.implementations(NAMES)
    assert {item.op for item in offered} >= set(NAMES)
    assert _wrong(offered) == []


def test_products_of_onednn_have_the_declared_parameters() -> None:
    assert _wrong(onednn.implementations()) == []


def test_other_parameters_are_seen() -> None:
    def add(a: float, c: float) -> float:
        return a + c

    assert _wrong((Implementation("add", "another", add, lambda _: None),)) == ["add"]


def test_a_module_offers_what_it_defines_or_names() -> None:
    here = ModuleType("here")
    vars(here).update(add=len, __name__="builtins")
    assert functions_of([here], ["add", "multiply"]) == {"add": len}
    vars(here)["__name__"] = "here"
    assert functions_of([here], ["add"]) == {}
    vars(here)["__all__"] = ["add"]
    assert functions_of([here], ["add"]) == {"add": len}
