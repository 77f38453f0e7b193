"""Kernels that come compiled with a wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import outpace
from outpace.targets.cpu import native, prebuilt
from outpace.targets.cpu.library.compiler import CompilerError, find_compiler
from outpace.targets.cpu.library.processor import this_processor

ROOT = Path(outpace.__file__).parents[2]
AMX, VNNI, STRONG, CLIENT, WEAK = (features for _, features in prebuilt.LEVELS.values())


def test_the_strongest_level_that_a_processor_has_is_taken(tmp_path: Path) -> None:
    amx, vnni, v4, client, v3 = (tmp_path / prebuilt.file_name(level) for level in prebuilt.LEVELS)
    assert prebuilt.find(STRONG, tmp_path) is None
    v3.touch()
    assert prebuilt.find(STRONG, tmp_path) == v3
    client.touch()
    assert prebuilt.find(STRONG, tmp_path) == v3
    assert prebuilt.find(CLIENT, tmp_path) == client
    v4.touch()
    assert prebuilt.find(STRONG | {"sse2"}, tmp_path) == v4
    vnni.touch()
    assert prebuilt.find(STRONG, tmp_path) == v4
    assert prebuilt.find(VNNI, tmp_path) == vnni
    amx.touch()
    assert prebuilt.find(VNNI, tmp_path) == vnni
    assert prebuilt.find(AMX, tmp_path) == amx
    assert prebuilt.find(WEAK, tmp_path) == v3
    assert prebuilt.find(WEAK - {"fma"}, tmp_path) is None


def test_a_library_of_other_sources_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "native-x86-64-v3-0123456789abcdef01234567.so").touch()
    assert prebuilt.find(STRONG, tmp_path) is None


def no_compiler() -> None:
    raise CompilerError("there is none")


@pytest.mark.slow  # it compiles all kernels
@pytest.mark.skipif(
    not this_processor().flags >= WEAK or shutil.which("c++") is None,
    reason="needs x86-64-v3 and a compiler",
)
def test_it_is_loaded_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / prebuilt.file_name("x86-64-v3")
    find_compiler().compile(prebuilt.SOURCE, made)  # as good as one from a wheel, here
    monkeypatch.setattr(native, "find_compiler", no_compiler)
    with pytest.raises(CompilerError):
        native._loaded()
    find = prebuilt.find
    monkeypatch.setattr(prebuilt, "find", lambda features: find(features, tmp_path))
    assert isinstance(native._loaded(), native.Native)
    broken = tmp_path / "broken" / made.name
    broken.parent.mkdir()
    broken.write_bytes(b"cut short")
    monkeypatch.setattr(prebuilt, "find", lambda features: broken)
    with pytest.raises(CompilerError):  # it would be compiled instead
        native._loaded()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="wheels for Linux")
def test_a_wheel_carries_kernels_for_each_level(tmp_path: Path) -> None:
    """Downloads the build backend."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), "."]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800)
    (wheel,) = tmp_path.glob("*.whl")
    assert "py3-none-linux" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    inside = tmp_path / "outpace/targets/cpu"
    for level in prebuilt.LEVELS:
        assert f"outpace/targets/cpu/{prebuilt.file_name(level)}" in names
    assert prebuilt.find(STRONG, inside) == inside / prebuilt.file_name("x86-64-v4")
    if this_processor().flags >= WEAK:
        library = prebuilt.find(this_processor().flags, inside)
        assert library is not None
        assert isinstance(native.Native(library), native.Native)
