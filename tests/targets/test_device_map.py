"""Models of which parts lie on other devices, or on the disk, write what a whole one writes."""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model

from alike import LENGTH, METHODS, MODELS, PENALISED, SAMPLED, llms, same, written
from devices import cpu_only
from draft.mtp_checkpoints import loaded, whole, write
from engine.texts import tokenizer, writer
from outpace import LLM, SamplingParams
from outpace.arguments import EngineArgs
from outpace.cli.flags.grouped import Flags
from outpace.core.trees.tree import Tree
from outpace.draft.fingerprint import digest_of
from outpace.draft.registry import find_drafter
from outpace.errors import ConfigError, OutpaceError, UnsupportedModel
from outpace.heads.base import Head
from outpace.targets.base import PromptInputs, ScoreInputs
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.loading.loaded import LoadedModel, probe_states
from outpace.targets.hf.loading.placing import pick_places
from outpace.targets.hf.logits import output_rows
from outpace.targets.hf.target import HFTarget
from representatives import representatives
from targets.families import CONTEXT, PROMPTS, VOCABULARY, build, drafter, target
from targets.generating import greedy
from two_devices import two_devices

pytestmark = cpu_only("Parts lie on the CPU, on the disk, and on devices that there are not.")

EVERY_METHOD = (*METHODS, "pass", "hidden_transfer", "layer_skip", "early_exit")


def laid_out(model: Any, *devices: Any) -> dict[str, Any]:
    """Returns a device map: the embeddings on the first device, the layers on one after the other,
    and what comes after them on the last."""
    inner = "model." if hasattr(model, "model") else ""
    layers = len(model.model.layers)
    places = {f"{inner}embed_tokens": devices[0], f"{inner}rotary_emb": devices[0]}
    for layer in range(layers):
        places[f"{inner}layers.{layer}"] = devices[layer * len(devices) // layers]
    tied = model.config.tie_word_embeddings
    return {
        **places,
        f"{inner}norm": devices[-1],
        "lm_head": devices[0] if tied else devices[-1],
    }


def on_disk(model: Any, folder: Path, tokenizer: Any = None, **options: Any) -> LoadedModel:
    """Returns a model whose first half is in memory, and the second on the disk."""
    model.save_pretrained(folder)
    return load(
        str(folder),
        dtype="float64",
        device_map=laid_out(model, "cpu", "disk"),
        tokenizer=tokenizer,
        **options,
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return on_disk(target("llama"), tmp_path_factory.mktemp("llama"))


# -- in memory and on the disk ---------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(name: str, tmp_path: Path) -> None:
    one = build(name.partition(",")[0], **MODELS[name])
    other = on_disk(one, tmp_path)
    assert any(weight.device.type == "meta" for weight in other.model.parameters())
    config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    pair = llms(one, other, speculative_config=config)
    same(pair)
    for what in ("pass_bytes", "lm_head_bytes", "weight_bytes"):  # seeded texts depend on the first
        assert getattr(pair[0].engine.target, what) == getattr(pair[1].engine.target, what)
    same(llms(one, other, speculative_config={**config, "verify": "coupled"}))


def drafting(method: str, model: Any) -> dict[str, Any]:
    dummy_options = find_drafter(method).dummy_options(LoadedModel(model, None, "llama"))
    return {"method": method, "num_speculative_tokens": 4, **dummy_options}


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_every_way_to_draft(method: str, llama: LoadedModel) -> None:
    config = drafting(method, target("llama")) if method != "none" else {"method": method}
    pair = llms(target("llama"), llama, speculative_config=config)
    same(pair)
    if method != "none":
        found = pair[1].generate(PROMPTS, greedy(LENGTH))
        assert sum(output.metrics.num_draft_tokens for output in found)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_keys_and_values_in_8_bits(kind: str, llama: LoadedModel) -> None:
    same(llms(target("llama"), llama, kv_cache_dtype=kind, speculative_config={"method": "suffix"}))


def test_samples_fork_and_texts_that_were_put_aside_come_back(llama: LoadedModel) -> None:
    config = {"method": "draft_model", "model": drafter("llama"), "num_speculative_tokens": 3}
    options = {"max_batch_total_tokens": 128, "max_num_batched_tokens": 6}
    pair = llms(target("llama"), llama, speculative_config=config, **options)
    several = SamplingParams(temperature=1.0, n=3, seed=4, max_tokens=24, ignore_eos=True)
    same(pair, several, [prompt * 4 for prompt in PROMPTS[:2]])


def test_forms_beams_and_text(tmp_path: Path) -> None:
    model = writer()
    other, one = on_disk(model, tmp_path, tokenizer()), LoadedModel(model, tokenizer(), "writer")
    pair = llms(one, other, speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    found = []
    for llm in pair:
        formed = written(llm, "go: ", structured_outputs={"regex": "[a-c]{3,9}x"})
        beams = llm.beam_search("go: ", {"beam_width": 3, "max_tokens": 6})[0]
        found.append([formed.text, [text.text for text in beams.sequences]])
    assert found[0] == found[1]


def test_modules_that_a_checkpoint_brings_draft(tmp_path: Path) -> None:
    family = "ernie4_5_moe"  # its modules take the target's own last norm, which is on the disk
    folder = write(tmp_path, family, whole(family))
    one = loaded(folder)
    other = load(str(folder), dtype="float64", device_map=laid_out(one, "cpu", "disk"))
    config = {"method": "mtp", "model": str(folder), "num_speculative_tokens": 2, "check": False}
    same(llms(one, other, speculative_config=config), greedy(LENGTH))


def test_what_reads_weights_finds_them_on_the_disk(llama: LoadedModel) -> None:
    model, tokens = target("llama"), torch.arange(5)
    assert digest_of(llama.model) == digest_of(model)
    pairs = [
        (output_rows(model, tokens), output_rows(llama.model, tokens)),
        (probe_states(LoadedModel(model, None, "")), probe_states(llama)),
    ]
    for left, right in pairs:
        assert left is not None
        assert right is not None
        assert torch.equal(left, right)
    assert "cpu and disk" in str(LLM(llama, max_model_len=CONTEXT).describe())


def test_weights_that_had_to_be_written_go_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = tmp_path / "spare"
    spare.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spare))
    other = on_disk(build("mixtral"), tmp_path / "mixtral")
    (folder,) = spare.iterdir()
    assert list(folder.iterdir())  # its experts, which the checkpoint holds in another form
    del other
    gc.collect()
    assert not folder.exists()
    with pytest.raises(OutpaceError):
        load(str(tmp_path / "mixtral"), device_map={"model.embed_tokens": "disk"})
    assert not list(spare.iterdir())


def test_one_call(tmp_path: Path) -> None:
    target("llama").save_pretrained(tmp_path)
    for device_map in ("auto", laid_out(target("llama"), "cpu", "disk")):
        llm = LLM(str(tmp_path), dtype="float64", device_map=device_map, max_model_len=CONTEXT)
        same((LLM(target("llama"), max_model_len=CONTEXT), llm))


# -- two devices -----------------------------------------------------------------------------------


@pytest.fixture
def two() -> Iterator[tuple[str, str]]:
    with two_devices() as (first, second):
        yield str(first), str(second)


def on_both(name: str, *devices: Any, **changes: Any) -> Any:
    """Returns the model of a family, laid out over devices."""
    model = build(name, **changes)
    return dispatch_model(model, laid_out(model, *devices), main_device=devices[0])


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("qwen3_moe", "mixtral")])
def test_every_kind_of_model_on_two_devices(name: str, two: tuple[str, str]) -> None:
    family, changes = name.partition(",")[0], MODELS[name]
    other = on_both(family, *two, **changes)
    config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    pair = llms(build(family, **changes), other, speculative_config=config)
    same(pair)
    cache = pair[1].engine.target.runner.cache  # type: ignore[attr-defined]
    pair[1].engine.target.admit(PromptInputs([1, 2, 3]))
    pair[1].engine.target.prefill(8, full=True)
    assert [str(layer.keys.device) for layer in cache.layers] == [
        two[at * 2 // len(cache.layers)] for at in range(len(cache.layers))
    ]


# Of weights that are made up torch takes no parts in inference mode, as these three and experts do.
@pytest.mark.parametrize(
    "method",
    representatives(
        [one for one in EVERY_METHOD if one not in ("eagle", "pass", "hidden_transfer")],
        ("auto", "lookahead", "draft_tree", "medusa", "early_exit"),
    ),
)
def test_every_way_to_draft_on_two_devices(method: str, two: tuple[str, str]) -> None:
    config = drafting(method, target("llama")) if method != "none" else {"method": method}
    options: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": CONTEXT}
    head = config.get("model")  # which is moved to where the target is
    other_head = {"model": copy.deepcopy(head)} if isinstance(head, Head) else {}
    one = LLM(target("llama"), speculative_config={**config, **other_head}, **options)
    other = LLM(on_both("llama", *two), speculative_config=config, **options)
    same((one, other), greedy(LENGTH))  # how much is drafted may follow from the kind of device


def test_prefixes_forks_and_trees_on_two_devices(two: tuple[str, str]) -> None:
    pair = llms(
        target("llama"),
        on_both("llama", *two),
        speculative_config={"method": "ngram"},
        enable_prefix_caching=True,
    )
    prompt, found = [(7 * at) % VOCABULARY for at in range(40)], []
    for llm in pair:
        first = written(llm, prompt)
        second = written(llm, [*prompt, *first.output_ids, 5, 6])
        found.append([(text.output_ids, text.cached_tokens) for text in (first, second)])
    assert found[0] == found[1]
    assert found[1][1][1]
    several = SamplingParams(temperature=1.0, n=3, seed=4, max_tokens=12, ignore_eos=True)
    same(pair, several, PROMPTS[:1])


@torch.inference_mode()
def test_a_tree_is_moved_on_each_device(two: tuple[str, str]) -> None:
    found = []
    for model in (target("llama"), on_both("llama", *two)):
        one = HFTarget(model, 2, CONTEXT)
        for prompt in ([3, 1, 4, 1, 5], [9, 2, 6]):
            one.admit(PromptInputs(prompt))
        while one.num_ready_rows < one.num_rows:
            one.prefill(16)
        tokens = torch.tensor([[7, 8, 9], [1, 2, 3]], device=one.device)
        tree = Tree.uniform([0, 0, 1], 2, one.device)
        scores = [one.score(ScoreInputs([[5], [6]], tokens, tree))]
        one.commit([[1, 3], [2]])
        scores.append(
            one.score(ScoreInputs([[1], [2]], tokens, tree, layers=frozenset({0, 1, -1})))
        )
        assert {score.logits.device for score in scores} == {one.device}
        states = scores[1].hidden_states
        found.append([*(s.logits.cpu() for s in scores), *(states[at].cpu() for at in (0, 1, -1))])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-9)


# -- a draft model on a device of its own ----------------------------------------------------------


def moved(model: Any, device: str) -> Any:
    """Returns a model on a device that there is not."""
    from accelerate.utils import set_module_tensor_to_device

    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        set_module_tensor_to_device(model, name, device)
    return model


@pytest.mark.parametrize(
    "config",
    representatives(
        [
            {"method": "draft_model"},
            {"method": "draft_model", "verify": "coupled"},
            {"method": "draft_model", "draft_vocab_size": 40},
            {"method": "draft_tree", "branching": [2, 2, 1]},
            {"method": "draft_tree", "branching": "dynamic"},
            {"method": "staged"},
            {"method": "auto"},
        ],
        lambda config: config.get("branching") == "dynamic" or "draft_vocab_size" in config,
    ),
    ids=str,
)
def test_a_draft_model_on_another_device(config: dict[str, Any], two: tuple[str, str]) -> None:
    here = {"num_speculative_tokens": 4, **config}
    there = moved(build("llama", seed=1), two[1])
    assert there.device == torch.device(two[1])
    pair = (
        LLM(target("llama"), speculative_config={**here, "model": build("llama", seed=1)}),
        LLM(moved(build("llama"), two[0]), speculative_config={**here, "model": there}),
    )
    same(pair, [SAMPLED, greedy(LENGTH), SAMPLED, PENALISED])
    assert sum(out.metrics.num_draft_tokens for out in pair[1].generate(PROMPTS, greedy(LENGTH)))


def test_devices_that_there_are_not(tmp_path: Path) -> None:
    target("llama").save_pretrained(tmp_path)
    for device in ("cuda:1", "cuda"):
        config = {"method": "draft_model", "model": str(tmp_path), "device": device}
        with pytest.raises(ConfigError, match="torch sees no CUDA device"):
            LLM(target("llama"), speculative_config=config)
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        LLM(str(tmp_path), device_map={"model": 0, "lm_head": "cpu"})


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantization": "int8"}, "quantization does not go with device_map"),
        ({"cpu_kernels": "packed"}, "cpu_kernels='packed' does not go with device_map"),
        ({"cpu_kernels": "tune"}, "cpu_kernels='tune' does not go with device_map"),
        ({"compile": True}, "compile=True does not go with device_map"),
        ({"device": "cpu"}, "device='cpu' does not go with device_map"),
        ({"tensor_parallel_size": 2}, "device_map does not go with a model over several processes"),
        ({"batch_invariant": True}, "leave batch_invariant or device_map out"),
        ({"device_map": "autp"}, "device_map must be 'auto', or say for each part"),
        ({"device_map": {}}, "device_map must be 'auto', or say for each part"),
        ({"device_map": {0: "cpu"}}, "device_map must be 'auto', or say for each part"),
        ({"device_map": {"model": "cpu", "lm_head": "dusk"}}, "unknown device 'dusk'"),
        ({"device_map": {"model": "cpu", "lm_head": True}}, "unknown device True"),
        ({"device_map": {"model.norm": "disk"}}, "does not say where these parts of the model lie"),
        (
            {"device_map": {"model": "cpu", "lm_head": "disk", "model.layer.1": "disk"}},
            "names 'model.layer.1', and LlamaForCausalLM has no such part.* 'model.layers.1'",
        ),
        ({"device_map": {"": "disk"}}, "model.embed_tokens of LlamaForCausalLM lies on the disk"),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    target("llama").save_pretrained(tmp_path)
    given = {"device_map": laid_out(target("llama"), "cpu", "disk"), **options}
    with pytest.raises((ConfigError, OutpaceError), match=said):
        LLM(str(tmp_path), max_model_len=CONTEXT, **given)


def test_models_that_are_not_laid_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a model that you loaded lies where you have put it"):
        LLM(target("llama"), device_map="auto")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(200))
    with pytest.raises(OutpaceError, match="GGUF file, whose blocks of weights stay together"):
        LLM(str(tmp_path / "model.gguf"), device_map="auto")


@pytest.mark.parametrize(
    ("family", "said"),
    [("mamba", "keeps recurrent states"), ("bloom", "counts positions by slots")],
)
def test_kinds_of_models(family: str, said: str) -> None:
    model = build(family)
    model.hf_device_map = {"a": "cpu", "b": "disk"}
    with pytest.raises(UnsupportedModel, match=said):
        LLM(model)


def test_accelerate_is_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target("llama").save_pretrained(tmp_path)
    known = find_spec
    monkeypatch.setattr(
        "outpace.targets.hf.loading.device_map.find_spec",
        lambda name: None if name == "accelerate" else known(name),
    )
    with pytest.raises(ConfigError, match=r"pip install 'outpace\[device-map\]'"):
        LLM(str(tmp_path), device_map="auto")


def test_the_flag(tmp_path: Path) -> None:
    flag, file = Flags(EngineArgs, ("device_map",)), tmp_path / "places.json"
    file.write_text('{"model": "cpu"}')
    assert flag.value("device_map", None) is None
    assert flag.value("device_map", "auto") == "auto"
    assert flag.value("device_map", '{"model": 0, "lm_head": "disk"}')["model"] == 0
    assert flag.value("device_map", str(file)) == {"model": "cpu"}
    assert flag.value("device_map", '{"model": "cpu"}\n') == {"model": "cpu"}
    for wrong in ("balanced", "[]", "{}"):
        with pytest.raises(ConfigError, match="--device-map"):
            flag.value("device_map", wrong)


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given = {"a": 1, "b": "cuda:0", "c": "cpu", "d": "disk", "e": torch.device("cuda")}
    where, found = pick_places(given)
    assert where == torch.device("cuda:1")
    assert found == {"a": 1, "b": 0, "c": "cpu", "d": "disk", "e": 0}
    with pytest.raises(ConfigError, match="torch sees 2 CUDA device"):
        pick_places({"a": 2})


# -- on GPUs ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path: Path) -> None:
    one = build("llama")
    one.save_pretrained(tmp_path)
    device_map = laid_out(one, 0, 1)
    draft = {"method": "draft_model", "model": str(tmp_path), "device": "cuda:1"}
    other = LLM(str(tmp_path), dtype="float64", device_map=device_map, speculative_config=draft)
    same((LLM(one), other), greedy(LENGTH))


@pytest.mark.gpu
def test_a_gpu_with_layers_in_memory_and_a_draft_model_on_the_cpu(tmp_path: Path) -> None:
    one = build("llama")
    one.save_pretrained(tmp_path)
    device_map = {**laid_out(one, 0, "cpu"), "lm_head": 0}
    draft = {"method": "draft_model", "model": str(tmp_path), "device": "cpu"}
    other = LLM(str(tmp_path), dtype="float64", device_map=device_map, speculative_config=draft)
    same((LLM(one), other), greedy(LENGTH))
