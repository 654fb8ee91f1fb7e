"""A stage in a thread of this process: the lead's own, which computes while the lead plans and draws."""

from __future__ import annotations

import logging
import threading

from penstock.runtime.pipeline.stage import Stage
from penstock.runtime.pipeline.steps import Link

log = logging.getLogger(__name__)


class StageThread:
    """Serves until its source is closed; then, or when it fails, it closes its target."""

    def __init__(self, stage: Stage, source: Link, target: Link) -> None:
        self._stage = stage
        self._source, self._target = source, target
        self._thread = threading.Thread(target=self._serve, name="penstock-stage", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it, and waits for the step it computes; safe to call twice."""
        self._source.close()
        self._target.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _serve(self) -> None:
        try:
            self._stage.serve(self._source, self._target)
        except Exception:
            log.exception("a stage ends")
        finally:
            self._source.close()
            self._target.close()
