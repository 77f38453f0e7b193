"""The compiler: whatever ``CXX`` says, and one line where it fails."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest
from torch import nn

from outpace.errors import ConfigError
from outpace.targets.cpu import kernels, native
from outpace.targets.cpu.kernels import speed_up
from outpace.targets.cpu.library import compiler
from outpace.targets.cpu.library.compiler import CompilerError, find_compiler
from outpace.targets.cpu.native_layers.linear import NativeLinear

SOURCE = 'extern "C" int answer() { return 42; }\n'


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.cpp"
    path.write_text(SOURCE)
    return path


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
def test_a_compiler_of_several_words(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "a folder" / "ccache", 'exec "$@"')
    monkeypatch.setenv("CXX", f"'{tmp_path}/a folder/ccache' c++")
    found = find_compiler()
    assert found.command[1] == "c++"
    found.compile(source, tmp_path / "library.so")
    assert (tmp_path / "library.so").stat().st_size > 0
    monkeypatch.setenv("CXX", "c++")
    assert find_compiler().identity != found.identity


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler --fast")
    with pytest.raises(CompilerError, match="CXX names 'no-such-compiler', which is not found"):
        find_compiler()
    monkeypatch.setenv("CXX", "'unclosed")
    with pytest.raises(CompilerError, match="cannot be read"):
        find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompilerError, match=r"a C\+\+ compiler .* is not found"):
        find_compiler()


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (
            "echo 'In file included' >&2; echo 'x.cpp:3: error: no header' >&2",
            "3: error: no header",
        ),
        ("echo 'cannot write' >&2", "failed: cannot write"),
        ("true", "ended with status 1 and said nothing"),
        ("kill -KILL $$", "ended by signal 9"),
    ],
)
def test_a_compiler_that_fails_is_told_by_its_first_error(
    says: str, reason: str, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(tmp_path / "c++", f"[ $1 = --version ] && exit 0; {says}; exit 1")
    monkeypatch.setenv("CXX", str(path))
    with pytest.raises(CompilerError, match=reason) as caught:
        find_compiler().compile(source, tmp_path / "library.so")
    assert "\n" not in str(caught.value)


def test_a_compiler_that_hangs_is_stopped_with_what_it_started(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    text = f"[ $1 = --version ] && exit 0; sleep 60 & echo $! > {child}; wait"
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", text)))
    found = find_compiler()
    monkeypatch.setattr(compiler, "PATIENCE", 0.5)
    with pytest.raises(CompilerError, match=r"took more than 0\.5 seconds"):
        found.compile(source, tmp_path / "library.so")
    assert _ends(int(child.read_text()))


def _ends(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":  # ended, and nobody has asked how
            return True
        time.sleep(0.05)
    return False


def test_without_a_compiler_one_line_says_so_and_torchs_products_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    missing = native.build.__wrapped__()
    assert missing.library is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "no-such-compiler', which is not found: install a C++ compiler" in record.message
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(kernels, "build", lambda: missing)
    model = nn.Sequential(nn.Linear(512, 512))
    with pytest.raises(ConfigError, match=r"'native' cannot be used: CXX names .* is not found"):
        speed_up(model, "native")
    assert speed_up(model, "auto") == 1
    assert not isinstance(model[0], NativeLinear)


def test_a_broken_compiler_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", "echo bad >&2; exit 1")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = native.build.__wrapped__()
    assert found.library is None
    assert found.problem is not None
    assert found.problem.endswith("--version failed: bad")
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
@pytest.mark.parametrize(
    ("does", "problem"),
    [
        ("exit 0", r"ended well and wrote no library$"),
        (
            'for output; do :; done; exec c++ -shared -x c++ /dev/null -o "$output"',
            "shows none of its functions, as with an option -fvisibility=hidden in CXX$",
        ),
    ],
)
def test_a_compiler_that_makes_something_else_is_no_compiler(
    does: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = 'if [ "$1" = --version ]; then exit 0; fi'
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", f"{says}\n{does}")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = native.build.__wrapped__()
    assert found.library is None
    assert re.search(problem, found.problem or "")
