"""Models whose products round their inputs: audited against one pass of the same code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outpace import LLM, SamplingParams
from outpace.audit.diff import Mode, audit_diff
from outpace.targets.cpu.native import native
from outpace.targets.hf.runner import PREFILL_CHUNK
from targets.gguf.files import tiny, write

PROMPTS = [[72, 101, 108, 108, 111, 32, 116], [65, 66, 65, 66, 65], [33, 97, 12]]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if native() is None:
        pytest.skip("our own products need a C++ compiler")
    folder = tmp_path_factory.mktemp("packed")
    return write(folder / "model.gguf", "llama", tiny("llama", num_hidden_layers=6), "Q4_0")


def decoder(path: Path, **options: object) -> LLM:
    config = {"method": "draft_model", "model": path, "num_speculative_tokens": 3, **options}
    return LLM(path, speculative_config=config, max_num_seqs=8)


def test_drafts_are_scored_to_the_bit_as_plain_text_is(path: Path) -> None:
    engines: dict[Mode, LLM] = {
        "greedy": decoder(path),
        "coupled": decoder(path, verify="coupled"),
    }
    report = audit_diff(engines, PROMPTS, PARAMS)
    assert report.ok
    assert (report.differences, report.deviations) == ([], [])
    assert report.noise.measured == 0, "another order of sums, and this would be about 1e-7"


def test_long_texts_are_read_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = decoder(path).engine.target
    text = [65 + at % 26 for at in range(100)]
    whole = target.forward_uncached(text)
    assert len(text) < PREFILL_CHUNK
    monkeypatch.setattr("outpace.targets.hf.target.PREFILL_CHUNK", 32)
    for last in (None, 1, 4, 5, 37, 100):
        assert torch.equal(target.forward_uncached(text, last), whole[-(last or 100) :])
