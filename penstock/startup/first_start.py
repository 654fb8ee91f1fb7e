"""A start from a checkpoint: its layers are declared and loaded, and steps recorded where they can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.config.options import EngineOptions
from penstock.config.resolve import Decision
from penstock.runtime.drafters.drafting import Drafting
from penstock.runtime.executor import RecordedExecutor
from penstock.startup.build_runner import load, make_runner
from penstock.startup.engine_spec import hold_to_size, kernel_decisions, make_engine_spec
from penstock.startup.given_rows import row_width
from penstock.startup.keep_start import keep_start
from penstock.startup.kept_start import weights_identity
from penstock.startup.levels import guarantee, level_notes, products_note
from penstock.startup.scheduling import scheduler_options
from penstock.startup.started import Started, Told, log_notes, log_plan

if TYPE_CHECKING:
    from penstock.startup.workers import Workers


class FirstStart:
    """Decides what an engine will be; then, asked to, loads it.

    Attributes:
        options: concrete.
        vocab_size: of the model.
    """

    def __init__(
        self, options: EngineOptions, drafting: Drafting | None = None, workers: Workers | None = None
    ) -> None:
        """Decides. `workers` are of the model's other ranks, None where there are none.

        Raises:
            PenstockError: as `make_engine_spec`.
        """
        self._drafting = drafting = drafting or Drafting()
        self._workers = workers
        group = None if workers is None else workers.group
        rooms = () if workers is None else workers.rooms()
        self._spec = make_engine_spec(options, drafts=drafting.most, group=group, rooms=rooms)
        self.options, self.vocab_size = self._spec.options, self._spec.model.vocab_size
        # Files may change while they are read: what is kept is of those that were there before.
        self._identity = weights_identity(self.options, self._spec.checkpoint.path)
        log_plan(self._spec.plan)

    def load(self, progress: Callable[[int, int], None] | None = None) -> Started:
        """Loads, and keeps what the next start can go on from; `progress` as of build_engine.

        Raises:
            PenstockError: weights are missing, left over or damaged, or do not fit.
        """
        workers = self._workers
        if workers is None:
            spec, kv_types, notes = load(self._spec, progress)
        else:
            spec, kv_types, notes = workers.load(self._spec, progress)
        options = spec.options
        whole = spec.model.whole_prompts
        limits = scheduler_options(options, spec.plan, whole_prompts=whole)
        runner, executor = make_runner(spec, kv_types, limits.max_num_seqs, self._drafting, workers)
        mode, _, detail = executor.describe.partition(": ")
        step = Decision("step", mode, detail)
        levels = level_notes(options.arithmetic, executor.fast)
        log_notes((*notes, step, *levels))
        numbers = f"weights {options.quantize or 'as stored'}, KV cache {' '.join(kv_types)}"
        told = Told(
            architecture=str((spec.checkpoint.config.get("architectures") or ["?"])[0]),
            vocab_size=spec.model.vocab_size,
            determinism=guarantee(spec.kernels, executor.fast),
            numbers=numbers + products_note(spec.kernels),
            settings=(*spec.settings, *notes, step, *levels),
            kernels=kernel_decisions(spec.kernels),
            parameters=spec.facts.parameters,
            stored=options.quantize or spec.facts.stored,
            row_width=row_width(spec.model),
        )
        if isinstance(executor, RecordedExecutor):
            lasting = tuple(note for note in (*notes, *levels) if note.name != "packed weights")
            keep_start(spec, kv_types, executor, replace(told, settings=lasting), self._identity)
        hold_to_size(options)
        path = str(spec.checkpoint.path)
        return Started(options, spec.plan, path, spec.groups, whole, runner, told, runner.adapters, workers)
