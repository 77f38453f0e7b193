"""Small models that learn to draft for a tiny target."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, SmolLM3Config

from outpace import LLM
from outpace.errors import ConfigError, ModelLoadError, VocabularyMismatch
from outpace.targets.cpu.native import Native, native
from outpace.targets.hf.gguf.load import read_dequantized
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.partial.layers import with_layers
from outpace.train.checkpoint import LOG, STATE
from outpace.train.distill import LikeliestRecipe
from outpace.train.draft_model import (
    UNFINISHED,
    DraftModelSizes,
    StartModel,
    load_start_model,
    prune_layers,
)
from outpace.train.losses import LOSSES, chunked_loss
from outpace.train.run import TrainingRun
from outpace.train.settings import TrainSettings
from outpace.train.teacher import TeacherBatch
from targets.families import CONTEXT, build, target
from targets.gguf.files import tiny, write

from .test_run import BLOCK, DEPTHS, check_precisions, full_disk, loaded, measured_length, text


def settings(steps: int = 8, **more: Any) -> TrainSettings:
    given: dict[str, Any] = {"block": BLOCK, "batch": 8, "warmup": 5, "learning_rate": 0.005}
    given |= {"held_out": 0.05, "method": "draft_model", "steps": steps, "start": "random"}
    return TrainSettings(**{**given, "head": {"depths": 3, "layers": 1}, **more})


def run(out: Path, asked: TrainSettings, tokens: torch.Tensor | None = None) -> TrainingRun:
    return TrainingRun(loaded(), text() if tokens is None else tokens, asked, out)


def quiet(_: object) -> None:
    """Reports nothing."""


def test_a_small_model_learns_and_its_simulated_acceptance_comes_true(tmp_path: Path) -> None:
    repeated = torch.cat([text(), text()])
    trainer = run(tmp_path, settings(150, held_out=0.5, loss="lk"), repeated)
    reached = trainer.play(quiet, every=75)
    assert reached.score > 2
    config = {"model": str(tmp_path), "num_speculative_tokens": DEPTHS}
    model = LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)
    measured = measured_length(model, BLOCK - DEPTHS)
    assert measured == pytest.approx(reached.score, rel=0.01)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_brings_the_distributions_closer(loss: str, tmp_path: Path) -> None:
    losses: list[float] = []
    trainer = run(tmp_path, settings(24, loss=loss))
    trainer.play(lambda progress: losses.append(progress.loss), every=8)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("start", ["random", "pruned"])
def test_products_in_bfloat16_teach_the_same(start: str, tmp_path: Path) -> None:
    check_precisions(lambda one: run(tmp_path / one, settings(6, precision=one, start=start)))


def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", settings(6))
    whole.play(quiet, every=2)
    calls = itertools.count()
    run(tmp_path / "cut", settings(6)).play(quiet, every=2, stop=lambda: next(calls) == 2)
    again = run(tmp_path / "cut", settings(6))
    assert again.step == 3
    again.play(quiet, every=2)
    for name, value in whole.network.state_dict().items():
        assert torch.equal(value, again.network.state_dict()[name]), name


def test_a_run_goes_on_where_its_start_is_named_in_another_way(tmp_path: Path) -> None:
    run(tmp_path, settings(1, start="")).play(quiet)
    assert run(tmp_path, settings(2, start="pruned")).step == 1


def test_several_chat_templates_are_written_at_each_report(tmp_path: Path) -> None:
    class Templates:
        """Writes what transformers writes of a tokenizer with a template for tools."""

        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "additional_chat_templates").mkdir()
            (Path(folder) / "additional_chat_templates" / "tools.jinja").write_text("tools")

    start = StartModel(build("llama"), Templates())
    for _ in range(2):
        start.save(tmp_path)
        kept = tmp_path / "additional_chat_templates" / "tools.jinja"
        assert kept.read_text() == "tools"
    assert not list(tmp_path.glob(f"{UNFINISHED}*"))


def test_what_a_killed_run_has_left_unfinished_is_removed(tmp_path: Path) -> None:
    run(tmp_path, settings(2)).play(quiet)
    kept = sorted(tmp_path.iterdir())
    (tmp_path / f"{UNFINISHED}a").mkdir()
    (tmp_path / f"{UNFINISHED}a" / "model.safetensors").write_bytes(b"half")
    (tmp_path / f"{STATE}.0.part").write_bytes(b"half")
    assert run(tmp_path, settings(2)).step == 2
    assert sorted(tmp_path.iterdir()) == kept


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2-window", "gemma3", "opt", "mixtral"])
def test_all_layers_of_a_target_are_the_target(family: str) -> None:
    whole = LoadedModel(target(family), None, family)
    begun = load_start_model(whole, "pruned", DraftModelSizes())
    same: Any = begun.to_trainable([0, 1], whole.device).model
    tokens = torch.tensor([[3, 9, 2, 4]])
    expected = target(family)(input_ids=tokens).logits
    assert torch.allclose(same(input_ids=tokens).logits.double(), expected, atol=1e-2, rtol=1e-3)
    short: Any = begun.to_trainable([1], whole.device).model
    assert sum(p.numel() for p in short.parameters()) < sum(p.numel() for p in same.parameters())
    assert short(input_ids=tokens).logits.shape == expected.shape


def test_a_full_disk_is_said_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = run(tmp_path, settings(1))
    monkeypatch.setattr(trainer.network, "save_pretrained", full_disk)
    with pytest.raises(OSError, match=r"a file cannot be written \(No space left") as found:
        trainer.play(quiet)
    assert found.value.filename == str(tmp_path)
    (log,) = tmp_path.iterdir()
    assert log.name == LOG
    assert not log.stat().st_size, "a run that begins anew may use the folder"


def test_a_folder_is_begun_from(tmp_path: Path) -> None:
    first = run(tmp_path / "first", settings(2))
    first.play(quiet)
    sizes = {"depths": 3}
    second = run(tmp_path / "second", settings(2, start=str(tmp_path / "first"), head=sizes))
    for name, value in first.network.state_dict().items():
        assert torch.equal(value, second.network.state_dict()[name]), name


def test_sizes_of_a_random_start() -> None:
    sizes = DraftModelSizes(layers=3, hidden_size=24, inner_size=20, heads=2, groups=1)
    made: Any = load_start_model(loaded(), "random", sizes).model
    assert made.config.num_hidden_layers == 3
    assert made.config.hidden_size == 24
    assert made.config.head_dim == 12
    assert made.config.vocab_size == 64


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"loss": "kl"}, "unknown loss 'kl'"),
        ({"head": {"layer": 1}}, "no size 'layer'"),
        ({"start": "pruned", "head": {"layers": 9}}, "layers is 9, and llama has 2"),
        ({"start": "pruned", "head": {"hidden_size": 8}}, "hidden_size cannot be set"),
        ({"head": {"hidden_size": 30}}, "cannot be shared evenly by 4 heads"),
        ({"head": {"depths": 30}}, "--block must be more than 30 tokens"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run(tmp_path, settings(**change))


def words(known: dict[str, int]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(known, unk_token="t0")))


def test_a_folder_with_other_tokens_is_refused(tmp_path: Path) -> None:
    build("llama", vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(VocabularyMismatch, match="64 tokens and the drafter 32"):
        run(tmp_path / "out", settings(start=str(tmp_path), head={"depths": 3}))
    known, whole = ({f"t{at}": at for at in range(count)} for count in (60, 64))
    build("llama", vocab_size=60).save_pretrained(tmp_path)
    words(known).save_pretrained(tmp_path)
    with pytest.raises(VocabularyMismatch, match="60 tokens and llama can generate 64"):
        load_start_model(
            LoadedModel(target("llama"), words(whole), "llama"), str(tmp_path), DraftModelSizes()
        )
    with pytest.raises(ModelLoadError):
        run(tmp_path / "out", settings(start=str(tmp_path / "no/such"), head={"depths": 3}))


@pytest.mark.parametrize("loss", LOSSES)
def test_pieces_are_derived_as_the_whole(loss: str) -> None:
    torch.manual_seed(0)
    own, theirs = torch.randn(7, 4, requires_grad=True), torch.randn(7, 4)
    head, target_head = torch.nn.Linear(4, 11), torch.nn.Linear(4, 11).requires_grad_(False)

    def piece(mine: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        p, q = target_head(other).log_softmax(-1), head(mine).log_softmax(-1)
        return LOSSES[loss](p, q).sum(), p.argmax(-1) == q.argmax(-1)

    # "lk" weighs its two parts by the acceptance of a piece: then one piece is the whole.
    size = 7 if loss == "lk" else 3
    found, same = chunked_loss(piece, own, theirs, size, list(head.parameters()))
    (2 * found).backward()
    mine = [own.grad, *(weight.grad for weight in head.parameters())]
    own.grad = None
    head.zero_grad()
    whole, alike = piece(own, theirs)
    (2 * whole).backward()
    torch.testing.assert_close(found, whole)
    assert torch.equal(same, alike)
    for slope, weight in zip(mine, [own, *head.parameters()], strict=True):
        torch.testing.assert_close(slope, weight.grad)
    with torch.no_grad():
        assert float(chunked_loss(piece, own, theirs, size, [])[0]) == pytest.approx(float(whole))


@pytest.mark.parametrize("start", ["pruned", "file"])
@pytest.mark.parametrize("kept", [[1], [0, 1]])
def test_a_model_in_blocks_is_dequantized_to_begin_from(
    start: str, kept: list[int], tmp_path: Path
) -> None:
    path = write(tmp_path / "target.gguf", "qwen2", tiny("qwen2"), "Q8_0")
    blocks = load(path)
    begun = load_start_model(blocks, str(path) if start == "file" else start, DraftModelSizes())
    made = begun.to_trainable(kept, blocks.device)
    own: Any = made.model
    for new, old in enumerate(kept):
        layer = blocks.model.model.layers[old]
        mine = own.model.layers[new]
        torch.testing.assert_close(mine.mlp.down_proj.weight, layer.mlp.down_proj.weight)
        torch.testing.assert_close(mine.input_layernorm.weight, layer.input_layernorm.weight)
    assert all(weight.requires_grad for weight in own.parameters())
    made.save(tmp_path / "small")
    assert load(tmp_path / "small").config.num_hidden_layers == len(own.model.layers) == len(kept)


@pytest.mark.parametrize("arch", ["qwen2", "gemma3", "gpt2"])
def test_the_layers_of_a_file_are_those_of_its_folder(arch: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4}
    path = write(tmp_path / "target.gguf", arch, tiny(arch, **sizes), "F32")
    tokens, kept = torch.tensor([[3, 9, 2, 4]]), [0, 1, 3]
    short: Any = prune_layers(read_dequantized(str(path)), kept).eval()
    same: Any = read_dequantized(str(path), kept)
    torch.testing.assert_close(same(input_ids=tokens).logits, short(input_ids=tokens).logits)
    assert same.config.to_dict() == short.config.to_dict()


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

    monkeypatch.setattr("gguf.quants.dequantize", counting(gguf.quants.dequantize))
    monkeypatch.setattr(Native, "dequantize_blocks", counting(Native.dequantize_blocks))
    return sizes


@pytest.mark.skipif(native() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("start", ["pruned", "file"])
def test_only_the_layers_that_are_kept_are_dequantized(
    start: str, tmp_path: Path, dequantized: list[int]
) -> None:
    path = write(tmp_path / "target.gguf", "qwen2", tiny("qwen2", num_hidden_layers=8), "Q8_0")
    whole = load(path)
    tokens = torch.randint(8, (6, BLOCK))
    named = str(path) if start == "file" else start
    asked = settings(1, start=named, head={"depths": 3, "layers": 2})
    dequantized.clear()
    network: Any = TrainingRun(whole, tokens, asked, tmp_path / "out").network
    matrices = [weight.nbytes for weight in network.parameters() if weight.ndim == 2]
    assert len(matrices) == 2 + 2 * 7, "two layers of seven, and what is outside of them"
    assert sorted(one for one in dequantized if one >= min(matrices)) == sorted(matrices)


def test_what_a_layer_is_goes_with_it() -> None:
    """Every fourth layer of SmolLM3 has no rotary embedding."""
    whole = SmolLM3Config(num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0])
    assert with_layers(whole, 4, [0, 3]).no_rope_layers == [1, 0]


def test_a_smaller_vocabulary_learns_up_to_a_token_that_it_lacks() -> None:
    """As one that an online drafter has seen in a prompt."""
    model = build("llama")
    recipe = LikeliestRecipe(model, 60)
    empty = torch.zeros(1, 4, 0, dtype=model.dtype)
    top, chances = torch.full((1, 4, 2), 7), torch.full((1, 4, 2), 0.5)

    def loss(tokens: list[int]) -> torch.Tensor:
        return recipe.compute_loss(TeacherBatch(torch.tensor([tokens]), empty, top, chances)).loss

    assert loss([62, 5, 6, 7]) == 0
    assert torch.isfinite(loss([5, 6, 62, 7]))
    torch.testing.assert_close(loss([5, 6, 62, 7]), loss([5, 6, 63, 8]))
