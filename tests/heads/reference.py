"""EAGLE-3, DFlash and DSpark heads computed one entry at a time, from the description of the
published code: what is read from a folder is compared with this."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from heads.variants import LAYERS


class Reference:
    """One text at a time, in float64."""

    def __init__(self, folder: Path, embeddings: Tensor, output: Tensor) -> None:
        """embeddings, output: the target's, ``[V, H]``."""
        about = json.loads((folder / "config.json").read_text())
        self.about = {**about, **about.get("eagle_config", {})}
        self.weights: dict[str, Tensor] = {}
        for name, value in load_file(folder / "model.safetensors").items():
            name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
            self.weights[name] = value.double() if value.is_floating_point() else value
        self.embeddings = self.weights.get("embed_tokens.weight", embeddings)
        tied = self.about.get("tie_word_embeddings")
        self.output = self.weights.get("lm_head.weight", self.embeddings if tied else output)
        self.vocabulary = len(embeddings)
        self.layers = 1 + max(
            int(name.split(".")[1]) for name in self.weights if name.startswith("layers.")
        )
        if "LlamaForCausalLMEagle4" in self.about.get("architectures", []):
            self.about["layer_types"] = ["sliding_attention"]
        self.keys: list[list[Tensor]] = [[] for _ in range(self.layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(self.layers)]
        self.positions: list[int] = []

    def reads(self, layers: int) -> list[int]:
        """Which of the hidden states (`heads.runs.hidden_states`) of a target with these layers."""
        if not self.about.get("use_aux_hidden_state", True):
            return [-1]
        given = self.about.get(LAYERS) or [2, layers // 2, layers - 3]
        return [at + 1 for at in given] if given[0] == 1 else given

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.about["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        found = self.weights[f"{name}.weight"] @ x
        return found + self.weights.get(f"{name}.bias", torch.zeros_like(found))

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        """states: ``[n H]``."""
        if self.about.get("norm_before_fc"):
            states = self.norm("input_norm", states)
        if self.about.get("fc_norm"):
            count = sum(name.startswith("fc_norm.") for name in self.weights)
            parts = enumerate(states.chunk(count))
            states = torch.cat([self.norm(f"fc_norm.{at}", part) for at, part in parts])
        return self.linear("fc", states) if "fc.weight" in self.weights else states

    def entry(
        self, guide: Tensor, token: int, position: int, seen: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Adds an entry that attends to earlier ones and itself; returns what the next entry goes
        on from, and the logits ``[V]`` of the token after it."""
        self.positions.append(position)
        embedded = self.norm("layers.0.input_layernorm", self.embeddings[token])
        normed = self.norm("layers.0.hidden_norm", guide)
        x = normed if self.about.get("norm_before_residual") else guide
        for layer in range(self.layers):
            prefix = f"layers.{layer}"
            read = (
                torch.cat([embedded, normed])
                if layer == 0
                else self.norm(f"{prefix}.input_layernorm", x)
            )
            x = x + self.attended(layer, read, position, seen)
            inner = self.norm(f"{prefix}.post_attention_layernorm", x)
            gate = silu(self.linear(f"{prefix}.mlp.gate_proj", inner))
            up = self.linear(f"{prefix}.mlp.up_proj", inner)
            x = x + self.linear(f"{prefix}.mlp.down_proj", gate * up)
        normed = self.norm("norm", x)
        return (normed if self.about.get("norm_output") else x), self.logits(normed)

    def attended(self, layer: int, read: Tensor, position: int, seen: Sequence[int]) -> Tensor:
        prefix = f"layers.{layer}.self_attn"
        heads, groups = self.about["num_attention_heads"], self.about["num_key_value_heads"]
        if f"{prefix}.kv_b_proj.weight" in self.weights:
            return self.latently(prefix, read, position, seen)
        queries = self.linear(f"{prefix}.q_proj", read).view(heads, -1)
        keys = self.linear(f"{prefix}.k_proj", read).view(groups, -1)
        values = self.linear(f"{prefix}.v_proj", read).view(groups, -1)
        if f"{prefix}.q_norm.weight" in self.weights:
            queries = self.norm(f"{prefix}.q_norm", queries)
            keys = self.norm(f"{prefix}.k_norm", keys)
        queries, keys = self.turned(queries, position), self.turned(keys, position)
        self.keys[layer].append(keys)
        self.values[layer].append(values)
        shown = [*seen, len(self.positions) - 1]
        if self.about.get("layer_types", ["full"] * self.layers)[layer] == "sliding_attention":
            least = position - self.about["sliding_window"]
            shown = [at for at in shown if self.positions[at] > least]
        found = []
        for head in range(heads):
            group = head * groups // heads
            scores = torch.stack([self.keys[layer][at][group] @ queries[head] for at in shown])
            weights = (scores / math.sqrt(len(queries[head]))).softmax(0)
            found.append(
                sum(w * self.values[layer][at][group] for w, at in zip(weights, shown, strict=True))
            )
        return self.linear(f"{prefix}.o_proj", torch.cat(found))

    def latently(self, prefix: str, read: Tensor, position: int, seen: Sequence[int]) -> Tensor:
        """What DeepSeek's attention adds (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
        about, heads = self.about, self.about["num_attention_heads"]
        plain, narrow = about["qk_nope_head_dim"], about["kv_lora_rank"]
        if f"{prefix}.q_a_proj.weight" in self.weights:
            small = self.linear(f"{prefix}.q_a_proj", read)
            queries = self.linear(f"{prefix}.q_b_proj", self.norm(f"{prefix}.q_a_layernorm", small))
        else:
            queries = self.linear(f"{prefix}.q_proj", read)
        queries = queries.view(heads, -1)
        both = self.linear(f"{prefix}.kv_a_proj_with_mqa", read)
        turned = self.turned_by_pairs(both[narrow:], position)
        made = self.norm(f"{prefix}.kv_a_layernorm", both[:narrow])
        parts = self.linear(f"{prefix}.kv_b_proj", made).view(heads, -1)
        keys = torch.cat([parts[:, :plain], turned.expand(heads, -1)], -1)
        ends = self.turned_by_pairs(queries[:, plain:], position)
        queries = torch.cat([queries[:, :plain], ends], -1)
        self.keys[0].append(keys)
        self.values[0].append(parts[:, plain:])
        rope = about.get("rope_scaling") or {}
        scale = len(queries[0]) ** -0.5
        if rope.get("rope_type") == "yarn":
            scale *= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2
        found = []
        for head, query in enumerate(queries):
            shown = [*seen, len(self.positions) - 1]
            scores = torch.stack([self.keys[0][at][head] @ query for at in shown])
            weights = (scores * scale).softmax(0)
            pairs = zip(weights, shown, strict=True)
            found.append(sum(weight * self.values[0][at][head] for weight, at in pairs))
        return self.linear(f"{prefix}.o_proj", torch.cat(found))

    def turned_by_pairs(self, x: Tensor, position: int) -> Tensor:
        """x: ``[..., D]``, of which each two neighbours are turned."""
        frequencies, factor = turns(self.about, x.shape[-1])
        angle = torch.tensor(float(position)) * frequencies
        cos, sin = ((part * factor).double() for part in (angle.cos(), angle.sin()))
        left, right = x[..., ::2], x[..., 1::2]
        return torch.stack([left * cos - right * sin, right * cos + left * sin], -1).flatten(-2)

    def turned(self, x: Tensor, position: int) -> Tensor:
        """x: ``[heads, D]``."""
        count = int(x.shape[-1] * self.about.get("partial_rotary_factor", 1.0))
        x, rest = x[:, :count], x[:, count:]
        frequencies, factor = turns(self.about, count)
        angle = (torch.tensor(float(position)) * frequencies).repeat(2)
        cos, sin = ((part * factor).double() for part in (angle.cos(), angle.sin()))
        left, right = x.chunk(2, -1)
        return torch.cat([x * cos + torch.cat([-right, left], -1) * sin, rest], -1)

    def logits(self, normed: Tensor) -> Tensor:
        return self.spread(self.output @ normed)

    def spread(self, own: Tensor) -> Tensor:
        """Own logits over the target's tokens."""
        if "d2t" not in self.weights:
            return own
        found = torch.full((self.vocabulary,), -math.inf, dtype=torch.float64)
        found[self.weights["d2t"] + torch.arange(len(own))] = own
        return found

    def drafted(
        self, text: Sequence[int], states: Tensor, tokens: Sequence[int], parents: Sequence[int]
    ) -> Tensor:
        """Returns the logits ``[1 + N, V]`` after a text and after each of N drafted tokens, whose
        parents are nodes, 0 the text. states: ``[T - 1, n H]``."""
        for at in range(len(text) - 1):
            onward = self.entry(self.combine_hidden_states(states[at]), text[at + 1], at, range(at))
        last = len(text) - 2
        features, found = [onward[0]], [onward[1]]
        depths, ways = [0], [list(range(last + 1))]
        masked = "mask_hidden" in self.weights
        for token, parent in zip(tokens, parents, strict=True):
            guide, depth, way = features[parent], depths[parent] + 1, ways[parent]
            if masked:
                guide = self.combine_hidden_states(self.weights["mask_hidden"].flatten())
                token = self.about["mask_token_id"]
            onward = self.entry(guide, token, last + depth, way)
            features.append(onward[0])
            found.append(onward[1])
            depths.append(depth)
            ways.append([*way, len(self.positions) - 1])
        return torch.stack(found)


def turns(about: Mapping[str, Any], width: int) -> tuple[Tensor, float]:
    """Returns by how much a position turns each pair of a head's elements, and the factor of
    queries and keys, in float32 as the published code computes it."""
    rope = about.get("rope_parameters") or about.get("rope_scaling") or {}
    base = rope.get("rope_theta") or about["rope_theta"]
    powers = base ** (torch.arange(0, width, 2).float() / width)
    plain = 1.0 / powers
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        return plain / rope["factor"], 1.0
    if kind == "llama3":
        first = rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        waves = 2 * math.pi / plain
        smooth = (first / waves - low) / (high - low)
        between = (1 - smooth) * plain / rope["factor"] + smooth * plain
        slow = torch.where(waves > first / low, plain / rope["factor"], between)
        return torch.where(waves < first / high, plain, slow), 1.0
    if kind == "yarn":
        first = rope["original_max_position_embeddings"]
        ends = [
            width * math.log(first / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (rope["beta_fast"], rope["beta_slow"])
        ]
        low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), width - 1)
        ramp = (torch.arange(width // 2).float() - low) / max(high - low, 0.001)
        kept = 1 - ramp.clamp(0, 1)
        stretched = 1.0 / (rope["factor"] * powers)

        def scale(given: float) -> float:
            return 0.1 * given * math.log(rope["factor"]) + 1.0

        mixed = stretched * (1 - kept) + plain * kept
        return mixed, scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return plain, 1.0


class BlockReference(Reference):
    """A DFlash head, whose entries of the text are made of the target's states alone."""

    def __init__(self, folder: Path, embeddings: Tensor, output: Tensor) -> None:
        super().__init__(folder, embeddings, output)
        self.about |= self.about.get("dflash_config", {})

    def block(self, states: Tensor, root: int, block: int) -> Tensor:
        """Returns the logits ``[block - 1, V]`` of the tokens after a root. states: ``[T, n H]``,
        those of the text before it."""
        text = [self.norm("hidden_norm", self.linear("fc", one)) for one in states]
        tokens = [root, *[self.about["mask_token_id"]] * (block - 1)]
        xs = [self.embeddings[token] for token in tokens]
        places = [*range(len(text)), *(len(text) + at for at in range(block))]
        for layer in range(self.layers):
            normed = [self.norm(f"layers.{layer}.input_layernorm", x) for x in xs]
            read = self.convolved(f"layers.{layer}.attention_conv", 0, normed, normed)
            self.keys[layer], self.values[layer] = [], []
            for position, x in zip(places, [*text, *read], strict=True):
                self.keep(layer, x, position)
            added = []
            for at, x in enumerate(read):
                own = len(text) + at
                least = own - self.window(layer) if self.window(layer) else -1
                last = own if self.causal(layer) else len(places) - 1
                shown = [*range(max(0, least + 1), len(text)), *range(len(text), last + 1)]
                added.append(self.looked(layer, x, own, shown))
            added = self.convolved(f"layers.{layer}.attention_conv", 1, added, normed)
            xs = [x + more for x, more in zip(xs, added, strict=True)]
            normed = [self.norm(f"layers.{layer}.post_attention_layernorm", x) for x in xs]
            added = []
            for inner in self.convolved(f"layers.{layer}.mlp_conv", 0, normed, normed):
                gate = silu(self.linear(f"layers.{layer}.mlp.gate_proj", inner))
                up = self.linear(f"layers.{layer}.mlp.up_proj", inner)
                added.append(self.linear(f"layers.{layer}.mlp.down_proj", gate * up))
            added = self.convolved(f"layers.{layer}.mlp_conv", 1, added, normed)
            xs = [x + more for x, more in zip(xs, added, strict=True)]
        self.outputs = [self.norm("norm", x) for x in xs]
        return torch.stack([self.logits(x) for x in self.outputs[1:]])

    def convolved(
        self, name: str, which: int, xs: list[Tensor], made_of: list[Tensor]
    ) -> list[Tensor]:
        """What DFlash 2 makes of the places of a block; made_of: what its kernels follow from."""
        if f"{name}.base_kernel" not in self.weights:
            return xs
        base, group = self.weights[f"{name}.base_kernel"][which], self.about["conv_group_size"]
        found = []
        for at, source in enumerate(made_of):
            moving = self.linear(f"{name}.kernel_projection", source)
            moving = moving.view(2, len(base), -1)[which].repeat_interleave(group, -1)
            taps = range(min(len(base), at + 1))
            found.append(sum((base[back] + moving[back]) * xs[at - back] for back in taps))
        return found

    def window(self, layer: int) -> int:
        kinds = self.about.get("layer_types") or ["full_attention"] * self.layers
        slides = "sliding_attention" in kinds
        if not slides and not self.about.get("use_swa"):
            return 0
        wide = int(self.about.get("swa_window_size") or self.about["sliding_window"])
        return wide if not slides or kinds[layer] == "sliding_attention" else 0

    def causal(self, layer: int) -> bool:
        said = self.about.get("is_causal", self.about.get("causal"))
        if said is None:
            kinds = self.about.get("layer_types") or []
            return "sliding_attention" in kinds and bool(self.window(layer))
        return bool(said)

    def keep(self, layer: int, x: Tensor, position: int) -> None:
        prefix, groups = f"layers.{layer}.self_attn", self.about["num_key_value_heads"]
        keys = self.linear(f"{prefix}.k_proj", x).view(groups, -1)
        self.keys[layer].append(self.turned(self.norm(f"{prefix}.k_norm", keys), position))
        self.values[layer].append(self.linear(f"{prefix}.v_proj", x).view(groups, -1))

    def looked(self, layer: int, x: Tensor, position: int, shown: Sequence[int]) -> Tensor:
        prefix = f"layers.{layer}.self_attn"
        heads, groups = self.about["num_attention_heads"], self.about["num_key_value_heads"]
        queries = self.linear(f"{prefix}.q_proj", x).view(heads, -1)
        queries = self.turned(self.norm(f"{prefix}.q_norm", queries), position)
        found = []
        for head, query in enumerate(queries):
            group = head * groups // heads
            scores = torch.stack([self.keys[layer][at][group] @ query for at in shown])
            weights = (scores / math.sqrt(len(query))).softmax(0)
            found.append(
                sum(w * self.values[layer][at][group] for w, at in zip(weights, shown, strict=True))
            )
        return self.linear(f"{prefix}.o_proj", torch.cat(found))


class JoinedReference(BlockReference):
    """A DSpark head: each token's logits follow from the one before it, too."""

    def after(self, path: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Returns the logits ``[V]`` of the token after a path in the `block` that was made last,
        the root its first token, and how likely that token is accepted."""
        if self.about.get("projector_type") == "domino":
            return self.after_domino(path), None
        kind, rank = self.about["markov_head_type"], self.about["markov_rank"]
        memory = torch.zeros(rank, dtype=torch.float64)
        head = "markov_head"
        first = 0 if self.about.get("sample_from_anchor", True) else 1
        for token, said in zip(path, self.outputs[first:], strict=False):
            before = embedded = self.weights[f"{head}.markov_w1.weight"][token]
            if kind == "gated":
                joined = torch.cat([said, before])
                before = before * self.linear(f"{head}.gate_proj", joined).sigmoid()
            if kind == "rnn":
                joined = torch.cat([memory, before, said])
                gate, new, out = self.linear(f"{head}.joint_proj", joined).chunk(3)
                memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * new.tanh()
                before = out.tanh()
        own = self.output @ said + self.linear(f"{head}.markov_w2", before)
        sure = torch.cat([said, embedded]) if self.about["confidence_head_with_markov"] else said
        chance = self.linear("confidence_head.proj", sure).sigmoid()
        return self.spread(own), chance

    def after_domino(self, path: Sequence[int]) -> Tensor:
        """The same of Domino: a gated recurrent unit (arXiv 1406.1078) reads the path."""
        memory = torch.zeros(self.about["gru_hidden_dim"], dtype=torch.float64)
        for token in path:
            new = self.weights["prefix_gru.weight_ih_l0"] @ self.embeddings[token]
            old = self.weights["prefix_gru.weight_hh_l0"] @ memory
            (r, z, n), (old_r, old_z, old_n) = new.chunk(3), old.chunk(3)
            reset, update = (r + old_r).sigmoid(), (z + old_z).sigmoid()
            fresh = (n + reset * old_n).tanh()
            memory = (1 - update) * fresh + update * memory
        said = self.outputs[len(path) - bool(self.about["shift_label"])]
        own = self.output @ said
        if len(path) > self.about["pure_draft_prefix_len"]:
            joined = silu(self.linear("embed_proj.0", torch.cat([said, memory])))
            own = own + self.linear("embed_proj.2", joined)
        return self.spread(own)
