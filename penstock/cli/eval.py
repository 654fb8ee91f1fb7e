"""`penstock eval`: tasks of EleutherAI's evaluation harness (lm-eval), asked of a model here or a running server's."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from contextlib import AbstractAsyncContextManager, ExitStack, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.elsewhere import AskingCommand, Elsewhere, takes_continuing_model
from penstock.config.errors import ConfigError
from penstock.config.names import served_name
from penstock.config.options import EngineOptions

if TYPE_CHECKING:
    import httpx2

    from penstock.cli.harness import HarnessModel

app = typer.Typer(add_completion=False)


@app.command(cls=AskingCommand)
@takes_continuing_model
def evaluate(
    engine: EngineOptions | Elsewhere,
    tasks: Annotated[str, typer.Option("--tasks", metavar="LIST", help="Names of tasks, such as arc_easy,gsm8k.")],
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", min=0, help="Solved examples before each. Default: the task's.")
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--limit", min=0, help="So many of a task's questions; below 1, a share.")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Ask in the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option("--system-instruction", help="A system message before all.")] = None,
    include_path: Annotated[
        Path | None, typer.Option("--include-path", help="A folder of tasks of your own (YAML files).")
    ] = None,
    at_once: Annotated[int, typer.Option("--max-concurrency", min=1, max=4096, help="Requests at a time.")] = 32,
    prefix_token: Annotated[
        int | None, typer.Option("--prefix-token", help="Id of the token before a text without a context.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write results, settings and versions here.")] = None,
    samples: Annotated[bool, typer.Option("--log-samples", help="Put each question and answer into --json.")] = False,
) -> None:
    """Ask a model the tasks of lm-eval, as they are compared everywhere; needs the extra `eval`.

    Tasks bring their data from Hugging Face's hub; those of --include-path can name files of this machine.
    """
    from penstock.cli.terminal import configure_logging

    configure_logging(quiet=True)
    if find_spec("lm_eval") is None:
        raise ConfigError("eval needs lm-eval; install it: pip install 'penstock-llm[eval]'.")
    if limit is not None and limit <= 0:
        raise ConfigError(f"--limit is {limit:g}; allowed: a number above 0.")
    if samples and json_path is None:
        raise ConfigError("--log-samples puts questions and answers into --json, which is not given.")
    if json_path is not None and json_path.is_dir():
        raise ConfigError(f"--json names {json_path}, which is a folder.")
    if json_path is not None and not json_path.parent.is_dir():
        raise ConfigError(f"--json names {json_path}, but there is no folder {json_path.parent}.")
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    wanted = {
        "tasks": names,
        "num_fewshot": num_fewshot,
        "limit": limit if limit is None or limit < 1 else int(limit),
        "apply_chat_template": apply_chat_template,
        "system_instruction": system,
        "log_samples": samples,
    }
    manager = _manager(include_path, names)
    with asyncio.Runner() as runner, ExitStack() as stack:
        model = _model(engine, runner, stack, at_once, prefix_token)
        found = _evaluated(model, manager, wanted)
    _print(found)
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=2, default=str) + "\n")


def _manager(include_path: Path | None, names: list[str]) -> Any:
    """The harness's list of tasks.

    Raises:
        ConfigError: there is no such folder or task.
    """
    if not names:
        raise ConfigError("--tasks is empty; name one, such as arc_easy.")
    if include_path is not None and not include_path.is_dir():
        raise ConfigError(f"--include-path names {include_path}, which is no folder.")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    for name in names:
        if not manager.match_tasks([name]):
            from penstock.cli.command import near

            raise ConfigError(f"lm-eval has no task {name!r}.{near(name, set(manager.all_tasks))}")
    return manager


def _model(
    engine: EngineOptions | Elsewhere, runner: asyncio.Runner, stack: ExitStack, at_once: int, prefix: int | None
) -> HarnessModel:
    """The model that is asked, until `stack` ends."""
    from penstock.cli.batch import asking_here
    from penstock.cli.harness import HarnessModel
    from penstock.cli.terminal import loading_bar

    def entered(context: AbstractAsyncContextManager[httpx2.AsyncClient]) -> httpx2.AsyncClient:
        client = runner.run(context.__aenter__())
        stack.callback(lambda: runner.run(context.__aexit__(None, None, None)))
        return client

    if isinstance(engine, Elsewhere):
        server = engine.server()
        name, client = server.model(engine.model), entered(server.client(at_once))
    else:
        from penstock.cli.start import start

        llm = runner.run(start(engine))
        stack.callback(lambda: runner.run(llm.close()))
        text = runner.run(llm.start()).text
        prefix = text.eos_ids[0] if prefix is None and not text.tokenizer.encode("") else prefix
        name, client = engine.served_model_name or served_name(engine.model), entered(asking_here(llm))
    return HarnessModel(
        runner,
        client,
        name,
        at_once=at_once,
        prefix=prefix,
        progress=lambda title: stack.enter_context(loading_bar(title=title, unit="requests")),
    )


def _evaluated(model: HarnessModel, manager: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    from lm_eval.evaluator import simple_evaluate

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # of defaults that tasks leave open it warns at length
    with ExitStack() as quiet:
        if not sys.stderr.isatty():
            quiet.enter_context(redirect_stderr(io.StringIO()))  # which has its bars
        found: dict[str, Any] = simple_evaluate(model, task_manager=manager, bootstrap_iters=1000, **wanted)
    return found


def _print(found: dict[str, Any]) -> None:
    """A row a metric: lm-eval calls them "acc,none", and their errors "acc_stderr,none"."""
    from penstock.cli.terminal import print_table

    rows = []
    for task, figures in found["results"].items():
        for key, value in figures.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = figures.get(f"{metric}_stderr,{filtered}")
            plus = f" ± {error:.4f}" if isinstance(error, float) else ""
            count = found.get("n-samples", {}).get(task, {}).get("effective", "")
            name = metric if filtered == "none" else f"{metric} ({filtered})"
            rows.append((task, name, f"{value:.4f}{plus}", str(found["n-shot"].get(task, "")), str(count)))
    print_table("eval", ("task", "metric", "value", "examples", "questions"), rows)
