"""GGUF files whose bytes were changed: a text, or an error that tells what is wrong."""

from __future__ import annotations

import resource
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.attack import answered, examples
from outpace import LLM, SamplingParams
from outpace.targets.hf.gguf.header import read_header
from targets.gguf.files import tiny, write

PARAMS = SamplingParams(max_tokens=2, seed=1)
ROOM = 8 << 30
"""Bytes of memory that the process may map while it reads damaged files."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(path, "qwen2", tiny("qwen2", num_hidden_layers=1), "Q4_0")
    return path.read_bytes()


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Makes an allocation that no file of this size explains fail, not swap."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped() + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def mapped() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def attempt(data: bytes) -> None:
    """Loads a file and generates with it."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.gguf"
        path.write_bytes(data)
        answered(lambda: LLM(path, cpu_kernels="off").generate([[5, 6], "he"], PARAMS))


WORDS = st.sampled_from([0, 1, 2, 3, 7, 8, 9, 12, 255, 1 << 16, 1 << 31, (1 << 32) - 1])
LONGS = st.sampled_from([0, 1, 1 << 20, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, (1 << 64) - 1])
NUMBERS = st.one_of(
    WORDS.map(lambda word: struct.pack("<I", word)),
    LONGS.map(lambda long: struct.pack("<Q", long)),
    st.floats(width=32).map(lambda number: struct.pack("<f", number)),
    st.binary(min_size=1, max_size=8),
)


def header_of(data: bytes) -> int:
    """Returns where the tensors' bytes begin, about."""
    return data.rindex(b"blk.0.") + 100


@examples(150)
@given(changes=st.lists(st.tuples(st.floats(0, 1), NUMBERS), min_size=1, max_size=3))
def test_changed_bytes_of_the_header(whole: bytes, changes: list[tuple[float, bytes]]) -> None:
    data = bytearray(whole)
    for share, new in changes:
        place = int(share * header_of(whole))
        data[place : place + len(new)] = new
    attempt(bytes(data))


@examples(40)
@given(share=st.floats(0, 1), garbage=st.binary(max_size=16))
def test_files_cut_short(whole: bytes, share: float, garbage: bytes) -> None:
    attempt(whole[: int(share * header_of(whole))] + garbage)


@examples(40)
@given(share=st.floats(0, 1), new=st.binary(min_size=1, max_size=64))
def test_changed_weights(whole: bytes, share: float, new: bytes) -> None:
    begin = header_of(whole)
    place = begin + int(share * (len(whole) - begin))
    attempt(whole[:place] + new + whole[place + len(new) :])


@examples(300)
@given(data=st.binary(max_size=200))
def test_headers_of_anything(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<I", 3) + data)
        answered(lambda: read_header(path))


NAMES = [
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "block_count",
    "context_length", "embedding_length", "feed_forward_length", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.factor", "rope.scaling.type",
]  # fmt: skip
TOKENIZER = [
    "add_bos_token", "add_space_prefix", "bos_token_id", "eos_token_id", "eot_token_id", "merges",
    "model", "padding_token_id", "pre", "scores", "token_type", "tokens", "unknown_token_id",
]  # fmt: skip
VALUES = st.one_of(
    st.integers(0, 70),
    st.sampled_from([1 << 16, 1 << 31, (1 << 32) - 1]),
    st.floats(width=32),
    st.text(max_size=6).filter(lambda text: text.isprintable()),
    st.booleans(),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=4),
    st.sampled_from(["gpt2", "llama", "t5", "gemma4", "qwen2", "linear", "yarn"]),
)


@examples(40)
@given(
    model=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2),
    tokenizer=st.dictionaries(st.sampled_from(TOKENIZER), VALUES, max_size=2),
)
def test_values_of_every_kind(model: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    said = {f"qwen2.{name}": value for name, value in model.items()}
    said |= {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.gguf"
        write(path, "qwen2", tiny("qwen2", num_hidden_layers=1), changes=said)
        attempt(path.read_bytes())
