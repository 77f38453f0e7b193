"""Passes of fixed shapes: padded, yet the same numbers; compiled and recorded ones too."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from outpace import LLM, SamplingParams
from outpace.engine.capture import CudaGraphs, EagerRunner
from outpace.errors import ConfigError
from outpace.targets.hf.fixed import (
    MAX_FIXED_COLUMNS,
    SLOT_BUCKET,
    CaptureFailed,
    FixedShapeConfig,
    Outputs,
    Step,
)
from outpace.targets.hf.position_patches import PositionPatches
from outpace.targets.hf.runner import Runner
from representatives import representatives

from .families import CONTEXT, FAMILIES, VOCABULARY, drafter, target
from .generating import greedy, ids
from .test_trees import TOLERANCE, Rows

PROMPTS = [[5, 9, 2, 41], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]

SOME = ("llama", "gpt2", "mistral", "gemma2", "falcon", "bloom", "gpt_oss", "llama4", "gpt_neo",
        "deepseek_v3", "deepseek_v32", "minimax_m3", "bart")  # fmt: skip
"""Families with windows and without, with positions of every sort, and with layers that are told
more than a mask."""


class Remembering(EagerRunner):
    """Plays as it comes; remembers which shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, int]] = set()

    def _run(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        self.shapes.add((inputs[0].shape[0], inputs[0].shape[1]))
        return super()._run(key, step, inputs)


def fix(runner: Runner) -> Remembering:
    player = Remembering()
    runner.use_fixed_shapes(FixedShapeConfig(runner.model, player, pads=True))
    return player


@torch.inference_mode()
@pytest.mark.parametrize("family", representatives(FAMILIES, SOME))
def test_padded_trees_equal_plain_forwards(family: str) -> None:
    if PositionPatches(target(family)).needed:
        with pytest.raises(ConfigError, match="leave compile out"):
            LLM(target(family), compile=True)
        return
    rows = Rows(family, [5, 9, 2])
    found = fix(rows.runner)
    for size in (8, 3, 12, 1):
        assert rows.round(size) < TOLERANCE
    assert {width for _, width in found.shapes} <= {1, 2, 4, 8, 16, 32, MAX_FIXED_COLUMNS}
    assert (3, 16) in found.shapes, "nine columns are padded to sixteen"


@pytest.mark.parametrize(
    ("family", "method"),
    representatives(
        itertools.product(
            ["llama", "gpt2", "mistral", "gemma2"], ["draft_model", "ngram", "draft_tree"]
        ),
        lambda family, method: family == "llama" or method == "draft_model",
    ),
)
def test_the_text_is_the_same(family: str, method: str) -> None:
    config = {"method": method, "num_speculative_tokens": 4}
    if method != "ngram":
        config["model"] = drafter(family)
    texts = []
    for fixed in (False, True):
        llm = LLM(target(family), speculative_config=config, max_num_seqs=3, max_model_len=CONTEXT)
        if fixed:
            shapes = fix(llm.engine.target.runner).shapes
            if method != "ngram":
                fix(llm.engine.drafter.runner)
        texts.append(ids(llm.generate(PROMPTS, greedy(16))))
    assert texts[0] == texts[1]
    assert 3 in {rows for rows, _ in shapes}


def test_slots_come_in_steps_and_never_beyond_the_capacity() -> None:
    found = FixedShapeConfig(target("llama"), EagerRunner(), pads=True)
    assert [found.slots(n, 4 * SLOT_BUCKET) for n in (1, SLOT_BUCKET, SLOT_BUCKET + 1)] == [
        SLOT_BUCKET,
        SLOT_BUCKET,
        2 * SLOT_BUCKET,
    ]
    assert found.slots(SLOT_BUCKET + 1, SLOT_BUCKET + 2) == SLOT_BUCKET + 2
    assert found.slots(3 * SLOT_BUCKET, 9 * SLOT_BUCKET) == 4 * SLOT_BUCKET, (
        "few numbers, where each is recorded"
    )
    assert (
        FixedShapeConfig(found.forward, EagerRunner(), pads=False).slots(600, 9 * SLOT_BUCKET)
        == 3 * SLOT_BUCKET
    )
    assert [found.rows(count, 6) for count in (1, 2, 3, 5, 6)] == [1, 2, 4, 6, 6]
    assert found.width(MAX_FIXED_COLUMNS) == MAX_FIXED_COLUMNS
    assert found.width(MAX_FIXED_COLUMNS + 1) is None


def test_recordings_are_forgotten_when_the_cache_moves() -> None:
    told = []
    runner = Runner(target("llama"), rows=1, max_length=4096)
    found = fix(runner)
    found.forget = lambda: told.append(runner.cache.capacity)  # type: ignore[method-assign]
    runner.admit(1)
    runner.prefill(0, [[1] * 300])
    assert told == [512]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from inside its compiler
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_compiled_texts_are_the_same(family: str, tmp_path: Path) -> None:
    target(family).save_pretrained(tmp_path)
    config = {"model": drafter(family), "num_speculative_tokens": 3}
    options = {"speculative_config": config, "max_num_seqs": 3, "max_model_len": CONTEXT}
    plain = LLM(tmp_path, dtype="float64", **options)
    compiled = LLM(tmp_path, dtype="float64", compile=True, **options)
    assert compiled.compile_seconds > plain.compile_seconds == 0
    for prompts in (PROMPTS, PROMPTS[:1]):
        expected, found = (ids(llm.generate(prompts, greedy(40))) for llm in (plain, compiled))
        assert found == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("options", [{"cpu_kernels": "packed"}, {"quantization": "int8"}])
def test_packed_and_quantised_layers_are_compiled_too(
    options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    options = {"max_num_seqs": 1, "max_model_len": 8, "dtype": "float32", **options}
    plain, compiled = (LLM(tmp_path, compile=on, **options) for on in (False, True))
    expected, found = (ids(llm.generate(PROMPTS[:2], greedy(4))) for llm in (plain, compiled))
    assert found == expected


def test_only_rounds_are_played_in_fixed_shapes() -> None:
    plain = {"method": "none"}
    llm = LLM(target("llama"), speculative_config=plain, max_num_seqs=1, max_model_len=CONTEXT)
    found = fix(llm.engine.target.runner)
    for length in range(1, 30):
        llm.generate([[1] * length], greedy(3))
    assert {width for _, width in found.shapes} <= {1, 2}
    assert len(found._ready) <= 2


@pytest.mark.gpu
def test_a_recording_that_fails_leaves_torch_as_it_was() -> None:
    """A caller's own draws and operations go on, and other steps can be recorded."""
    steps, stream = CudaGraphs(), torch.cuda.current_stream()
    ones = torch.ones(2, device="cuda")
    steps.run("asks the host", lambda x: (x * int(x.sum()),), [ones])
    with pytest.raises(CaptureFailed):
        steps.run("asks the host", lambda x: (x * int(x.sum()),), [ones])
    assert torch.cuda.current_stream() == stream
    assert torch.rand(2, device="cuda").max() < 1
    for _ in range(3):
        (found,) = steps.run("asks nothing", lambda x: (x + 1,), [ones])
        assert found.tolist() == [2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["draft_model", "draft_tree", "ngram"])
def test_recorded_texts_are_the_same(method: str, temperature: float, tmp_path: Path) -> None:
    target("llama").save_pretrained(tmp_path / "target")
    drafter("llama").save_pretrained(tmp_path / "drafter")
    config = {"method": method, "num_speculative_tokens": 3}
    if method != "ngram":
        config["model"] = str(tmp_path / "drafter")
    options = {"speculative_config": config, "max_num_seqs": 3, "max_model_len": CONTEXT}
    plain, recorded = (
        LLM(tmp_path / "target", dtype="float64", device="cuda", compile=on, **options)
        for on in (False, True)
    )
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True)
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS):
        expected, found = (ids(llm.generate(prompts, params)) for llm in (plain, recorded))
        assert found == expected
