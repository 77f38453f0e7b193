"""Our own products and layers: the same numbers as torch's, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from cpu.described import BASE, DESCRIBED, made
from outpace import LLM, SamplingParams
from outpace.core.trees.tree import Tree
from outpace.targets.cpu import native, race
from outpace.targets.cpu.kernels import speed_up
from outpace.targets.cpu.native import Native
from outpace.targets.cpu.native_layers.description import RotaryStyle
from outpace.targets.cpu.native_layers.layer import NativeLayer, agree, use_native_layers
from outpace.targets.cpu.native_layers.linear import (
    INVARIANT_ROWS,
    WIDE_LANES,
    FusedProduct,
    NativeLinear,
    fuse_products,
    native_int8,
    native_linear,
    prepack_weights,
)
from outpace.targets.cpu.native_layers.model import NativeModel, use_native_model
from outpace.targets.cpu.native_layers.passes import RotaryTable
from outpace.targets.cpu.native_layers.product import NativeProduct, WeightLayout
from outpace.targets.cpu.weights.narrow import narrowed
from outpace.targets.cpu.weights.quantize import native_int4
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.slot_ranges import PassSlots
from representatives import representatives

FOUND = native.native()
pytestmark = pytest.mark.skipif(FOUND is None, reason="no C++ compiler here")

SHAPES = [(64, 32), (31, 48), (101, 64), (100, 7), (1, 5), (144, 129)]


def library() -> Native:
    assert FOUND is not None
    return FOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_products_are_torchs_and_a_row_keeps_its_bits(
    shape: tuple[int, int], bias: bool, dtype: torch.dtype
) -> None:
    if not library().takes(dtype):
        pytest.skip("the compiler knows no such numbers")
    torch.manual_seed(0)
    plain = nn.Linear(shape[1], shape[0], bias=bias)
    plain.weight.copy_(plain.weight.to(dtype))
    layer = native_linear(library(), plain)
    assert layer.weight.dtype == dtype
    x = torch.randn(INVARIANT_ROWS, shape[1])
    alone = torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(alone, plain(x), rtol=1e-5, atol=1e-5)
    for rows in range(1, INVARIANT_ROWS + 1):
        assert torch.equal(layer(x[:rows]), alone[:rows])
        assert torch.equal(layer(x[-rows:].flip(0)), alone[-rows:].flip(0))
    assert torch.equal(layer(x.view(2, INVARIANT_ROWS // 2, -1)).view(INVARIANT_ROWS, -1), alone)
    many = torch.randn(3, INVARIANT_ROWS, shape[1])
    torch.testing.assert_close(layer(many), plain(many), rtol=1e-5, atol=1e-5)
    assert layer(torch.zeros(0, shape[1])).shape == (0, shape[0])


@pytest.mark.parametrize("rows", [1, 7, 24, 25, 26, 31, 100])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_eight_bits_are_scaled_back(shape: tuple[int, int], rows: int) -> None:
    torch.manual_seed(0)
    layer = native_int8(library(), nn.Linear(shape[1], shape[0]))
    x = torch.randn(rows, shape[1])
    assert layer.weight.dtype == torch.int8
    torch.testing.assert_close(layer(x), layer.dense(x), rtol=1e-5, atol=1e-5)
    if layer.can_prepack:
        expected = layer.dense(x)
        layer.prepack()
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(layer(x[-1:]), layer(x)[-1:])


@pytest.mark.parametrize("tune", [False, True])
@pytest.mark.parametrize("wins", [False, True])
@torch.inference_mode()
def test_prompts_go_to_whoever_is_faster(
    wins: bool, tune: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fixed rule says who that is, and a race only where it is asked for."""
    clock = cycle([0, 1, 0, 2] if wins else [0, 2, 0, 1])
    monkeypatch.setattr("outpace.targets.cpu.race.perf_counter", lambda: next(clock))
    layer = native_linear(library(), nn.Linear(64, 3 * library().panel))
    x, rows = torch.randn(40, 64), layer.weight.clone()
    expected = layer(x)
    lanes = WIDE_LANES if wins != tune else WIDE_LANES - 1  # the rule says the contrary of a race
    monkeypatch.setattr(library(), "lanes", lanes)
    assert prepack_weights(nn.ModuleList([layer]), tune) == wins
    assert (layer.most > INVARIANT_ROWS) == wins
    assert (layer.layout is WeightLayout.PANELS) == wins
    assert torch.equal(layer.weight, rows)
    assert layer.state_dict().keys() == {"weight", "bias"}
    assert torch.equal(layer.state_dict()["weight"], rows)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_race_for_prompts_multiplies_by_gpt2s_weight_as_its_layer_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = native_linear(library(), Conv1D(96, 32))
    raced: list[NativeLinear] = []
    ready = race._ready
    monkeypatch.setattr(race, "_ready", lambda made: raced.append(made) or ready(made))
    race.native_reads_prompts(layer)
    x = torch.randn(3, 32)
    torch.testing.assert_close(raced[0](x) + layer.bias, layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs", [7, 64, 1100])
@torch.inference_mode()
def test_laid_out_a_row_keeps_its_bits_in_any_company(
    inputs: int, bias: bool, dtype: torch.dtype
) -> None:
    if not library().takes(dtype):
        pytest.skip("the compiler knows no such numbers")
    torch.manual_seed(0)
    plain = nn.Linear(inputs, 5 * library().panel, bias=bias)
    plain.weight.copy_(plain.weight.to(dtype))
    layer = native_linear(library(), plain)
    layer.prepack()
    x = torch.randn(140, inputs)
    alone = torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(alone, plain(x), rtol=1e-5, atol=1e-5)
    for rows in (*range(1, 2 * INVARIANT_ROWS), 139, 140):
        assert torch.equal(layer(x[:rows]), alone[:rows])
        assert torch.equal(layer(x[-rows:].flip(0)), alone[-rows:].flip(0))


@pytest.mark.parametrize("make", [native_linear, native_int8, native_int4])
def test_compiled_products_of_no_rows(make: Callable[[Native, Any], NativeProduct]) -> None:
    layer = make(library(), nn.Linear(64, 48)).requires_grad_(False)
    assert layer.compiled(torch.empty(2, 0, 64)).shape == (2, 0, 48)
    assert layer(torch.empty(0, 64)).shape == (0, 48)


@torch.inference_mode()
def test_layers_of_any_size_and_order_compute_together() -> None:
    torch.manual_seed(0)
    size = library().panel
    linears = [nn.Linear(40, outputs) for outputs in (101, 4 * size, 7, 9 * size)]
    layers = [native_linear(library(), linear) for linear in linears]
    layers[1].prepack()
    layers[3].prepack()
    together = FusedProduct(library(), layers)
    for rows in (1, 3, 30):
        x = torch.randn(rows, 40)
        for layer, linear in zip(layers, linears, strict=True):
            torch.testing.assert_close(together.product(layer, x), linear(x), rtol=1e-5, atol=1e-5)


def test_weights_that_are_read_by_others_stay_in_rows() -> None:
    model = made("llama", tie_word_embeddings=True, vocab_size=32 * 5)
    speed_up(model, "native", smallest=1)
    prepack_weights(model)
    assert model.lm_head.layout is WeightLayout.ROWS
    assert model.lm_head.weight is model.model.embed_tokens.weight


@torch.inference_mode()
def test_models_in_sixteen_bits_add_up_in_float32() -> None:
    plain = nn.Linear(256, 32).bfloat16()
    layer = native_linear(library(), plain)
    x = torch.randn(3, 256).bfloat16()
    exact = (x.double() @ plain.weight.double().t() + plain.bias.double()).bfloat16()
    assert layer(x).dtype == torch.bfloat16
    assert float((layer(x) == exact).double().mean()) > 0.95


@torch.inference_mode()
def test_gpt2_layers_stay_as_they_are_shown() -> None:
    layer = Conv1D(24, 16)
    x = torch.randn(3, 16)
    expected, shown = layer(x), layer.weight.clone()
    fast = native_linear(library(), layer)
    torch.testing.assert_close(fast(x), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(fast.weight, shown)


@pytest.mark.parametrize("shape", [(300, 300), (3, 90000), (90000, 3)])
def test_only_weights_that_lose_nothing_are_narrowed(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    assert narrowed(weight, library().takes) is weight
    short = weight.bfloat16().float()
    found = narrowed(short, library().takes)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.float(), short)
    assert narrowed(short, lambda dtype: False) is short
    short[-1, -1] += 1e-6  # beyond the sample that is looked at first
    assert narrowed(short, library().takes) is short
    half = weight.half().float()
    assert not library().takes(torch.float16) or torch.equal(
        narrowed(half, library().takes), half.half()
    )


def test_gradients_still_flow() -> None:
    layer = native_linear(library(), nn.Linear(32, 16))
    x = torch.randn(2, 32, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None


@torch.inference_mode()
def test_a_weight_that_moved_is_found_again() -> None:
    layer = native_linear(library(), nn.Linear(32, 16, bias=False))
    x = torch.randn(2, 32)
    before = layer(x)
    layer.weight.data = 2 * layer.weight.data
    torch.testing.assert_close(layer(x), 2 * before)


@torch.inference_mode()
def test_layers_that_share_their_input_compute_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama")
    ids = torch.tensor([[5, 6, 7]])
    expected = model(input_ids=ids).logits
    speed_up(model, "native", smallest=1)
    layers = sum(isinstance(module, NativeLinear) for module in model.modules())
    assert fuse_products(model) == 10, "q, k, v and gate, up of two layers"
    calls = []
    products = Native.products
    monkeypatch.setattr(
        Native, "products", lambda self, x, weights: calls.append(1) or products(self, x, weights)
    )
    for _ in range(2):
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2 * (layers - 6)
    attention = model.model.layers[0].self_attn
    x, other = torch.randn(1, 64), torch.randn(1, 64)
    first, second = attention.k_proj(x), attention.v_proj(other)
    torch.testing.assert_close(first, x @ attention.k_proj.weight.t())
    torch.testing.assert_close(second, other @ attention.v_proj.weight.t())


LAYER_BY_LAYER = ("llama", "gemma2", "stablelm-parallel", "deepseek_v3", "lfm2", "qwen3_next")
LAYERS = representatives(
    product(DESCRIBED, [False, True]),
    lambda family, whole: whole or family in LAYER_BY_LAYER,
)
"""Each family, its layers one by one or all in one call, which computes them by the same code."""


def scored(runner: Runner, tokens: Tensor, tree: Tree | None, lengths: list[int]) -> Tensor:
    runner.lengths = list(lengths)
    logits: Tensor = runner.forward(tokens, keep=tokens.shape[1], tree=tree).logits
    return logits


def play(model: PreTrainedModel, whole: bool) -> None:
    speed_up(model, "native", smallest=1)
    for layer in model.modules():
        if whole and isinstance(layer, NativeLinear) and layer.can_prepack:
            layer.prepack()
    assert use_native_layers(model) == 2
    if whole:
        assert use_native_model(model)


@pytest.mark.parametrize(("family", "whole"), LAYERS)
@torch.inference_mode()
def test_played_layers_give_transformers_numbers(family: str, whole: bool) -> None:
    model, plain = made(family), made(family)
    play(model, whole)
    found, expected = (Runner(which, rows=2, max_length=512) for which in (model, plain))
    tokens = torch.randint(0, 101, (2, 7))
    for tree in (Tree.uniform([0, 0, 1, 2, 2, 0], rows=2), Tree.chain(2, 6)):
        for lengths in ([9, 4], [9, 9], [300, 7]):
            logits = []
            for runner in (found, expected):
                runner.retain([])
                runner.admit(2)
                torch.manual_seed(1)
                runner.prefill(0, [list(range(1, lengths[0] % 97)), list(range(3, lengths[1]))])
                for start in range(0, max(lengths), 20):  # the library's passes fill it too
                    runner.lengths = [min(start, length) for length in lengths]
                    runner.forward(torch.full((2, 20), 5), keep=20)
                logits.append(scored(runner, tokens, tree, lengths))
            torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("family", "whole"), LAYERS)
@torch.inference_mode()
def test_a_token_has_the_same_bits_alone_and_among_drafts(family: str, whole: bool) -> None:
    model = made(family)
    play(model, whole)
    runner = Runner(model, rows=3, max_length=512)
    runner.admit(3)
    torch.manual_seed(1)
    text = torch.randint(0, 101, (160,)).tolist()
    alone = []
    for length, token in enumerate(text):  # one row, one token at a time
        runner.lengths = [length]
        alone.append(runner.forward(torch.tensor([[token]]), keep=1).logits[0, 0])
    runner.lengths = [0, 0, 0]
    done = 0
    while done < len(text) - 8:  # three rows; the right path lies at the end of a tree
        nodes = [1, 2, *text[done + 1 : done + 4], 3]
        tokens = torch.tensor([[text[done], *nodes]] * 3)
        tree = Tree.uniform([0, 1, 0, 3, 4, 4], rows=3)
        logits = scored(runner, tokens, tree, [done] * 3)
        for node, at in ((0, 0), (3, 1), (4, 2), (5, 3)):
            for row in range(3):
                assert torch.equal(logits[row, node], alone[done + at])
        runner.lengths = [done] * 3
        runner.advance_paths(1, [[3, 4, 5]] * 3)
        done += 4
    for rows in (1, 3):  # and so does one in a short prompt
        length = INVARIANT_ROWS // rows
        logits = scored(runner, torch.tensor([text[:length]] * rows), None, [0] * rows)
        assert torch.equal(logits, torch.stack(alone[:length]).expand(rows, -1, -1))


@pytest.mark.parametrize("whole", [False, True])
@torch.inference_mode()
def test_a_token_has_the_same_bits_wherever_its_row_lies(whole: bool) -> None:
    model = made("llama")
    play(model, whole)
    torch.manual_seed(1)
    texts = [torch.randint(0, 101, (length,)).tolist() for length in (400, 60, 30, 44)]
    runner = Runner(model, rows=4, max_length=512)
    drafts = torch.randint(0, 101, (4, 5))
    tree = Tree.uniform([0, 0, 2, 1], rows=1)
    alone = []
    for text, draft in zip(texts, drafts, strict=True):
        runner.admit(1)
        for begin in range(0, len(text), 20):
            runner.prefill(0, [text[begin : begin + 20]])
        alone.append(runner.forward(draft[None], keep=5, tree=tree).logits[0])
        runner.retain([])
    runner.admit(4)
    for row, text in enumerate(texts):
        for begin in range(0, len(text), 20):
            runner.prefill(row, [text[begin : begin + 20]])
    rows = [0, 1, 2, 3]
    for kept in ([0, 1, 2, 3], [0, 2, 3], [1, 2]):
        runner.retain([rows.index(row) for row in kept if row in rows])
        rows = [row for row in rows if row in kept]
        trees = Tree.uniform([0, 0, 2, 1], rows=len(rows))
        logits = runner.forward(drafts[rows], keep=5, tree=trees).logits
        assert torch.equal(logits, torch.stack([alone[row] for row in rows]))


@torch.inference_mode()
def test_layers_read_rows_of_any_length_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(slots: PassSlots) -> Tensor:
        raise AssertionError("rows were copied together")

    model = made("llama")
    play(model, whole=True)
    runner = Runner(model, rows=3, max_length=512)
    runner.admit(3)
    for row, length in enumerate((400, 5, 5)):
        runner.prefill(row, [[1] * length])
    runner.retain([0, 2])
    seen = cached_property(gathered)
    seen.__set_name__(PassSlots, "seen")
    monkeypatch.setattr(PassSlots, "seen", seen)
    slots = [part.clone() for part in runner.cache.row(1)]
    runner.forward(torch.tensor([[1, 2], [3, 4]]), keep=1)
    for before, after in zip(slots, runner.cache.row(1), strict=True):
        changed = (before != after).any(0).any(-1)
        assert changed.nonzero().flatten().tolist() == [5, 6]


@torch.inference_mode()
def test_layers_of_other_shapes_are_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would write after the memory that it works in."""
    model = made("llama")
    for layer in model.model.layers:
        layer.mlp.up_proj = nn.Linear(layer.mlp.up_proj.in_features, 1)  # torch repeats its output
    monkeypatch.setattr(Native, "layers", lambda *_: pytest.fail("it was tried"))
    assert use_native_layers(model) == 0


@torch.inference_mode()
def test_layers_that_compute_something_else_are_left_to_transformers() -> None:
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, **ends))
    other = made("llama", hidden_act="quick_gelu")
    hooked = made("llama")
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    more = made("gemma3")
    more.model.layers[0].mlp.more = nn.Linear(4, 4)
    clipped = made("olmo2")
    clipped.config.clip_qkv = 8.0  # what the few tokens of a trial may not reach
    uncapped = made("gemma3", attn_logit_softcapping=50.0)  # which its code does not look at
    bounded = made("llama", hidden_act="gelu_10")  # as gelu, up to 10
    scaled = made("llama")
    scaled.model.layers[0].register_buffer("scale", torch.ones(1))
    counts = (0, 0, 1, 1, 0, 0, 0, 1)
    models = (gpt2.eval(), other, hooked, more, clipped, uncapped, bounded, scaled)
    for model, count in zip(models, counts, strict=True):
        speed_up(model, "native", smallest=1)
        assert use_native_layers(model) == count
        assert sum(isinstance(layer.forward, NativeLayer) for layer in model.modules()) == count


@torch.inference_mode()
def test_what_the_attributes_of_a_layer_do_not_say_is_found_out() -> None:
    """A trial refuses what a description gets wrong, and chooses among what it leaves open."""

    class Doubled(nn.Module):
        def __init__(self, norm: Any) -> None:
            super().__init__()
            self.weight, self.eps = norm.weight, norm.variance_epsilon

        def forward(self, x: Tensor) -> Tensor:
            return 2 * torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

    model = made("qwen3")
    model.model.layers[0].input_layernorm = Doubled(model.model.layers[0].input_layernorm)
    attention = model.model.layers[1].self_attn
    forward = type(attention).forward
    attention.forward = lambda *args, **options: (
        2 * forward(attention, *args, **options)[0],
        None,
    )
    speed_up(model, "native", smallest=1)
    assert use_native_layers(model) == 0
    turned = {family: made(family) for family in ("llama", "cohere", "glm4", "smollm3")}
    found = []
    for model in turned.values():
        use_native_layers(model)
        found.append([layer.forward.description.rotary for layer in model.model.layers])
    assert found == [
        [RotaryStyle.HALVES] * 2,
        [RotaryStyle.INTERLEAVED] * 2,
        [RotaryStyle.INTERLEAVED_HALF_TABLE] * 2,
        [RotaryStyle.HALVES, RotaryStyle.NONE],
    ]


@torch.inference_mode()
def test_a_model_played_whole_shows_its_last_layer_before_the_norm() -> None:
    """transformers runs the model meanwhile, and our own pass is there again afterwards."""
    model, plain = made("qwen3"), made("qwen3")
    play(model, whole=True)
    runners = [Runner(which, rows=1, max_length=64) for which in (model, plain)]
    for runner in runners:
        runner.admit(1)
    given = {"keep": 1, "output_hidden_states": True, "last_layer": True}
    found, expected = (
        runner.forward(torch.tensor([[5, 6, 7]]), **given).hidden_states for runner in runners
    )
    assert len(found) == len(expected) == model.config.num_hidden_layers + 2
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(plain.model.norm(expected[-2]), expected[-1])
    assert model.forward._is_unchanged()


@torch.inference_mode()
def test_a_model_played_whole_still_does_what_else_it_is_asked() -> None:
    model, plain = made("qwen3"), made("qwen3")
    play(model, whole=True)
    runners = [Runner(which, rows=1, max_length=64) for which in (model, plain)]
    tokens = torch.tensor([[5, 6, 7]])

    def same(tensors: list[Tensor]) -> None:
        torch.testing.assert_close(tensors[0], tensors[1], rtol=1e-3, atol=1e-3)

    for runner in runners:
        runner.admit(1)
    asked = [runner.forward(tokens, keep=1, output_hidden_states=True) for runner in runners]
    for states in zip(*(output.hidden_states for output in asked), strict=True):
        same(list(states))
    model(input_ids=tokens, use_cache=False, output_hidden_states=True)  # its hooks stay for good
    same([scored(runner, tokens, None, [0]) for runner in runners])
    inner = model.model
    for watched in (inner, inner.layers[1], inner.layers[0].self_attn.k_proj, inner.norm):
        seen: list[nn.Module] = []
        hook = watched.register_forward_hook(lambda module, *_, seen=seen: seen.append(module))
        same([scored(runner, tokens, None, [0]) for runner in runners])
        assert seen == [watched]
        hook.remove()
    same([which(input_ids=tokens).logits for which in (model, plain)])
    before = scored(runners[0], tokens, None, [0])
    with torch.no_grad():
        for which in (model, plain):
            which.model.norm.weight.data = which.model.norm.weight.data * 2
    same([scored(runner, tokens, None, [0]) for runner in runners])
    for which in (model, plain):
        which.model.layers = which.model.layers[:1]
        which.config.num_hidden_layers = 1
    same([scored(runner, tokens, None, [0]) for runner in runners])
    assert not torch.allclose(scored(runners[0], tokens, None, [0]), before, atol=1e-2)


@torch.inference_mode()
def test_a_model_that_does_more_between_layers_and_logits_is_not_played_whole() -> None:
    model = made("granite")
    speed_up(model, "native", smallest=1)
    assert use_native_layers(model) == 2
    kept = type(model).forward

    class Other(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **options: Any) -> Any:
            output = kept(self, *args, **options)
            output.logits = output.logits.flip(-1)
            return output

    model.__class__ = Other
    assert not use_native_model(model)
    assert not isinstance(model.forward, NativeModel)


def test_texts_are_those_of_torch(tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path)
    texts = []
    for options in ({"cpu_kernels": "off"}, {"cpu_kernels": "native"}):
        for method in (None, {"method": "ngram", "num_speculative_tokens": 4}):
            llm = LLM(tmp_path, speculative_config=method, **options)  # type: ignore[arg-type]
            params = SamplingParams(temperature=0, max_tokens=60)
            found = llm.generate([[1, 2, 3], [7]], params)
            texts.append([out.token_ids for out in found])
    assert all(text == texts[0] for text in texts)


def test_a_model_handed_over_keeps_its_layers(tmp_path: Path) -> None:
    model = made("llama")
    assert not isinstance(load(model).model.model.layers[0].forward, NativeLayer)
    model.save_pretrained(tmp_path)
    ours = load(tmp_path).model
    assert isinstance(ours.model.layers[0].forward, NativeLayer)
    assert isinstance(ours.forward, NativeModel)
    off = load(tmp_path, cpu_kernels="off").model
    assert not isinstance(off.model.layers[0].forward, NativeLayer)
    assert not isinstance(off.forward, NativeModel)


@torch.inference_mode()
def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    model = made("llama")
    play(model, whole=True)
    runner = Runner(model, rows=2, max_length=512)
    runner.admit(2)
    tokens, threads, found = torch.randint(0, 101, (2, 9)), torch.get_num_threads(), []
    try:
        for count in (threads, 1, 3):
            torch.set_num_threads(count)
            found.append(scored(runner, tokens, None, [0, 4]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic"])
@torch.inference_mode()
def test_angles_are_the_models_own(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, **({} if kind == "default" else {"factor": 4.0})}
    module = LlamaForCausalLM(LlamaConfig(**{**BASE, "rope_parameters": rope})).model.rotary_emb
    rotary, x = RotaryTable(module), torch.zeros(1)
    for reach in (8, 4, 600):  # beyond the 512 that "dynamic" leaves as they are
        positions = torch.tensor([[reach - 1, 0, 2]])
        cosines, sines, where = rotary(x, positions, reach)
        assert (where is None) == (kind == "dynamic")
        if where is not None:
            cosines, sines = cosines[where], sines[where]
        expected = module(x, positions)
        torch.testing.assert_close(cosines, expected[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(sines, expected[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("error", "fine"), [(1.3e-4, True), (1e-3, False)])
def test_a_layer_is_trusted_in_spite_of_rounding_but_not_of_more(error: float, fine: bool) -> None:
    """error: of one number, as a share of the spread; the layer of a real model was off by the
    first of them."""
    expected = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    found = expected.clone()
    found[1, 2] += error * expected.std()
    assert agree(found, expected, expected, torch.nn.Identity()) == fine
