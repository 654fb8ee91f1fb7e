"""vLLM's own HTTP server; the arguments are those of `vllm.entrypoints.openai.api_server`.

It is run by name rather than as `vllm serve`: that asks for the version of a package `vllm`, which the CPU wheel is
not, and what this process starts is held to an instruction set like it.
"""

from __future__ import annotations

from benchmarks.cpu.workers.vllm import hold_isa

hold_isa()

if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main  # type: ignore[import-not-found]

    main()
