"""Compiled code is loaded only as it was kept, from a place that nobody else can write to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.targets.cpu import native
from outpace.targets.cpu.library import compiler as library_cache
from outpace.targets.cpu.library.compiler import (
    LibraryCache,
    NotTrusted,
    cache_folders,
    find_compiler,
)
from processes import START_SECONDS, killed_after

PAGE = 4096
CONTENTS = bytes(range(256)) * 16 * 5  # five pages

STUB = """
extern "C" {
int outpace_kinds() { return 4; }
int outpace_lanes() { return 8; }
long long outpace_panel() { return 8; }
void outpace_products() {}
long long outpace_scratch() { return 0; }
void outpace_layers() {}
long long outpace_quantized_size() { return 0; }
long long outpace_blocks_size() { return 0; }
void outpace_lay_out_blocks() {}
void outpace_dequantize_blocks() {}
void outpace_dequantize_rows() {}
}
"""


def write(output: Path) -> None:
    output.write_bytes(CONTENTS)


def never(output: Path) -> None:
    raise AssertionError("made again")


def has_compiler() -> bool:
    try:
        find_compiler()
    except Exception:  # whatever it is, there is none
        return False
    return True


@pytest.fixture
def cache(tmp_path: Path) -> LibraryCache:
    return LibraryCache(tmp_path / "kept")


def test_what_was_made_is_kept(cache: LibraryCache) -> None:
    assert cache.find("key") is None
    made = cache.find_or_make("key", write, patience=1)
    assert made.read_bytes() == CONTENTS
    assert cache.find("key") == cache.find_or_make("key", never, patience=1) == made
    assert cache.find("other") is None
    assert not list(cache.folder.glob("*.tmp"))
    assert not made.stat().st_mode & 0o077


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def zero(page: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(page * PAGE)
            file.write(bytes(PAGE))

    return damage


SIZES, PAGES = (0, 1, PAGE, 3 * PAGE, len(CONTENTS) - 1), (0, 2, 4)


@pytest.mark.parametrize(
    "damage",
    [*map(cut, SIZES), *map(zero, PAGES)],
    ids=[*(f"cut to {size}" for size in SIZES), *(f"page {page} zeroed" for page in PAGES)],
)
def test_damage_is_noticed_and_repaired(
    cache: LibraryCache, damage: Callable[[Path], None]
) -> None:
    kept = cache.find_or_make("key", write, patience=1)
    damage(kept)
    assert cache.find("key") is None
    assert not kept.exists()
    assert cache.find_or_make("key", write, patience=1).read_bytes() == CONTENTS


def owned_by(uid: int, which: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Path.lstat

    def lstat(path: Path) -> Any:
        found = plain(path)
        if path != which:
            return found
        return SimpleNamespace(st_uid=uid, st_mode=found.st_mode)

    monkeypatch.setattr(Path, "lstat", lstat)


def test_what_belongs_to_others_is_not_loaded(
    cache: LibraryCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = cache.find_or_make("key", write, patience=1)
    owned_by(0, kept, monkeypatch)
    assert cache.find("key") == kept, "root may do anything anyway"
    owned_by(os.getuid() + 1, kept, monkeypatch)
    assert cache.find("key") is None
    monkeypatch.undo()
    owned_by(os.getuid() + 1, cache.folder, monkeypatch)
    with pytest.raises(NotTrusted, match="belongs to another user"):
        LibraryCache(cache.folder)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_what_others_may_write_to_is_not_loaded(cache: LibraryCache, mode: int) -> None:
    kept = cache.find_or_make("key", write, patience=1)
    kept.chmod(mode)
    assert cache.find("key") is None
    cache.folder.chmod(mode)
    with pytest.raises(NotTrusted, match="others may write"):
        LibraryCache(cache.folder)


def test_a_folder_that_anybody_may_replace_is_not_used(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(NotTrusted, match="everybody may replace"):
        LibraryCache(parent / "kept")
    parent.chmod(0o1777)  # as /tmp is: only owners may replace what is in it
    LibraryCache(parent / "kept")


def test_a_link_is_no_library(cache: LibraryCache, tmp_path: Path) -> None:
    kept = cache.find_or_make("key", write, patience=1)
    elsewhere = tmp_path / "elsewhere"
    kept.rename(elsewhere)
    kept.symlink_to(elsewhere)
    assert cache.find("key") is None
    assert elsewhere.exists()


MAKE = """
import sys, time
from pathlib import Path
from outpace.targets.cpu.library.compiler import LibraryCache

folder, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

def make(output):
    output.with_name("object.o").write_bytes(b"half")
    with log.open("a") as file:
        file.write("made ")
    time.sleep(seconds)
    output.write_bytes(b"whole")

print(LibraryCache(folder).find_or_make("key", make, patience=30))
"""


@contextmanager
def process(folder: Path, log: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", MAKE, str(folder), str(log), str(seconds)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running,
        killed_after(START_SECONDS, running),
    ):
        yield running


def test_two_processes_make_it_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    place = tmp_path / "kept"
    with process(place, log, seconds=0.5) as one, process(place, log, seconds=0.5) as other:
        found = {each.communicate()[0].strip() for each in (one, other)}
    assert len(found) == 1
    assert Path(found.pop()).read_bytes() == b"whole"
    assert log.read_text() == "made "


def test_a_killed_process_leaves_nothing_that_hurts(tmp_path: Path) -> None:
    folder, log = tmp_path / "kept", tmp_path / "log"
    with process(folder, log, seconds=60) as running:
        while not log.exists():
            assert running.poll() is None
            time.sleep(0.02)
        running.send_signal(signal.SIGKILL)
        running.communicate()
    assert list(folder.glob("key.*.tmp")), "it was killed halfway"
    made = LibraryCache(folder).find_or_make("key", write, patience=1)
    assert made.read_bytes() == CONTENTS
    assert not list(folder.glob("*.tmp"))


def test_old_leftovers_of_other_libraries_are_removed(cache: LibraryCache) -> None:
    old, new = cache.folder / "other.1.tmp", cache.folder / "other.2.tmp"
    for left in (old, new):
        left.mkdir()
    os.utime(old, (0, 0))
    cache.find_or_make("key", write, patience=1)
    assert not old.exists()
    assert new.exists(), "somebody may be at it"


def test_waiting_has_an_end(cache: LibraryCache) -> None:
    with cache._lock("key", patience=1), pytest.raises(TimeoutError, match="another process"):
        LibraryCache(cache.folder).find_or_make("key", never, patience=0.1)


def test_a_maker_that_fails_leaves_nothing(cache: LibraryCache) -> None:
    with pytest.raises(AssertionError):
        cache.find_or_make("key", never, patience=1)
    assert {path.suffix for path in cache.folder.iterdir()} <= {".lock"}
    assert cache.find_or_make("key", write, patience=1).exists()


def test_folders_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    home, passing = cache_folders()
    assert home.is_relative_to(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert [*cache_folders()] == [tmp_path / "xdg" / "outpace", passing]
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert [*cache_folders()] == [home, passing]
    monkeypatch.setenv("HOME", "relative")
    assert [*cache_folders()] == [passing]

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert [*cache_folders()] == [passing]
    assert passing.is_absolute()


# -- the library as it is built and loaded -----------------------------------------------------


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small source instead of ours, and folders below ``tmp_path``; returns the cache's."""
    if not has_compiler():
        pytest.skip("no C++ compiler here")
    source = tmp_path / "stub.cpp"
    source.write_text(STUB)
    monkeypatch.setattr(native, "SOURCE", source)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "outpace"


def built() -> native.Native | None:
    """Builds as a new process would."""
    return native.build.__wrapped__().library


def test_a_damaged_library_is_built_again(stub: Path) -> None:
    assert built() is not None
    (kept,) = stub.glob("*.so")
    made = kept.stat()
    assert built() is not None
    assert kept.stat() == made
    for size in (4096, 100, 0):
        contents = kept.read_bytes()[:size]
        kept.unlink()  # this process has it in its memory
        kept.write_bytes(contents)
        assert built() is not None
        (kept,) = stub.glob("*.so")
        assert kept.stat().st_size == made.st_size


@pytest.mark.parametrize("trusted", [True, False])
def test_where_it_cannot_be_kept_it_is_kept_elsewhere(
    stub: Path, tmp_path: Path, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.parent.write_text("a file where a folder should be")
    passing = tmp_path / f"outpace-{os.getuid()}"
    if not trusted:
        passing.mkdir()
        passing.chmod(0o777)
    assert built() is not None
    assert bool([*tmp_path.rglob("*.so")]) == trusted, "for this process only"


def test_a_lock_that_never_opens_only_delays(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "PATIENCE", 0.1)
    monkeypatch.setattr(library_cache, "_locked", lambda lock: False)
    assert built() is not None
    assert not [*tmp_path.rglob("*.so")]
