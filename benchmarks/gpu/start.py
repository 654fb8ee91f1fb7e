"""How long a process takes from its start to its first token, with the model's files in the page cache.

The files are written here, in a published shape and of random values; the process that is timed is one of its own:

    python -m benchmarks.gpu.start FOLDER DEVICE BEGIN [OPTION=VALUE …]
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL = "Llama-3.1-8B"
LONGEST = 30.0  # seconds that writing may take, beyond which random weights are made in the process instead
_DTYPES = {"bf16": "BF16", "f32": "F32", "f16": "F16"}


def start(setting: Any) -> Iterator[Any]:
    """The first of two processes also compiles what Triton's cache does not have."""
    from benchmarks.gpu.engines import folder_of
    from benchmarks.gpu.measure import Figure

    if setting.compiling:
        return
    with tempfile.TemporaryDirectory(dir=_roomy()) as made:
        folder = folder_of(MODEL, setting, Path(made))
        whole = write_weights(folder, setting.torch_device)
        more = ["max_model_len=64", "kv_blocks=40", "max_num_seqs=2"] if setting.tiny else ["max_model_len=8192"]
        more += [] if whole else ["load_format=dummy"]
        for name in ("first token after the process' start", "the same, again"):
            found = _timed(folder, setting.device, more, max(60.0, setting.left))
            note = "read from files" if whole else "random weights made in the process, as writing files took too long"
            note += f"; imports {found['imports']:.1f} s, engine {found['engine']:.1f} s"
            note += f"; {found['graphs']} graphs existed"
            yield Figure(name, found["first"], "s", most=30.0, note=note)
            if setting.tiny:
                return


def _roomy() -> str | None:
    """A folder in memory, if it holds a model twice."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 34 << 30 else None


def write_weights(folder: Path, device: str) -> bool:
    """Writes model.safetensors with random values; False, and there is none, if it would take too long."""
    import torch

    from penstock.weights.dummy import open_dummy

    infos, end = open_dummy(folder).tensors, 0
    header: dict[str, dict[str, Any]] = {}
    for name, info in infos.items():
        offsets = [end, end + info.nbytes]
        header[name] = {"dtype": _DTYPES[info.format], "shape": list(info.shape), "data_offsets": offsets}
        end += info.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path, started = folder / "model.safetensors", time.monotonic()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, info in infos.items():
            kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[info.format]
            values = torch.randn(info.shape, dtype=kind, device=device) * info.shape[-1] ** -0.5
            values = values + 1 if len(info.shape) == 1 else values
            file.write(values.flatten().view(torch.uint8).cpu().numpy().data)
            spent, done = time.monotonic() - started, header[name]["data_offsets"][1]
            if done > end // 8 and spent * end / done > LONGEST:
                path.unlink()
                return False
    return True


def _timed(folder: Path, device: str, more: list[str], timeout: float) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.gpu.start", str(folder), device, repr(time.time()), *more]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise RuntimeError(f"the process ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    folder, device, begin, *more = sys.argv[1:]
    started = float(begin)
    if device == "interpreter":
        from penstock.config.environment import interpret_triton

        interpret_triton()
    from penstock.config.options import EngineOptions
    from penstock.config.sampling import SamplingParams
    from penstock.core.request import EngineRequest
    from penstock.engine.build import build_engine

    imports = time.time() - started
    pairs = (option.split("=") for option in more)
    given: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in pairs}
    options = EngineOptions(model=folder, device=device, pack_cache="off", **given)
    engine, _ = build_engine(options)
    built = time.time() - started
    engine.add(EngineRequest("it", tuple(range(3, 20)), SamplingParams(temperature=0.0, max_tokens=4)))
    while not any(output.tokens for output in engine.step()):
        pass
    first = time.time() - started
    graphs = getattr(getattr(engine.runner, "_graphs", None), "_graphs", ())
    print(json.dumps({"imports": imports, "engine": built - imports, "first": first, "graphs": len(graphs)}))
    engine.close()


if __name__ == "__main__":
    main()
