"""The MLP speculator: a small recurrent network over the target's state and the drafted tokens.

Wertheimer et al. 2024, arXiv 2404.19124.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.base import Head, HeadConfig, SharedModules, TargetShape, parse_config
from outpace.heads.checkpoint import Format, HeadCheckpoint
from outpace.heads.folder import HeadFolder
from outpace.methods.heads.published import has_full_vocab
from outpace.methods.heads.steps import StepHead, StepHeadDrafter

# -- the network -----------------------------------------------------------------------------------


EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class MlpSpeculatorConfig(HeadConfig):
    """What an MLP speculator is built from."""

    inner_size: int = 512
    """Width of its state."""
    tied: bool = True
    """Whether all depths share their weights (the first matrix apart: it reads the target's
    state)."""
    centred: bool = True
    """Whether states are normalised about their mean; in published speculators they are not."""
    scaled: bool = False
    """Whether the target's state is normalised first."""


class MlpSpeculator(StepHead):
    """``s_k = GELU(norm(W s_(k-1) + a E[token]))``; the guesses at depth k are ``H s_k``.

    a keeps the shares of state and token in the sum as they are in the paper, at every depth.
    """

    kind: ClassVar[str] = "mlp_speculator"
    Config: ClassVar[type[HeadConfig]] = MlpSpeculatorConfig

    def __init__(self, target: TargetShape, config: MlpSpeculatorConfig) -> None:
        super().__init__(target, config)
        inner, own = config.inner_size, 1 if config.tied else config.depths
        states = min(own + 1, config.depths)  # the first one is wider than the others
        state_share = 0.5 ** (0.5 / config.depths)
        self.token_share = math.sqrt((1 - state_share**2) * inner / 2) / state_share
        self.emb = nn.ModuleList(nn.Embedding(target.vocab_size, inner) for _ in range(own))
        self.proj = nn.ModuleList(
            nn.Linear(inner if k else target.hidden_size, inner, bias=False) for k in range(states)
        )
        norm = nn.LayerNorm if config.centred else ShiftedNorm
        self.ln = nn.ModuleList(norm(inner) for _ in range(own))
        self.scaled = config.scaled
        self.head = nn.ModuleList(nn.Linear(inner, self.vocabulary, bias=False) for _ in range(own))
        for table in self.emb:
            nn.init.normal_(table.weight, std=inner**-0.5)  # type: ignore[arg-type]

    @property
    def num_parallel_depths(self) -> int:
        return len(self.emb)

    def step(
        self, memory: Tensor, tokens: Tensor, depth: int, shared: SharedModules
    ) -> tuple[Tensor, Tensor]:
        at = min(depth, len(self.emb)) - 1
        if depth == 1 and self.scaled:
            memory = nn.functional.rms_norm(memory, memory.shape[-1:], eps=EPS) / math.sqrt(2)
        state = self.proj[min(depth, len(self.proj)) - 1](memory)
        state = self.ln[at](state + self.token_share * self.emb[at](tokens))
        state = nn.functional.gelu(state)
        return self.head[at](state), state


class ShiftedNorm(nn.Module):
    """Normalises by the mean square, and then scales and shifts."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """x: ``[..., size]`` -> the same shape."""
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, EPS) + self.bias


# -- how it drafts ---------------------------------------------------------------------------------


class MlpSpeculatorDrafter(StepHeadDrafter):
    """Drafts with a `MlpSpeculator` head."""

    name: ClassVar[str] = "mlp_speculator"


# -- its published format --------------------------------------------------------------------------

# IBM's published speculators (``ibm-fms``): ``config.json`` of the type ``mlp_speculator``.
#
# ``n_predict`` is the number of tokens guessed, ``emb_dim`` the target's width, ``inner_dim`` the
# speculator's, or 0 where they are the same. The weights are ``speculator.emb``, ``proj``, ``ln``
# and ``head``, numbered by depth; tied ones are there once, or several times and alike.


TYPE, PREFIX = "mlp_speculator", "speculator."


class MlpSpeculatorFormat(Format):
    """The target is known by its width and its vocabulary only."""

    name: ClassVar[str] = "mlp_speculator"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        return about.get("model_type") == TYPE

    @classmethod
    def read(cls, folder: HeadFolder, about: Mapping[str, Any]) -> Head:
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
            config = parse_config(MlpSpeculatorConfig, given)
            head = MlpSpeculator(target, config)
            weights = _once(found, head)
        return folder.fill(head, {**weights, "d2t": head.d2t})

    @classmethod
    def write(cls, head: Head) -> HeadCheckpoint:
        if not isinstance(head, MlpSpeculator):
            raise cls.refuse(f"holds no {head.kind} heads")
        config = asdict(head.config)
        if config["centred"]:
            raise cls.refuse(
                "holds speculators without centred states only (--set centred=false when it is "
                "trained)"
            )
        if not has_full_vocab(head):
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
        return HeadCheckpoint(about, weights)


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
