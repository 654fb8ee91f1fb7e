"""`penstock plan`: what memory a model needs, without loading it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.command import Command
from penstock.cli.options import takes_engine_options
from penstock.config.errors import MemoryPlanError
from penstock.config.options import EngineOptions

if TYPE_CHECKING:
    from penstock.startup.engine_spec import EngineSpec

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
@takes_engine_options
def plan(
    engine: EngineOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what memory a model needs, without loading it. Exit code 1 says that it does not fit."""
    from penstock.startup.engine_spec import make_engine_spec

    count = engine.data_parallel_size
    try:
        spec = make_engine_spec(_of_one(engine) if count > 1 else engine)
    except MemoryPlanError as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"fits": False, "error": str(error)}))
        raise typer.Exit(1) from None
    facts = {**describe(spec), "engines": count}
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        _print(spec, facts)


def _of_one(engine: EngineOptions) -> EngineOptions:
    """What each of several engines is asked for."""
    from penstock.cluster.engines import memory_of_one
    from penstock.config.data_parallel import check_data_parallel, engine_options
    from penstock.host.engine import hosted_options

    check_data_parallel(engine)
    hosted = hosted_options(engine)
    return engine_options(hosted, 0, memory_of_one(hosted))


def describe(spec: EngineSpec) -> dict[str, Any]:
    """The plan as plain values; sizes in bytes."""
    from penstock.weights.weight_plan import kept_as

    made, options = spec.plan, spec.options
    return {
        "fits": True,
        "model": spec.facts.name,
        "parameters": spec.facts.parameters,
        "dtype": options.dtype,
        "weights_kept_as": list(kept_as(spec.weights)) or [options.dtype],
        "device": options.device,
        "max_model_len": made.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "block_size": options.block_size,
        "kv_blocks": list(made.kv_blocks),
        "bytes": {
            "weights_on_disk": made.weights_file_bytes,
            "weights_resident": made.weights_bytes,
            "kv_cache": made.kv_bytes,
            "activations": made.activation_bytes,
            "total": made.total_bytes,
            "available": made.available_bytes,
            "free": made.available_bytes - made.total_bytes,
        },
        "full_length_sequences": made.max_concurrent_full_length,
        "settings": [{"name": s.name, "value": s.value, "reason": s.reason} for s in spec.settings],
        "notes": list(made.notes),
    }


def _print(spec: EngineSpec, facts: dict[str, Any]) -> None:
    from penstock.cli.terminal import print_table
    from penstock.startup.memory_plan import format_bytes

    sizes, kept = facts["bytes"], facts["weights_kept_as"]
    blocks = " + ".join(f"{count:,}" for count in facts["kv_blocks"])
    rows = (
        ("weights on disk", "weights_on_disk", f"{facts['parameters']:,} parameters"),
        ("weights resident", "weights_resident", f"{' and '.join(kept[:3])}; computed in {facts['dtype']}"),
        ("KV cache", "kv_cache", f"{blocks} blocks of {facts['block_size']} tokens"),
        ("activations", "activations", spec.plan.step_remark),
        ("total", "total", f"on {facts['device']}"),
        ("free", "free", f"of {format_bytes(sizes['available'])} available now"),
    )
    print_table(
        f"Memory for {facts['model']}",
        ("what", "size", "remark"),
        [(what, format_bytes(sizes[key]), remark) for what, key, remark in rows],
    )
    count, length = facts["full_length_sequences"], facts["max_model_len"]
    typer.echo(
        f"\n{count:.1f} sequences of the full {length:,} tokens fit; at most {facts['max_num_seqs']} run at once.\n"
    )
    settings = [(s["name"], s["value"], s["reason"]) for s in facts["settings"]]
    print_table("Derived settings", ("setting", "value", "because"), settings)
    if facts["engines"] > 1:
        typer.echo(f"Note: all of this is of one of {facts['engines']} engines, which map the same weights.")
    for note in facts["notes"]:
        typer.echo(f"Note: {note}.")
