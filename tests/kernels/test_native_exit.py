"""What the native library says when the interpreter ends: nothing."""

from __future__ import annotations

import subprocess
import sys

HOLDING = "import builtins; from penstock import _native; builtins.kept = [_native.SamplerRow(8), _native]"


def test_what_a_script_still_holds_is_not_complained_about() -> None:
    ended = subprocess.run([sys.executable, "-c", HOLDING], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == ""
