"""Writes a checkpoint as a pair of folders that Transformers loads."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import tokenizer as vocabulary
import torch
from network import DRAFTER, EPSILON, TARGET, THETA, Network, Shape, grow
from tokenizer import END, END_OF_TEXT, PAD, POSITIONS, VOCABULARY, Tokenizer
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

NOTICE = Path(__file__).with_name("NOTICE.txt")
TOLERANCE = 1e-4


def config(shape: Shape, layers: int, tokenizer: Tokenizer) -> LlamaConfig:
    """The Llama configuration of a network."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        head_dim=shape.width,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=EPSILON,
        rope_theta=THETA,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        pad_token_id=tokenizer.token_to_id(PAD),
    )


def weights(network: Network) -> dict[str, Tensor]:
    """The stacked weights under Llama's names."""
    shape = network.shape
    sizes = [shape.heads * shape.width, *[shape.groups * shape.width] * 2]
    named = {"model.embed_tokens.weight": network.embedding, "model.norm.weight": network.final}
    named["lm_head.weight"] = network.embedding
    for layer in range(network.layers):
        at = f"model.layers.{layer}."
        for name, part in zip("qkv", network.qkv[layer].split(sizes), strict=True):
            named[f"{at}self_attn.{name}_proj.weight"] = part
        named[at + "self_attn.o_proj.weight"] = network.out[layer]
        named[at + "mlp.gate_proj.weight"] = network.gate_up[layer, 0]
        named[at + "mlp.up_proj.weight"] = network.gate_up[layer, 1]
        named[at + "mlp.down_proj.weight"] = network.down[layer]
        named[at + "input_layernorm.weight"] = network.before[layer]
        named[at + "post_attention_layernorm.weight"] = network.after[layer]
    return {name: value.detach().cpu().clone() for name, value in named.items()}


def convert(network: Network, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """The same network as Transformers' class, its logits checked."""
    model = LlamaForCausalLM(config(network.shape, network.layers, tokenizer)).eval()
    model.load_state_dict(weights(network))
    tokens = torch.arange(2 * 96).view(2, 96) * 37 % VOCABULARY
    with torch.no_grad():
        mine = network(tokens.to(network.embedding.device)) @ network.embedding.T
        apart = (model(tokens).logits - mine.cpu()).abs().max().item()
    if apart > TOLERANCE:
        raise ValueError(f"logits differ by {apart:.1e} from the Llama in Transformers")
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=[tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END)],
        pad_token_id=model.config.pad_token_id,
        do_sample=False,
        max_new_tokens=128,
    )
    return model


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """The tokenizer's files, with the chat template inside the configuration."""
    vocabulary.wrap(tokenizer).save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    # The name that every version of Transformers knows; the newest writes another.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n")


def save(network: Network, shape: Shape, tokenizer: Tokenizer, folder: Path) -> None:
    """One model's folder, complete when it appears."""
    whole = network if network.layers == shape.layers else grow(network, shape.layers)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        convert(whole, tokenizer).to(torch.bfloat16).save_pretrained(scratch)
        save_tokenizer(tokenizer, Path(scratch))
        shutil.copy(NOTICE, scratch)
        for path in Path(scratch).iterdir():
            path.chmod(0o644)
            path.replace(folder / path.name)


def save_pair(target: Network, drafter: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """`folder/target` and `folder/drafter`."""
    save(target, TARGET, tokenizer, folder / "target")
    save(drafter, DRAFTER, tokenizer, folder / "drafter")


def load_pair(checkpoint: Path) -> tuple[Network, Network]:
    """Both networks of a checkpoint, on the CPU."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    target = Network(TARGET, state["target"]["qkv"].shape[0])
    drafter = Network(DRAFTER, DRAFTER.layers)
    target.load_state_dict(state["target"])
    drafter.load_state_dict(state["drafter"])
    return target, drafter


def load_exported(folder: Path, shape: Shape) -> Network:
    """A network from the folder of one model that `save` wrote, in float32 on the CPU."""
    named = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    network = Network(shape, shape.layers)

    def stack(*names: str) -> Tensor:
        """The named weights of each layer one below the other, layers first."""
        at = "model.layers.{}.{}.weight"
        return torch.stack(
            [
                torch.cat([named[at.format(layer, name)] for name in names])
                for layer in range(shape.layers)
            ]
        )

    with torch.no_grad():
        network.embedding.copy_(named["model.embed_tokens.weight"])
        network.final.copy_(named["model.norm.weight"])
        network.before.copy_(stack("input_layernorm"))
        network.after.copy_(stack("post_attention_layernorm"))
        network.qkv.copy_(stack(*(f"self_attn.{part}_proj" for part in "qkv")))
        network.out.copy_(stack("self_attn.o_proj"))
        network.gate_up.copy_(stack("mlp.gate_proj", "mlp.up_proj").view_as(network.gate_up))
        network.down.copy_(stack("mlp.down_proj"))
    return network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder, with pair.pt and tokenizer.json")
    parser.add_argument("folder", type=Path, help="where target/ and drafter/ are written")
    options = parser.parse_args()
    tokenizer = vocabulary.load(options.run / "tokenizer.json")
    save_pair(*load_pair(options.run / "pair.pt"), tokenizer, options.folder)


if __name__ == "__main__":
    main()
