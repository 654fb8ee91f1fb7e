"""What the native library says when the interpreter ends: nothing."""

from __future__ import annotations

import subprocess
import sys

HOLDING = """
import ctypes
from penstock import _native
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_native.SamplerRow(8)))  # as a thread that still runs has one
"""


def test_what_a_script_still_holds_is_not_complained_about() -> None:
    ended = subprocess.run([sys.executable, "-c", HOLDING], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == ""
