"""Names of the formats that models can be quantised to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

GGUF_FILE_TYPES: Mapping[str, int] = MappingProxyType(
    {
        "f32": 0,
        "f16": 1,
        "q4_0": 2,
        "q4_1": 3,
        "q8_0": 7,
        "q5_0": 8,
        "q5_1": 9,
        "q2_k": 10,
        "q3_k_s": 11,
        "q3_k_m": 12,
        "q3_k_l": 13,
        "q4_k_s": 14,
        "q4_k_m": 15,
        "q5_k_s": 16,
        "q5_k_m": 17,
        "q6_k": 18,
        "iq4_nl": 25,
        "iq4_xs": 30,
        "bf16": 32,
        "tq1_0": 36,
        "tq2_0": 37,
        "mxfp4": 38,
    }
)
"""What a GGUF file as a whole can be quantised to → its `general.file_type`."""

SAFETENSORS_FORMATS = ("int8", "int4", "fp8", "fp8_block", "nvfp4")
"""What a Hugging Face folder can be quantised to."""

QUANTIZE_FORMATS = (*GGUF_FILE_TYPES, *SAFETENSORS_FORMATS)
"""Every format `quantize` and `--quantize` know."""
