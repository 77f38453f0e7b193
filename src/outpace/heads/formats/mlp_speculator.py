"""IBM's published speculators (``ibm-fms``): ``config.json`` of the type ``mlp_speculator``.

``n_predict`` is the number of tokens guessed, ``emb_dim`` the target's width, ``inner_dim`` the
speculator's, or 0 where they are the same. The weights are ``speculator.emb``, ``proj``, ``ln`` and
``head``, numbered by depth; tied ones are there once, or several times and alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.heads.base import Head, TargetShape, config_of
from outpace.heads.folder import Folder
from outpace.heads.formats.base import Content, Format
from outpace.heads.formats.llama import knows_all
from outpace.heads.steps.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig

TYPE, PREFIX = "mlp_speculator", "speculator."


class MlpSpeculatorFormat(Format):
    """The target is known by its width and its vocabulary only."""

    name: ClassVar[str] = "mlp_speculator"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        return about.get("model_type") == TYPE

    @classmethod
    def read(cls, folder: Folder, about: Mapping[str, Any]) -> Head:
        found = folder.read_weights("model.safetensors", "pytorch_model.bin")
        with folder.describing(TYPE):
            target = TargetShape(about["emb_dim"], about["vocab_size"], 0)
            given = {
                "depths": about["n_predict"],
                "inner_size": about.get("inner_dim") or target.hidden_size,
                "tied": about.get("tie_weights", False),
                "scaled": about.get("scale_input", False),
                "centred": False,
            }
            config = config_of(MlpSpeculatorConfig, given)
            assert isinstance(config, MlpSpeculatorConfig)
            head = MlpSpeculator(target, config)
            weights = _once(found, head)
        return folder.fill(head, {**weights, "d2t": head.d2t})

    @classmethod
    def write(cls, head: Head) -> Content:
        if not isinstance(head, MlpSpeculator):
            raise cls.refuse(f"holds no {head.kind} heads")
        config = head.config.as_dict()
        if config["centred"]:
            raise cls.refuse(
                "holds speculators without centred states only (--set centred=false when it is "
                "trained)"
            )
        if not knows_all(head):
            raise cls.refuse("holds heads that know all tokens only")
        weights = {PREFIX + name: value for name, value in head.state_dict().items()}
        del weights[PREFIX + "d2t"]
        about = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": TYPE,
            "emb_dim": head.target.hidden_size,
            "inner_dim": config["inner_size"],
            "n_predict": config["depths"],
            "vocab_size": head.target.vocab_size,
            "tie_weights": config["tied"],
            "scale_input": config["scaled"],
            "n_candidates": 5,
            "top_k_tokens_per_head": [5, 4, *[3] * config["depths"]][: config["depths"]],
            "torch_dtype": str(head.dtype).removeprefix("torch."),
        }
        return Content(about, weights)


def _once(weights: Mapping[str, Tensor], head: MlpSpeculator) -> dict[str, Tensor]:
    """The weights by our names, without the copies of tied ones; ``ValueError`` where such copies
    differ."""
    own = {name.removeprefix(PREFIX): value for name, value in weights.items()}
    known = head.state_dict().keys()
    found = {}
    for name, value in own.items():
        part, _, rest = name.partition(".")
        number, _, which = rest.partition(".")
        last = max((int(each.split(".")[1]) for each in known if each.startswith(f"{part}.")),
                   default=-1)  # fmt: skip
        if name in known or not number.isdigit() or int(number) < last or last < 0:
            found[name] = value
        elif not torch.equal(value, own.get(f"{part}.{last}.{which}", value[:0])):
            raise ValueError(f"{name} is not that of the depth before, and weights are tied")
    return found
