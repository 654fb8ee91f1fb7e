"""The name a model goes by, from what the user wrote to find it."""

from __future__ import annotations

import re
from pathlib import Path

BUNDLED_MODEL = "penstock-concierge"
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def served_name(model: str) -> str:
    """The name clients use unless another is given; never empty.

    Args:
        model: a .gguf file (its name without the suffix and the number of a split file's part), a folder (the name
            behind links, `.` and `..`), or the bundled model's name.
    """
    if model == BUNDLED_MODEL:
        return model
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        return _SHARD.sub("", path.stem) or "model"
    return path.resolve().name or "model"
