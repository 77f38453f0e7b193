"""Kernels that come compiled with a wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import outpace
from outpace.targets.cpu import native, prebuilt
from outpace.targets.cpu.library.compiler import CompilerError, find_compiler, kernels_found
from outpace.targets.cpu.library.processor import this_processor

ROOT = Path(outpace.__file__).parents[2]
AMX, VNNI, STRONG, CLIENT, WEAK = (features for _, features in prebuilt.LEVELS.values())


def test_the_strongest_level_that_a_processor_has_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt, "levels_of", lambda *machine: prebuilt.LEVELS)
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


def test_sources_are_all_that_is_compiled_and_includes_point_one_way() -> None:
    """The names of libraries follow from these files (`file_name`)."""
    included = {
        source.name: set(re.findall(r'#include "(.*?)"', source.read_text()))
        for source in prebuilt.sources()
    }
    order = list(TopologicalSorter(included).static_order())  # which finds circles
    assert set(order) == included.keys()
    needed = {prebuilt.SOURCE.name}
    for name in reversed(order):
        needed |= included[name] if name in needed else set()
    assert needed == included.keys()


@pytest.mark.parametrize(
    ("system", "machine", "levels"),
    [
        ("linux", "x86_64", list(prebuilt.LEVELS)),
        ("linux", "aarch64", ["armv8.2-dotprod", "armv8"]),
        ("darwin", "arm64", ["apple-m1"]),
        ("win32", "AMD64", []),
    ],
)
def test_each_kind_of_machine_has_levels(system: str, machine: str, levels: list[str]) -> None:
    assert list(prebuilt.levels_of(system, machine)) == levels


def test_the_strongest_level_of_an_arm_processor_is_taken(tmp_path: Path) -> None:
    known = prebuilt.levels_of("linux", "aarch64")
    dots, plain = (tmp_path / prebuilt.file_name(level) for level in known)
    plain.touch()
    assert prebuilt.find({"asimd", "asimddp"}, tmp_path, known) == plain
    dots.touch()
    assert prebuilt.find({"asimd", "asimddp"}, tmp_path, known) == dots
    assert prebuilt.find({"asimd"}, tmp_path, known) == plain


def test_what_is_found_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt, "find", lambda features: tmp_path / "native-x86-64-v3-0123.so")
    assert kernels_found() == "compiled with this package (x86-64-v3)"
    monkeypatch.setattr(prebuilt, "find", lambda features: None)
    assert kernels_found().startswith("compiled by /")
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = "none, because CXX names 'no-such-compiler', which is not found: install a C++ compiler"
    assert kernels_found().startswith(said)


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
    assert all((inside / "csrc" / source.name).is_file() for source in prebuilt.sources())
    for level in prebuilt.LEVELS:
        assert f"outpace/targets/cpu/{prebuilt.file_name(level)}" in names
    assert prebuilt.find(STRONG, inside) == inside / prebuilt.file_name("x86-64-v4")
    if this_processor().flags >= WEAK:
        library = prebuilt.find(this_processor().flags, inside)
        assert library is not None
        assert isinstance(native.Native(library), native.Native)
