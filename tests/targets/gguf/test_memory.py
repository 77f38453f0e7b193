"""What loading a GGUF file takes: blocks are dequantised for nobody who does not multiply them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import LLM, SamplingParams
from outpace.targets.cpu.native import Native, native
from outpace.targets.cpu.weights.blocks import Blocks
from outpace.targets.hf.gguf.file import read_model
from outpace.targets.hf.gguf.load import load_gguf
from outpace.targets.hf.loading.load import load
from targets.gguf.files import tiny, write
from targets.gguf.tiny_families import FAMILIES

OURS = pytest.mark.skipif(native() is None, reason="needs a C++ compiler")


@pytest.fixture
def dequantized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each matrix, or part of one, that is dequantised from blocks."""
    sizes: list[int] = []

    def counting(function: Any) -> Any:
        def dequantize(*given: Any) -> Any:
            matrix = function(*given)
            sizes.append(matrix.nbytes)
            return matrix

        return dequantize

    monkeypatch.setattr(Blocks, "dense", counting(Blocks.dense))
    monkeypatch.setattr(Native, "dequantize_blocks", counting(Native.dequantize_blocks))
    return sizes


@pytest.mark.parametrize("arch", FAMILIES)
def test_building_a_model_dequantizes_none_of_its_blocks(
    arch: str, tmp_path: Path, dequantized: list[int]
) -> None:
    path = write(tmp_path / "model.gguf", arch, tiny(arch), "Q8_0")
    dequantized.clear()
    device = torch.device("cpu")
    model, _ = load_gguf(read_model(path), None, torch.float32, device, lambda *_: None)
    kept = [name for name, module in model.named_modules() if hasattr(module, "blocks")]
    assert kept
    assert sum(dequantized) == 0


@OURS
def test_loading_target_and_draft_model_dequantizes_no_block(
    tmp_path: Path, dequantized: list[int]
) -> None:
    target = write(tmp_path / "target.gguf", "qwen2", tiny("qwen2"), "Q8_0")
    drafter = write(tmp_path / "drafter.gguf", "llama", tiny("llama"), "Q8_0")
    dequantized.clear()
    llm = LLM(target, speculative_config={"model": str(drafter), "num_speculative_tokens": 2})
    assert llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=4))
    assert sum(dequantized) == 0


@OURS
def test_a_family_that_is_dequantized_is_dequantized_once(
    tmp_path: Path, dequantized: list[int]
) -> None:
    path = write(tmp_path / "model.gguf", "mistral3", tiny("mistral3"), "Q8_0")
    dequantized.clear()
    model: Any = load(path).model
    inner = [m for name, m in model.named_modules() if name.endswith("_proj")]
    assert inner
    matrices = {m.in_features * m.out_features for m in (*inner, model.lm_head)}
    assert max(dequantized) == 4 * max(matrices)
    linear = [*inner, model.lm_head]
    assert sum(dequantized) == sum(4 * m.in_features * m.out_features for m in linear)


PEAK = """
import sys
from outpace.targets.hf.loading.load import load

def peak() -> int:
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

load(sys.argv[1])
before = peak()
load(sys.argv[2])
print(peak() - before)
"""
"""Prints the bytes by which loading a second model raises the process's highest use of memory; the
first pays for what is imported."""


@OURS
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_peak_of_loading_is_bounded_by_the_file(tmp_path: Path) -> None:
    """The file's pages and the layout that products read: twice the file, and some for the rest.
    Dequantised, the blocks alone would take almost four times the file more."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6}
    small = write(tmp_path / "small.gguf", "qwen2", tiny("qwen2"), "Q8_0")
    large = write(tmp_path / "large.gguf", "qwen2", tiny("qwen2", **sizes), "Q8_0")
    size = large.stat().st_size
    assert size > 50e6
    run = [sys.executable, "-c", PEAK, str(small), str(large)]
    raised = int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    assert raised < 3 * size
