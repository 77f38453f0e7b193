"""Gemma 4's assistants: read as transformers' class saves them, and drafting what it computes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace import LLM, SamplingParams
from outpace.core.proposal import Proposal
from outpace.draft.base import Rows
from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.checkpoint import find_head_kind, load_head, save_head
from outpace.inspection import inspect
from outpace.methods.heads.gemma4_assistant import Gemma4AssistantDrafter
from outpace.targets.hf.loading.loaded import LoadedModel
from representatives import representatives
from targets.families import build
from targets.generating import greedy, ids
from targets.test_vision import LENGTH, prompts
from targets.vision_families import CONTEXT, plain
from targets.vision_families import target as seeing

transformers: Any = pytest.importorskip("transformers")
if not hasattr(transformers, "Gemma4AssistantForCausalLM"):
    pytest.skip("this transformers has no Gemma 4 assistant", allow_module_level=True)

VOCABULARY, WIDE = 32, 24
TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
SIZES = {
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 4,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
PROMPTS = [[3, 4, 7, 11, 5, 6, 9, 1, 2], [12], [19, 3, 0, 0, 5, 9, 2]]
KINDS = ["plain", "ordered"]


@cache
def target(shared: int = 0) -> Any:
    """shared: layers that use keys and values of earlier ones."""
    torch.manual_seed(3)
    # Those that share have embeddings of each layer, too, without which transformers stumbles.
    more = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
    config = transformers.Gemma4TextConfig(
        **{**SIZES, **(more if shared else {})}, hidden_size=WIDE, intermediate_size=32,
        num_hidden_layers=6,
        layer_types=TYPES * 2, num_kv_shared_layers=shared, attention_k_eq_v=False,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Gemma4ForCausalLM(config).double().eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def reference(monkeypatch: pytest.MonkeyPatch, kind: str) -> Any:
    """transformers' class. Its 5.23 cannot build one: no layer computes what the others share."""
    kept: Any = transformers.Gemma4TextConfig.kv_sharing_modes

    def modes(self: Any) -> list[Any]:
        every = self.num_kv_shared_layers == self.num_hidden_layers
        found: list[Any] = ["reuse"] * self.num_hidden_layers if every else kept.fget(self)
        return found

    monkeypatch.setattr(transformers.Gemma4TextConfig, "kv_sharing_modes", property(modes))
    text = transformers.Gemma4TextConfig(
        **SIZES, hidden_size=16, intermediate_size=32, num_hidden_layers=3, layer_types=TYPES,
        num_kv_shared_layers=3,
    )  # fmt: skip
    config = transformers.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=WIDE, use_ordered_embeddings=kind == "ordered",
        num_centroids=8, centroid_intermediate_top_k=3,
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.Gemma4AssistantForCausalLM(config).double().eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCABULARY))
    return model


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"method": "gemma4_assistant", "model": folder, "check": False, **more}


@pytest.mark.parametrize(
    ("how", "shared", "kind"),
    representatives(
        itertools.product(["chain", "tree", "dynamic"], [0, 3], KINDS),
        lambda how, shared, kind: (how == "chain") != (shared == 3 and kind == "ordered"),
    ),
)
def test_what_is_drafted_in_a_run(
    kind: str, shared: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node is what transformers' class says after the same path, given the keys and values of
    the text; and the text is the target's."""
    theirs, model = reference(monkeypatch, kind), target(shared)
    theirs.save_pretrained(tmp_path)
    more: dict[str, Any] = {
        "chain": {"num_speculative_tokens": 3},
        "tree": {"branching": [2, 2, 1], "num_speculative_tokens": 10},
        "dynamic": {"branching": "dynamic", "top_k": 2, "depth": 3, "num_speculative_tokens": 6},
    }[how]
    alone = LLM(model, speculative_config={"method": "none"}, max_num_seqs=3)
    llm = LLM(model, speculative_config=settings(tmp_path, **more), max_num_seqs=3)
    drafter: Any = llm.engine.drafter
    propose, checked = drafter.propose, 0

    def watched(rows: Rows, budgets: Sequence[int]) -> Proposal:
        nonlocal checked
        made: list[Any] = []
        draft_steps = drafter.draft_steps

        def walking(rows: Rows) -> Any:
            made.append(draft_steps(rows))
            return made[-1]

        drafter.draft_steps = walking
        found: Proposal = propose(rows, budgets)
        drafter.draft_steps = draft_steps
        for row in range(len(rows)):
            text, count = rows.since(row, 0), int(found.counts[row])
            if not count:
                continue
            with torch.no_grad():
                output = model.model(
                    torch.tensor([text[:-1]]), return_shared_kv_states=True, use_cache=False
                )
            states = {0: output.last_hidden_state[:, -1:]}
            tokens, under = {0: text[-1]}, {0: list[int]()}
            parents = found.tree.parents[row].tolist()
            entries = dict(output.shared_kv_states) if shared else cached(model, text[:-1])
            logits = {}
            for node in range(count + 1):
                if node:
                    tokens[node], under[node] = int(found.tokens[row, node - 1]), []
                    states[node] = states[-1 - parents[node - 1]]
                    under[parents[node - 1]].append(tokens[node])
                embedded = model.get_input_embeddings()(torch.tensor([[tokens[node]]]))
                with torch.no_grad():
                    said = theirs(
                        inputs_embeds=torch.cat([embedded, states[node]], -1),
                        position_ids=torch.tensor([[len(text) - 1]]), shared_kv_states=entries,
                    )  # fmt: skip
                states[-1 - node], logits[node] = said.last_hidden_state, said.logits[0, 0]
            for node, drafted in under.items():
                best = logits[node].topk(max(1, len(drafted))).indices.tolist()
                assert drafted == best[: len(drafted)]
                checked += len(drafted)
        return found

    drafter.propose = watched

    texts = ids(llm.generate(PROMPTS, greedy(10)))
    assert texts == ids(alone.generate(PROMPTS, greedy(10)))
    assert checked > 30


def cached(model: Any, text: Sequence[int]) -> dict[str, Any]:
    """Keys and values of the last layer of each type."""
    store = transformers.DynamicCache()
    with torch.no_grad():
        model.model(torch.tensor([text]), past_key_values=store)
    found = {}
    for layer, kind in enumerate(model.config.layer_types):
        found[kind] = store.layers[layer].keys, store.layers[layer].values
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, model = reference(monkeypatch, kind), target()
    theirs.save_pretrained(tmp_path)
    assert find_head_kind(tmp_path) == "gemma4_assistant"
    llm = LLM(model, speculative_config=settings(tmp_path, num_speculative_tokens=3))
    drafter: Any = llm.engine.drafter
    draft_steps, checked = drafter.draft_steps, 0

    def walking(rows: Rows) -> Any:
        nonlocal checked
        found, text = draft_steps(rows), rows.since(0, 0)
        memory = found._memory
        said = theirs(
            inputs_embeds=torch.cat(
                [model.get_input_embeddings()(torch.tensor([text[-1:]])), memory], -1
            ),
            position_ids=torch.tensor([[len(text) - 1]]),
            shared_kv_states=cached(model, text[:-1]),
        )
        first = found.first()
        assert torch.allclose(first, said.logits[:, 0], rtol=0, atol=1e-10)
        assert torch.allclose(found._memory, said.last_hidden_state, rtol=0, atol=1e-10)
        checked += 1
        return draft_steps(rows)

    drafter.draft_steps = walking
    with torch.inference_mode():
        llm.generate([PROMPTS[0]], greedy(12))
    assert checked > 2


def test_sampled_texts_are_the_same_alone_and_in_company(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference(monkeypatch, "ordered").save_pretrained(tmp_path)
    config = settings(tmp_path, branching=[2, 1], num_speculative_tokens=4)
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=8)
    llm = LLM(target(), speculative_config=config, max_num_seqs=3)
    together = ids(llm.generate(PROMPTS, params))
    alone = [ids(llm.generate([prompt], params))[0] for prompt in PROMPTS]
    assert together == alone


def test_prompts_with_images() -> None:
    loaded = LoadedModel(seeing("gemma4"), None, "a tiny model")
    config = {"method": "gemma4_assistant", "num_speculative_tokens": 3}
    config |= Gemma4AssistantDrafter.dummy_options(loaded)
    llm = LLM(loaded, speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)
    drafted: list[int] = []
    with llm.engine.observing(lambda trace: drafted.append(trace.proposal.tree.size)):
        found = ids(llm.generate(prompts("gemma4"), greedy(8)))
    assert found == [text[:8] for text in plain("gemma4", LENGTH)]
    assert max(drafted) == 3


def test_what_a_folder_is_and_which_target_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference(monkeypatch, "plain").save_pretrained(tmp_path / "assistant")
    found = inspect(str(tmp_path / "assistant"))
    assert (found.kind, found.facts["format"]) == ("head", "gemma4_assistant")
    head = load_head(tmp_path / "assistant")
    for form in ("outpace", "gemma4_assistant"):
        with pytest.raises(ConfigError, match="kept as it was published"):
            save_head(head, tmp_path / "out", form)
    other = build("llama", vocab_size=VOCABULARY, hidden_size=WIDE, num_attention_heads=4)
    with pytest.raises(ConfigError, match=r"'sliding_attention', which .* does not show"):
        LLM(other, speculative_config=settings(tmp_path / "assistant"))


@pytest.mark.parametrize("fault", ["ordering", "missing", "entry", "truncated"])
def test_a_damaged_folder_is_named(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference(monkeypatch, "ordered").save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights, about = load_file(file), json.loads(config.read_text())
    if fault == "ordering":
        weights["masked_embedding.token_ordering"][:2] = 5
    if fault == "missing":
        del weights["pre_projection.weight"]
    if fault == "entry":
        about["num_centroids"] = 7
    save_file(weights, file)
    config.write_text(json.dumps(about))
    if fault == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"damaged|does not describe"):
        load_head(tmp_path)


def test_keys_and_values_of_eight_bits_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it attends to is what the target attends to."""
    model, texts = target(), []
    reference(monkeypatch, "plain").save_pretrained(tmp_path)
    for config in ({"method": "none"}, settings(tmp_path, num_speculative_tokens=3)):
        llm = LLM(model, speculative_config=config, max_num_seqs=3, kv_cache_dtype="int8")
        outputs = llm.generate(PROMPTS, greedy(12))
        texts.append(ids(outputs))
    assert texts[0] == texts[1]
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0


def test_rotary_frequencies_stay_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 a token far back would stand several radians from its place."""
    reference(monkeypatch, KINDS[0]).save_pretrained(tmp_path)
    head = load_head(tmp_path).to(torch.float32)
    before = {name: value.clone() for name, value in head.named_buffers() if "inv_freq" in name}
    head.to(torch.bfloat16)
    assert before
    assert all(torch.equal(head.get_buffer(name), value) for name, value in before.items())
    assert {each.dtype for each in head.parameters()} == {torch.bfloat16}
