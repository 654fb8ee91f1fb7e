"""`penstock show`: what a model is, and what it needs here."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from penstock.cli.command import Command, model_names

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def show(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", autocompletion=model_names, help="A model's name, folder or .gguf file."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Print the chat template alone.")] = False,
    license: Annotated[bool, typer.Option("--license", help="Print the licence alone.")] = False,
    system: Annotated[bool, typer.Option("--system", help="Print the system message alone.")] = False,
    parameters: Annotated[bool, typer.Option("--parameters", help="Print the parameters alone.")] = False,
    modelfile: Annotated[bool, typer.Option("--modelfile", help="Print a Modelfile that makes the model.")] = False,
) -> None:
    """Say what a model is: architecture, sizes, template, licence, capabilities, and what it needs on this machine."""
    from penstock.cli.terminal import print_table
    from penstock.library.describe import describe, modelfile_of
    from penstock.library.store import open_store
    from penstock.startup.forecast import forecast
    from penstock.startup.memory_plan import format_bytes

    store = open_store()
    told = describe(store, name)
    texts = {"template": template, "license": license, "system": system, "parameters": parameters}
    if any(texts.values()):
        for field, wanted in texts.items():
            if wanted:
                typer.echo(getattr(told, field))
        return
    if modelfile:
        typer.echo(modelfile_of(store, name))
        return
    found = forecast(told.facts) if told.facts is not None else None
    if as_json:
        plan = found.plan if found is not None else None
        needs: dict[str, object] = {"fits": plan is not None, "why_not": found.why if found else ""}
        if plan is not None:
            needs["bytes"] = {
                "weights": plan.weights_bytes,
                "kv_cache": plan.kv_bytes,
                "activations": plan.activation_bytes,
            }
        typer.echo(json.dumps({**told.as_json(), "needs": needs}, ensure_ascii=False))
        return
    rows = [(what, value) for what, value in told.rows() if value]
    rows.insert(1, ("size on disk", format_bytes(told.bytes)))
    print_table(told.name, ("what", "value"), rows)
    if found is not None and found.plan is not None:
        typer.echo("")
        print_table("Needs here, on the CPU", ("what", "size", "remark"), found.plan.table())
    elif found is not None:
        hint = f" With --quantize {found.quantize} it runs." if found.quantize else ""
        typer.echo(f"\nDoes not run on this CPU: {found.why}{hint}")
