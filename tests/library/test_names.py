"""Names are read strictly: what passes may become part of a path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.errors import CheckpointError, ConfigError
from penstock.library.digests import sha256
from penstock.library.files import inside
from penstock.library.names import HubName, PathName, RegistryName, UrlName, parse_name, registry_name

R = "registry.ollama.ai"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen", "Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", HubName("Qwen", "Qwen3-0.6B", "v1.0")),
        ("Qwen/Qwen3-0.6B@refs/pr/1", HubName("Qwen", "Qwen3-0.6B", "refs/pr/1")),
        ("hf.co/unsloth/Q-GGUF:Q4_K_M", HubName("unsloth", "Q-GGUF", "main", "Q4_K_M")),
        ("unsloth/Q-GGUF:q4_k_m@v1", HubName("unsloth", "Q-GGUF", "v1", "q4_k_m")),
        ("huggingface.co/a/b:UD/b-Q2.gguf", HubName("a", "b", "main", "UD/b-Q2.gguf")),
        ("llama3.2", RegistryName("llama3.2", "latest", "library", R)),
        ("llama3.2:1b", RegistryName("llama3.2", "1b", "library", R)),
        ("localhost:5000/m:x", RegistryName("m", "x", "library", "localhost:5000")),
        ("ghcr.io/me/m", RegistryName("m", "latest", "me", "ghcr.io")),
        ("https://h.example/a/m.gguf?download=1#top", UrlName("https://h.example/a/m.gguf?download=1")),
        ("./folder", PathName(Path("folder"))),
        ("some/m.gguf", PathName(Path("some/m.gguf"))),
    ],
)
def test_names_are_read(text: str, name: object) -> None:
    assert parse_name(text) == name


@pytest.mark.parametrize(
    "text", ["Qwen/Qwen3-0.6B@v1", "hf.co/a/b:Q4_K_M", "llama3.2:1b", "ghcr.io/me/m:x", "h.io/m:x"]
)
def test_a_name_that_is_shown_is_read_again(text: str) -> None:
    assert str(parse_name(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "a/b/c", "..", "a/..", "../x:y/", "a/b@../../etc", "a/b:../x", "hf.co/a", "hf.co/a/b/c", "m:", "m:../x",
        "ghcr.io/../../etc/passwd", "ghcr.io/a/b/c:d", "gh..io/a/b", "GHCR.IO/a/b", "a/b\nc", "a--b/c", "m:a/b", "-m",
        "m.lock", "https://", "https://u:secret@h/x.gguf", "https://h/..", "ftp://h/x.gguf", "x" * 600, "a/b@", "\0",
        "localhost:99999999/m",
    ],
)  # fmt: skip
def test_what_is_no_name_is_refused(text: str) -> None:
    if isinstance(name := _read(text), PathName):
        assert text in ("..", "../x:y/")
    else:
        assert name is None


def _read(text: str) -> object:
    try:
        return parse_name(text)
    except ConfigError:
        return None


def test_a_model_made_here_may_have_a_space_in_the_registry() -> None:
    assert registry_name("me/m:x") == RegistryName("m", "x", "me", R)
    with pytest.raises(ConfigError, match="made here"):
        registry_name("hf.co/a/b:Q4_0")


@given(st.text(alphabet="ab./:@-_~\\ \n\0h", max_size=30))
def test_no_part_of_a_name_leaves_a_folder(text: str) -> None:
    name = _read(text)
    parts: tuple[str, ...] = ()
    if isinstance(name, RegistryName):
        parts = name.parts
    elif isinstance(name, HubName):
        parts = (name.owner, name.repo, *name.revision.split("/"), *name.selector.split("/"))
    for part in parts:
        assert part not in (".", "..") and "/" not in part and "\0" not in part
    base = "/base"
    assert os.path.normpath(os.path.join(base, *filter(None, parts))).startswith(base)


@pytest.mark.parametrize("text", ["sha256:" + "a" * 63, "sha256:" + "A" * 64, "../" * 20, "sha512:" + "a" * 128, ""])
def test_odd_digests_are_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="no digest"):
        sha256(text)


@pytest.mark.parametrize(
    "name", ["/etc/x", "../x", "a/../x", "a//b", ".", "a\\b", "a\nb", "a/" * 9 + "b", "x" * 300, ""]
)
def test_names_of_a_server_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError):
        inside(tmp_path, name)


def test_a_link_inside_a_folder_is_not_followed_out_of_it(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store/sub").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="is a link"):
        inside(tmp_path / "store", "sub/x")
    assert inside(tmp_path / "store", "other/x") == tmp_path / "store/other/x"


def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_name("https://user:secret@h/x.gguf")
    assert "secret" not in str(refused.value)
