"""Published EAGLE-3 heads of every kind: read as their makers' code computes them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.published import SIZE, TARGET, VOCABULARY, eagle3, of_library, put
from heads.reference import Reference
from heads.runs import PROMPTS, Model, decoder, hidden_states, plain_texts, target
from heads.variants import (
    LAYERS,
    MAKERS,
    MASKED,
    READS,
    both,
    drop,
    latent,
    nested,
    say,
)
from outpace import LLM
from outpace.core.proposal import Proposal
from outpace.draft.base import Rows
from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.base import TargetShape
from outpace.heads.checkpoint import check_fits_target, load_head, save_head
from outpace.heads.layers import AttentionContext, KeyValues
from outpace.methods.heads.eagle3 import Eagle3, Eagle3Config, find_layers
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.train.teacher import TeacherBatch
from targets.families import build
from targets.generating import greedy, ids

TEXT = [3, 17, 4, 4, 9, 12, 0, 19, 7]
DRAFT, PARENTS = [4, 7, 11, 3, 12, 19], [0, 1, 1, 2, 0, 4]


def read(folder: Path) -> Eagle3:
    head = load_head(folder)
    assert isinstance(head, Eagle3)
    check_fits_target(head, TARGET, "the head")
    return head.double()


@pytest.mark.parametrize("name", MAKERS)
def test_a_head_computes_what_its_makers_code_does(name: str, tmp_path: Path) -> None:
    """After a text, and after each node of a tree."""
    MAKERS[name](tmp_path)
    head, model = read(tmp_path), Model()
    reference = Reference(tmp_path, model.embeddings, model.output)
    wide = len(head.hidden_layers) * SIZE
    states = torch.randn(len(TEXT) - 1, wide, dtype=torch.float64)
    expected = reference.drafted(TEXT, states, DRAFT, PARENTS)

    attn_context = AttentionContext.causal(head.begin(1), len(states))
    outputs, entries = head.step(
        head.combine_hidden_states(states[None]), torch.tensor([TEXT[1:]]), attn_context, model
    )
    found = [head.logits(outputs[:, -1:], model)[0, 0]]
    outputs, text, ways = [outputs[:, -1]], len(states), [[]]
    for node, (token, parent) in enumerate(zip(DRAFT, PARENTS, strict=True)):
        way = ways[parent]
        visible = torch.tensor([[*[True] * text, *(at in way for at in range(node)), True]])
        position = torch.tensor([[text + len(way)]])
        guide, fed = head.draft_inputs(outputs[parent][:, None], torch.tensor([[token]]))
        output, own = head.step(
            guide, fed, AttentionContext(position, entries, visible[None]), model
        )
        parts = zip(
            *(each.split_layers(head.config.layers) for each in (entries, own)), strict=True
        )
        entries = KeyValues.join_layers([before.then(new) for before, new in parts])
        outputs.append(output[:, 0])
        ways.append([*way, node])
        found.append(head.logits(output, model)[0, 0])
    known = expected[:, head.d2t]
    assert torch.allclose(torch.stack(found), known, rtol=0, atol=1e-10)
    assert torch.isneginf(expected).sum() == len(found) * (VOCABULARY - head.vocabulary)


def test_against_deepspec(tmp_path: Path) -> None:
    """The makers' own code writes the folder, and drafts a chain. Its norms compute in float32."""
    modeling: Any = pytest.importorskip("deepspec.modeling.eagle3.qwen3.modeling")
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=SIZE, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=6, vocab_size=VOCABULARY, rms_norm_eps=1e-6,
        layer_types=["full_attention"], tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    for name, value in {
        "num_target_layers": 12, "target_layer_ids": [1, 3, 5, 8, 10], "ttt_length": 7,
        "step_loss_decay": 0.8, "draft_num_hidden_layers": 1,
    }.items():  # fmt: skip
        setattr(config, name, value)
    torch.manual_seed(0)
    theirs = modeling.Qwen3Eagle3Model(config).double().eval()
    for parameter in theirs.parameters():
        parameter.data = torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path)
    head, model = read(tmp_path), Model()
    assert (head.hidden_layers, head.config.depths) == ((2, 4, 6, 9, 11), 7)
    states = torch.randn(1, len(TEXT) - 1, 5 * SIZE, dtype=torch.float64)
    context = AttentionContext.causal(head.begin(1), states.shape[1])
    outputs, entries = head.step(
        head.combine_hidden_states(states), torch.tensor([TEXT[1:]]), context, model
    )
    output, fed = outputs[:, -1:], states
    for count in range(3):
        text = torch.tensor([[*TEXT[1:], *DRAFT[:count]]])
        with torch.no_grad():
            project = theirs.project_hidden_states(fed) if count == 0 else fed
            mask = torch.full((text.shape[1],) * 2, -1e300, dtype=torch.float64).triu(1)
            said = theirs(hidden_states=project, input_ids=text, attention_mask=mask[None, None])
        assert torch.allclose(
            head.logits(output, model)[0, 0], theirs.compute_logits(said)[0, -1], atol=1e-5
        )
        fed = torch.cat([project, said[:, -1:]], 1)
        token = torch.tensor([[DRAFT[count]]])
        guide, given = head.draft_inputs(output, token)
        place = states.shape[1] + count
        visible = torch.ones(1, 1, place + 1, dtype=torch.bool)
        context = AttentionContext(torch.tensor([[place]]), entries, visible)
        output, own = head.step(guide, given, context, model)
        entries = KeyValues.join_layers([entries.then(own)])


@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_comes_back_bit_by_bit(name: str, tmp_path: Path) -> None:
    """Through our own format, the published one, and the library's."""
    MAKERS[name](tmp_path / "public")
    first = load_head(tmp_path / "public")
    forms = ["outpace", "eagle3", "speculators"]
    if first.config.latent:
        with pytest.raises(ConfigError, match="holds no heads with latent attention"):
            save_head(first, tmp_path / "other", forms.pop())
    for form in forms:
        save_head(first, tmp_path / form, form)
        again = load_head(tmp_path / form)
        assert again.config == first.config or form == "speculators"
        for weight, value in first.state_dict().items():
            assert torch.equal(again.state_dict()[weight], value), (form, weight)
        check_fits_target(again, TARGET, "the head")
    check_fits_target(first, TARGET, "the head")
    assert again.hidden_layers == first.hidden_layers
    if name == "tied":  # the others have the files' own weights
        return
    given, found = (
        {name.removeprefix("model.").replace("midlayer.", "layers.0."): value for name, value in
         load_file(tmp_path / part / "model.safetensors").items() if "efficient" not in name}
        for part in ("public", "eagle3")
    )  # fmt: skip
    assert given.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in given.items())


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("usual layers", READS),
        ("nested", (2, 5, 8)),
        ("DeepSpec", (2, 6, 11)),
        ("outputs of layers", (2, 6, 9)),
        ("outputs of layers, not nested", (2, 6, 9)),
        ("states, not nested", (0, 5, 11)),
        ("two states", (3, 10)),
        ("five states", (2, 4, 6, 8, 11)),
        ("one state as it is", (-1,)),
    ],
)
def test_which_layers_it_reads(name: str, layers: tuple[int, ...], tmp_path: Path) -> None:
    MAKERS[name](tmp_path)
    assert read(tmp_path).hidden_layers == layers


def library(folder: Path, kind: str, **more: Any) -> None:
    """A folder of the library `speculators` for a head with several layers."""
    change = MASKED if kind == "peagle" else say()
    weights = eagle3(folder / "flat", change, layers=2)
    flat = json.loads((folder / "flat" / "config.json").read_text())
    weights, about = of_library("eagle3", weights, flat)
    inside = {"speculators_model_type": kind, LAYERS: [1, 5, 8], **more}
    put(folder, {**about, **inside}, weights, "model.safetensors")


def test_the_librarys_layers_are_states_also_if_the_first_one_is_1(tmp_path: Path) -> None:
    library(tmp_path, "eagle3", norm_before_residual=True)
    head = read(tmp_path)
    assert (head.hidden_layers, head.config.layers, head.config.depths) == ((1, 5, 8), 2, 3)
    assert head.config.norm_before_residual
    save_head(head, tmp_path / "again", "eagle3")
    assert read(tmp_path / "again").hidden_layers == (1, 5, 8)


def test_p_eagle_of_the_library(tmp_path: Path) -> None:
    library(tmp_path, "peagle", mask_token_id=17, architectures=["PEagleSpeculator"])
    head = read(tmp_path)
    assert (head.config.parallel, head.config.mask_token, head.config.depths) == (True, 17, 3)
    save_head(head, tmp_path / "again", "speculators")
    about = json.loads((tmp_path / "again" / "config.json").read_text())
    assert about["speculators_model_type"] == "peagle"
    assert (about["mask_token_id"], about[LAYERS]) == (17, [1, 5, 8])


# -- in a whole run --------------------------------------------------------------------------------


def guessed(layers: str) -> bool:
    """Whether a kind of head leaves its layers open."""
    return layers not in ("nested", "norm before fc, nested", "one state as it is") and not (
        layers.startswith(("outputs", "states", "two", "five"))
    )


IN_CHAINS = (
    "usual layers", "outputs of layers", "NeMo", "norm before fc", "3.1", "yarn", "window",
    "the target's output matrix", "one state as it is", "P-EAGLE", "narrower, 3.1", "two states",
    "three layers, windows", "P-EAGLE, windows",
)  # fmt: skip
IN_TREES = ("usual layers", "3.1", "three layers, windows", "P-EAGLE, windows")


@pytest.mark.parametrize(
    ("name", "branching"),
    [*((name, "auto") for name in IN_CHAINS), *((name, [2, 2, 1]) for name in IN_TREES)],
)
def test_what_is_drafted_in_a_run(name: str, branching: Any, tmp_path: Path) -> None:
    """The tokens that its makers' code would draft, from the states that transformers says; and the
    text is the target's."""
    MAKERS[name](tmp_path)
    model = target()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if guessed(name) else "error")
        llm = decoder(model, tmp_path, branching=branching)
    drafter: Any = llm.engine.drafter
    propose, checked = drafter.propose, 0
    known = len(load_head(tmp_path).d2t)

    def watched(rows: Rows, budgets: Sequence[int]) -> Proposal:
        nonlocal checked
        found: Proposal = propose(rows, budgets)
        for row in range(len(rows)):
            count, text = int(found.counts[row]), rows.since(row, 0)
            if not count:
                continue
            reference = Reference(
                tmp_path, model.get_input_embeddings().weight, model.lm_head.weight
            )
            states = hidden_states(model, text)
            wanted = torch.cat([states[at][:-1] for at in reference.reads(12)], -1)
            tokens = found.tokens[row, :count].tolist()
            parents = found.tree.parents[row, :count].tolist()
            logits = reference.drafted(text, wanted, tokens, parents)
            for node in range(count + 1):
                children = [t for t, above in zip(tokens, parents, strict=True) if above == node]
                best = logits[node].topk(min(known, len(children))).indices.tolist()
                assert children == best, (text, node)
            checked += count
        return found

    drafter.propose = watched
    assert ids(llm.generate(PROMPTS, greedy(8))) == plain_texts()
    assert checked > 20


# -- a head that is always right -------------------------------------------------------------------

DEEP, COUNT = 12, 8
"""Layers and tokens of a target that is made by hand."""
FIRST, ONE, WRONG = COUNT, COUNT + DEEP, COUNT + DEEP + 1
"""In its states: whether each layer was passed; always 1. In the head's: whether it reads others
than those that it was made for."""
WIDE = 32
CYCLE = [3, 6, 1, 0, 7, 2, 4, 5]
"""After which token each follows."""


@cache
def counting() -> Any:
    """A target that goes around a cycle of tokens. Its states show how many layers they have
    passed."""
    model = build(
        "qwen2", vocab_size=COUNT, hidden_size=WIDE, num_hidden_layers=DEEP,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=16,
    )  # fmt: skip
    with torch.inference_mode(False), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
        model.model.embed_tokens.weight[:, :COUNT] = torch.eye(COUNT)
        model.model.embed_tokens.weight[:, ONE] = 1.0
        for at, layer in enumerate(model.model.layers):
            layer.self_attn.v_proj.bias[0] = 1.0
            layer.self_attn.o_proj.weight[FIRST + at, 0] = 1.0
        for token, following in enumerate(CYCLE):
            model.lm_head.weight[following, token] = 20.0
    return model


def right(folder: Path, reads: Sequence[int], size: int = WIDE, **about: Any) -> Path:
    """A head that guesses all that `counting` says if it reads these of its hidden states, and
    token 0 if it reads others."""
    each = bool(about.get("fc_norm"))
    fc = torch.zeros(size, len(reads) * WIDE, dtype=torch.float64)
    squares = [2.0 + at for at in reads]  # the token, the one, and the layers that were passed
    mean = sum(squares) / (len(reads) * WIDE)
    for place, at in enumerate(reads):
        scale = 1.0
        if each or about.get("norm_before_fc"):
            scale = ((squares[place] / WIDE if each else mean) + 1e-12) ** 0.5
        part = fc[:, place * WIDE : (place + 1) * WIDE]
        part[:COUNT, :COUNT] = scale / len(reads) * torch.eye(COUNT)
        part[WRONG if size == WIDE else size - 1, ONE] = 1.0 if at else 0.0
        if at:
            part[WRONG if size == WIDE else size - 1, FIRST + at - 1] = -1.0
        part[WRONG if size == WIDE else size - 1, FIRST + at] = 1.0
    gate, down = torch.zeros(24, size).double(), torch.zeros(size, 24).double()
    gate[:COUNT, :COUNT] = torch.eye(COUNT)
    inner = torch.nn.functional.silu(torch.tensor(size**0.5).double()) * size**0.5
    for token, following in enumerate(CYCLE):
        down[following, token] += 1 / inner
        down[token, token] -= 1 / inner
    head = torch.zeros(COUNT, size, dtype=torch.float64)
    for token, following in enumerate(CYCLE):
        head[following, token] = 20.0
    head[0, WRONG if size == WIDE else size - 1] = 1e4
    half = size // 2
    weights = {
        "fc.weight": fc,
        "midlayer.hidden_norm.weight": torch.ones(size),
        "midlayer.input_layernorm.weight": torch.ones(size),
        "midlayer.post_attention_layernorm.weight": torch.ones(size),
        "midlayer.self_attn.q_proj.weight": torch.zeros(size, 2 * size),
        "midlayer.self_attn.k_proj.weight": torch.zeros(half, 2 * size),
        "midlayer.self_attn.v_proj.weight": torch.zeros(half, 2 * size),
        "midlayer.self_attn.o_proj.weight": torch.zeros(size, size),
        "midlayer.mlp.gate_proj.weight": gate,
        "midlayer.mlp.up_proj.weight": gate.clone(),
        "midlayer.mlp.down_proj.weight": down,
        "norm.weight": torch.full((size,), size**-0.5),
        "lm_head.weight": head,
    }
    if about.get("norm_before_fc"):
        weights["input_norm.weight"] = torch.ones(len(reads) * WIDE)
    for at in range(len(reads) if each else 0):
        weights[f"fc_norm.{at}.weight"] = torch.ones(WIDE)
    if size != WIDE:
        about |= {"target_hidden_size": WIDE}
        weights["embed_tokens.weight"] = torch.zeros(COUNT, size)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": size, "rms_norm_eps": 1e-12,
        "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "hidden_act": "silu", "vocab_size": COUNT,
        "draft_vocab_size": COUNT, **about,
    }  # fmt: skip
    put(folder, config, {name: w.double() for name, w in weights.items()}, "model.safetensors")
    return folder


def accepted(llm: LLM, plain: LLM) -> tuple[int, int]:
    """How many drafted tokens are accepted, and how many were drafted."""
    prompts = [[0, 3, 0, 3], [6], [2, 1, 6, 4]]
    outputs = llm.generate(prompts, greedy(15))
    assert ids(outputs) == ids(plain.generate(prompts, greedy(15)))
    metrics = [output.outputs[0].metrics for output in outputs]
    drafted = sum(each.num_draft_tokens for each in metrics)
    return sum(each.num_accepted_tokens for each in metrics), drafted


@pytest.mark.parametrize(
    ("reads", "about"),
    [
        ((2, 5, 8), {"eagle_config": {LAYERS: [2, 5, 8]}}),
        ((2, 6, 9), {"eagle_config": {LAYERS: [1, 5, 8]}}),
        ((2, 6, 9), {LAYERS: [1, 5, 8]}),
        ((2, 7), {LAYERS: [1, 6]}),
        ((0, 3, 6, 8, 11), {LAYERS: [0, 3, 6, 8, 11]}),
        ((4, 7, 10), {LAYERS: [4, 7, 10], "norm_output": True}),
        ((4, 7, 10), {LAYERS: [4, 7, 10], "norm_before_fc": True}),
        ((4, 7, 10), {LAYERS: [4, 7, 10], "fc_norm": True, "norm_output": True}),
        ((4, 7, 10), {LAYERS: [4, 7, 10], "size": 16}),
    ],
)
def test_a_head_that_is_always_right_is_always_accepted(
    reads: tuple[int, ...], about: dict[str, Any], tmp_path: Path
) -> None:
    llm = decoder(counting(), right(tmp_path, reads, **about))
    assert llm.engine.drafter.needs.hidden_layers == reads
    taken, drafted = accepted(llm, decoder(counting(), None))
    assert taken == drafted > 30


def test_a_head_that_reads_other_layers_shows_that(tmp_path: Path) -> None:
    """So the test above would find a misread list."""
    llm = decoder(counting(), right(tmp_path, (2, 5, 8), **{LAYERS: [3, 6, 9]}))
    taken, drafted = accepted(llm, decoder(counting(), None))
    assert taken < drafted / 4


# -- which layers, where nothing says it -----------------------------------------------------------


class Tokenizer:
    """Says a text of `counting` whatever it is asked for."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        found = [3]
        while len(found) < 40:
            found.append(CYCLE[found[-1]])
        return {"input_ids": found}

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(COUNT)}


@pytest.mark.parametrize("reads", [(2, 6, 9), (3, 7, 10), (1, 5, 8)])
def test_the_neighbours_of_the_usual_layers_are_tried(
    reads: tuple[int, ...], tmp_path: Path
) -> None:
    head = load_head(right(tmp_path, reads))
    assert isinstance(head, Eagle3)
    model = counting()
    loaded = replace(LoadedModel(model, None, "counting"), tokenizer=Tokenizer())
    check_fits_target(head, TargetShape.of(model.config), "the head")
    assert head.names_no_layers
    listed = ", ".join(map(str, reads))
    sentence = rf"the head does not say which layers .* \[{listed}\] are a guess; "
    with pytest.warns(UserWarning, match=sentence + "with them it guesses 39 of 39 tokens right"):
        find_layers(head, loaded, "the head")
    assert head.hidden_layers == reads


def test_a_guess_is_said_to_be_one(tmp_path: Path) -> None:
    folder = right(tmp_path, (2, 6, 9))
    with pytest.warns(UserWarning, match=f"are a guess. Add {LAYERS} to its config.json"):
        llm = decoder(counting(), folder)
    taken, drafted = accepted(llm, decoder(counting(), None))
    assert taken == drafted


# -- training --------------------------------------------------------------------------------------


def test_a_parallel_head_learns_its_masks() -> None:
    """From the second depth on, what it guesses follows from masks and not from its outputs."""
    torch.manual_seed(0)
    head = Eagle3(TARGET, Eagle3Config(depths=3, parallel=True, mask_token=5, heads=2))
    states = torch.randn(2, 9, 3 * SIZE)
    chances = torch.rand(2, 9, 4)
    batch = TeacherBatch(
        torch.randint(VOCABULARY, (2, 9)), states, torch.randint(VOCABULARY, (2, 9, 4)), chances
    )
    model = Model()
    model.embeddings, model.output = model.embeddings.float(), model.output.float()
    head.recipe()(head, model).compute_loss(batch).loss.backward()
    assert head.mask_hidden is not None
    assert head.mask_hidden.grad is not None
    assert float(head.mask_hidden.grad.abs().max()) > 0
    features, tokens = head.draft_inputs(torch.randn(2, 3, SIZE), torch.tensor([[1, 2, 3]] * 2))
    assert torch.equal(tokens, torch.full((2, 3), 5))
    assert torch.equal(features[0, 0], features[1, 2])


# -- what cannot be read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "more", "sentence"),
    [
        (
            say(architectures=["Eagle3MiniMaxM2ForCausalLM"]),
            {},
            "its architecture is .*MiniMaxM2",
        ),
        (both(latent, say(kv_lora_rank=None)), {}, "kv_lora_rank is None"),
        (both(latent, say(v_head_dim="3")), {}, "v_head_dim is '3'"),
        (both(latent, say(qk_nope_head_dim=5)), {}, "damaged, or not those .*q_b_proj"),
        (both(latent, drop("midlayer.self_attn.kv_b_proj.weight")), {}, "not those .*kv_b_proj"),
        (both(latent, say(layer_types=["sliding_attention"], sliding_window=3)), {}, "with one la"),
        (nested(2, 5), {}, r"fc joins 3 of its target's states, and eagle_aux\w+ is \[2, 5\]"),
        (say(), {"states": 2}, "fc joins 2 of its target's states, and it has no eagle_aux"),
        (nested(2, 5, -3), {}, "reads is .*, and not layers"),
        (nested(1, 5, "x"), {}, "does not describe a head of the kind 'eagle3'"),
        (say(eagle_config=5), {}, "does not describe a head of the kind 'eagle3'"),
        (say(num_hidden_layers=3), {"layers": 2}, "num_hidden_layers is 3, and .* 2 layers"),
        (drop("layers.1.mlp.up_proj.weight"), {"layers": 2}, r"stack\.1\.mlp\.up_proj"),
        (say(target_hidden_size=16), {}, "fc joins 1.5 of its target's states"),
        (drop("embed_tokens.weight"), {"size": 12}, "12 wide and its target 8, and it has no emb"),
        (say(norm_before_fc=True, fc_norm=True), {}, "do not go together"),
        (say(norm_before_fc=True), {}, r"input_norm\.weight"),
        (say(norm_output=1), {}, "norm_output is 1"),
        (drop("lm_head.weight"), {}, "knows some tokens only, and has no output matrix"),
        (say(rope_scaling={"type": "dynamic", "factor": 2.0}), {}, "rope_type is 'dynamic'"),
        (say(rope_scaling={"rope_type": "llama3", "factor": 8.0}), {}, "does not describe a head"),
        (say(rope_scaling={"rope_type": "yarn", "factor": "x"}), {}, "does not describe a head"),
        (say(rope_scaling=7), {}, "does not describe a head of the kind 'eagle3'"),
        (say(partial_rotary_factor=0.1), {}, "rope turns 0 of 4"),
        (say(layer_types=["sliding_attention"]), {}, "and no sliding_window is used"),
        (say(layer_types=["chunked_attention"]), {}, "'chunked_attention', and only"),
        (say(layer_types=["full_attention"] * 3), {}, "layer_types are of 3 layers, and it has 1"),
        (say(hidden_act="gelu"), {}, "hidden_act is 'gelu'"),
        (say(logit_scale=0.5), {}, "logit_scale is 0.5"),
        (say(eagle_config={"use_last_layernorm": False}), {}, "use_last_layernorm is False"),
        (both(MASKED, say(mask_token_id=None, pard_token=None)), {}, "none of .*mask_token_id"),
        (both(MASKED, say(mask_token_id=20)), {}, "mask_token is 20 of 20 tokens"),
        (say(tie_word_embeddings=True), {}, ""),
    ],
)
def test_a_head_that_cannot_be_read_is_refused(
    change: Any, more: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    eagle3(tmp_path, change, **more)
    if not sentence:  # a copied entry that nothing follows from
        load_head(tmp_path)
        return
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        load_head(tmp_path)
    assert str(caught.value).count("\n") == 0
