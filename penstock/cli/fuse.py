"""`penstock fuse`: a model whose weights have adapters in them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from penstock.cli.command import Command

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def fuse(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a .gguf file, or a name of the library.")],
    adapter: Annotated[
        list[str],
        typer.Option("--adapter", metavar="PATH[:SCALE]", help="A folder of PEFT, a .gguf file or a name; repeatable."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write, or a .gguf file.")],
    quantize: Annotated[
        str | None, typer.Option("--quantize", "-q", metavar="FORMAT", help="Write the weights smaller: q4_k_m, …")
    ] = None,
) -> None:
    """Merge adapters into the weights of a model: a Hugging Face folder of its own.

    Weights keep their type. Those of a .gguf file become bfloat16, since what is merged into few bits is mostly lost;
    --quantize makes them small again.
    """
    from penstock.cli.named_model import find_model
    from penstock.cli.terminal import loading_bar
    from penstock.config.adapters import path_and_scale
    from penstock.config.errors import ConfigError
    from penstock.config.quantisation import SAFETENSORS_FORMATS
    from penstock.library.adapters import adapter_path
    from penstock.weights.writers.float_folder import float_base
    from penstock.weights.writers.merge import Merged, merge_adapters
    from penstock.weights.writers.quantize import quantize_model

    if output.exists():
        raise ConfigError(f"{output} exists already; choose another --output.")
    if (output.suffix == ".gguf") != (quantize is not None and quantize.lower() not in SAFETENSORS_FORMATS):
        raise ConfigError(f"--output is {str(output)!r}; a folder is written, or a .gguf file with --quantize.")
    wanted = [path_and_scale("--adapter", given) for given in adapter]
    merged = [Merged(Path(adapter_path(path)), scale) for path, scale in wanted]
    path = Path(find_model(model).path)
    bar = loading_bar(title="Merging", waiting="Reading the model")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        place = TemporaryDirectory(dir=output.parent)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror or error}. Choose another --output.") from None
    with place as folder, bar as told:
        path = float_base(path, Path(folder, "floats"), told)
        whole = output if quantize is None else Path(folder, "merged")
        count = merge_adapters(path, merged, whole, told)
        if quantize is not None:
            quantize_model(str(whole), quantize.lower(), output, progress=told)
    typer.echo(f"{output}: {count} matrices changed{'' if quantize is None else f', then written as {quantize}'}")
