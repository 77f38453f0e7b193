"""What cannot be decoded speculatively is refused by name and with the reason, at load."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from devices import on_device
from outpace import LLM
from outpace.errors import ConfigError, UnsupportedModel
from outpace.targets.hf import kinds, position_patches, support, trials
from outpace.targets.hf.kinds import WRONG_BEFORE
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.masks import PassLayout, chunk_of, window_of, with_span
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.slot_layer import SlotLayer
from versions import since

from .families import BASE, BOTH, FAMILIES, WINDOW, build, target
from .generating import greedy, ids

SMALL = {name: value for name, value in BASE.items() if name not in ("num_key_value_heads",)}
CONFIGS: dict[str, tuple[Any, str]] = {
    "mpt": (transformers.MptConfig, "ALiBi"),
    "prophetnet": (transformers.ProphetNetConfig, "several tokens at once"),
    "switch_transformers": (transformers.SwitchTransformersConfig, "experts drop tokens"),
    "deepseek_v4": (transformers.DeepseekV4Config, "compressed_sparse_attention"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_refused_by_name(name: str) -> None:
    config, reason = CONFIGS[name]
    with pytest.raises(UnsupportedModel, match=rf"'{name}'.*{reason}.*: use a"):
        support.check_config(config())


def test_a_hybrid_class_may_have_no_layer_with_a_state() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.BambaConfig(
            **{**SMALL, "num_key_value_heads": 2, "attn_layer_indices": [0, 1]},
            mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_expand=2,
        ),
        dtype=torch.float64,
    ).eval()  # fmt: skip
    assert Runner(model, 1, 64).steps is None
    expected = model.generate(on_device([[5, 6, 7]]), max_new_tokens=12, do_sample=False)
    assert ids(LLM(model).generate([[5, 6, 7]], greedy(12))) == [expected[0, 3:].tolist()]


WITHOUT_HEAD: dict[str, Any] = {
    "LlamaModel": transformers.LlamaModel,
    "LlamaForSequenceClassification": transformers.LlamaForSequenceClassification,
    "LlamaForTokenClassification": transformers.LlamaForTokenClassification,
}


@pytest.mark.parametrize("name", WITHOUT_HEAD)
def test_a_model_that_writes_no_text_is_refused_as_such(name: str) -> None:
    model = WITHOUT_HEAD[name](transformers.LlamaConfig(**BASE))
    with pytest.raises(UnsupportedModel, match=rf"^{name} has no head that writes texts.*: give"):
        LLM(model)


def test_a_module_that_is_no_model_of_transformers_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"^DataParallel is no model of transformers"):
        LLM(torch.nn.DataParallel(build("llama")))


def test_a_model_without_weights_is_refused_as_such() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE))
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM are not in memory"):
        LLM(model)


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention"])
def test_attention_without_a_mask_is_refused_with_the_remedy(kernel: str) -> None:
    model = build("llama")
    model.config._attn_implementation_internal = kernel
    with pytest.raises(UnsupportedModel, match=rf"{kernel}.*attn_implementation='sdpa'"):
        support.check(model)


# -- models that ignore silently what they are given -----------------------------------------------


class Ignores(transformers.LlamaForCausalLM):
    """Drops one argument, as many a model file does."""

    dropped = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop(self.dropped, None)
        return super().forward(*args, **kwargs)


class IgnoresMask(Ignores):
    dropped = "attention_mask"


class IgnoresPositions(Ignores):
    dropped = "position_ids"


class IgnoresCache(Ignores):
    dropped = "past_key_values"


class Shifts(transformers.LlamaForCausalLM):
    """Positions of its own: the number of the column."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        kwargs["position_ids"] = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids=input_ids, **kwargs)


@pytest.mark.parametrize("kind", [IgnoresMask, IgnoresPositions, IgnoresCache, Shifts])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_probe_catches_a_model_that_ignores(kind: type, dtype: torch.dtype) -> None:
    if kind is IgnoresPositions and dtype is torch.bfloat16:
        pytest.skip("in a random model this is as small as rounding may be in a large one")
    model = kind(target("llama").config).to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.dim() > 1 else 1)
    with pytest.raises(UnsupportedModel, match=rf"{kind.__name__} .*cannot be decoded"):
        load(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mixtral"])
def test_the_probe_accepts_narrower_types(family: str, dtype: torch.dtype) -> None:
    trials.probe(build(family).to(dtype))


FAILS: dict[str, tuple[str, str]] = {
    "attention_mask": ("attention_mask", "takes no attention mask"),
    "position_ids": ("position_ids", "takes no position_ids"),
    "past_key_values": ("past_key_values", "does not work with a cache"),
    "input_ids": ("input_ids", "cannot read a text of token ids alone"),
}


@pytest.mark.parametrize("name", FAILS)
def test_a_model_that_fails_is_refused_in_plain_words_and_its_error_is_the_cause(name: str) -> None:
    argument, reason = FAILS[name]

    class Fails(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get(argument) is not None:
                raise RuntimeError("tensor a (4) must match tensor b (8)")
            return super().forward(*args, **kwargs)

    with pytest.raises(UnsupportedModel, match=rf"Fails cannot .*: it {reason}") as refusal:
        load(Fails(target("llama").config))
    assert "tensor a" not in str(refusal.value)
    assert "tensor a" in str(refusal.value.__cause__)


def test_an_ignored_mask_is_named_where_layers_attend_and_keep_a_state() -> None:
    class Fails(transformers.FalconH1ForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("attention_mask", None)
            if kwargs.get("past_key_values") is not None:
                raise RuntimeError("tensor a (4) must match tensor b (8)")
            return super().forward(*args, **kwargs)

    with pytest.raises(UnsupportedModel, match="ignores a mask with a row for each token"):
        load(Fails(target("falcon_h1").config))


def test_positions_that_do_not_start_at_0_are_named() -> None:
    small = {**SMALL, "pad_token_id": 1, "is_decoder": True}
    model = transformers.RobertaForCausalLM(transformers.RobertaConfig(**small)).eval()
    with pytest.raises(UnsupportedModel, match="count the positions of a text from 0"):
        load(model)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_damaged_weights_are_named_as_such(value: float) -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = value
    with pytest.raises(UnsupportedModel, match=r"NaN or infinite logits.*weights are damaged"):
        load(model)


def test_only_the_option_itself_makes_mpt_a_model_with_alibi() -> None:
    """Without it the model is tried out, and transformers' own turns out to know no positions."""
    config = transformers.MptConfig(
        d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=64,
        attn_config={"alibi": False},
    )  # fmt: skip
    support.check_config(config)
    with pytest.raises(UnsupportedModel, match="ignores the position_ids"):
        load(transformers.MptForCausalLM(config).eval())


# -- models that give more logits than they are asked for ------------------------------------------


class GivesAll(Ignores):
    dropped = "logits_to_keep"


def test_the_last_logits_are_read_of_a_model_that_gives_all() -> None:
    model = GivesAll(target("llama").config).double().eval()
    model.load_state_dict(target("llama").state_dict())
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(on_device([[5, 6, 7]]), **settings)[0, 3:].tolist()
    for method in ("none", "ngram"):
        llm = LLM(model, speculative_config={"method": method}, max_num_seqs=2)
        alike = llm.generate([[5, 6, 7], [5, 6, 7]], greedy(12))
        assert ids(alike) == [expected, expected]


def test_the_probe_asks_for_fewer_logits_than_it_feeds_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it would not see: a runner that takes the first of too many logits for the last."""

    def first_columns(self: Runner, tokens: Tensor, keep: int, **options: Any) -> Any:
        output = forward(self, tokens, tokens.shape[1], **options)
        return output._replace(logits=output.logits[:, :keep])

    forward = Runner.forward
    monkeypatch.setattr(Runner, "forward", first_columns)
    with pytest.raises(UnsupportedModel, match="otherwise than the same tokens in a text"):
        trials.probe(target("llama"))


def test_whisper_as_a_language_model_is_decoded() -> None:
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
        encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=48, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, max_target_positions=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForCausalLM(config).double().eval()
    text = [5, 6, 7]
    with torch.inference_mode():
        for _ in range(12):
            text.append(int(model(on_device([text])).logits[0, -1].argmax()))
    assert ids(LLM(model).generate([[5, 6, 7]], greedy(12))) == [text[3:]]


# -- sliding windows in configurations -------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("stray", [{}, {"layer_types": BOTH}])
def test_a_window_that_the_model_does_not_have_changes_nothing(
    family: str, stray: dict[str, Any]
) -> None:
    model = build(family, sliding_window=WINDOW, **stray)
    settings = {"max_new_tokens": 16, "do_sample": False, "use_cache": False, "pad_token_id": 0}
    expected = model.generate(on_device([[5, 6, 7]]), **settings)[0, 3:].tolist()
    assert ids(LLM(model).generate([[5, 6, 7]], greedy(16))) == [expected]


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].windowed])
def test_a_window_as_long_as_the_context_is_none(family: str) -> None:
    model = build(family, sliding_window=64)
    assert window_of(model, longest=65) == 64
    assert window_of(model, longest=64) is None
    expected = model.generate(
        on_device([[5, 6, 7]]), max_new_tokens=60, do_sample=False, pad_token_id=0
    )
    llm = LLM(model, speculative_config={"method": "ngram"}, max_model_len=64)
    assert ids(llm.generate([[5, 6, 7]], greedy(60))) == expected[:, 3:].tolist()


def test_trying_windows_leaves_the_model_as_it_was() -> None:
    model = build("mistral", sliding_window=40)
    with with_span(model, "sliding_window", 2):
        assert model.config.sliding_window == model.model.config.sliding_window == 2
    trials.probe(model)
    assert model.config.sliding_window == model.model.config.sliding_window == 40


class Narrow(transformers.LlamaForCausalLM):
    """A window of 9 tokens at call time, whatever the configuration says by then."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is None:
            attention_mask = torch.ones(len(input_ids[0]), len(input_ids[0])).tril().triu(-8)
            attention_mask = attention_mask[None, None].bool()
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


def test_a_window_that_is_fixed_in_the_code_is_found_by_a_longer_text() -> None:
    config = copy.deepcopy(target("llama").config)
    config.sliding_window = 9
    with pytest.raises(UnsupportedModel, match="otherwise than the same tokens in a text"):
        load(Narrow(config).double().eval())


@pytest.mark.parametrize("family", ["mistral", "gemma3", "phi3"])
def test_the_probe_crosses_a_window_of_any_length(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would not see otherwise: masks without the window."""
    model = build(family, sliding_window=100)
    trials.probe(model)
    monkeypatch.setattr(PassLayout, "within", lambda self, window: self.seen)
    with pytest.raises(UnsupportedModel, match="otherwise than the same tokens in a text"):
        trials.probe(model)


def test_the_probe_picks_fewer_tokens_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would not see otherwise: an attention that ignores what an indexer picks."""
    model = build("deepseek_v32", index_topk=2048)
    trials.probe(model)
    monkeypatch.setattr(SlotLayer, "update_indexer", lambda self, states: states * 0)
    with pytest.raises(UnsupportedModel, match="cannot be decoded speculatively"):
        trials.probe(model)


@pytest.mark.parametrize("family", ["bart", "bloom", "falcon-alibi", "gpt_neo", "llama4"])
def test_a_model_that_is_not_told_positions_is_refused_and_none_is_changed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family, **({"floor_scale": 4} if family == "llama4" else {}))
    before = [{**vars(module)} for module in model.modules()]
    trials.probe(model)
    assert [{**vars(module)} for module in model.modules()] == before
    monkeypatch.setattr(position_patches, "KINDS", ())
    with pytest.raises(UnsupportedModel, match="cannot be decoded speculatively"):
        trials.probe(model)


def test_a_model_that_is_told_positions_cannot_be_compiled() -> None:
    with pytest.raises(ConfigError, match=r"counts positions by slots .* leave compile out"):
        LLM(build("bloom"), compile=True)


@pytest.mark.parametrize("size", [100, 8192])
def test_the_probe_crosses_the_end_of_a_chunk(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama4", attention_chunk_size=size)
    trials.probe(model)
    assert model.config.attention_chunk_size == size
    monkeypatch.setattr(PassLayout, "within_chunk", lambda self, size: self.seen)
    with pytest.raises(UnsupportedModel, match="otherwise than the same tokens in a text"):
        trials.probe(model)


def test_a_chunk_as_long_as_the_context_is_none() -> None:
    model = build("llama4", attention_chunk_size=64)
    assert chunk_of(model, longest=65) == 64
    assert chunk_of(model, longest=64) is None
    assert chunk_of(build("llama", attention_chunk_size=8), longest=64) is None


def test_a_model_whose_code_was_wrong_is_refused_with_the_version_that_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kinds, "INSTALLED", "5.17.0")
    for kind in WRONG_BEFORE:
        with pytest.raises(UnsupportedModel, match=r"5\.17\.0, .* transformers 5\.18 or later\."):
            support.check_type(kind)
    monkeypatch.setattr(kinds, "INSTALLED", "5.18.0")
    for kind in WRONG_BEFORE:
        support.check_type(kind)


@since("5.18", "Doge over several tokens")
def test_a_text_ends_where_attention_begins_to_drop_tokens() -> None:
    config = transformers.DogeConfig(**SMALL, num_key_value_heads=2, keep_window_size=20)
    torch.manual_seed(1)
    model = transformers.DogeForCausalLM(config).double().eval()
    assert LoadedModel(model, None, "doge").max_length == 20
    expected = model.generate(on_device([[5, 6, 7]]), max_new_tokens=17, do_sample=False)
    llm = LLM(model, speculative_config={"method": "ngram"})
    assert ids(llm.generate([[5, 6, 7]], greedy(60))) == expected[:, 3:].tolist()


# -- rotary angles that change with the length of the text -----------------------------------------


def test_longrope_is_decoded_only_as_far_as_its_first_angles_reach() -> None:
    """Its angles switch for the whole batch when the longest row passes the original length."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 24,
    }
    model = build(
        "phi3", rope_parameters=rope, original_max_position_embeddings=24, sliding_window=None
    )
    assert LoadedModel(model, None, "phi3").max_length == 24
    runner = Runner(model, rows=2, max_length=24)
    runner.admit(2)
    runner.prefill(0, [list(range(20)), [1, 2]])
    # The second row's draft is padding for the first, whose columns then reach beyond the end.
    logits = runner.forward(on_device([[20, 0, 0, 0, 0, 0], [3, 4, 5, 6, 7, 8]]), keep=6).logits
    with torch.inference_mode():
        for row, (ids, column) in enumerate([(list(range(21)), 0), ([1, 2, 3, 4, 5, 6, 7, 8], 5)]):
            alone = model(input_ids=on_device([ids]), use_cache=False).logits[0, -1]
            assert torch.allclose(logits[row, column], alone, atol=1e-6)


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "linear", "llama3"])
def test_other_scaled_angles_do_not_change(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = 64
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = build("llama", rope_parameters=rope)
    trials.probe(model)
    assert LoadedModel(model, None, "llama").max_length == 128
