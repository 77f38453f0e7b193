"""A head with a CTC output: frames that are all guessed at once, some of them blank or repeated.

Wen et al. 2024, "Speculative Decoding with CTC-based Draft Model for LLM Inference Acceleration",
arXiv 2412.00061.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.nn import functional

from outpace.core.proposal import DraftSampling, Proposal
from outpace.draft.base import Rows
from outpace.draft.token_trees import TokenTree, deterministic_trees
from outpace.heads.base import Head, HeadConfig, SharedModules, TargetShape
from outpace.heads.layers import RMSNorm, default_num_heads
from outpace.methods.heads.base import HeadOptions
from outpace.methods.heads.steps import PrefixConfig, StateDrafter, StateHead
from outpace.targets.base import Target
from outpace.train.recipe import LossOutput, Recipe
from outpace.train.teacher import TeacherBatch

# -- the network -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CtcConfig(PrefixConfig):
    """What a CTC head is built from."""

    frames: int = 6
    """Guesses that are made at once; the text that they spell is shorter, or as long."""
    inner_size: int = 0
    """Width of the feed-forward part; 0: the target's."""


class Ctc(StateHead):
    """One transformer layer over the frames, each of which starts from the target's state.

    The frames spell a text: repeated tokens count once, and blank frames not at all (Graves et al.
    2006). So the head need not know at which place a token comes in order to guess that it comes.
    The paper's layer attends over the whole text; this one starts from the state that the target
    drew the root from, which has done that, or with ``prefix`` from what a layer over the text
    makes of it.
    """

    kind: ClassVar[str] = "ctc"
    Config: ClassVar[type[HeadConfig]] = CtcConfig
    learns_online: ClassVar[bool] = False

    @classmethod
    def recipe(cls) -> type[Recipe]:
        return CtcRecipe

    def __init__(self, target: TargetShape, config: CtcConfig) -> None:
        super().__init__(target, config)
        if config.frames < config.depths:
            raise ValueError(f"{config.frames} frames do not spell {config.depths} tokens")
        size = target.hidden_size
        self.places = nn.Parameter(torch.empty(config.frames, size))
        self.joined = nn.Linear(2 * size, size, bias=False)
        self.layer = FrameLayer(size, config.inner_size or size)
        self.output = nn.Linear(size, self.vocabulary, bias=False)
        self.blank = nn.Linear(size, 1)
        nn.init.normal_(self.places, std=0.02)

    @property
    def num_parallel_depths(self) -> int:
        return self.config.depths

    @property
    def frames(self) -> int:
        """How many there are, F."""
        return len(self.places)

    def guess(self, states: Tensor, roots: Tensor, shared: SharedModules) -> Tensor:
        """Returns the logits ``[B, W, F, V' + 1]`` of all frames; the last one is the blank's.

        states: ``[B, W, H]``, what the guesses after the roots ``[B, W]`` start from.
        """
        seen = torch.cat([states, shared.embed(roots).to(states.dtype)], -1)
        start = states + self.joined(seen)
        found = self.layer(start[:, :, None] + self.places)  # [B, W, F, H]
        return torch.cat([self.output(found), self.blank(found)], -1)

    @torch.no_grad()
    def init_from_lm_head(self, shared_head: Tensor | None) -> None:
        """Each frame begins as the target's own head on the unchanged state."""
        super().init_from_lm_head(shared_head)
        for weight in (self.joined.weight, self.layer.attention.out_proj.weight):
            nn.init.zeros_(weight)
        nn.init.zeros_(self.layer.down.weight)
        if shared_head is not None:
            self.output.weight.copy_(shared_head)


class FrameLayer(nn.Module):
    """A transformer layer in which the frames of one place see each other."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(size, eps=1e-6)
        self.attention = nn.MultiheadAttention(
            size, default_num_heads(size), bias=False, batch_first=True
        )
        self.norm = RMSNorm(size, eps=1e-6)
        self.up = nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``[B, W, F, H]`` -> the same shape."""
        flat = x.flatten(0, 1)
        seen = self.attention_norm(flat)
        flat = flat + self.attention(seen, seen, seen, need_weights=False)[0]
        found: Tensor = flat + self.down(nn.functional.silu(self.up(self.norm(flat))))
        return found.view_as(x)


# -- what frames spell -----------------------------------------------------------------------------

# The texts that CTC frames spell, and how likely each is: prefix beam search.
#
# Graves and Jaitly 2014, "Towards End-to-End Speech Recognition with Recurrent Neural Networks".


BEAMS = 24
"""Texts that are kept from frame to frame."""
TOP_K = 6
"""The likeliest tokens of a frame that are looked at, unless a user asks for another number."""

Text = tuple[int, ...]


@dataclass(frozen=True)
class Frame:
    """What a frame may be."""

    blank: float
    """How likely it is blank."""
    tokens: Sequence[tuple[int, float]]
    """Its likeliest tokens, and how likely each is."""


def prefix_beam_search(frames: Iterable[Frame]) -> dict[Text, float]:
    """Returns the likeliest texts that frames spell, with the sum over all frames that spell each.

    >>> found = prefix_beam_search([Frame(0.5, [(7, 0.5)]), Frame(0.5, [(7, 0.5)])])
    >>> found[()], found[7,]
    (0.25, 0.75)
    """
    # By text: how likely its frames are so far, the last of them blank, or not.
    beams: dict[Text, tuple[float, float]] = {(): (1.0, 0.0)}
    for frame in frames:
        blank: defaultdict[Text, float] = defaultdict(float)
        spoken: defaultdict[Text, float] = defaultdict(float)
        for text, (after_blank, after_token) in beams.items():
            blank[text] += (after_blank + after_token) * frame.blank
            for token, chance in frame.tokens:
                repeated = bool(text) and text[-1] == token
                if repeated:
                    spoken[text] += after_token * chance
                # A token is spoken twice only where a blank frame stands in between.
                before = after_blank if repeated else after_blank + after_token
                if before:
                    spoken[(*text, token)] += before * chance
        both = {text: (blank[text], spoken[text]) for text in {**blank, **spoken}}
        best = sorted(both, key=lambda text: (-sum(both[text]), text))[:BEAMS]
        beams = {text: both[text] for text in best}
    return {text: sum(parts) for text, parts in beams.items()}


def beginnings(texts: dict[Text, float], count: int) -> dict[Text, float]:
    """Returns the likeliest beginnings of these texts, at most ``count``, each with its chance; the
    likeliest first, so that none comes before its own beginnings.

    >>> beginnings({(5, 7): 0.4, (5, 8): 0.2, (6,): 0.3, (): 0.1}, 2)
    {(5,): 0.6000000000000001, (5, 7): 0.4}
    """
    mass: defaultdict[Text, float] = defaultdict(float, texts)
    for length in range(max(map(len, texts), default=0), 0, -1):
        for text in [each for each in mass if len(each) == length]:
            mass[text[:-1]] += mass[text]
    # A beginning is never less likely than what it begins.
    chosen = sorted((text for text in mass if text), key=lambda text: (-mass[text], text))
    return {text: mass[text] for text in chosen[:count] if mass[text] > 0}


def frames_of(logits: Tensor, tokens: Tensor, top_k: int) -> list[list[Frame]]:
    """Returns the frames of each of B places: one transfer from the device.

    logits: ``[B, F, V' + 1]`` of V' tokens and, last, of a blank. tokens: ``[V']``, the target's
    numbers of these tokens. top_k: how many tokens of each frame are looked at.
    """
    chances = logits.double().softmax(-1)
    best = chances[..., :-1].topk(top_k, -1)
    listed = torch.cat([chances[..., -1:], best.values, tokens[best.indices].double()], -1)
    return [[_frame(frame, top_k) for frame in place] for place in listed.tolist()]


def _frame(listed: Sequence[float], count: int) -> Frame:
    blank, chances, tokens = listed[0], listed[1 : 1 + count], listed[1 + count :]
    return Frame(blank, [(int(token), p) for token, p in zip(tokens, chances, strict=True)])


# -- how it is trained -----------------------------------------------------------------------------


class CtcRecipe(Recipe):
    """The loss of a `Ctc` head by how likely its frames spell the text after each place.

    Its drafts are simulated as trees of ``depths`` nodes: the likeliest beginnings of all that the
    frames spell. A depth is hit where one of them is what the target says, up to that depth.
    """

    beyond_depths: ClassVar[int] = 2  # the text after a root begins one token after it

    def __init__(self, head: Ctc, shared: SharedModules) -> None:
        self._head, self._shared = head, shared

    def compute_loss(self, batch: TeacherBatch) -> LossOutput:
        head, tokens = self._head, batch.tokens
        depths, rows = head.config.depths, len(tokens)
        places = tokens.shape[1] - depths - 1
        states = head.begin_at(batch.hidden_states[:, :places].to(head.dtype))
        logits = head.guess(states, tokens[:, 1 : 1 + places], self._shared).float().flatten(0, 1)
        # [B P, depths]: the text after the roots, and what the target says there.
        text = tokens[:, 2:].unfold(1, depths, 1)[:, :places].flatten(0, 1)
        likeliest = batch.top_tokens[:, 1:-1, 0].unfold(1, depths, 1)[:, :places].flatten(0, 1)
        own, roots = head.target_to_draft()[text], slice(1, 1 + places)
        if batch.learned is None:
            losses = self._losses(logits, own)
        else:
            learned = batch.learned[:, roots].flatten()
            losses = self._losses(logits[learned], own[learned])
        loss = losses.sum() / batch.count(roots)
        if torch.is_grad_enabled():
            return LossOutput(loss, tokens.new_empty(rows, places, 0, dtype=torch.bool))
        return LossOutput(loss, self._hits(logits, likeliest).view(rows, places, depths))

    def _hits(self, logits: Tensor, likeliest: Tensor) -> Tensor:
        """``[N, depths]``; logits: of frames ``[N, F, V' + 1]``; likeliest: what the target says,
        ``[N, depths]``."""
        head = self._head
        frames = frames_of(logits, head.d2t, min(TOP_K, head.vocabulary))
        hits = []
        for place, wanted in zip(frames, likeliest.tolist(), strict=True):
            drafted = beginnings(prefix_beam_search(place), len(wanted))
            hits.append([tuple(wanted[:end]) in drafted for end in range(1, len(wanted) + 1)])
        return torch.tensor(hits, device=logits.device)

    def _losses(self, logits: Tensor, text: Tensor) -> Tensor:
        """``[N]``, of frames ``[N, F, V' + 1]`` and the tokens ``[N, depths]`` that they should
        spell, up to the first that the head does not know."""
        if not len(text):
            return logits.sum((1, 2))  # torch's own loss takes no empty batch
        known = (text >= 0).cumprod(-1).sum(-1)
        frames = torch.full_like(known, logits.shape[1])
        probs = functional.log_softmax(logits, -1).transpose(0, 1)
        losses: Tensor = functional.ctc_loss(
            probs,
            text.clamp_min(0),
            frames,
            known,
            blank=logits.shape[-1] - 1,
            reduction="none",
            zero_infinity=True,  # repeated tokens want more frames than there are
        )
        return losses


# -- how it drafts ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CtcOptions(HeadOptions):
    """What a user may set."""

    top_k: Annotated[int, Ge(1), Le(64)] = TOP_K
    """Tokens of each frame that are looked at."""


class CtcDrafter(StateDrafter):
    """Drafts the likeliest beginnings of what the frames spell, as many as the budget allows.

    How likely a text is is the sum over all frames that spell it. Tokens were selected after that
    was known, so that they are deterministic: several frames collapse to the same text, and a token
    does not follow any distribution of its own.
    """

    name: ClassVar[str] = "ctc"
    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.DETERMINISTIC})
    default_rule: ClassVar[str] = "match"
    Options: ClassVar[type[Any]] = CtcOptions

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        super().__init__(head, target, vocabulary)
        self.head = cast(Ctc, self._head)
        self._top_k = 1

    def apply_options(self, options: CtcOptions) -> None:
        self._top_k = min(options.top_k, len(self._vocab_mapping))

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        live = [budget if self.can_draft(rows, row) else 0 for row, budget in enumerate(budgets)]
        if not any(live):
            return Proposal.empty(len(rows), rows.seeds.device)
        frames = self._frames(rows)
        guesses = [
            _tree(beginnings(prefix_beam_search(frames[row]), budget)) if budget else TokenTree()
            for row, budget in enumerate(live)
        ]
        return deterministic_trees(guesses, rows.seeds.device)

    @torch.inference_mode()
    def _frames(self, rows: Rows) -> list[list[Frame]]:
        """The frames of each row: one transfer from the device."""
        logits = self.head.guess(*self.starts(rows), self._target)[:, 0]  # [B, F, V' + 1]
        known = len(self._vocab_mapping)  # the rest is padding
        logits = torch.cat([logits[..., :-1][..., :known], logits[..., -1:]], -1)
        return frames_of(logits, self.head.d2t, self._top_k)


def _tree(texts: Mapping[Text, float]) -> TokenTree:
    """The tree of these texts. All beginnings of a text come before it."""
    number: dict[Text, int] = {(): 0}
    guess = TokenTree()
    for text, chance in texts.items():
        number[text] = guess.add(text[-1], number[text[:-1]], chance)
    return guess
