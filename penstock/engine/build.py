"""From options to a running engine: from what an earlier start kept where there is that, else with torch and layers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.config.options import EngineOptions
from penstock.engine.api import EngineInfo
from penstock.engine.loop import Engine
from penstock.engine.restart import restarted
from penstock.kernels.cpu.journal import JournalError
from penstock.runtime.drafter import Drafter
from penstock.startup.claim import Claim
from penstock.startup.kept_start import find
from penstock.startup.shortage import shortage_as_plan_error

log = logging.getLogger(__name__)


def build_engine(
    options: EngineOptions,
    progress: Callable[[int, int], None] | None = None,
    *,
    grammars: bool = False,
    drafter: Drafter | None = None,
) -> tuple[Engine, EngineInfo]:
    """Builds an engine that is ready to step.

    Args:
        options: as given by the user.
        progress: called with (bytes read, bytes in all) while weights load.
        grammars: the vocabulary is loaded for them meanwhile; else the first grammar waits for it.
        drafter: proposes tokens for requests that allow it; None for nobody.

    Raises:
        PenstockError: as `make_engine_spec`; also weights that are missing, left over or damaged, or another engine of
            this process that has other threads or another instruction set.
    """
    claim = Claim(options)
    try:
        return _built(claim, progress, grammars, drafter)
    except BaseException as error:
        claim.release()
        if (said := shortage_as_plan_error(error)) is not error:
            raise said from None
        raise


def _built(
    claim: Claim, progress: Callable[[int, int], None] | None, grammars: bool, drafter: Drafter | None
) -> tuple[Engine, EngineInfo]:
    again = find(claim.options) if drafter is None else None
    if again is not None:
        try:
            engine, info = restarted(claim, again, grammars=grammars)
        except JournalError as error:
            log.warning("the engine starts anew: what was kept of its last start cannot be used (%s)", error)
        else:
            size = again.kept.facts.file_bytes
            if progress is not None:
                progress(size, size)
            return engine, info
    from penstock.engine.first_start import built

    return built(claim, progress, grammars, drafter)
