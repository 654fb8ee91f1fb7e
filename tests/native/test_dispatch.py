"""CPU features, the choice of an instruction set, the random generator and hostile arguments to the sampler."""

from __future__ import annotations

import itertools
import platform
import threading
from pathlib import Path

import numpy as np
import pytest

from penstock.config.errors import ConfigError
from penstock.kernels import reference as torch_reference
from penstock.kernels.cpu import implementations as cpu
from penstock.kernels.cpu import native
from penstock.kernels.reference import noise
from penstock.kernels.reference import sampling as reference
from penstock.kernels.registry import KernelContext, choose
from penstock.kernels.sampling import RowSettings

AVX512 = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")


def test_features_agree_with_the_kernel() -> None:
    """The kernel lists a feature only where it saves the registers too."""
    info = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not info.is_file():
        pytest.skip("compares with Linux on x86-64")
    flags = next(line for line in info.read_text().splitlines() if line.startswith("flags")).split()
    features = native.cpu_features()
    for name in (
        "avx",
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512_vnni",
        "avx512_bf16",
        "amx_tile",
        "amx_int8",
    ):
        assert features[name] == (name in flags), name


def test_the_best_possible_set_is_chosen() -> None:
    native.select_isa("auto")
    possible = [name for name in native.built_isas() if native.library().refusal(name) is None]
    assert native.isa() == possible[-1]
    assert native.select_isa("generic") == "generic"
    assert native.select_isa("auto") == possible[-1]


def test_refusals_differ() -> None:
    library = native.library()
    known = library.refusal("sse9")
    assert all(name in known for name in ("not one of auto", "generic, avx2, avx512", "avx512_bf16", "amx"))
    tiles = (*AVX512, "avx512_bf16", "amx_tile", "amx_bf16")
    assert "lacks os_grants_amx" in library.refusal("amx", dict.fromkeys(tiles, True))
    assert "lacks amx_tile" in library.refusal("amx", dict.fromkeys((*AVX512, "avx512_bf16"), True))
    assert library.refusal("amx", dict.fromkeys((*tiles, "os_grants_amx"), True)) is None
    assert library.refusal("amx_emulated", dict.fromkeys(AVX512, True)) is None
    lacking = library.refusal("avx2", {"avx2": True, "fma": False})
    assert "lacks fma, f16c" in lacking
    assert "Choose auto" in lacking
    assert library.refusal("avx512", dict.fromkeys(AVX512, True)) is None
    assert library.refusal("avx512", dict.fromkeys(AVX512[:3], True)).count("avx512") == 6
    assert library.refusal("avx512_bf16", dict.fromkeys((*AVX512, "avx512_bf16"), True)) is None
    assert "lacks avx512_bf16" in library.refusal("avx512_bf16", dict.fromkeys(AVX512, True))
    assert library.refusal("generic", {}) is None


def test_the_emulation_of_matrix_units_is_never_chosen_by_itself() -> None:
    native.select_isa("auto")
    assert native.isa() != "amx_emulated"
    assert native.library().known_isas()[0] == "amx_emulated"
    assert dict(native.refused_isas()).keys() == set(native.library().known_isas()) - set(native.usable_isas())


def test_pairs_of_bfloat16_are_preferred_without_amx() -> None:
    names = native.built_isas()
    if "avx512_bf16" not in names:
        pytest.skip("built for another processor")
    preferred = names.index("avx512_bf16") > names.index("avx512")
    assert preferred is not native.cpu_features()["amx_tile"]


@pytest.mark.parametrize("name", ["amx", "sse9", "", "AVX2"])
def test_an_impossible_choice_changes_nothing(name: str) -> None:
    if name in native.usable_isas():
        pytest.skip("possible on this machine")
    before = native.isa()
    with pytest.raises(ConfigError, match="isa"):
        native.select_isa(name)
    assert native.isa() == before


def test_registry_takes_the_native_sampler_and_says_why_not() -> None:
    everything = (*cpu.implementations(["sampling"]), *torch_reference.implementations(["sampling"]))
    candidates = [item for item in everything if item.op == "sampling"]
    choice = choose("sampling", candidates, KernelContext("cpu", "float32"))
    assert choice.chosen.name == f"native ({native.isa()})"
    choice = choose("sampling", candidates, KernelContext("cpu", "float32", prefer_reference=True))
    assert choice.chosen.function is reference.ReferenceSampling
    assert choice.refused[0][1] == "the reference is preferred"
    assert choose("sampling", candidates, KernelContext("cuda", "bfloat16")).refused[0][1] == "runs on cpu, not cuda"


# Known answers of the authors' Random123 distribution (kat_vectors, philox4x32 with 10 rounds).
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert tuple(native.library().philox4x32(counter, key)) == expected
    assert noise.philox4x32(counter, key) == expected


def test_noise_is_the_reference_s() -> None:
    rng = np.random.default_rng(1)
    drawn = set()
    for _ in range(500):
        seed, sequence, position = int(rng.integers(2**63)) * 2 + 1, int(rng.integers(2**32)), int(rng.integers(2**62))
        token = int(rng.integers(2**18))
        value = native.library().token_noise(seed, sequence, position, token)
        assert value == noise.noise(seed, sequence, position, np.array([token]))[0]
        drawn.add(value)
    assert len(drawn) == 500
    near = (range(4), range(4), range(4), range(16))
    assert len({native.library().token_noise(*key) for key in itertools.product(*near)}) == 1024


def test_sample_refuses_what_does_not_fit() -> None:
    library = native.library()
    logits = np.zeros((2, 50), np.float32)
    rows = [library.SamplerRow(50), library.SamplerRow(50)]
    positions = [0, 0]
    tokens, errors = library.sample(logits, rows, positions)
    assert len(tokens) == 2 and errors == [0, 0]
    for arguments in (
        (logits, rows[:1], positions),
        (logits, rows, positions[:1]),
        (logits[:1], rows, positions),
        (logits, [rows[0], rows[0]], positions),
        (np.zeros((2, 51), np.float32), rows, positions),
        (np.zeros((2, 0), np.float32), rows, positions),
        (logits, rows, [0, -1]),
        (logits, rows, positions, np.zeros((2, 1), np.uint32)),
        (logits, rows, positions, np.zeros((1, 2), np.uint32)),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            library.sample(*arguments)
    for wrong in (
        (logits.astype(np.float64), rows, positions),
        (logits[:, ::2], rows, positions),
        (logits, [1, 2], positions),
        (logits, rows, ["0", "0"]),
    ):
        with pytest.raises(TypeError):
            library.sample(*wrong)


def test_logprobs_refuses_what_does_not_fit() -> None:
    kernel = native.NativeSampling()
    logits = np.zeros((2, 50), np.float32)
    for targets, top in (([0, 50], 1), ([-1, 0], 1), ([0], 1), ([0, 0], 51)):
        with pytest.raises(ValueError, match=r"\w"):
            kernel.logprobs(logits, np.array(targets), top)


@pytest.mark.parametrize(
    "wrong",
    [
        {"vocab_size": 0},
        {"logit_bias": ((10, 1.0),)},
        {"logit_bias": ((0, float("nan")),)},
        {"allowed_ids": (10,)},
        {"allowed_ids": (-1,)},
        {"bad_words": ((1, 10),)},
        {"bad_words": ((),)},
        {"stop_ids": (10,)},
        {"prompt_ids": (10,), "repetition_penalty": 2.0},
        {"generated_ids": (2**40,)},
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"min_p": 1.5},
    ],
)
def test_rows_refuse_bad_settings(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        native.NativeSampling().row(RowSettings(**{"vocab_size": 10, **wrong}))  # type: ignore[arg-type]


def test_threads_may_call_at_once() -> None:
    """The team serves one caller; others work alone, with the same result."""
    logits = np.random.default_rng(0).standard_normal((16, 8192)).astype(np.float32)
    kernel = native.NativeSampling()
    positions = np.arange(16)
    expected = kernel.sample(logits, [kernel.row(RowSettings(8192, seed=i)) for i in range(16)], positions)[0]
    failures: list[object] = []

    def work() -> None:
        for _ in range(20):
            got = kernel.sample(logits, [kernel.row(RowSettings(8192, seed=i)) for i in range(16)], positions)[0]
            if not np.array_equal(got, expected):
                failures.append(got)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
