"""Commands that ask a model in this process, or one of a running server (--url)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import typer

from penstock.cli.command import Command
from penstock.cli.options import MODEL_FLAGS, flag, freely_seeded, make_engine_options, takes
from penstock.config.options import EngineOptions

if TYPE_CHECKING:
    from penstock.cli.server_client import Server


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A running server that is talked to; without a model the first that it lists."""

    url: str
    api_key: str | None
    model: str | None
    seed: int | None = None

    def server(self) -> Server:
        """How commands speak to it. Raises ConfigError for what is no URL."""
        from penstock.cli.server_client import Server

        return Server(self.url, self.api_key)


SERVER_FLAGS = (
    flag("url", str | None, None, "Model", "Talk to this running server instead; MODEL is one of its models.",
         hidden=False),
    flag("api_key", str | None, None, "Model", "What the server at --url wants as a bearer token.", hidden=False),
    flag("model_name", str | None, None, "Model", "The same as MODEL.", "--model-name", hidden=True),
)  # fmt: skip


_LOCAL: Final = frozenset(parameter.name for parameter in MODEL_FLAGS) - {"model", "seed"}


class AskingCommand(Command):
    """A command with --url: flags of a model in this process are refused beside it, not ignored."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, unless its flags contradict each other."""
        given = [name for name in ctx.params if name in _LOCAL and _is_typed(ctx, name)]
        if ctx.params.get("url") is not None and given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise typer.BadParameter(
                f"{flags}: the server at --url has settings of its own; leave out one or the other."
            )
        return super().invoke(ctx)


def _is_typed(ctx: Any, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def place(given: Mapping[str, Any]) -> tuple[dict[str, Any], Elsewhere | None]:
    """The flags of a model in this process, and the server that is asked instead, if one is."""
    own = dict(given)
    url, api_key = own.pop("url"), own.pop("api_key")
    own["model"] = own.pop("model_name") or own["model"]
    if url is None:
        return own, None
    return own, Elsewhere(url, (api_key or "").partition(",")[0] or None, own["model"], own.get("seed"))


def _chatting(given: Mapping[str, Any]) -> EngineOptions | Elsewhere:
    own, elsewhere = place(given)
    return elsewhere or freely_seeded(own)


def _continuing(given: Mapping[str, Any]) -> EngineOptions | Elsewhere:
    own, elsewhere = place(given)
    return elsewhere or make_engine_options(own)


takes_chatting_model = takes("engine", (*MODEL_FLAGS, *SERVER_FLAGS), _chatting)
takes_continuing_model = takes("engine", (*MODEL_FLAGS, *SERVER_FLAGS), _continuing)
