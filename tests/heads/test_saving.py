"""Files that cannot be written raise one kind of error, whichever library writes them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from safetensors import SafetensorError

from outpace.heads.folder import saving

FULL = "No space left on device (os error 28)"


@pytest.mark.parametrize("kind", [SafetensorError, RuntimeError, Exception])
def test_what_libraries_raise_over_a_full_disk_names_the_file(
    kind: type[Exception], tmp_path: Path
) -> None:
    full = pytest.raises(OSError, match=r"a file cannot be written \(No space left")
    with full as found, saving(tmp_path / "weights"):
        raise kind(FULL)
    assert found.value.filename == str(tmp_path / "weights")
    assert isinstance(found.value.__cause__, kind)


def test_what_python_raises_keeps_its_reason(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device") as found, saving(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (found.value.errno, found.value.filename) == (errno.ENOSPC, str(tmp_path))
    with pytest.raises(FileNotFoundError) as missing, saving(tmp_path):
        (tmp_path / "none").read_text()
    assert missing.value.filename == str(tmp_path / "none")


def test_mistakes_of_another_kind_are_none_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(KeyError), saving(tmp_path):
        raise KeyError("weight")
