"""Uses `penstock.LLM` where nothing is installed but what a GPU machine has; run by test_offline.py in its own process.

Prints one line of JSON. Every other library, and the native one, is hidden: it is as if it were not installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

ASKED = {"torch", "triton", "numpy", "safetensors", "tokenizers", "jinja2"}
OF_TORCH = {"filelock", "fsspec", "functorch", "mpmath", "networkx", "setuptools", "sympy", "torchgen"}
OF_OTHERS = {"markupsafe", "typing_extensions"}
VISIBLE = ASKED | OF_TORCH | OF_OTHERS | sys.stdlib_module_names | {"penstock"}


class Visible(PathFinder):
    """Finds what is visible, in the places that Python looks in."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.partition(".")[0]
        if fullname == "penstock._native" or not (name in VISIBLE or name.startswith("_sysconfigdata")):
            return None
        return super().find_spec(fullname, path, target)


def refusal(call: Callable[[], Any]) -> str:
    """What a call is refused with."""
    from penstock.config.errors import PenstockError

    try:
        call()
    except PenstockError as error:
        return str(error)
    return "nothing was refused"


def everything(model: str) -> dict[str, Any]:
    """What needs no other library, on a model that chats; and what is said of that which does."""
    from penstock import LLM, BeamParams, SamplingParams
    from penstock.program import gen, select

    said: dict[str, Any] = {}
    with LLM(model, device="cpu", max_model_len=256, max_num_seqs=4) as llm:
        said["kernels"] = sorted({kernel.value for kernel in llm.info.kernels})
        message = {"role": "user", "content": "Find me a hotel in Paris."}
        tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
        said["chat"] = llm.chat([message], temperature=0, max_tokens=4)[0].text
        parsed = llm.chat([message], tools=[tool], parse=True, thinking_budget=2, temperature=0, max_tokens=4)
        said["parsed"] = len(parsed[0].outputs[0].token_ids)
        two = SamplingParams(n=2, seed=1, max_tokens=3, logprobs=2, top_p=0.9, repetition_penalty=1.1)
        said["logprobs"] = [len(output.logprobs) for output in llm.generate("The weather", two)[0].outputs]
        said["prompt_logprobs"] = len(llm.generate([[5, 6, 7]], max_tokens=1, prompt_logprobs=1)[0].prompt_logprobs)
        ended = llm.generate("The weather", temperature=0, max_tokens=8)[0].text
        said["stop"] = [ended, llm.generate("The weather", temperature=0, max_tokens=8, stop=(ended[2:4],))[0].text]
        said["beams"] = len(llm.beam_search("The weather", BeamParams(n=2, max_tokens=2))[0].outputs)
        said["embedding"] = len(llm.embed("a text")[0].values)
        state = llm.program()
        state += "A"
        state += gen("word", max_tokens=2)
        state += select("choice", ["x", "y"])
        said["program"] = [len(state["word"]) > 0, state["choice"]]
        said["grammar"] = refusal(lambda: llm.generate("x", json_schema={"type": "object"}))
    return said


def greedy(device: str, model: str) -> dict[str, Any]:
    """The kernels that a device gets, and what they answer."""
    from penstock import LLM, SamplingParams

    with LLM(model, device=device, max_model_len=32, max_num_seqs=1) as llm:
        ids = llm.generate("Once upon a time", SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids
        return {"ids": ids, "kernels": sorted({kernel.value for kernel in llm.info.kernels})}


if __name__ == "__main__":
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Visible]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    what, *rest = sys.argv[1:]
    if what == "command":
        from penstock.__main__ import main

        main()
    said = everything(*rest) if what == "everything" else greedy(what, *rest)
    said["others"] = sorted({name.partition(".")[0] for name in sys.modules} & {"fastapi", "zmq", "msgspec", "typer"})
    print(json.dumps(said))
