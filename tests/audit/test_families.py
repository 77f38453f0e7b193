"""The walk over families finds what is identical, what is refused, and what is different."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from lab.families import trial, walk
from lab.families.listing import Family, Finding, listed
from lab.families.models import tiny_config, tiny_model
from lab.families.prompts import ILLUSTRATED, prompts_for
from lab.families.sizes import CHUNK, DECODERS, DEFAULTS, EXCEPTIONS, VOCABULARY, WINDOW
from lab.families.walk import Limits
from typer.testing import CliRunner

from outpace.cli.audit import app
from outpace.core import extras
from outpace.errors import ConfigError, UnsupportedModel
from outpace.llm import LLM
from outpace.targets.hf import support, trials
from outpace.targets.hf.masks import PassLayout
from outpace.targets.hf.vision import images as vision_images
from versions import since

FOUND = [
    Finding("llama", "LlamaForCausalLM", "identical", trees=True),
    Finding("rwkv", "RwkvForCausalLM", "identical", "a state | no tree"),
    Finding("blt", "BltForCausalLM", "refused", "it cannot read a text"),
]
WRONG = Finding("mpt", "MptForCausalLM", "DIFFERENT", "with ngram the text differs")
NOT_BUILT = Finding("jetmoe", "JetMoeForCausalLM", "not built", "KeyError: a size")
UNFINISHED = Finding("falcon_h1", "FalconH1ForCausalLM", "not finished", "it takes longer")


def last(family: str, kind: str = "causal") -> Finding:
    (one,) = listed([family], [kind])
    *_, found = trial.findings(one)
    return found


# -- tiny configurations -----------------------------------------------------------------------


def test_what_makes_a_family_stays() -> None:
    config = tiny_config("gemma3_text")
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert (config.sliding_window, config.vocab_size) == (WINDOW, VOCABULARY)
    config = tiny_config("llama4_text")
    assert config.layer_types == ["chunked_attention", "full_attention"]
    assert (config.attention_chunk_size, config.no_rope_layers) == (CHUNK, [1, 0])
    grouped, alone = tiny_config("mistral"), tiny_config("llama")
    assert grouped.num_key_value_heads < grouped.num_attention_heads
    assert alone.num_key_value_heads == alone.num_attention_heads


def test_changes_win() -> None:
    assert tiny_config("llama", num_hidden_layers=5).num_hidden_layers == 5


@since("5.23", "all families of which the list is")
def test_every_exception_is_of_a_listed_family() -> None:
    assert {*DEFAULTS, *EXCEPTIONS, *DECODERS} <= {one.family for one in listed()}


def test_a_family_that_nobody_lists_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no model .* 'lama' .* mean 'llama'"):
        listed(["lama"], ["causal"])
    with pytest.raises(ConfigError, match=r"'qqq' .*choose from \d+, such as \S+, ") as raised:
        listed(["qqq"])
    assert len(str(raised.value)) < 300, "a sentence, and not the list of all families"
    with pytest.raises(ConfigError, match=r"no models of kind 'text': give one of causal, "):
        listed(kinds=["text"])


def test_a_family_is_listed_once_for_each_kind() -> None:
    assert [one.kind for one in listed(["gemma3"])] == ["causal", "image-text"]
    assert [one.kind for one in listed(["voxtral"])] == ["speech"]
    assert [one.kind for one in listed(["voxtral"], ["seq2seq"])] == ["seq2seq"]
    assert {one.kind for one in listed()} == {"causal", "speech", "seq2seq", "image-text"}


def test_a_configuration_inside_another_keeps_its_own_options() -> None:
    text = tiny_config("paligemma").text_config
    assert (text.model_type, text.num_key_value_heads) == ("gemma", 1)
    assert text.use_bidirectional_attention


def test_prompts_show_images_where_the_model_looks_for_them() -> None:
    (llava,) = listed(["llava"], ["image-text"])
    model = tiny_model(llava)
    prompts = prompts_for(model, "image-text")
    placeholder = model.config.image_token_id
    size = (16 // 4) ** 2
    for prompt, shown in zip(prompts, ILLUSTRATED, strict=True):
        assert list(prompt.token_ids).count(placeholder) == size * list(shown).count(-1)
        longer = prompt.arguments(model.device, [1, 2])
        assert longer["input_ids"].shape[1] == len(prompt.token_ids) + 2


@pytest.mark.parametrize(
    "family",
    [
        "aria",
        "deepseek_vl",
        pytest.param("granite_docling", marks=since("5.23", "Granite Docling")),
        "kimi_k25",
        "minicpmv4_6",
        "video_llama_3",
    ],
)
def test_images_come_in_the_form_that_a_model_takes(family: str) -> None:
    (one,) = listed([family], ["image-text"])
    model = tiny_model(one)
    prompts = prompts_for(model, "image-text")
    assert [bool(prompt.more) for prompt in prompts] == [True, False, True]
    logits = model(**prompts[0].arguments(model.device), use_cache=False).logits
    assert logits.shape[1] == len(prompts[0].token_ids)


def test_windows_of_images_and_layers_that_are_named_stay() -> None:
    vision = tiny_config("qwen2_5_vl").vision_config
    assert (vision.window_size, vision.patch_size) == (16, 4)
    assert list(tiny_config("qwen3_vl").vision_config.deepstack_visual_indexes) == [1]


# -- verdicts ----------------------------------------------------------------------------------


def test_a_mask_without_the_window_is_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassLayout, "within", lambda self, window: self.seen)
    found = last("mistral")
    assert (found.verdict, found.failed) == ("refused", False)
    assert "otherwise than the same tokens in a text" in found.reason


def test_what_the_check_at_load_misses_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "probe", lambda model, coarse=False: None)
    monkeypatch.setattr(PassLayout, "within", lambda self, window: self.seen)
    found = last("mistral")
    assert (found.verdict, found.failed) == ("DIFFERENT", True)
    assert "differs from plain generate at token" in found.reason


def test_a_family_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ImportError("it needs timm\nand more")

    monkeypatch.setattr(trial, "tiny_model", fails)
    found = last("llama")
    assert (found.verdict, found.reason) == ("not built", "ImportError: it needs timm")


@pytest.mark.parametrize(
    ("family", "kind", "reason"),
    [
        ("bart", "seq2seq", ""),
        ("voxtral", "speech", "texts only, without audio"),
        ("lfm2_vl", "image-text", ""),
    ],
)
def test_texts_of_other_kinds_of_models_are_compared_too(
    family: str, kind: str, reason: str
) -> None:
    found = last(family, kind)
    assert (found.verdict, found.reason) == ("identical", reason)
    assert (found.trees, found.kind) == (True, kind)
    assert 0 < found.accepted < found.drafted


@pytest.mark.parametrize(
    ("family", "kind", "reason"),
    [
        ("canary", "speech", "reads 'input_features' in a form of its own"),
        ("moonshine", "speech", "reads 'input_values' in a form of its own"),
        ("dia", "speech", "writes nine channels of audio codes at once"),
        ("t5gemma", "seq2seq", "its decoder has sliding windows"),
        ("fsmt", "seq2seq", "takes a mask or a cache"),
        pytest.param(
            "musicgen",
            "causal",
            "reads 4 codes of audio at once",
            marks=since("5.20", "a configuration of MusicGen without its parts"),
        ),
        ("kosmos-2", "image-text", "reads no text without an image"),
        ("pi0", "image-text", "has no vocabulary"),
    ],
)
def test_a_refusal_says_what_cannot_be_done(family: str, kind: str, reason: str) -> None:
    (one,) = listed([family], [kind])
    with pytest.raises(UnsupportedModel, match=reason):
        LLM(tiny_model(one))


@pytest.mark.parametrize(
    ("family", "kind", "reason"),
    [
        ("gemma4_assistant", "causal", "drafts for a Gemma 4"),
        ("gemma4_unified_assistant", "causal", "drafts for a Gemma 4"),
        ("vibevoice", "speech", "writes speech"),
    ],
)
def test_what_writes_no_text_is_refused_by_its_type(family: str, kind: str, reason: str) -> None:
    found = last(family, kind)
    assert found.verdict == "refused"
    assert reason in found.reason
    with pytest.raises(UnsupportedModel, match=reason):
        support.check_config(transformers.PretrainedConfig(model_type=family))


def test_families_with_networks_of_timm_get_small_ones() -> None:
    gemma, perception = tiny_config("gemma3n"), tiny_config("perception_lm")
    assert gemma.text_config.num_kv_shared_layers == 2
    assert gemma.vision_config.hidden_size == tiny_config("fast_vlm").vision_config.hidden_size
    assert perception.vision_config.model_args["depth"] == 2


@pytest.mark.parametrize("family", ["fast_vlm", "gemma3n", "perception_lm"])
def test_families_with_networks_of_timm_are_identical(family: str) -> None:
    pytest.importorskip("timm")
    found = last(family, "image-text")
    assert (found.verdict, found.reason) == ("identical", "")


@since("5.18", "GIT over several tokens")
def test_a_model_whose_images_nobody_knows_is_tried_with_texts() -> None:
    found = last("git", "image-text")
    assert (found.verdict, found.reason) == ("identical", "texts only, without images")


def test_a_model_that_refuses_its_images_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Any:
        raise UnsupportedModel("its images cannot be read")

    monkeypatch.setattr(vision_images, "read_prompt", refuses)
    found = last("llava", "image-text")
    assert (found.verdict, found.reason) == ("refused", "its images cannot be read")


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (MemoryError(), "not finished"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "not finished"),
        (ValueError("a defect"), "DIFFERENT"),
    ],
)
@pytest.mark.parametrize("where", ["__init__", "generate"])
def test_running_out_of_memory_is_no_defect(
    error: Exception, verdict: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(trial.LLM, where, fails)
    assert last("llama").verdict == verdict


# -- processes ---------------------------------------------------------------------------------


def test_three_families_in_processes_of_their_own() -> None:
    names = listed(["llama", "llama4_text", "blt"], ["causal"])
    found = {one.family: one for one in walk.walk(names, Limits(), workers=2)}
    assert {name: one.verdict for name, one in found.items()} == {
        "llama": "identical",
        "llama4_text": "identical",
        "blt": "refused",
    }
    assert found["llama"].trees
    assert 0 < found["llama"].accepted < found["llama"].drafted
    assert "keeps one of another kind" in found["blt"].reason


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(seconds=0.2), "takes longer than 0.2 s"),
        (Limits(gigabytes=0.01), "only been started takes more than 0.01 GB"),
    ],
)
def test_a_family_that_takes_too_much_is_stopped(limits: Limits, reason: str) -> None:
    (found,) = walk.walk(listed(["llama"], ["causal"]), limits)
    assert found.verdict in ("not built", "not finished")
    assert reason in found.reason


@pytest.mark.slow
def test_every_family_is_identical_or_refused() -> None:
    found = [*walk.walk(listed(), Limits(), workers=2)]
    assert {one.family: one.reason for one in found if one.failed} == {}


# -- command and page --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "code"),
    [(FOUND, 0), ([*FOUND, NOT_BUILT], 0), ([*FOUND, WRONG], 1), ([*FOUND, UNFINISHED], 1)],
)
def test_the_command_writes_what_it_finds_and_fails_for_a_difference(
    found: list[Finding], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walked(names: Sequence[Family], *_: Any) -> Iterator[Finding]:
        assert [one.family for one in names] == ["blt", "llama"]
        yield from found

    monkeypatch.setattr(walk, "walk", walked)
    json_file, page = tmp_path / "new" / "families.json", tmp_path / "families.md"
    options = ["--kind", "causal", "--only", "llama", "--only", "blt"]
    options += ["--json", str(json_file)]
    result = CliRunner().invoke(app, ["families", *options, "--markdown", str(page)])
    assert result.exit_code == code, result.output
    written = json.loads(json_file.read_text())
    assert written["ok"] == (code == 0)
    assert written["transformers"] == transformers.__version__
    assert [one["family"] for one in written["families"]] == sorted(one.family for one in found)
    text = " ".join(page.read_text().split())
    assert f"transformers {transformers.__version__}" in text
    assert "| identical | chains, trees | llama |" in text
    assert "chains only: a state / no tree" in text
    assert "2 identical, 1 refused" in result.output
    assert ("1 DIFFERENT" in text) == (WRONG in found)


def test_a_file_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "walk", lambda *_: iter(FOUND))
    result = CliRunner().invoke(app, ["families", "--markdown", "/dev/null/page.md"])
    assert isinstance(result.exception, ConfigError)
    assert "cannot write /dev/null/page.md" in str(result.exception)


def test_a_wheel_says_where_the_walk_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "CLONE", tmp_path)
    for verb in ("families", "options"):
        result = CliRunner().invoke(app, [verb])
        assert isinstance(result.exception, ConfigError)
        assert "folder lab/ of the repository" in str(result.exception)
