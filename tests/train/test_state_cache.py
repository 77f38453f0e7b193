"""What a target makes of a text is read once, and kept."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.errors import ConfigError, ModelLoadError
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.train import state_cache as kept
from outpace.train.run import TrainingRun
from outpace.train.state_cache import PROBE, SUFFIX, HiddenStateCache
from outpace.train.teacher import Teacher, signature_of
from targets.families import drafter

from .test_run import full_disk, loaded, settings, text

MUCH = 10**9


def cache_in(folder: Path, most_bytes: int = MUCH) -> HiddenStateCache:
    return HiddenStateCache(folder, signature_of(loaded()), most_bytes)


def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that grows by the number of blocks of each pass that a teacher makes."""
    found: list[int] = []
    own = Teacher._read

    def counted(self: Teacher, tokens: torch.Tensor) -> Any:
        found.append(len(tokens))
        return own(self, tokens)

    monkeypatch.setattr(Teacher, "_read", counted)
    return found


def test_a_kept_state_is_that_of_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = passes(monkeypatch)
    plain = Teacher(loaded(), (1, -1)).read(text()[:4])
    teacher = Teacher(loaded(), (1, -1), state_cache=cache_in(tmp_path))
    teacher.read(text()[:2])
    first = teacher.read(text()[:4])  # two of them are kept by now
    again = Teacher(loaded(), (1, -1), state_cache=cache_in(tmp_path)).read(text()[:4])
    assert made == [4, 2, 2]
    assert torch.equal(first.hidden_states, again.hidden_states)
    assert first.hidden_states.dtype == plain.hidden_states.dtype
    torch.testing.assert_close(again.hidden_states, plain.hidden_states, rtol=1e-2, atol=1e-6)
    assert torch.equal(again.top_tokens, plain.top_tokens)
    torch.testing.assert_close(again.top_chances, plain.top_chances)


def test_a_layer_that_is_read_twice_is_there_twice(tmp_path: Path) -> None:
    """As EAGLE-3 reads the layers of a target that has only one."""
    plain = Teacher(loaded(), (0, 0, -1)).read(text()[:2])
    for _ in range(2):
        kept_states = Teacher(loaded(), (0, 0, -1), state_cache=cache_in(tmp_path)).read(text()[:2])
        torch.testing.assert_close(
            kept_states.hidden_states, plain.hidden_states, rtol=1e-2, atol=1e-6
        )


def test_drafters_that_read_other_layers_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = passes(monkeypatch)
    layers = loaded().config.num_hidden_layers
    Teacher(loaded(), (1,), state_cache=cache_in(tmp_path)).read(text()[:2])
    Teacher(loaded(), (-1, 0), top=0, state_cache=cache_in(tmp_path)).read(text()[:2])
    assert made == [2, 2]
    both = Teacher(loaded(), (0, 1, -1), top=1, state_cache=cache_in(tmp_path)).read(text()[:2])
    assert made == [2, 2]
    for _ in range(2):  # the output of the last layer before the norm is another state
        Teacher(loaded(), (layers, -1), state_cache=cache_in(tmp_path)).read(text()[:2])
        assert made == [2, 2, 2]
    assert both.top_tokens.shape == (*text()[:2].shape, 1)


def test_a_folder_has_its_bounds_and_survives_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = passes(monkeypatch)
    teacher = Teacher(loaded(), (1,), state_cache=cache_in(tmp_path, 1))
    for _ in range(2):
        teacher.read(text()[:1])
        teacher.read(text()[1:2])
    files = list(tmp_path.glob(f"*{SUFFIX}"))
    assert (len(files), made) == (1, [1, 1, 1])
    files[0].write_bytes(files[0].read_bytes()[:-5])
    Teacher(loaded(), (1,), state_cache=cache_in(tmp_path)).read(text()[:1])
    assert made == [1, 1, 1, 1]


def test_several_processes_may_write_the_same_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one writes a file, another one writes it, too, from beginning to end."""
    first, second = cache_in(tmp_path), cache_in(tmp_path)
    own, written = kept.save_file, []

    def write(values: Any, path: Path) -> None:
        own(values, path)
        written.append(path)
        if len(written) == 1:
            Teacher(loaded(), (1,), state_cache=second).read(text()[:1])

    monkeypatch.setattr(kept, "save_file", write)
    Teacher(loaded(), (1,), state_cache=first).read(text()[:1])
    assert len(written) == 2
    assert first.find(text()[0], (1,), 1) is not None
    assert not list(tmp_path.glob("*.part"))


def test_what_a_killed_process_has_left_counts_and_is_removed_when_it_is_old(
    tmp_path: Path,
) -> None:
    cache_in(tmp_path)
    left = tmp_path / f"a{SUFFIX}.0.part"
    left.write_bytes(b"half of a block of text")
    assert cache_in(tmp_path, 16).full
    assert left.exists(), "another process might be writing it"
    os.utime(left, (time.time() - 4000,) * 2)
    assert not cache_in(tmp_path, 16).full
    assert not left.exists()


def test_a_full_disk_is_said_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = Teacher(loaded(), (1,), state_cache=cache_in(tmp_path))
    monkeypatch.setattr(kept, "save_file", full_disk)
    with pytest.raises(OSError, match=r"a file cannot be written \(No space left") as found:
        teacher.read(text()[:1])
    assert found.value.filename.endswith(SUFFIX)


def test_a_folder_belongs_to_one_target(tmp_path: Path) -> None:
    cache_in(tmp_path)
    with pytest.raises(ConfigError, match="keeps hidden states of llama"):
        HiddenStateCache(
            tmp_path, signature_of(LoadedModel(drafter("llama"), None, "changed")), MUCH
        )
    (tmp_path / PROBE).write_bytes(b"cut")
    with pytest.raises(ModelLoadError, match="delete it to begin anew"):
        cache_in(tmp_path)


def test_the_text_is_read_once_however_long_a_head_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = passes(monkeypatch)
    for method in ("medusa", "mlp_speculator"):
        asked = settings(method, 6, batch=5)
        shared = cache_in(tmp_path / "kept")
        run = TrainingRun(loaded(), text(), asked, tmp_path / method, state_cache=shared)
        run.play(lambda progress: None, every=3)
    assert sum(made) == len(text())
