"""The target as a teacher: the hidden states of a text, what it would say at each place, and what a
model is recognised by that was trained over its states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.proposal import AuxTokens
from outpace.errors import UnsupportedModel
from outpace.heads.base import TargetShape
from outpace.heads.classifiers import ModelSignature
from outpace.targets.hf.kinds import is_encoder_decoder, scale_of_embeddings
from outpace.targets.hf.loading.loaded import LoadedModel, probe_states
from outpace.targets.hf.logits import LogitScaling, output_rows
from outpace.targets.hf.nextn import last_layer_output, last_norm
from outpace.targets.hf.partial.aux_tokens import AuxForward, frozen
from outpace.targets.hf.plain import forward_mask
from outpace.targets.hf.recurrent.families import from_the_embedding
from outpace.train.state_cache import CachedBlock, HiddenStateCache

TOP = 16
"""Most probable tokens that are kept of each distribution: the rest of it is left out of the
loss."""

AT_ONCE = 256
"""Places whose logits are made at once: over a large vocabulary they take much memory."""


@dataclass(frozen=True, eq=False)
class TeacherBatch:
    """What the target makes of B texts of T tokens."""

    tokens: Tensor  # [B, T]
    hidden_states: Tensor  # [B, T, H], the layers that were asked for side by side
    top_tokens: Tensor  # [B, T, TOP], the likeliest next tokens, the likeliest first
    top_chances: Tensor  # [B, T, TOP]; 0 where nothing is to be learned
    learned: Tensor | None = None
    """``[B, T]`` bool: after which tokens the distribution is to be learned; None: after all."""
    global_loss_mask: Tensor | None = None
    """``learned`` of all texts of a step, where other processes read some; None: of these. Losses
    are means over the places in all of them: each counts alike, whichever process reads it."""

    def of(self, own: Tensor, all_own: Tensor | None = None) -> TeacherBatch:
        """Returns what is to be learned of texts of which some tokens are the target's own,
        ``[B, T]`` bool: the distributions that these were drawn from. A drafter never drafts the
        others. all_own: the same of all texts of a step; None: of these."""
        learned = loss_mask_of(own).to(self.tokens.device)
        mask = None if all_own is None else loss_mask_of(all_own).to(self.tokens.device)
        chances = self.top_chances * learned[..., None]
        return replace(self, top_chances=chances, learned=learned, global_loss_mask=mask)

    def share(self, where: Tensor) -> Tensor | float:
        """Returns the share of some places of all texts at which there is something to learn."""
        mask = self._mask()
        return 1.0 if mask is None else mask[:, where].float().mean().clamp_min(1e-9)

    def count(self, where: slice = slice(None)) -> float:
        """Returns at how many of some places there is something to learn, at least 1. With other
        processes it is the mean over all of them."""
        mask = self._mask()
        if mask is None:
            return float(self.tokens[:, where].numel())
        return max(1.0, int(mask[:, where].sum()) * len(self.tokens) / len(mask))

    def _mask(self) -> Tensor | None:
        return self.learned if self.global_loss_mask is None else self.global_loss_mask


@dataclass(frozen=True, eq=False)
class _Pass:
    """What one pass over B texts of T tokens brings."""

    states: Mapping[int, Tensor]  # by layer, [B, T, H]
    top_tokens: Tensor  # [B, T, TOP]
    top_chances: Tensor  # [B, T, TOP]


def loss_mask_of(own: Tensor) -> Tensor:
    """Returns after which tokens ``[B, T]`` one follows that is the target's own. own: ``[B, T]``
    bool, which ones are; the last one is taken to go on."""
    return torch.cat([own[:, 1:], own[:, -1:]], 1)


class Teacher:
    """Reads blocks of tokens with a target that is never changed."""

    def __init__(
        self,
        loaded: LoadedModel,
        layers: Sequence[int],
        top: int = TOP,
        state_cache: HiddenStateCache | None = None,
    ) -> None:
        """layers: whose states are wanted, numbered as in `Needs.hidden_layers`. top: how many of
        the likeliest tokens a batch holds; 0 for a student that makes whole distributions from the
        states.
        state_cache: where what was read is kept, and looked up before anything is read."""
        model: Any = loaded.model
        if is_encoder_decoder(model):
            raise UnsupportedModel(
                f"{loaded.name} is an encoder-decoder, and heads learn from texts without a "
                "source: use a decoder-only model."
            )
        self._model = model
        # By number as transformers gives them. They lack the output of the last layer as it is,
        # which comes after them here.
        self._count = count = int(loaded.config.num_hidden_layers)
        places = {count: count + 1, **{-1 - back: count - back for back in range(count + 1)}}
        self._layers = tuple(places.get(layer, layer) for layer in layers)
        if count in layers:
            last_norm(model.get_decoder())  # or it is refused now
        self._cache = state_cache
        self._dtype, self._limit = loaded.dtype, top
        self.vocabulary = loaded.vocabulary
        self._name, self._max_length = loaded.name, loaded.max_length
        self._aux_forward: AuxForward | None = None
        self._lm_head = LMHead(model, loaded.config, loaded.name)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        device: torch.device = self._model.device
        return device

    @torch.no_grad()
    def read(self, tokens: Tensor) -> TeacherBatch:
        """Returns the batch of blocks ``[B, T]``, which are read in one pass, as far as they are
        not kept."""
        tokens = tokens.to(self._model.device)
        if self._cache is None:
            found = self._read(tokens)
            states = [found.states[layer] for layer in self._layers]
            empty = found.top_chances.new_empty(*tokens.shape, 0)
            joined = torch.cat(states, -1) if states else empty
            return TeacherBatch(tokens, joined, found.top_tokens, found.top_chances)
        kept = self._looked_up(tokens, self._cache)
        return TeacherBatch(
            tokens,
            torch.stack([each.states for each in kept]).to(tokens.device, self._dtype),
            torch.stack([each.top_tokens for each in kept]).to(tokens.device),
            torch.stack([each.top_chances for each in kept]).to(tokens.device),
        )

    def _looked_up(self, tokens: Tensor, state_cache: HiddenStateCache) -> list[CachedBlock]:
        """What is kept of blocks ``[B, T]``; those of which it is not are read."""
        found = [state_cache.find(block, self._layers, self._limit) for block in tokens]
        missing = [at for at, each in enumerate(found) if each is None]
        if missing:
            new = self._read(tokens[missing])
            for place, at in enumerate(missing):
                states = {layer: value[place] for layer, value in new.states.items()}
                likeliest, chances = new.top_tokens[place], new.top_chances[place]
                found[at] = state_cache.keep(tokens[at], self._layers, states, likeliest, chances)
        return [each for each in found if each is not None]

    def _read(self, tokens: Tensor) -> _Pass:
        # Only the last place's logits: those of all places are made piece by piece below.
        model, mask = self._model, forward_mask(self._model, tokens.shape[1])
        with ExitStack() as stack:
            asked = self._count + 1 in self._layers
            after_last = stack.enter_context(last_layer_output(model)) if asked else []
            output = model(
                input_ids=tokens,
                use_cache=False,
                output_hidden_states=True,
                logits_to_keep=1,
                **mask,
            )
        kind = model.config.get_text_config().model_type
        known = from_the_embedding(
            output.hidden_states, kind, lambda: model.get_input_embeddings()(tokens)
        )
        last = known[-1]
        known = (*known, *after_last)
        states = {layer: known[layer] for layer in self._layers}
        if not self._limit:
            none = last.new_zeros(*tokens.shape, 0)
            return _Pass(states, none.long(), none)
        chances, likeliest = self._top(last.flatten(0, 1))
        shape = (*tokens.shape, -1)
        return _Pass(states, likeliest.view(shape), chances.view(shape))

    def _top(self, last: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of the distributions at states ``[P, H]``, with their
        probabilities."""
        found = []
        for piece in torch.split(last, AT_ONCE):
            logits = self.logits(piece)
            found.append(logits.softmax(-1).topk(min(self._limit, self.vocabulary), -1))
        return torch.cat([each.values for each in found]), torch.cat([e.indices for e in found])

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Returns the logits ``[..., V]`` of last hidden states, for the tokens that the target can
        generate."""
        return self._lm_head(states)[..., : self.vocabulary].float()

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings ``[..., H]`` of tokens ``[...]``."""
        found: Tensor = self._model.get_input_embeddings()(tokens)
        return found

    @property
    def embedding_scale(self) -> float:
        """By what `embed` multiplies the rows of the model's table."""
        return scale_of_embeddings(self._model.get_input_embeddings())

    def compute_logits(self, states: Tensor) -> Tensor:
        """Returns the logits ``[..., V]`` of last hidden states ``[..., H]``. Gradients go through
        it, and leave none behind on the target's weights."""
        return self._lm_head.with_gradients(states.to(self._dtype))

    def apply_soft_cap(self, logits: Tensor) -> Tensor:
        """Returns logits ``[..., V']`` that a head's copy of output rows has made, with the soft
        bound of the target's."""
        return self._lm_head.apply_soft_cap(logits)

    def forward_aux(self, tokens: Tensor, aux_tokens: AuxTokens) -> Tensor:
        """Returns the logits ``[B, R, V]`` of auxiliary tokens in texts ``[B, T]``, as `AuxForward`
        makes them.

        Gradients go through them to what the auxiliary tokens are made from. Raises
        ``UnsupportedModel`` where the target's own code lets none through.
        """
        if self._aux_forward is None:
            self._aux_forward = AuxForward(self._model, self._max_length)
        logits = self._aux_forward(tokens, aux_tokens)
        if torch.is_grad_enabled() and not logits.requires_grad:
            raise UnsupportedModel(
                f"{self._name} computes with code that no gradient goes through, and this head "
                "learns by what it does in the target's passes: train it for the model in another "
                "format, such as safetensors."
            )
        return logits

    def head_rows(self, tokens: Tensor) -> Tensor | None:
        """Returns the output matrix's rows ``[R, H]`` of some tokens, as a head begins with them;
        None where it is not held as one matrix."""
        return output_rows(self._model, tokens)


# -- from the state after the last layer to logits ------------------------------------------------


PROBED = 4
"""Tokens on which the two ways to logits are compared."""
TOLERANCE = 0.02
"""By how much of their spread the logits of the two ways may differ: 16-bit weights round."""


class LMHead:
    """Makes a model's logits piece by piece: over a large vocabulary those of a whole batch take
    more memory than its weights."""

    def __init__(self, model: nn.Module, config: Any, name: str) -> None:
        """config: the text model's. Raises ``UnsupportedModel`` where the logits follow from the
        last state in a way that is not known here."""
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

    def apply_soft_cap(self, logits: Tensor) -> Tensor:
        """Returns scaled logits, of any tokens, with the soft bound of the model's."""
        return self._scaling.apply_soft_cap(logits)

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


# -- which model a head or a classifier belongs to -------------------------------------------------


def signature_of(loaded: LoadedModel) -> ModelSignature:
    """Returns what a model is recognised by; takes one pass over a few tokens."""
    return ModelSignature(TargetShape.of(loaded.config, loaded.name), probe_states(loaded))
