"""From the state behind a model's last layer to its logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import UnsupportedModel
from outpace.targets.hf.logits import LogitScaling, output_rows
from outpace.targets.hf.partial.riding import frozen

PROBED = 4
"""Tokens on which the two ways to logits are compared."""
TOLERANCE = 0.02
"""By how much of their spread the logits of the two ways may differ: 16-bit weights round."""


class Readout:
    """Makes a model's logits piece by piece: over a large vocabulary those of a whole batch take
    more memory than its weights."""

    def __init__(self, model: nn.Module, config: Any, name: str) -> None:
        """config: the text model's. Raises ``UnsupportedModel`` where the logits follow from the
        last state in a way that is not known here."""
        self._model = model
        self._head = model.get_output_embeddings()  # type: ignore[operator]
        if self._head is None:
            raise UnsupportedModel(f"{name} has no output head to learn from.")
        self._scaling = LogitScaling.of(config)
        self._check(model, int(config.vocab_size), name)

    def __call__(self, states: Tensor) -> Tensor:
        """Returns the logits ``[..., V]`` of last states ``[..., H]``."""
        return self._scaling(self._head(states))

    def with_gradients(self, states: Tensor) -> Tensor:
        """Returns the same. Gradients go through it, and leave none behind on the weights."""
        with frozen(self._head):
            return self(states)

    def bounded(self, logits: Tensor) -> Tensor:
        """Returns scaled logits, of any tokens, with the soft bound of the model's."""
        return self._scaling.bounded(logits)

    def rows(self, tokens: Tensor) -> Tensor | None:
        """Returns what a head that has a copy of some rows of the output matrix begins with
        (`output_rows`)."""
        return output_rows(self._model, tokens)

    @property
    def learns(self) -> list[nn.Parameter]:
        """The weights that it uses and that learn."""
        return [weight for weight in self._head.parameters() if weight.requires_grad]

    @torch.no_grad()
    def _check(self, model: nn.Module, vocabulary: int, name: str) -> None:
        device = next(model.parameters()).device
        tokens = torch.arange(PROBED, device=device)[None] % vocabulary
        output = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        own, theirs = self(output.hidden_states[-1]), output.logits
        if float((own - theirs).abs().max()) > TOLERANCE * float(theirs.float().std()):
            raise UnsupportedModel(
                f"the logits of {name} do not follow from its last hidden state as those of other "
                "models do, so that nothing can learn from them: use a drafter that needs no "
                "training."
            )
