"""A GPU that refuses memory although the plan had room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from penstock.config.errors import MemoryPlanError
from penstock.startup.memory_plan import NO_REMEDY, MemoryPlan


@contextmanager
def oom_as_plan_error(plan: MemoryPlan, doing: str, remedy: Callable[[], str]) -> Iterator[None]:
    """Turns a GPU's refusal of memory into an error that shows the plan.

    Args:
        plan: of the engine.
        doing: what is being done, "the weights are loaded" for example.
        remedy: the flags that help, worked out where memory ran out; "" if none do.

    Raises:
        MemoryPlanError: in the place of torch.OutOfMemoryError.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        first, flags = str(error).strip().partition("\n")[0], remedy()
        rows = "\n".join(f"  {what:<12} {size:>10}  {remark}".rstrip() for what, size, remark in plan.table())
        raise MemoryPlanError(
            f"the GPU's memory ran out while {doing}, by this plan:\n{rows}\n"
            f"{first.rstrip('.')}; {f'start with {flags}' if flags else NO_REMEDY}."
        ) from error
