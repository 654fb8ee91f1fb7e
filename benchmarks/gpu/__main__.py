"""Runs the benchmark as `python -m benchmarks.gpu`."""

from __future__ import annotations

import sys

from benchmarks.gpu.run import main

sys.exit(main())
