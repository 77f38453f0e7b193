"""Loading: what cannot be loaded is refused within seconds, by its cause and a remedy."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outpace import LLM
from outpace.errors import ConfigError, ModelLoadError, UnsupportedModel
from outpace.llm import BUNDLED
from outpace.methods.models.options import DraftModelOptions
from outpace.targets.hf import trials
from outpace.targets.hf.kinds import INSTALLED
from outpace.targets.hf.loading import source
from outpace.targets.hf.loading.load import load, load_drafter
from outpace.targets.hf.loading.reading import read_tokenizer
from outpace.targets.hf.loading.source import check_path, locate, locate_adapter, names_gguf
from targets.families import build, target
from targets.generating import greedy
from targets.gguf.files import tiny, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_model_len": 4096}, r"max_model_len must be in \[2, 2048\] for this model, not 4096"),
        ({"max_batch_total_tokens": 99}, r"=99 is less than one text may have \(2048 tokens\)"),
        (
            {"max_batch_total_tokens": 99, "max_model_len": 100},
            r"=99 is less than one text may have \(100 tokens\)",
        ),
    ],
)
def test_texts_that_are_too_long_are_refused_before_weights_are_read(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    given: dict[str, int],
    said: str,
) -> None:
    model = folder
    if kind == "file":
        sizes = {"max_position_embeddings": 2048}
        model = write(tmp_path / "model.gguf", "qwen2", tiny("qwen2", **sizes), "Q8_0")

    def read(*given: Any, **options: Any) -> Any:
        pytest.fail("weights were read")

    with monkeypatch.context() as patch:
        patch.setattr("outpace.targets.hf.loading.load.read_weights", read)
        patch.setattr("outpace.targets.hf.gguf.load.empty_model", read)
        with pytest.raises(ConfigError, match=said):
            LLM(model, **given)  # type: ignore[arg-type]
    fits = {**given, "max_batch_total_tokens": 100, "max_model_len": 100}
    assert LLM(model, **fits).max_model_len == 100  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        LLM(load(model), **given)  # type: ignore[arg-type]


# -- where, and in which numbers --------------------------------------------------------------


@pytest.mark.parametrize("device", ["meta", "lazy", "hpu"])
def test_a_device_that_computes_nothing_here_is_named(folder: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=rf"does not compute on the device '{device}' here: use"):
        load(folder, device=device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn])
def test_a_dtype_that_no_model_computes_in_is_named(folder: Path, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"unknown dtype {dtype}: choose from auto, float32"):
        load(folder, dtype=dtype)


def test_a_path_that_cannot_be_looked_at_is_named() -> None:
    path = "x" * 5000
    with pytest.raises(ModelLoadError, match=r"cannot look for the model 'x+.*File name too long"):
        check_path(path)
    assert not names_gguf(path)
    for config in ({"model": path}, {"model": path, "num_speculative_tokens": 2}):
        with pytest.raises(ModelLoadError, match="cannot look for the model"):
            LLM(speculative_config=config)


# -- code of others ----------------------------------------------------------------------------


@pytest.mark.parametrize("trust", ["no", "false", "True", 1, None])
def test_trust_is_a_bool(folder: Path, trust: Any) -> None:
    with pytest.raises(ConfigError, match="trust_remote_code must be True or False, not"):
        load(folder, trust_remote_code=trust)
    with pytest.raises(ConfigError, match="trust_remote_code must be True or False, not"):
        load_drafter(folder, load(folder), trust_remote_code=trust)


def test_code_that_comes_with_a_model_is_named_with_the_whole_remedy(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    named = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    config |= {"model_type": "unheard_of", "auto_map": named}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('executed')")
    with pytest.raises(ModelLoadError, match="Python code of its own") as caught:
        load(folder)
    assert "pass trust_remote_code=True" in str(caught.value)
    assert "\n" not in str(caught.value)


class Anything:
    """An object that a pickle of weights has no business with."""


def test_a_type_of_model_that_is_newer_than_transformers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama99"}))
    said = rf"a model of type 'llama99', which transformers {INSTALLED} does not know: install"
    with pytest.raises(ModelLoadError, match=said):
        load(folder)


def test_pickled_weights_that_are_more_than_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(1), "more": Anything()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"saved as \*\.safetensors") as caught:
        load(folder)
    assert "weights_only" not in str(caught.value), "which would be the unsafe way"


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_experts_are_computed_in_float64(tmp_path: Path, family: str) -> None:
    """transformers' usual way to compute them takes no float64."""
    build(family).save_pretrained(tmp_path)
    expected = LLM(build(family)).generate([[1, 2, 3]], greedy(6))[0].token_ids
    loaded = load(tmp_path, dtype="float64")
    assert LLM(loaded).generate([[1, 2, 3]], greedy(6))[0].token_ids == expected
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    words = r"by 'grouped_mm', which takes no float64\. Load it with experts_implementation='eager'"
    with pytest.raises(UnsupportedModel, match=words):
        load(own)
    own.set_experts_implementation("eager")
    load(own)


# -- places ------------------------------------------------------------------------------------


class Hub:
    """What the hub answers, and how often it was asked."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, 0

    def model_info(self, name: str, *, timeout: float) -> Any:
        assert timeout <= 10
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.answer])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub([])
    monkeypatch.setattr(
        HfApi, "model_info", lambda api, *args, **options: found.model_info(*args, **options)
    )
    monkeypatch.setattr(source, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return found


def _said(kind: Any) -> Exception:
    error: Exception = kind.__new__(kind)  # its constructor wants an answer of the HTTP library
    error.args = ("404",)
    return error


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (_said(RepositoryNotFoundError), "nor a model of this name on the hub: check the spelling"),
        (_said(GatedRepoError), "accept them on https://huggingface.co/some/model, then log in"),
        (OSError("Name or service not known"), "cannot be reached .*Name or service not known"),
        (["README.md", "q4.gguf"], "holds GGUF files only: name one of them, as 'some/model:FILE'"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_at_once(hub: Hub, answer: Any, reason: str) -> None:
    hub.answer = answer
    with pytest.raises(ModelLoadError, match=reason):
        load("some/model")
    assert hub.asked == 1
    with pytest.raises(ModelLoadError, match=reason):
        read_tokenizer("some/model", False)


LORA = {"peft_type": "LORA", "base_model_name_or_path": "some/base"}


@pytest.mark.parametrize(
    ("about", "what", "remedy"),
    [
        (json.dumps(LORA), "a LoRA adapter for the model 'some/base'", "name that model, and"),
        (
            json.dumps({**LORA, "peft_type": "IA3"}),
            "an adapter of the kind 'IA3' for the model",
            "merge it into its model",
        ),
        ("cut sh", "a LoRA adapter for another model", "name that model, and this folder as lora="),
        ("[]", "a LoRA adapter for another model", "name that model, and this folder as lora="),
    ],
)
@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_alone_is_named_as_what_it_is(
    tmp_path: Path, about: str, what: str, remedy: str, with_config: bool
) -> None:
    (tmp_path / "adapter_config.json").write_text(about)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    if with_config:
        (tmp_path / "config.json").write_text("{}")
    for load_it in (load, check_path, lambda path: DraftModelOptions(model=path)):
        with pytest.raises(ModelLoadError, match=f"holds {what}.* and no model: {remedy}"):
            load_it(str(tmp_path))


def test_an_adapter_beside_its_model_is_never_applied_or_ignored_in_silence(folder: Path) -> None:
    """transformers applies it where peft is installed, and ignores it elsewhere."""
    (folder / "adapter_config.json").write_text(json.dumps(LORA))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"holds a model and a LoRA adapter .*: move the"):
        load(folder)
    (folder / "adapter_config.json").unlink()
    load(folder)


def test_adapters_on_the_hub_are_refused_before_they_are_downloaded(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.answer = ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
    with pytest.raises(ModelLoadError, match="'some/model' holds a LoRA adapter for another model"):
        load("some/model")
    hub.answer += ["config.json", "model.safetensors"]
    with pytest.raises(ModelLoadError, match="'some/model' holds a model and a LoRA adapter"):
        load("some/model")
    # As it was downloaded by another program.
    (folder / "adapter_config.json").write_text(json.dumps(LORA))
    monkeypatch.setattr(source, "try_to_load_from_cache", lambda name, file: str(folder / file))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="'some/model' holds a model and a LoRA adapter"):
        load("some/model")


def test_an_adapter_on_the_hub_is_downloaded(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    def download(name: str, file: str) -> str:
        fetched.append(file)
        return str(folder / file)

    monkeypatch.setattr(source, "hf_hub_download", download)
    hub.answer = ["adapter_config.json", "adapter_model.safetensors", "README.md"]
    assert locate_adapter("some/adapter") == folder
    assert fetched == ["adapter_config.json", "adapter_model.safetensors"]
    hub.answer = ["config.json", "model.safetensors"]
    with pytest.raises(ModelLoadError, match="'some/adapter' on the hub holds no adapter"):
        locate_adapter("some/adapter")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate_adapter("some/adapter") == Path("some/adapter")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    monkeypatch.setattr(source, "try_to_load_from_cache", lambda name, file: str(folder / file))
    assert locate_adapter("some/adapter") == folder


def test_offline_nothing_is_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE forbids to download it: unset that"):
        load("some/model")
    assert hub.asked == 0


def test_a_model_on_the_hub_is_found(hub: Hub) -> None:
    hub.answer = ["config.json", "model.safetensors"]
    assert locate("some/model") == "some/model"


def test_what_was_downloaded_is_used_without_asking(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "try_to_load_from_cache", lambda name, file: str(folder / file))
    hub.answer = ["config.json", "model.safetensors"]
    assert locate("some/model") == "some/model", "its tokenizer may have to be downloaded"
    assert hub.asked == 1
    (folder / "tokenizer.json").write_text("{}")
    assert locate("some/model") == str(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "first.safetensors", "b": "second"}}))
    assert locate("some/model") == str(folder), "one file has all weights, whatever lies with it"
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    assert locate("some/model") == "some/model", "one of two files is there"
    (folder / "second").write_text("")
    assert locate("some/model") == str(folder)
    index.write_text("cut sh")
    assert locate("some/model") == "some/model"
    assert hub.asked == 3
    index.unlink()
    (folder / "tokenizer.json").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate("some/model") == "some/model", "the library below says what is missing"


# -- steps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"cpu_kernels": "off"}])
def test_each_step_is_reported_and_drafts_are_checked(
    folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, float]] = []
    probes: list[Any] = []
    probe = trials.probe
    monkeypatch.setattr(trials, "probe", lambda *args, **how: probes.append(probe(*args, **how)))
    load(folder, progress=lambda text, done: steps.append((text, done)), **options)
    shares = [done for _, done in steps]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert "ready" not in dict(steps), "a drafter may have to be loaded yet"
    assert "reading the weights" in dict(steps)
    # Where layers round their inputs, an ignored mask could not be told from rounding afterwards.
    assert len(probes) == (2 if "quantization" in options else 1)


def test_a_pickle_is_what_the_test_takes_it_for(folder: Path) -> None:
    """`Anything` really is refused by torch's safe reader."""
    torch.save(Anything(), folder / "more.bin")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(folder / "more.bin", weights_only=True)


OTHERWISE: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": torch.float16},
    {"device": "meta"},
]


@pytest.mark.parametrize("options", OTHERWISE)
def test_a_model_handed_over_is_not_converted_or_moved(options: dict[str, Any]) -> None:
    model = target("llama")  # in float64, on the CPU
    said = f"{next(iter(options))} .* was asked for, and the model that you loaded"
    with pytest.raises(ConfigError, match=said):
        load(model, **options)
    with pytest.raises(ConfigError, match=said):
        load_drafter(model, load(model), **options)


def test_a_model_without_a_generation_config_has_no_options_of_its_own() -> None:
    model = build("llama")
    model.generation_config = None
    assert load(model).eos_ids == ()
    assert len(LLM(model).generate([[5, 6]], greedy(4))[0].token_ids) == 4


def test_a_model_handed_over_may_be_named_as_it_is() -> None:
    model = target("llama")
    assert load(model, dtype="float64", device="cpu").dtype == torch.float64
    assert load_drafter(model, load(model), dtype="float64").device.type == "cpu"


def test_a_model_that_has_a_tokenizer_is_given_no_other() -> None:
    sentence = "was loaded with a tokenizer"
    loaded = load(BUNDLED / "target")
    assert load(loaded, tokenizer=loaded.tokenizer).tokenizer is loaded.tokenizer
    with pytest.raises(ConfigError, match=sentence):
        load(loaded, tokenizer=copy.deepcopy(loaded.tokenizer))
    with pytest.raises(ConfigError, match=sentence):
        LLM(loaded, tokenizer=copy.deepcopy(loaded.tokenizer))


def test_a_model_that_was_training_is_evaluated() -> None:
    model = build("llama").train()
    LLM(model)
    assert not model.training
