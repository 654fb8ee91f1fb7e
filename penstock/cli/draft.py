"""`penstock draft`: heads that draft for a model."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.command import Command
from penstock.cli.options import takes_engine_options
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.train.settings import METHODS, TrainSettings

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.llm import LLM
    from penstock.train.acceptance import Acceptance
    from penstock.train.answers import Answer, AnswerFile
    from penstock.train.nets import DraftNet
    from penstock.train.target import Target
    from penstock.train.training import StepLoss

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train heads that draft for a model.")
_AT_ONCE: Final = 64  # answers that are made, then kept
_SAVED_S: Final = 60.0  # between two times that the training is saved
_TOLD_S: Final = 15.0  # between two lines that tell the loss
_DEFAULTS: Final = TrainSettings()


@app.callback()
def draft() -> None:
    """Train heads that draft for a model."""


@app.command("train", cls=Command)
@takes_engine_options
def train(
    engine: EngineOptions,
    text: Annotated[
        Path, typer.Option("--text", help="What the model is asked: .jsonl of messages or prompts, or paragraphs.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")] = Path("draft-head"),
    method: Annotated[str, typer.Option("--method", help=f"Which head: {', '.join(METHODS)}.")] = _DEFAULTS.method,
    drafts: Annotated[
        int, typer.Option("--drafts", help="Tokens that it drafts one after the other.")
    ] = _DEFAULTS.drafts,
    prompts: Annotated[int, typer.Option("--prompts", min=2, help="Answers at most.")] = 4096,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Tokens of an answer.")] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, max=2, help="Of the answers; those held out are greedy.")
    ] = 0.0,
    epochs: Annotated[int, typer.Option("--epochs", help="How often each answer is read.")] = _DEFAULTS.epochs,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Answers a step.")] = _DEFAULTS.batch_size,
    starts: Annotated[
        int, typer.Option("--starts", help="Places of an answer that are learned in one reading.")
    ] = _DEFAULTS.starts,
    learning_rate: Annotated[float, typer.Option("--learning-rate")] = _DEFAULTS.learning_rate,
    draft_vocab: Annotated[
        int, typer.Option("--draft-vocab", help="Most tokens that an EAGLE-3 head can draft.")
    ] = _DEFAULTS.draft_vocab,
    held_out: Annotated[
        float, typer.Option("--held-out", help="Share of the answers that measure it.")
    ] = _DEFAULTS.held_out,
    force: Annotated[bool, typer.Option("--force", help="Replace what lies at the output, and begin anew.")] = False,
) -> None:
    """Train a draft head on a model's own answers; ended with Ctrl-C, the same command goes on.

    Answers and what has been learned lie in a folder beside the output, `.training` behind its name, until it is done.
    """
    from penstock.cli.terminal import configure_logging
    from penstock.train.target import check_drafted_for
    from penstock.weights.writers.files import check_replaceable

    configure_logging(quiet=True)
    settings = TrainSettings(
        method=method,
        drafts=drafts,
        epochs=epochs,
        batch_size=batch_size,
        starts=starts,
        learning_rate=learning_rate,
        draft_vocab=draft_vocab,
        held_out=held_out,
        seed=engine.seed or 0,
    )
    check_replaceable(output)
    asked = {"text": _digest(text), "prompts": prompts, "max_tokens": max_tokens, "temperature": temperature}
    if output.exists() and not force:
        raise ConfigError(f"{output} exists already; choose another --output, or replace it with --force.")
    check_drafted_for(engine, method)
    place = _place(output, anew=force)
    facts = {**_computed(engine), **asked, **asdict(settings)}
    with _written(place):
        made, longest = _answers(engine, text, place, asked, settings.held_out)
        _train(engine, settings, made, place, facts, output, longest)
    shutil.rmtree(place, ignore_errors=True)


def _computed(engine: EngineOptions) -> dict[str, Any]:
    """Whose answers they are, and what their bits depend on."""
    return {"model": engine.model, "dtype": engine.dtype, "quantize": engine.quantize}


def _place(output: Path, *, anew: bool) -> Path:
    """The folder beside the output in which a training is kept; `anew`: without what lies there."""
    place = output.with_name(f"{output.name}.training")
    if anew:
        shutil.rmtree(place, ignore_errors=True)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{place} cannot be made: {error.strerror or error}. Choose another --output.") from None
    return place


@contextmanager
def _written(place: Path) -> Iterator[None]:
    """A full disk ends a training with a word; it can go on."""
    try:
        yield
    except OSError as error:
        told = f"{place} cannot be written: {error.strerror or error}. Make room there; the same command goes on."
        raise ConfigError(told) from None


def _digest(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # it is read twice, and a device may have no end
            raise ConfigError(f"--text {path} is no plain file.")
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"--text {path} cannot be read: {error.strerror or error}.") from None


def _answers(
    engine: EngineOptions, text: Path, place: Path, asked: dict[str, Any], share: float
) -> tuple[tuple[list[Answer], list[Answer]], int]:
    """The model's answers to learn from and to measure, the latter greedy, those that are missing made now; and the
    tokens that the model has room for."""
    from penstock.cli.draft_prompts import read_prompts
    from penstock.cli.terminal import STARTING, loading_bar
    from penstock.engine.text_pipeline import TextPipeline
    from penstock.llm import LLM
    from penstock.train.answers import AnswerFile, held_out, measurable

    _same(place / "asked.json", {**_computed(engine), **asked})
    answers, greedy = AnswerFile(place / "answers.jsonl"), AnswerFile(place / "greedy.jsonl")
    given = {name: value for name, value in asdict(engine).items() if name != "model"}
    with loading_bar(waiting=STARTING) as told:
        llm = LLM(engine.model, progress=told, **given)
    with llm, loading_bar(title="Answering", unit="", waiting="Reading the text") as told:
        longest, room = llm.info.max_model_len, asked["max_tokens"]
        if room >= longest:
            raise ConfigError(f"--max-tokens is {room}; the model has room for {longest} with the prompt.")
        read = read_prompts(text, TextPipeline.of(engine), asked["prompts"], longest - room)
        if read.too_long:
            typer.echo(f"{read.too_long} prompts of more than {longest - room} tokens are left out.", err=True)
        _answer(llm, read.tokens, answers, asked["temperature"], room, told)
        learned, kept = held_out(answers.answers, share)
        if asked["temperature"]:
            _answer(llm, [one.prompt for one in kept], greedy, 0.0, room, told)
            kept = measurable(greedy.answers)
    return (learned, kept), longest


def _answer(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    file: AnswerFile,
    temperature: float,
    room: int,
    told: Callable[[int, int], None],
) -> None:
    """Adds the answers to those prompts that have none yet; another run draws the same."""
    from penstock.train.answers import Answer

    file.keep(prompts, _AT_ONCE)
    for begin in range(len(file.answers), len(prompts), _AT_ONCE):
        part = [list(tokens) for tokens in prompts[begin : begin + _AT_ONCE]]
        made = llm.generate(part, temperature=temperature, max_tokens=room, seed=begin)
        file.add([Answer(one.prompt_ids, one.outputs[0].token_ids) for one in made])
        told(len(file.answers), len(prompts))


def _same(path: Path, facts: dict[str, Any]) -> None:
    """Notes what a folder is of; raises ConfigError where it is of something else."""
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(facts), encoding="utf-8")
        partial.replace(path)
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Begin anew with --force.") from None
    if found != facts:
        raise ConfigError(
            f"{path.parent} holds answers to another --text, of another model or made otherwise. Go on with the same "
            "settings, begin anew with --force, or choose another --output."
        )


def _train(
    engine: EngineOptions,
    settings: TrainSettings,
    made: tuple[list[Answer], list[Answer]],
    place: Path,
    facts: dict[str, Any],
    output: Path,
    longest: int,
) -> None:
    from penstock.cli.terminal import STARTING, loading_bar
    from penstock.train.acceptance import measure
    from penstock.train.build import begin
    from penstock.train.head_folder import rounded, write_head
    from penstock.train.target import Target
    from penstock.weights.writers.files import replacing

    learned, kept = made
    context = max(len(answer.tokens) for answer in (*learned, *kept))
    with loading_bar(waiting=STARTING) as told:
        target = Target(engine, context, told)
    with closing(target):
        net, drafted = begin(target, learned, settings)
        _learn(net, drafted, target, learned, settings, place / "state.npz", facts)
        rounded(net)
        with loading_bar(title="Measuring", unit="", waiting="Measuring") as told:
            found = measure(net, target, kept, drafted, told, facts["max_tokens"])
        with replacing(output) as folder:
            folder.mkdir()
            size = write_head(folder, net, target, drafted, longest)
    _print(output, size, settings.method, len(kept), found)


def _learn(
    net: DraftNet,
    drafted: Tensor | None,
    target: Target,
    answers: list[Answer],
    settings: TrainSettings,
    state: Path,
    facts: dict[str, Any],
) -> None:
    from penstock.cli.terminal import loading_bar
    from penstock.train.training import Training

    training = Training(net, target, answers, settings, drafted)
    if state.exists():
        training.resume(state, facts)
        typer.echo(f"Going on behind step {training.done} of {training.steps}.", err=True)
    with loading_bar(title="Training", unit="", waiting="Training") as told, _interruptible() as interrupted:
        saved = said = time.monotonic()

        def tell(loss: StepLoss) -> bool:
            nonlocal saved, said
            told(loss.step, loss.steps)
            now = time.monotonic()
            if now - said > _TOLD_S or loss.step == loss.steps:
                said = now
                typer.echo(f"step {loss.step} of {loss.steps}: loss {_figures(loss.by_draft)}", err=True)
            if now - saved > _SAVED_S:
                saved = now
                training.save(state, facts)
            return not interrupted.is_set()

        training.run(tell)
    training.save(state, facts)
    if training.done < training.steps:
        typer.echo(f"Ended behind step {training.done} of {training.steps}; the same command goes on.", err=True)
        raise typer.Exit(130)


@contextmanager
def _interruptible() -> Iterator[Event]:
    """Ctrl-C sets the event within, so that a step is ended; a second time it interrupts."""
    asked = Event()

    def ask(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _figures(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _print(output: Path, size: int, method: str, answers: int, found: Acceptance) -> None:
    from penstock.cli.terminal import print_table

    rows = [
        (str(draft), f"{match:.3f}", f"{tokens:.2f}")
        for draft, (match, tokens) in enumerate(zip(found.match, found.tokens_a_step, strict=True), start=1)
    ]
    title = f"{answers} answers that were held out, {found.tokens:,} tokens, greedy"
    print_table(title, ("DRAFTS", "ALL RIGHT", "TOKENS A STEP"), rows, numbers=True)
    config = json.dumps({"method": method, "model": str(output)})
    typer.echo(f"{output}: {size / 2**20:.1f} MiB. Use it with --speculative-config '{config}'.")
