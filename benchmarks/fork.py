"""Eight branches from one long prompt: forks of a program against eight requests that share nothing.

The forks go on from a prompt of `--prompt` tokens, each with a line of its own and `--max-tokens` sampled tokens; the
independent requests have the same tokens, on an engine whose prefix cache is off. Both engines hold the same
model, are warm, and take turns; every round has a prompt of its own, so that nothing is left from the last one. Figures
are medians over the rounds. That the answers are equal, and the prompt computed once, is checked in every round.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.report import arguments, report
from penstock import LLM
from penstock.engine.text_pipeline import TextPipeline
from penstock.program import gen
from penstock.text.tokenizer import Tokenizer
from penstock.weights.open import bundled_model_path


def stretched(folder: Path, positions: int) -> str:
    """The bundled model with room for more positions than it was trained on: speed does not depend on what it says."""
    shutil.copytree(bundled_model_path(), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}), encoding="utf-8")
    return str(folder)


def prompt_text(data: Path, tokenizer: Tokenizer, tokens: int, number: int) -> str:
    """About `tokens` tokens of real dialogue, different for every number."""
    text = (data / "chat" / "sgd_dev_200.jsonl").read_text(encoding="utf-8")
    begin = number * 40_000
    piece = text[begin : begin + 8 * tokens]
    return f"Round {number}. " + piece[: len(piece) * tokens // len(tokenizer.encode(piece))]


def forked(llm: LLM, prompt: str, branches: int, max_tokens: int) -> tuple[float, list[tuple[int, ...]], int]:
    """Seconds, whole token sequences before the answers with them, and prompt tokens computed."""
    before = llm.stats()
    started = time.perf_counter()
    forks = (llm.program() + prompt).fork(branches)
    for index, fork in enumerate(forks):
        fork += f" Branch {index}:" + gen("answer", max_tokens=max_tokens, temperature=0, ignore_eos=True)
    forks.join()
    seconds = time.perf_counter() - started
    after = llm.stats()
    computed = (after.prompt_tokens - before.prompt_tokens) - (after.cached_tokens - before.cached_tokens)
    return seconds, [fork.token_ids for fork in forks], computed


def independent(llm: LLM, asked: list[list[int]], max_tokens: int) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds and answers of requests given at once."""
    started = time.perf_counter()
    answers = llm.generate(asked, max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return time.perf_counter() - started, [answer.outputs[0].token_ids for answer in answers]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="a folder or file; by default the bundled model, stretched")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--branches", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    length = given.prompt + given.max_tokens + 512
    shared, alone, computed = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or stretched(Path(folder), length)
        tokenizer = TextPipeline.load(model).tokenizer
        forking, plain = LLM(model, max_model_len=length), LLM(model, max_model_len=length, enable_prefix_caching=False)
    with forking, plain:
        for number in range(given.rounds + 1):  # the first warms both up
            prompt = prompt_text(given.data, tokenizer, given.prompt, number)
            seconds, whole, tokens = forked(forking, prompt, given.branches, given.max_tokens)
            asked = [list(ids[: -given.max_tokens]) for ids in whole]
            other, answers = independent(plain, asked, given.max_tokens)
            if answers != [ids[-given.max_tokens :] for ids in whole]:
                raise SystemExit(f"round {number}: forks and independent requests answer differently")
            if number:
                shared.append(seconds)
                alone.append(other)
                computed.append(tokens / (sum(map(len, asked)) / len(asked)))
    fork, apart = statistics.median(shared), statistics.median(alone)
    figures = {
        "setting": {key: getattr(given, key) for key in ("model", "prompt", "branches", "max_tokens", "rounds")},
        "forked_seconds": shared,
        "independent_seconds": alone,
        "ratio": apart / fork,
        "prompts_computed": statistics.median(computed),
    }
    rows = [
        ("forks of a program", fork, statistics.median(computed), 1.0),
        ("independent requests, cache off", apart, float(given.branches), apart / fork),
    ]
    report("fork", given.results, figures, ("way", "seconds", "prompts computed", "over forks"), rows)


if __name__ == "__main__":
    main()
