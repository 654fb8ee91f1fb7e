"""Runs logits processors: what an operator registered at the start, on the rows of those requests that name it.

A processor sees one row of the model's logits with the tokens before it, and changes it ahead of everything else that
decides what is drawn. It has to be a function of what it is given: then drafts, prefix hits, preemption and company
change nothing, since each place that is verified has a history of its own.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.config.errors import PROCESSOR_ARGUMENTS, ConfigError, format_value
from penstock.config.logits_processors import Processor, ProcessorCall, Registered, registered
from penstock.core.protocol import NewSequence
from penstock.runtime.row_settings import tokens_read

if TYPE_CHECKING:
    from torch import Tensor

Floats = npt.NDArray[np.float32]
log = logging.getLogger(__name__)


class ProcessorError(Exception):
    """A processor that cannot be run; the text is written for the client."""


@dataclass(slots=True)
class RowProcessors:
    """The processors of one sequence, in the order in which they run.

    Attributes:
        prompt_ids, generated_ids: the sequence's tokens so far.
        error: why none of them can be run, "" if they can.
        made: each with its name and what it gets behind the row: arguments by place and by name.
    """

    prompt_ids: tuple[int, ...]
    generated_ids: list[int]
    error: str = ""
    made: list[tuple[str, Processor, list[Any], dict[str, Any]]] = field(default_factory=list)

    def run(self, row: Floats, drafts: Sequence[int] = ()) -> None:
        """Changes a row of logits [V] in place.

        Args:
            row: the model's own, behind the sequence's tokens and these drafts.
            drafts: tokens that come before what is drawn, if they are right.

        Raises:
            ProcessorError: one failed, or left what is no row of logits.
        """
        if self.error:
            raise ProcessorError(self.error)
        generated = [*self.generated_ids, *drafts] if drafts else self.generated_ids
        for name, processor, args, kwargs in self.made:
            try:
                changed = processor(self.prompt_ids, generated, row, *args, **kwargs)
                if changed is not None and changed is not row:
                    row[:] = np.asarray(changed, np.float32).reshape(row.shape)
                largest = row.max()
            except Exception as error:
                log.exception("the logits processor %s failed", format_value(name))
                raise ProcessorError(_failed(name, f"raised {type(error).__name__}")) from error
            if not largest < np.inf:  # NaN is the largest there is
                log.error("the logits processor %s left NaN or infinity in a row", format_value(name))
                raise ProcessorError(_failed(name, "left logits that are no numbers"))


def _failed(name: str, how: str) -> str:
    return f"the logits processor {format_value(name)} {how}; leave it out, or tell whoever runs this server."


class LogitsProcessors:
    """The processors of an engine, by name."""

    def __init__(self, loaded: Mapping[str, Processor]) -> None:
        self._loaded = dict(loaded)

    def of(self, new: NewSequence) -> RowProcessors | None:
        """Those that a sequence wants, made for it; None for one that wants none."""
        calls = new.sampling.logits_processors
        if not calls:
            return None
        row = RowProcessors(tokens_read(new), list(new.generated_ids))
        try:
            row.made.extend(map(self._make, calls))
        except ProcessorError as error:
            row.error = str(error)
        return row

    def _make(self, call: ProcessorCall) -> tuple[str, Processor, list[Any], dict[str, Any]]:
        found = self._loaded.get(call.name)
        if found is None:
            raise ProcessorError(f"no logits processor {format_value(call.name)} is registered here.")
        args, kwargs = call.given()
        if not inspect.isclass(found):
            _check(found, [(), (), None, *args], kwargs)
            return call.name, found, args, kwargs
        _check(found, args, kwargs)
        try:
            made: Any = found(*args, **kwargs)
        except (TypeError, ValueError) as error:
            log.warning("the logits processor %s refuses its arguments: %s", format_value(call.name), error)
            raise ProcessorError(PROCESSOR_ARGUMENTS) from error
        except Exception as error:
            log.exception("the logits processor %s could not be made", format_value(call.name))
            raise ProcessorError(_failed(call.name, f"raised {type(error).__name__}")) from error
        return call.name, made, [], {}


def _check(processor: Processor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ProcessorError where it does not take these arguments."""
    try:
        signature = inspect.signature(processor)
    except (TypeError, ValueError):  # of some that are not written in Python nothing is known
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ProcessorError(PROCESSOR_ARGUMENTS) from error


def load_processors(texts: Sequence[str]) -> LogitsProcessors:
    """The processors that an option names, imported.

    Raises:
        ConfigError: one of them is not there, or cannot be called.
    """
    return LogitsProcessors({one.name: _load(one) for one in registered(texts)})


def _load(one: Registered) -> Processor:
    where = f"--logits-processors {one.module}:{one.attribute}"
    try:
        found: Any = importlib.import_module(one.module)
        for part in one.attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        told = f"{where} is not there: {type(error).__name__}: {error}"
        raise ConfigError(f"{told}; it has to be installed, or in a folder of PYTHONPATH.") from error
    if not callable(found):
        raise ConfigError(f"{where} is no function or class.")
    processor: Processor = found
    return processor


class ProcessedPlace(NamedTuple):
    """A row of logits that processors change.

    Attributes:
        number: which row of a step's.
        row: whose.
        drafts: those before it.
    """

    number: int
    row: RowProcessors
    drafts: tuple[int, ...]


class ProcessedRows(NamedTuple):
    """Rows of a step's logits as processors left them.

    Attributes:
        rows: by place, [V] float32; not finite where there is an error.
        errors: by place, why.
    """

    rows: Mapping[int, Floats]
    errors: Mapping[int, str]


NOTHING_PROCESSED = ProcessedRows({}, {})


def process(places: Sequence[ProcessedPlace], logits: Floats) -> ProcessedRows:
    """Runs what each place wants on its row of logits [len(places), V], which are the caller's and are changed."""
    errors: dict[int, str] = {}
    for place, row in zip(places, logits, strict=True):
        try:
            place.row.run(row, place.drafts)
        except ProcessorError as error:
            row[:] = np.nan  # nothing is drawn here
            errors[place.number] = str(error)
    return ProcessedRows({place.number: row for place, row in zip(places, logits, strict=True)}, errors)


@contextmanager
def exchanged(logits: Any, made: ProcessedRows) -> Iterator[Any]:
    """Logits [L, V] with those rows in the place of the model's own, for as long as something is drawn from them."""
    places = list(made.rows)
    if not places:
        yield logits
    elif not isinstance(logits, np.ndarray):
        yield _exchanged_there(logits, places, np.stack(list(made.rows.values())))
    else:
        logits = logits if logits.flags.writeable else logits.copy()
        own = logits[places]
        logits[places] = list(made.rows.values())
        try:
            yield logits
        finally:
            logits[places] = own


def _exchanged_there(logits: Tensor, places: list[int], rows: Floats) -> Tensor:
    """A copy of logits on a device with other rows at these places."""
    from penstock.kernels.copies import upload

    changed = logits.float().clone()
    changed[upload(np.array(places), logits.device)] = upload(rows, logits.device)
    return changed
