"""Layers that keep a state in our own code: the same states in any company, and drafts that are
taken out of them again."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cpu.described import made
from cpu.test_blocks import drafts_change_no_word, same_bits_everywhere
from cpu.test_native import play
from outpace import LLM
from outpace.core.trees.tree import Tree
from outpace.targets.cpu.kernels import speed_up
from outpace.targets.cpu.native import native
from outpace.targets.cpu.native_layers import passes
from outpace.targets.cpu.native_layers.layer import NativeLayer, use_native_layers
from outpace.targets.cpu.native_layers.model import NativeModel
from outpace.targets.cpu.weights.weight import LINE
from outpace.targets.describe import describe
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.recurrent.states import StateCache
from outpace.targets.hf.runner import Runner
from targets.gguf.files import tiny, write

pytestmark = pytest.mark.skipif(native() is None, reason="no C++ compiler here")

FAMILIES = ("lfm2", "lfm2-taps", "qwen3_next", "qwen3_5", "granite4", "granite4-still")
ARCHS: dict[str, dict[str, Any]] = {
    "lfm2": {}, "lfm2moe": {}, "qwen35": {}, "qwen35moe": {}, "granitehybrid": {},
    "granitehybrid_dense": {},
}  # fmt: skip
OFF: dict[str, Any] = {"cpu_kernels": "off"}
TEXT = [(7 * at * at + 3) % 101 for at in range(90)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ours(family: str) -> Any:
    """A model that our own code computes."""
    model = made(family)
    with torch.inference_mode():
        play(model, whole=True)
    return model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("states")
    return {
        arch: write(folder / f"{arch}.gguf", arch, tiny(arch, **more), "Q8_0")
        for arch, more in ARCHS.items()
    }


def runner_of(model: Any, rows: int = 1) -> Runner:
    runner = Runner(model, rows=rows, max_length=256)
    runner.admit(rows)
    return runner


def states_after(runner: Runner, row: int, length: int) -> dict[Any, Tensor]:
    """The states of a row after its first tokens."""
    assert isinstance(runner.cache, StateCache)
    assert runner.restorable_length(row, length) == length
    return dict(runner.cache.saved_states(row, length)[length - 1])


def same(found: dict[Any, Tensor], expected: dict[Any, Tensor]) -> bool:
    assert found.keys() == expected.keys() != set()
    return all(torch.equal(found[name], expected[name]) for name in expected)


@torch.inference_mode()
def one_by_one(model: Any, text: list[int]) -> Runner:
    runner = runner_of(model)
    for token in text:
        runner.forward(torch.tensor([[token]]), keep=1)
        runner.advance([1])
    return runner


@pytest.mark.parametrize("columns", [2, 3, 8, 40, 64])
@torch.inference_mode()
def test_states_after_columns_at_once_are_those_after_one_at_a_time(
    ours: Any, columns: int
) -> None:
    text = TEXT[: 5 + columns]
    alone = one_by_one(ours, text)
    for keep in (1, columns):  # a prompt, within which no state is kept, and a draft
        runner = runner_of(ours)
        runner.forward(torch.tensor([text[:5]]), keep=1)
        runner.advance([5])
        runner.forward(torch.tensor([text[5:]]), keep=keep)
        runner.advance([columns])
        for length in range(6, len(text) + 1) if keep > 1 else [len(text)]:
            assert same(states_after(runner, 0, length), states_after(alone, 0, length))
        before = len(text) - 2  # the last column but one is committed, and the last is not
        assert runner.restorable_length(0, before) == (5 if keep == 1 else before)


@torch.inference_mode()
def test_any_part_of_a_draft_is_taken_back_in_any_row(ours: Any) -> None:
    """Chains and trees of which each row keeps another part, with the bits of rows alone."""
    texts = [TEXT[at : at + 40] for at in (0, 9, 30)]
    runner = runner_of(ours, rows=3)
    for row, text in enumerate(texts):
        runner.prefill(row, [text[: 3 + row]])
    for number, kept in enumerate(([0, 3, 1], [3, 0, 2], [2, 2, 0], [1, 3, 3], [0, 0, 0])):
        starts = list(runner.lengths)
        pending = [text[at] for text, at in zip(texts, starts, strict=True)]
        drafts = [text[at + 1 : at + 4] for text, at in zip(texts, starts, strict=True)]
        if number % 2:  # the text is the longest path of a tree
            nodes = [[7, *draft, 9] for draft in drafts]
            tree = Tree.uniform([0, 0, 2, 3, 2], rows=3)
            paths = [[2, 3, 4][:count] for count in kept]
        else:
            nodes, tree, paths = drafts, None, []
        fed = torch.tensor([[first, *own] for first, own in zip(pending, nodes, strict=True)])
        runner.forward(fed, keep=fed.shape[1], tree=tree)
        if tree is None:
            runner.advance([1 + count for count in kept])
        else:
            runner.advance_paths(1, paths)
        runner.drop_checkpoints()
        for row, text in enumerate(texts):
            length = runner.lengths[row]
            alone = one_by_one(ours, text[:length])
            assert same(states_after(runner, row, length), states_after(alone, 0, length))


@torch.inference_mode()
def test_rows_that_fork_and_texts_that_are_saved_go_on(ours: Any) -> None:
    runner = Runner(ours, rows=3, max_length=256)
    runner.admit(1)
    runner.prefill(0, [TEXT[:20]])
    runner.keep_checkpoint(0, 20)
    saved = runner.save(0, 20)
    for token in TEXT[20:24]:
        runner.forward(torch.tensor([[token]]), keep=1)
        runner.advance([1])
        runner.drop_checkpoints()
    runner.fork(0, 20)
    runner.admit(1)
    runner.restore(2, saved, 20)
    logits = runner.forward(torch.tensor([[1, 2]] * 3), keep=2).logits
    assert torch.equal(logits[1], logits[2])
    alone = one_by_one(ours, TEXT[:20])
    assert torch.equal(alone.forward(torch.tensor([[1, 2]]), keep=2).logits[0], logits[1])


@torch.inference_mode()
def test_transformers_layers_and_ours_go_on_from_each_others_states(ours: Any, family: str) -> None:
    """A hook brings transformers' code back for a pass."""
    plain = made(family)
    runners = [runner_of(ours), runner_of(plain)]
    for number, begin in enumerate(range(0, 40, 8)):
        hook = ours.model.norm if hasattr(ours.model, "norm") else ours.model.embedding_norm
        hook = hook.register_forward_hook(lambda *_: None) if number % 2 else None
        tokens = torch.tensor([TEXT[begin : begin + 8]])
        found, expected = (runner.forward(tokens, keep=8).logits for runner in runners)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        if hook is not None:
            hook.remove()
        for runner in runners:
            runner.advance([6])
            runner.drop_checkpoints()


@torch.inference_mode()
def test_states_do_not_depend_on_the_number_of_threads(ours: Any) -> None:
    threads, found = torch.get_num_threads(), []
    try:
        for count in (threads, 1, 3):
            torch.set_num_threads(count)
            runner = runner_of(ours, rows=2)
            runner.prefill(0, [TEXT[:30], TEXT[20:50]])
            found.append([states_after(runner, row, 30) for row in range(2)])
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(same(one, other) for one, other in zip(found[0], others, strict=True))


@torch.inference_mode()
def test_layers_are_given_enough_memory_to_work_in(
    ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[tuple[Tensor, int]] = []
    describe_pass = passes._describe_pass

    def guarded(given: passes.PassInputs, cached: int, scratch: int) -> Any:
        described, size = describe_pass(given, cached, scratch), scratch + LINE
        rooms.append((torch.full((size + 4096,), 7.0), size))
        described.struct.scratch = rooms[-1][0].data_ptr()
        return described

    monkeypatch.setattr(passes, "_describe_pass", guarded)
    runner = runner_of(ours, rows=2)
    for columns in (1, 5, 30):
        runner.forward(torch.tensor([TEXT[:columns]] * 2), keep=columns)
    assert len(rooms) == 3
    assert all(bool((room[size:] == 7.0).all()) for room, size in rooms)


@torch.inference_mode()
def test_layers_that_compute_something_else_are_left_to_transformers() -> None:
    wide = made("lfm2-taps", conv_L_cache=9)  # more inputs than are made room for
    dilated = made("lfm2-taps")
    dilated.model.layers[0].conv.conv.dilation = (2,)
    more = made("qwen3_5")
    more.model.layers[0].linear_attn.more = nn.Linear(4, 4)
    scaled = made("qwen3_5")
    norm = scaled.model.layers[0].linear_attn.norm
    norm.forward = lambda x, gate: 2 * type(norm).forward(norm, x, gate)
    doubled = made("lfm2-taps")
    mixer = doubled.model.layers[1].conv
    own = mixer.forward
    mixer.forward = lambda hidden_states, **options: 2 * own(hidden_states, **options)
    counts = (0, 1, 1, 1, 1)
    for model, count in zip((wide, dilated, more, scaled, doubled), counts, strict=True):
        speed_up(model, "native", smallest=1)
        assert use_native_layers(model) == count
        assert sum(isinstance(layer.forward, NativeLayer) for layer in model.modules()) == count


# -- weights in blocks -----------------------------------------------------------------------------


@cache
def played(path: Path) -> Any:
    """The model of a file, which our own code computes. Nobody changes it."""
    with torch.inference_mode(False):
        model = load(path).model
    assert isinstance(model.forward, NativeModel)
    return model


def read(model: Any, tokens: Tensor) -> Tensor:
    runner = runner_of(model, len(tokens))
    logits: Tensor = runner.forward(tokens, keep=tokens.shape[1]).logits
    return logits


@pytest.mark.parametrize("arch", ARCHS)
@torch.inference_mode()
def test_models_in_blocks_give_the_numbers_of_dequantized_weights(
    arch: str, files: dict[str, Path]
) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 200, (2, 15))
    found = read(played(files[arch]), tokens)
    expected = read(load(files[arch], **OFF).model, tokens)
    off = (found - expected).square().mean(-1).sqrt() / expected.std(-1)
    assert float((off < 0.05).float().mean()) >= 0.8, "a choice may be another one now and then"
    assert 1e-4 < off.median() < 0.03, "activations are rounded, and nothing else"


@pytest.mark.parametrize("arch", ARCHS)
@torch.inference_mode()
def test_a_token_has_the_same_bits_alone_and_among_drafts(
    arch: str, files: dict[str, Path]
) -> None:
    same_bits_everywhere(played(files[arch]), 200)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("arch", ARCHS)
def test_drafts_change_no_word(arch: str, method: str, files: dict[str, Path]) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
    if method == "draft_model":
        config["model"] = files["lfm2"]
    drafts_change_no_word(files[arch], config)


@pytest.mark.parametrize("arch", ["lfm2", "qwen35moe"])
def test_a_text_that_goes_on_begins_where_the_last_one_ended(
    arch: str, files: dict[str, Path]
) -> None:
    prompt, params = [(5 * at) % 97 for at in range(40)], {"temperature": 0, "max_tokens": 20}
    llm = LLM(files[arch], enable_prefix_caching=True)
    begun = [*prompt, *llm.generate([prompt], params)[0].token_ids, 3, 4]
    restored: list[int] = []
    restore = StateCache.restore
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            StateCache, "restore", lambda *given: restored.append(given[3]) or restore(*given)
        )
        found = llm.generate([begun], params)[0]
    assert restored == [len(begun) - 3]
    assert found.token_ids == LLM(files[arch]).generate([begun], params)[0].token_ids


def test_it_says_what_computes_the_layers(files: dict[str, Path]) -> None:
    found = describe(load(files["qwen35moe"]))
    assert (found.kernels, found.native_layers, found.whole_model) == ("integer", 2, True)


@torch.inference_mode()
def test_copies_compute_the_same(files: dict[str, Path]) -> None:
    model, tokens = played(files["qwen35"]), torch.randint(0, 200, (1, 9))
    assert torch.equal(read(copy.deepcopy(model), tokens), read(model, tokens))
