"""`penstock serve` for those who come from other engines: their spellings are read, their flags answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import typer

from penstock.cli.command import Command
from penstock.cli.foreign.dotted import MEMBERS, joined
from penstock.cli.foreign.table import ENGINES, SPOKEN, answer_to, flags_of, found_in

UNNEEDED: Final = "penstock.unneeded"
"""Where a context keeps what to say of flags that were typed and are not needed here."""
_HELP: Final = "--help-flags"
_SEVERAL: Final = {
    "--served-model-name": "--alias",
    "--logits-processors": "--logits-processors",
    "--lora-modules": "--lora-modules",
}
_RANGES: Final = {"--control-vector-layer-range": "--control-vector-layers"}
_WIDTH: Final = 34


class ServeCommand(Command):
    """Takes underscores for dashes and several names of the model, and knows what flags of other engines are here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        typed = args[: args.index("--")] if "--" in args else args
        if (place := next((at for at, word in enumerate(typed) if word.partition("=")[0] == _HELP), None)) is not None:
            engine = typed[place].partition("=")[2] or "".join(typed[place + 1 : place + 2])
            typer.echo(table(engine))
            ctx.exit()
        takes = {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.get_params(ctx)
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        words, ctx.meta[UNNEEDED] = _ours(_dashed(joined(_ranged(_named(typed)), MEMBERS), takes), takes)
        return super().parse_args(ctx, [*words, *args[len(typed) :]])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        formatter.write_text(
            f"Flags of {', '.join(SPOKEN.values())}, and what they are here: {_HELP} {'|'.join(ENGINES)}"
        )


def table(engine: str) -> str:
    """Every flag of an engine with what it is here, a line each.

    Raises:
        typer.BadParameter: no engine of that name is known.
    """
    if engine not in ENGINES:
        raise typer.BadParameter(f"{_HELP} {engine!r} is none of {', '.join(ENGINES)}.")
    return "\n".join(f"{flag.name:<{_WIDTH}} {flag.sentence}" for flag in flags_of(engine).values())


def _dashed(words: Sequence[str], known: Mapping[str, bool]) -> Iterator[str]:
    """With dashes in flags that were written with underscores, as argparse's users do."""
    for word in words:
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        yield dashed + equals + value if word.startswith("--") and (dashed in known or answer_to(dashed)) else word


def _named(words: Sequence[str]) -> list[str]:
    """With each further value behind a flag of its own: vLLM takes several names and processors behind one, after the
    model."""
    found = [*words]
    for flag, repeated in _SEVERAL.items():
        if flag not in found[1:] or found[0].startswith("-"):
            continue
        first = found.index(flag) + 2
        last = next((at for at in range(first, len(found)) if found[at].startswith("-")), len(found))
        found[first:last] = [word for value in found[first:last] for word in (repeated, value)]
    return found


def _ranged(words: Sequence[str]) -> list[str]:
    """With llama-server's first and last, which are two words, as the one that they are here."""
    found = [*words]
    for flag, ours in _RANGES.items():
        while flag in found:
            first = found.index(flag)
            found[first : first + 3] = [ours, "-".join(found[first + 1 : first + 3])]
    return found


def _ours(words: Iterator[str], takes: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """The words without flags of others that are not needed here, and what to say of those.

    Args:
        words: as typed.
        takes: our flags, and whether each takes a value.

    Raises:
        typer.BadParameter: a flag of others that is something else here, or nothing.
    """
    kept, told = list[str](), list[str]()
    for word in words:
        name, equals, _ = word.partition("=")
        if name in takes or not word.startswith("-"):
            value = [next(words, None)] if takes.get(name) and not equals else []
            kept += [word, *(one for one in value if one is not None)]
            continue
        found = [flag for _, flag in found_in(name) if flag.word != "same"]  # which our own parser answers
        if any(flag.word != "nothing" for flag in found):
            raise typer.BadParameter(str(answer_to(name)))
        if not found:
            kept.append(word)
            continue
        told.append(f"{name} is not needed: {found[0].about}")
        if found[0].values and not equals:
            next(words, "")
    return kept, told
