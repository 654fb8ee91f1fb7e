"""Which arithmetic answers are computed with."""

from __future__ import annotations

ARITHMETIC_VERSION = 3
"""Rises when the same build options, model, request and seed may give other bits than before; docs/architecture.md says
what each version is. `system_fingerprint`, `/version` and the file of packed weights carry it."""
