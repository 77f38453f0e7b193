"""Memory that layers of our own work in: bounded, however many threads there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cpu.test_blocks import SIZES, played, unrounded
from outpace.targets.cpu.native import native
from outpace.targets.cpu.native_layers import passes
from outpace.targets.cpu.weights.weight import LINE
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.runner import Runner
from targets.gguf.files import tiny, write

pytestmark = pytest.mark.skipif(native() is None, reason="no C++ compiler here")

MANY = 18
"""Threads that share the hidden states of `TOKENS`, where fewer keep a copy each."""

ROWS, COLUMNS = 3, 20
COUNTS = 1, 3, MANY
ATTENDING = (2 * 64 + 8 * 2) * 64
"""Floats for the attention of each thread: 64 keys and values, and what two queries of eight tokens
see, of heads of 64 numbers."""


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Guarded:
    """Puts known numbers after the memory that each pass works in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rooms: list[tuple[Tensor, int]] = []
        self._describe = passes._describe_pass
        monkeypatch.setattr(passes, "_describe_pass", self._described)

    def _described(self, given: passes.PassInputs, head_stride: int, scratch: int) -> Any:
        found, size = self._describe(given, head_stride, scratch), scratch + LINE
        self._rooms.append((torch.full((size + 4096,), 7.0), size))
        found.struct.scratch = self._rooms[-1][0].data_ptr()
        return found

    @property
    def held(self) -> list[int]:
        """Floats of each pass, after a look at those after them."""
        assert all(bool((room[size:] == 7.0).all()) for room, size in self._rooms)
        return [size - LINE for _, size in self._rooms]


@pytest.mark.parametrize("keep", [1, 3, COLUMNS])
@pytest.mark.parametrize("form", ["layers", "blocks", "panels"])
@torch.inference_mode()
def test_threads_that_share_states_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, threads: None, form: str, keep: int
) -> None:
    model = unrounded(panels=True) if form == "panels" else played("llama", form == "blocks")
    guarded = Guarded(monkeypatch)
    torch.manual_seed(2)
    tokens, found, held = torch.randint(0, 101, (ROWS, COLUMNS)), [], []
    runner = Runner(model, rows=ROWS, max_length=64)
    runner.admit(ROWS)
    for count in COUNTS:
        torch.set_num_threads(count)
        runner.lengths = [0, 4, 9]
        with_states = runner.forward(tokens, keep=keep, output_hidden_states=True)
        logits = runner.forward(tokens, keep=keep).logits
        found.append([logits, with_states.logits, *with_states.hidden_states])
        held.append(guarded.held[-1] - count * ATTENDING)
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert torch.equal(one, same)
    assert held[1] - held[0] == 4 * ROWS * COLUMNS * SIZES["hidden_size"], "one, or three copies"
    assert held[2] == held[0], "many threads work in as much as one"


@pytest.mark.parametrize("tokens", [1, 5, 16, 2048])
def test_what_a_pass_works_in_does_not_grow_with_threads(tokens: int) -> None:
    """On 64 threads a prompt of 2,048 tokens took 2 x 64 x 2,048 x hidden floats more."""
    library: Any = native()
    layers = played("llama").forward._stack._description().layers

    def held(count: int) -> int:
        return int(library.scratch(layers, 1, tokens, 4096, count)) - count * ATTENDING

    assert max(map(held, (2, 8, 64, 256, 4096))) - held(1) <= 2 * 1024 * SIZES["hidden_size"]
    assert tokens < 2048 or held(256) == held(1)


def test_what_is_seen_of_a_long_text_takes_bounded_memory() -> None:
    library: Any = native()
    layers = played("llama").forward._stack._description().layers

    def held(rows: int, columns: int, view: int) -> int:
        alone = library.scratch(layers, rows, columns, 1, 1)
        return int(library.scratch(layers, rows, columns, view, 1)) - int(alone)

    assert held(1, 8, 512) == 0, "one piece"
    assert held(1, 8, 32768) == 8 * 4 * 64 * (64 + 2)
    assert held(1, 9, 32768) == 0, "as many tokens as there are threads"
    assert max(held(rows, 8, 1 << 20) for rows in (1, 2, 16, 1024)) <= 1 << 24


@pytest.mark.parametrize("kind", ["auto", "int8"])
@torch.inference_mode()
def test_a_mixture_with_sinks_over_a_long_text(
    monkeypatch: pytest.MonkeyPatch, threads: None, tmp_path: Path, kind: Any
) -> None:
    """Three pieces of slots, shared out where threads outnumber key heads, and experts."""
    path = write(tmp_path / "m.gguf", "gpt-oss", tiny("gpt-oss"), "MXFP4")
    model, found = load(path).model, []
    guarded = Guarded(monkeypatch)
    text = torch.arange(1308)[None] * 7 % 200
    for count in (1, 3, 5):
        torch.set_num_threads(count)
        runner = Runner(model, rows=1, max_length=2048, kv_cache_dtype=kind)
        runner.admit(1)
        runner.forward(text[:, :1300], keep=1)
        runner.lengths = [1300]
        found.append(runner.forward(text[:, 1300:], keep=8).logits)
    assert guarded.held
    assert all(torch.equal(each, found[0]) for each in found[1:])
