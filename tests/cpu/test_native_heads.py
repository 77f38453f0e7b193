"""Layers of heads in our own code: what torch makes of them, in texts that grow and in drafts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from devices import cpu_only
from outpace import LLM
from outpace.core.trees.tree import Tree
from outpace.draft.registry import find_drafter
from outpace.draft.vocab_mapping import VocabMapping
from outpace.heads.base import TargetShape
from outpace.heads.checkpoint import load_head
from outpace.heads.decoder import DecoderLayer, NormedLayer
from outpace.heads.layers import LayerConfig
from outpace.heads.native import NativeLayers, SlotAttentionContext
from outpace.methods.heads.decoder_heads import DecoderDraftSteps
from outpace.methods.heads.eagle import Eagle, EagleConfig
from outpace.methods.heads.eagle3 import Eagle3, Eagle3Config
from outpace.methods.heads.gemma4_layer import GatedGelu
from outpace.methods.heads.head_kv_cache import HeadKVCache, PrefixLayerCache
from outpace.methods.heads.mtp import Mtp, MtpConfig
from outpace.targets.cpu.native import native
from outpace.targets.cpu.native_layers.blocks import use_block_kernels
from outpace.targets.cpu.native_layers.linear import prepack_weights
from outpace.targets.cpu.weights.quantize import quantize
from targets.families import CONTEXT, PROMPTS, target

pytestmark = [
    pytest.mark.skipif(native() is None, reason="no C++ compiler here"),
    cpu_only("Our own code computes on a CPU."),
]

SIZE, VOCABULARY, LAYERS = 32, 61, 12
HEAD = {"heads": 4, "groups": 2, "head_dim": 16, "inner_size": 48}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
NEAR = {"atol": 1e-4, "rtol": 1e-4}
BUNDLED = Path(__file__).parents[2] / "bundle" / "heads" / "eagle3-qwen2.5-coder-1.5b"


class Shared:
    """What heads read of a target."""

    def __init__(self, size: int = SIZE) -> None:
        torch.manual_seed(5)
        self._rows, self._output = torch.randn(VOCABULARY, size), torch.randn(VOCABULARY, size)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._rows[tokens % VOCABULARY]

    def compute_logits(self, states: Tensor) -> Tensor:
        return states @ self._output.t()


def eagle3(**more: Any) -> Any:
    config = Eagle3Config(**{**HEAD, "reads": [1, 2, 3], **more})
    return Eagle3(TargetShape(SIZE, VOCABULARY, LAYERS), config)


def eagle(**more: Any) -> Any:
    return Eagle(TargetShape(SIZE, VOCABULARY, LAYERS), EagleConfig(**{**HEAD, **more}))


def mtp(**more: Any) -> Any:
    return Mtp(TargetShape(SIZE, VOCABULARY, LAYERS), MtpConfig(**{**HEAD, **more}))


IN_INT8 = "8 bits"
MADE: dict[str, Callable[[], Any]] = {
    "eagle3": eagle3,
    "several layers and windows": lambda: eagle3(layers=3, windows=[0, 4, 6]),
    "norms of heads": lambda: eagle3(normed=True),
    "biases": lambda: eagle3(bias=True, output_bias=True),
    "the normalised state goes on": lambda: eagle3(norm_before_residual=True),
    "normalised outputs": lambda: eagle3(norm_output=True, layers=2),
    "some elements are turned": lambda: eagle3(rope={**ROPE, "partial_rotary_factor": 0.5}),
    "a scaled turn": lambda: eagle3(
        rope={**ROPE, "rope_type": "yarn", "inv_freq": [0.5] * 8, "attention_factor": 1.3}
    ),
    IN_INT8: lambda: eagle3(layers=2),
    "eagle": lambda: eagle(input_norm=True),
    "eagle without a norm": lambda: eagle(input_norm=False, fusion_bias=True, bias=True),
    "mtp": mtp,
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    head = MADE[name]().eval().requires_grad_(False)
    for each in head.parameters():
        each.add_(torch.randn_like(each), alpha=0.1)
    if name == IN_INT8:
        quantize(head, "int8")
        prepack_weights(head)
    return head


class Played:
    """Texts of some rows, and drafts after them."""

    def __init__(self, head: Any, shared: Any, rows: int, own: bool) -> None:
        self.head, self.shared = head, shared
        self.cache = HeadKVCache(head, rows, ahead=1)
        self.cache.native = NativeLayers.of(head.decoder_layers) if own else None
        assert (self.cache.native is not None) is own
        for _ in range(rows):
            self.cache.admit()

    @torch.inference_mode()
    def read(self, rows: Sequence[int], states: Tensor, tokens: Tensor, counts: Any) -> Tensor:
        """Returns the outputs of the next entries."""
        attn_context = self.cache.next_of(rows, [tokens.shape[1]] * len(rows))
        assert isinstance(attn_context, SlotAttentionContext) is (self.cache.native is not None)
        found, entries = self.head.step(
            self.head.combine_hidden_states(states), tokens, attn_context, self.shared
        )
        self.cache.append(rows, entries, counts)
        return found

    @torch.inference_mode()
    def drafts(self, outputs: Tensor, fed: Tensor, levels: Sequence[int], tree: Tree) -> list[Any]:
        """Returns the logits of all levels of a tree, and the outputs that follow from them."""
        vocabulary = VocabMapping(torch.arange(VOCABULARY), VOCABULARY)
        if getattr(self.head, "d2t", None) is not None:
            vocabulary = VocabMapping(self.head.d2t, 151936)
        draft_steps = DecoderDraftSteps(self.head, self.shared, vocabulary, self.cache, outputs)
        found, done, last = [draft_steps.first()], 0, [0]
        for width in levels:
            nodes = list(range(done, done + width))
            parents = [int(tree.parents[0, node]) for node in nodes]
            at = torch.tensor([last.index(parent) for parent in parents])
            done, last = done + width, [node + 1 for node in nodes]
            part = Tree.uniform(tree.parents[0, :done].tolist(), rows=len(fed))
            found.append(draft_steps.next_logits(fed[:, :done], part, at))
        return found


def numbers(head: Any, rows: int, count: int) -> tuple[Tensor, Tensor]:
    """States of a target, and tokens."""
    wide = len(head.hidden_layers) * head.target.hidden_size
    return torch.randn(rows, count, wide), torch.randint(0, VOCABULARY, (rows, count))


def play(games: Sequence[Played], near: Callable[[Any, Any], None]) -> None:
    """Reads texts of different lengths and drafts after them, with all of them alike."""
    torch.manual_seed(1)
    head = games[0].head
    parents, levels = [0, 0, 1, 1, 2, 4, 5], (2, 3, 2)
    tree = Tree.uniform(parents, rows=3)
    for rows, counts in (([0, 1, 2], [7, 1, 4]), ([2, 0], [3, 2]), ([0, 1, 2], [2, 2, 1])):
        states, tokens = numbers(head, len(rows), max(counts))
        outputs = [game.read(rows, states, tokens, counts) for game in games]
        for row, count in enumerate(counts):
            near([each[row, :count] for each in outputs], rows)
    for repeated in range(2):  # what was drafted before is not seen
        fed = torch.randint(0, VOCABULARY, (3, len(parents)))
        found = [
            game.drafts(each[:, :1], fed, levels, tree)
            for game, each in zip(games, outputs, strict=True)
        ]
        for level in zip(*found, strict=True):
            near(level, repeated)
    for game in games:
        game.cache.drop(1, 1)
    states, tokens = numbers(head, 1, 40)
    near([game.read([1], states, tokens, [40]) for game in games], "a longer text")


@pytest.mark.parametrize("name", list(MADE))
def test_torch_makes_the_same_of_it(name: str) -> None:
    head = made(name)

    def near(found: Any, where: Any) -> None:
        torch.testing.assert_close(*found, **NEAR, msg=lambda text: f"{where}: {text}")

    play([Played(head, Shared(), 3, own) for own in (True, False)], near)


def test_the_bundled_head_in_4_bits() -> None:
    head: Any = load_head(BUNDLED, blocks=True).to(torch.float32)
    use_block_kernels(head)

    def near(found: Any, where: Any) -> None:
        ours, torchs = (each.nan_to_num(neginf=0.0) for each in found)
        off = (ours - torchs).square().mean().sqrt() / torchs.std()
        assert off < 0.02, where  # a last bit may decide how an activation is rounded

    play([Played(head, Shared(1536), 3, own) for own in (True, False)], near)


@pytest.mark.parametrize("name", ["eagle3", "several layers and windows"])
def test_the_same_bits_in_any_company(name: str) -> None:
    """Alone and in a batch of longer and shorter texts, in a chain and in a tree."""
    head, shared = made(name), Shared()
    together, alone = Played(head, shared, 3, True), Played(head, shared, 1, True)
    torch.manual_seed(2)
    states, tokens = numbers(head, 3, 18)
    features = head.combine_hidden_states(states)
    head.combine_hidden_states = lambda states: states  # torch's product is another one in a batch
    all_of = together.read([0, 1, 2], features, tokens, [18, 3, 11])
    one_by_one = [
        alone.read([0], features[2:, at, None], tokens[2:, at, None], [1]) for at in range(11)
    ]
    assert torch.equal(all_of[2, :11], torch.cat(one_by_one, 1)[0])
    step, kept = head.step, []

    def recorded(*given: Any) -> Any:
        found = step(*given)
        kept.append(found[0])
        return found

    head.step = recorded
    tree = Tree.uniform([0, 0, 1, 2, 3], rows=3)
    fed = torch.randint(0, VOCABULARY, (3, 5))
    together.drafts(all_of[:, 10:11], fed, (2, 2, 1), tree)
    chain = fed[2:, [0, 2, 4]]
    alone.drafts(all_of[2:, 10:11], chain, (1, 1, 1), Tree.uniform([0, 1, 2], rows=1))
    in_tree, in_chain = kept[:3], kept[3:]
    for wide, single in zip(in_tree, in_chain, strict=True):
        assert torch.equal(wide[2, 0], single[0, 0])


def test_rows_that_come_and_go() -> None:
    """Forked, kept, saved and restored ones, rows out of order, and rows that get no entries."""
    head = made("several layers and windows")
    games = [Played(head, Shared(), 5, own) for own in (True, False)]
    torch.manual_seed(4)

    def read(rows: Sequence[int], counts: Sequence[int]) -> None:
        states, tokens = numbers(head, len(rows), max(counts))
        found = [game.read(rows, states, tokens, counts) for game in games]
        for row, count in enumerate(counts):
            torch.testing.assert_close(*(each[row, :count] for each in found), **NEAR)

    for game in games:
        game.cache.retain([0, 1, 2])
    read([0, 1, 2], [9, 4, 6])
    for game in games:
        game.cache.admit(0, 5)
    read([3, 1, 0], [2, 0, 3])
    for game in games:
        saved = game.cache.save(2, 6)
        game.cache.retain([1, 3])
        game.cache.admit()
        game.cache.restore(2, saved, 5)
    read([2, 0, 1], [3, 1, 2])
    for game in games:
        game.cache.reset()
        game.cache.admit()
    read([0], [3])


def test_long_texts() -> None:
    """Their slots are shared out among threads, buffers are exchanged in the middle of a draft, and
    the table of rotary positions grows."""
    head = made("eagle3")
    games = [Played(head, Shared(), 3, own) for own in (True, False)]
    torch.manual_seed(6)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(18):  # up to 324 and 576 slots, across 256 and 512 in drafts
            states, tokens = numbers(head, 3, 32)
            found = [game.read([0], states[:1], tokens[:1], [32]) for game in games]
            found = [game.read([1, 2], states[1:, :18], tokens[1:, :18], [18, 1]) for game in games]
            tree = Tree.uniform([0, 1, 2, 3], rows=3)
            fed = torch.randint(0, VOCABULARY, (3, 4))
            drafted = [
                game.drafts(each[[0, 0, 1], :1], fed, (1,) * 4, tree)
                for game, each in zip(games, found, strict=True)
            ]
            for level in zip(*drafted, strict=True):
                torch.testing.assert_close(*level, **NEAR)
    finally:
        torch.set_num_threads(threads)


def test_a_long_prompt_at_once_has_the_bits_of_its_pieces() -> None:
    """In blocks: of more tokens than threads hold each for itself."""
    head: Any = load_head(BUNDLED, blocks=True).to(torch.float32)
    use_block_kernels(head)
    at_once, pieces = (Played(head, Shared(1536), 1, True) for _ in range(2))
    states, tokens = numbers(head, 1, 1100)
    features = head.combine_hidden_states(states)
    head.combine_hidden_states = lambda states: states
    whole = at_once.read([0], features, tokens, [1100])
    parts = [
        pieces.read([0], features[:, some], tokens[:, some], [some.stop - some.start])
        for some in (slice(0, 700), slice(700, 701), slice(701, 1100))
    ]
    assert torch.equal(whole, torch.cat(parts, 1))


def test_each_row_has_a_tree_of_its_own() -> None:
    head = made("eagle3")
    games = [Played(head, Shared(), 3, own) for own in (True, False)]
    torch.manual_seed(7)
    states, tokens = numbers(head, 3, 8)
    outputs = [game.read([0, 1, 2], states, tokens, [8, 1, 5])[:, :1] for game in games]
    fed = torch.randint(0, VOCABULARY, (3, 5))
    parents = torch.tensor([[0, 0, 1, 2, 2], [0, 0, 1, 1, 2], [0, 0, 2, 2, 1]])
    vocabulary = VocabMapping(torch.arange(VOCABULARY), VOCABULARY)
    begin = torch.zeros(2, dtype=torch.long)
    with torch.inference_mode():
        walks = [
            DecoderDraftSteps(head, game.shared, vocabulary, game.cache, each)
            for game, each in zip(games, outputs, strict=True)
        ]
        for tree, at in ((parents[:, :2], begin), (parents, parents[:, 2:] - 1)):
            found = [
                draft_steps.next_logits(fed[:, : tree.shape[1]], Tree(tree), at)
                for draft_steps in walks
            ]
            torch.testing.assert_close(*found, **NEAR)


def test_all_depths_at_once() -> None:
    head = eagle3(parallel=True, depths=4, mask_token=7).eval().requires_grad_(False)
    games = [Played(head, Shared(), 2, own) for own in (True, False)]
    torch.manual_seed(8)
    states, tokens = numbers(head, 2, 6)
    vocabulary = VocabMapping(torch.arange(VOCABULARY), VOCABULARY)
    found = []
    for game in games:
        outputs = game.read([0, 1], states, tokens, [6, 3])[:, :1]
        found.append(DecoderDraftSteps(head, game.shared, vocabulary, game.cache, outputs).ahead(4))
    torch.testing.assert_close(*found, **NEAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [DecoderLayer, NormedLayer])
def test_layers_over_a_text(kind: Any, dtype: torch.dtype) -> None:
    """Whatever the target's states are: a head that is handed over is in its own dtype."""
    torch.manual_seed(3)
    layer = kind(SIZE, LayerConfig(**HEAD)).eval().requires_grad_(False)
    readers = [PrefixLayerCache(layer, 2) for _ in range(2)]
    readers[0].native = NativeLayers.of([layer])
    assert readers[0].native is not None
    for reader in readers:
        reader.admit()
        reader.admit()
    for counts in ((3, 1), (1, 6), (2, 2)):
        states = torch.randn(2, max(counts), SIZE).to(dtype)
        for reader in readers:
            for row, count in enumerate(counts):
                reader.add(row, states[row, :count])
        ours, torchs = (reader.latest([0, 1]).float() for reader in readers)
        near = 0.05 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(ours, torchs, atol=near, rtol=0)


class Other(DecoderLayer):
    """A layer that computes something else."""


def test_what_is_left_to_torch() -> None:
    head = made("eagle3")
    layers = head.decoder_layers
    assert NativeLayers.of([Other(SIZE, LayerConfig(**HEAD))]) is None
    assert NativeLayers.of([DecoderLayer(SIZE, LayerConfig(**{**HEAD, "head_dim": 6}))]) is None
    assert NativeLayers.of([*layers[:1], *layers[:1]]) is None
    normed = NormedLayer(SIZE, LayerConfig(**HEAD))
    assert NativeLayers.of([normed, DecoderLayer(SIZE, LayerConfig(**HEAD))]) is None
    activated = DecoderLayer(SIZE, LayerConfig(**HEAD))
    activated.mlp = GatedGelu(SIZE, 48)
    assert NativeLayers.of([activated]) is None
    assert NativeLayers.of(made("eagle3").double().decoder_layers) is None
    assert NativeLayers.of([]) is None
    found = NativeLayers.of(layers)
    assert found is not None
    with torch.inference_mode():
        assert found.takes(1)
        assert not found.takes(65), "weights in float32: torch is faster"
        hook = layers[0].mlp.register_forward_hook(lambda *_: None)
        assert not found.takes(1), "somebody looks on"
        hook.remove()
        assert found.takes(1)
        down = layers[0].mlp.down_proj
        layers[0].mlp.down_proj = nn.Sequential(down)
        assert not found.takes(1), "a part is another one"
        layers[0].mlp.down_proj = down
        assert found.takes(1)
        layers[0].half()
        assert not found.takes(1), "norms are read as float32"
        layers[0].float()
        assert found.takes(1)
    assert not found.takes(1), "gradients are wanted"


def test_weights_that_move_are_found_again() -> None:
    head, shared = made("eagle"), Shared()
    game = Played(head, shared, 1, True)
    states, tokens = numbers(head, 1, 4)
    before = game.read([0], states, tokens, [0])
    head.layer.mlp.down_proj.weight = nn.Parameter(torch.zeros(SIZE, 48), requires_grad=False)
    head.layer.self_attn.q_proj.weight.mul_(2)  # in place, as a head learns
    after = game.read([0], states, tokens, [0])
    expected = Played(head, shared, 1, False).read([0], states, tokens, [0])
    torch.testing.assert_close(after, expected, **NEAR)
    assert not torch.allclose(before, after)


def test_a_pass_that_is_far_from_even_is_torchs() -> None:
    """Each row would take slots for as many entries as the row with the most."""
    head = load_head(BUNDLED, blocks=True).to(torch.float32)
    use_block_kernels(head)
    cache = Played(head, Shared(1536), 2, True).cache
    with torch.inference_mode():
        assert isinstance(cache.next_of([0, 1], [300, 100]), SlotAttentionContext)
        assert not isinstance(cache.next_of([0, 1], [300, 2]), SlotAttentionContext)


@pytest.mark.parametrize("kernels", ["auto", "native", "off"])
def test_a_drafter_has_them_unless_kernels_are_off(kernels: Any, tmp_path: Path) -> None:
    model: Any = copy.deepcopy(target("llama")).float()
    model.save_pretrained(tmp_path)
    shape = TargetShape.of(model.config)
    sizes = {"heads": 1, "head_dim": 16, "inner_size": 32}
    config = {"method": "eagle3", "model": Eagle3(shape, Eagle3Config(**sizes)).eval()}
    llm = LLM(
        tmp_path,
        dtype="float32",
        device="cpu",
        speculative_config=config,
        cpu_kernels=kernels,
        max_model_len=CONTEXT,
    )
    drafter: Any = llm.engine.drafter
    assert isinstance(drafter, find_drafter("eagle3"))
    fits = shape.hidden_size % native().lanes == 0
    assert (drafter._cache.native is not None) is (kernels != "off" and fits)
    params = {"temperature": 0, "max_tokens": 12}
    drafted, plain = (
        [out.token_ids for out in llm.generate(PROMPTS, {**params, **more})]
        for more in ({}, {"speculative": "off"})
    )
    assert drafted == plain
