"""`penstock perplexity`: what quantising a model cost."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.command import Command
from penstock.cli.options import takes_engine_options
from penstock.cli.textfile import Chunks, Context
from penstock.config.options import EngineOptions

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
@takes_engine_options
def perplexity(
    engine: EngineOptions,
    text: Annotated[Path, typer.Option("--text", help="A UTF-8 text file.")],
    context: Context = None,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            min=1,
            help="Overlapping stretches, each so many tokens on; every token is scored. "
            "Default: stretches side by side, second halves scored, as llama-perplexity does.",
        ),
    ] = None,
    chunks: Chunks = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="MODEL", help="The original: also report how far MODEL lies from it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how well a model predicts a text, or how far its predictions lie from another's."""
    from penstock.cli.terminal import STARTING, configure_logging, loading_bar
    from penstock.cli.textfile import text_windows

    configure_logging(quiet=True)
    with loading_bar(waiting="Reading the text"):
        windows, size = text_windows(engine, text, context, stride, chunks)
    figures: dict[str, Any] = {"model": engine.model, "text": str(text), "context": size, "stride": stride}
    with loading_bar(waiting=STARTING) as told:
        from penstock.evaluate import scoring  # and torch with it

        scorer = scoring.Scorer(engine, size, progress=told)
    with closing(scorer):
        figures |= {"dtype": scorer.spec.options.dtype, "windows": len(windows)}
        if against is None:
            with loading_bar(title="Scoring", unit="", waiting="Scoring") as told:
                figures |= _perplexity(scoring.perplexity(scorer, windows, told))
        else:
            with loading_bar(waiting=STARTING) as told:
                original = replace(engine, model=against, quantize=None, kv_cache_dtype="float32")
                reference = scoring.Scorer(original, size, progress=told)
            with closing(reference), loading_bar(title="Scoring", unit="", waiting="Scoring") as told:
                own, theirs, divergence = scoring.compare(scorer, reference, windows, told)
            figures |= _perplexity(own) | {
                "against": {"model": against, **_perplexity(theirs)},
                "perplexity_ratio": own.value / theirs.value,
                "divergence": asdict(divergence),
            }
    typer.echo(json.dumps(figures)) if as_json else _print(figures)


def _perplexity(found: Any) -> dict[str, Any]:
    return {
        "perplexity": found.value,
        "standard_error": found.error,
        "mean_nll": found.mean_nll,
        "tokens": found.tokens,
    }


def _print(figures: dict[str, Any]) -> None:
    from penstock.cli.terminal import print_table

    def value(of: dict[str, Any]) -> str:
        return f"{of['perplexity']:.4f} ± {of['standard_error']:.4f}"

    rows = [("perplexity", value(figures), f"{figures['tokens']:,} tokens in {figures['windows']} stretches")]
    if "divergence" in figures:
        d, ratio = figures["divergence"], figures["perplexity_ratio"]
        rows += [
            ("perplexity of the other", value(figures["against"]), figures["against"]["model"]),
            ("ratio", f"{ratio:.5f} ± {ratio * d['log_ratio_error']:.5f}", ""),
            ("KL divergence, mean", f"{d['mean']:.6f} ± {d['standard_error']:.6f}", "nats a token"),
            ("KL divergence, median", f"{d['median']:.6f}", ""),
            ("KL divergence, 99 %", f"{d['percentile_99']:.6f}", ""),
            ("KL divergence, largest", f"{d['maximum']:.6f}", ""),
            ("same most probable token", f"{d['same_top']:.2%}", ""),
            ("change of the true token's p", f"{d['mean_probability_change']:+.4%}", "mean"),
            ("", f"{d['rms_probability_change']:.4%}", "root mean square"),
        ]
    print_table(f"{figures['model']} on {figures['text']}", ("", "", ""), rows)
