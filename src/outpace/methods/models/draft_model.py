"""A smaller causal LM drafts a chain.

Leviathan et al. 2022; Chen et al. 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.core.logits_pipeline import Branches
from outpace.core.proposal import Capabilities, DraftSampling, Needs, Proposal
from outpace.core.request import Request
from outpace.core.transfer import padded, to_device
from outpace.core.trees.tree import Tree
from outpace.draft.base import CATCH_UP_TOKENS, Drafter, Round, Rows, Setup
from outpace.draft.chains import Chains
from outpace.draft.prefix_cache import PrefixCache
from outpace.draft.trees import TreeLevelsCache
from outpace.draft.vocab_mapping import VocabMapping
from outpace.errors import ConfigError, VocabularyMismatch
from outpace.heads.classifiers import ModelSignature
from outpace.methods.models.draft_text import DraftText, SharedTokensText
from outpace.methods.models.frequent_tokens import NUM_FREQUENT, FrequentTokens, marks
from outpace.methods.models.image_feeder import ImageFeeder, ModelRow
from outpace.methods.models.images import ImageAccess
from outpace.methods.models.loading import load_draft_model, trainable_copy
from outpace.methods.models.noisy_copy import noisy_copy
from outpace.methods.models.options import AUTO, SAME, DraftModelOptions
from outpace.methods.models.window import reserve, window_start
from outpace.targets.hf.fixed import WITH_STATES
from outpace.targets.hf.kinds import is_encoder_decoder
from outpace.targets.hf.loading.loaded import LoadedModel, check_same_vocabulary
from outpace.targets.hf.runner import PREFILL_CHUNK, Runner
from outpace.train.teacher import signature_of

GO_BACK = 2
"""Tokens by which a row may go back before the end of what is committed: the last one is fed once
more where its logits are gone."""


COMMITTED_ROOM = 32
"""Tokens that must fit after a text for `DraftModel.probs_of`: more are hardly ever committed at
once."""


class DraftModel(Drafter):
    """Draws each token from the model's distribution under the request's own options, left to
    right.

    Nothing leaves the device while it drafts, unless the rule ends chains early. Its cache is fed
    whatever the row has that it has not seen, so that nothing special happens after a full
    acceptance, a rejection or rounds without it. What a text begins with that earlier ones began
    with, too, it does not read again (`PrefixCache`), unless what is drafted must follow from the
    text alone. Of a text that is longer than its context it reads a window at the end: when the
    context is full, about the second half of it is read anew from position 0. Where the window
    begins follows from the length of the text alone, so that models that are equal see the same of
    a text, however much each of them drafts.
    """

    name: ClassVar[str] = "draft_model"
    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.IID})
    capabilities: Capabilities = Capabilities(supports_early_stop=True, has_probs=True)
    Options: ClassVar[type[Any]] = DraftModelOptions

    def __init__(
        self,
        drafter: LoadedModel,
        runner: Runner,
        vocabulary: int,
        images: ImageAccess,
    ) -> None:
        """vocabulary: tokens of the target. images: what it sees of images."""
        self.loaded: LoadedModel = drafter
        self.runner = runner
        self._own_size = int(drafter.config.vocab_size)
        self._knows_all = self._own_size >= vocabulary
        self._images, self._image_feeder = images, ImageFeeder(images, runner)
        self.needs = Needs(images=images.prepares)
        self._vocab_mapping = VocabMapping.shared(self._own_size, vocabulary, runner.device)
        self._frequent: FrequentTokens | None = None
        self._rows: list[ModelRow] = []
        self._prefixes = PrefixCache(runner, runner.max_length)
        self._reserve = reserve(runner.max_length)
        self.weight_bytes = drafter.nbytes
        self.pass_bytes = runner.pass_bytes
        self._tree_levels = TreeLevelsCache(runner.device)

    @classmethod
    def build(cls, setup: Setup) -> Drafter:
        """Loads ``model``; see `load_drafter`. One with another tokenizer drafts in another way."""
        online = setup.options.online
        drafter = cls._built(setup)
        drafter._prefixes = PrefixCache(
            drafter.runner, drafter.runner.max_length, setup.saved_texts, setup.saved_tokens
        )
        if online is None:
            drafter._restrict_vocabulary(setup.options.draft_vocab_size)
            return drafter
        # Not imported above: few drafters learn.
        from outpace.methods.online.online import Online
        from outpace.methods.online.student import OnlineModel

        return Online(drafter, OnlineModel(drafter.loaded, setup), online)

    @classmethod
    def _built(cls, setup: Setup) -> DraftModel:
        loaded = cls._load(setup)
        wanted, runner = setup.options.vocabulary, cls._runner(setup, loaded)
        if wanted in (AUTO, SAME):
            try:
                check_same_vocabulary(setup.loaded, loaded)
                images = ImageAccess(setup.loaded, loaded, setup.options.images)
                return cls(loaded, runner, setup.loaded.vocabulary, images)
            except VocabularyMismatch:
                if wanted == SAME or None in (setup.loaded.tokenizer, loaded.tokenizer):
                    raise
        if setup.options.online is not None:
            raise ConfigError(
                f"{loaded.name} has another tokenizer than {setup.loaded.name}, so that it cannot "
                "learn from it online: leave online out, or use a model with the target's tokens."
            )
        # Not imported above: what it returns is a draft model itself.
        from outpace.methods.models.cross_tokenizer import cross_tokenizer_drafter

        images = ImageAccess(setup.loaded, loaded, setup.options.images, same_tokens=False)
        return cross_tokenizer_drafter(wanted, setup.loaded, loaded, runner, images)

    def _restrict_vocabulary(self, size: Any) -> None:
        """Lets it score only the usual tokens, where that saves time."""
        shared, own = self._vocab_mapping.is_same, self._own_size
        if size not in (AUTO, None) and not shared:
            raise ConfigError(
                "draft_vocab_size is for a draft model with the target's own tokens: leave it out."
            )
        if size == AUTO:
            size = (
                NUM_FREQUENT
                if self.runner.supports_partial_logits and own >= 2 * NUM_FREQUENT
                else None
            )
        if size is not None and shared and size < own:
            always = [token for token in marks(self.loaded.tokenizer) if token < own]
            self._frequent = FrequentTokens(size, always)
            if self.runner.supports_partial_logits:
                self.pass_bytes -= self.runner.lm_head_bytes * (own - size) // own

    @staticmethod
    def _load(setup: Setup) -> LoadedModel:
        options = setup.options
        if options.online is not None:
            options = replace(options, model=trainable_copy(options.model))
        compiled = setup.capture is not None
        return load_draft_model(options, setup.loaded, setup.cpu_kernels, compiled, setup.progress)

    @staticmethod
    def _runner(setup: Setup, drafter: LoadedModel) -> Runner:
        if is_encoder_decoder(drafter.model) and not is_encoder_decoder(setup.loaded.model):
            raise ConfigError(
                f"{drafter.name} is an encoder-decoder, and a target without an encoder has "
                "nothing for its encoder to read: use a decoder-only drafter."
            )
        fixed = setup.capture(drafter.model) if setup.capture is not None else None
        # On a device of its own: tokens go there in each step, and logits come back.
        kind, device = setup.options.kv_cache_dtype, setup.target.device
        return Runner(drafter.model, setup.rows, drafter.max_length, fixed, kind, device)

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        return {
            "model": LoadedModel(noisy_copy(loaded.model), None, "a noisy copy", same_tokens=True)
        }

    @property
    def nbytes(self) -> int:
        return self.weight_bytes + self.runner.nbytes + self._prefixes.nbytes

    @property
    def compile_seconds(self) -> float:
        return self.runner.compile_seconds

    def begin(self, requests: Sequence[Request]) -> None:
        for request in requests:
            parent = self._parent(request)
            row = self._image_feeder.begin(request, parent, self._new_text)
            self._join(row, parent)
            self._rows.append(row)
            row.keeps = request.source is None and row.prompt is None
            alone = request.forked_from is None and not request.reproducible
            row.can_reuse_prefix = row.keeps and alone

    def _parent(self, request: Request) -> ModelRow | None:
        """The row of the request that a new one is copied from."""
        return next((row for row in self._rows if row.request is request.forked_from), None)

    def _join(self, row: ModelRow, parent: ModelRow | None) -> None:
        """Gives a new row its slots: a copy of its parent's, or none."""
        row.own = row.text.extend(row.request.token_ids)
        read = max(0, len(row.own) - 1)
        source = self._copied(row, parent)
        if source is not None and self.runner.restorable_length(source, read) == read:
            self.runner.fork(source, read)
        else:
            self.runner.admit(1, row.request.source)
            self.runner.keep_checkpoint(self.runner.active - 1, read)

    def _copied(self, row: ModelRow, parent: ModelRow | None) -> int | None:
        """The number of the parent's row, if it has the prompt's beginning and saw the same."""
        if parent is None or parent.begin or (parent.prompt is None) != (row.prompt is None):
            return None
        return self._rows.index(parent)

    def computed_tokens(self, request: Request) -> Mapping[str, int]:
        number = next(n for n, row in enumerate(self._rows) if row.request is request)
        row, known = self._rows[number], self.runner.lengths[number]
        if row.can_reuse_prefix and not window_start(len(row.own), self.runner.max_length):
            known = self._prefixes.known(row.own[:-1])
        return {self.name: known}

    def _new_text(self, goes_on: bool) -> DraftText:
        """A text, or what follows a prompt that was read in another way."""
        return SharedTokensText(self._own_size, self._images.hidden)

    def forget_texts(self) -> None:
        self._prefixes.clear()

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        if interrupted:
            self.runner.reset()
            self._rows = []
            self._prefixes.clear()
            return
        leaving = [n for n, row in enumerate(self._rows) if row.request in requests]
        for number in leaving[max(0, len(leaving) - self._prefixes.limit) :]:
            row = self._rows[number]
            if row.keeps and not row.begin:
                # A later text may go on from all of it.
                cached = row.own[: self.runner.lengths[number]]
                self._prefixes.keep(number, cached, continued=row.request.keep_cached)
        staying = [n for n, row in enumerate(self._rows) if row.request not in requests]
        self.runner.retain(staying)
        self._rows = [self._rows[number] for number in staying]

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        counts = self._draft_counts(rows, budgets)
        if not any(counts):
            return Proposal.empty(len(rows), rows.seeds.device)
        live = [count > 0 for count in counts]
        asked = WITH_STATES if rows.terms.continue_on_hidden is not None else {}
        read, states = self._feed(live, **asked)
        logits = read[:, 0]  # [B, V]
        chains = Chains(rows, counts, self.random_stream)
        while chains.grow(logits, states=None if states is None else states[:, -1]):
            scored, states = self._score(self._readable(chains.tokens[:, -1:]), keep=1, **asked)
            self.runner.advance([int(row) for row in live])
            logits = scored[:, -1]
        return chains.proposal(self._tree_levels.chain(len(rows), chains.length))

    def probs_of(
        self, rows: Rows, tokens: Tensor, wanted: Sequence[bool] | None = None
    ) -> Tensor | None:
        """Returns the distributions before any argmax, ``[B, T, V]``, from one pass that reads what
        was committed since, too; zeros in rows that reach beyond the context."""
        count = tokens.shape[1]
        asked = [count if on else 0 for on in wanted or [True] * len(rows)]
        budgets = self._update(rows, asked)
        # What is known of a row must not depend on how many tokens others have just got.
        most = self.runner.max_length - max(count, COMMITTED_ROOM, self._reserve)
        live = [
            budget > 0 and len(row.own) <= most
            for row, budget in zip(self._rows, budgets, strict=False)
        ]
        if not any(live):
            return None
        # After a token that it does not have its distributions mean nothing.
        fed = tokens[:, :-1].clamp(max=self._own_size - 1)
        listed = zip(fed.tolist(), live, strict=True)
        logits, _ = self._feed(live, [row if on else [] for row, on in listed])
        if logits.shape[1] < count:
            return None
        steps = torch.arange(count, device=tokens.device)
        before = (steps[:, None] > steps).expand(len(rows), -1, -1)
        branches = Branches(tokens[:, None].expand(-1, count, -1), before)
        probs = rows.pipeline.softmax_probs(logits, branches, rows.history_before())
        dead = to_device([not on for on in live], probs.device).bool()
        return probs.masked_fill(dead[:, None, None], 0.0)

    def observe(self, round: Round) -> None:
        # What is cached of a draft stays as far as it was accepted. The last token of a chain was
        # never fed, and of trees nothing counts as cached.
        self._update(round.rows)
        lengths = self.runner.lengths
        for number, accepted in enumerate(round.verdict.nodes):
            row = self._rows[number]
            lengths[number] = self.runner.restorable_length(
                number, len(row.own) - row.begin + accepted
            )
        self.runner.drop_checkpoints(GO_BACK)

    def model_signature(self) -> ModelSignature | None:
        return signature_of(self.loaded)

    def _next_logits(self, fed: Tensor, tree: Tree, parents: Tensor) -> Tensor:
        """As `draft.trees.NextLogits`, for what drafts trees."""
        return self._score(self._readable(fed), parents.shape[-1], tree=tree)[0]

    def _readable(self, tokens: Tensor) -> Tensor:
        """Drafted tokens as the model can be fed them. One that it does not have is only drawn
        where the options leave none of its own: whatever follows it does not matter."""
        return tokens if self._knows_all else tokens.clamp(max=self._own_size - 1)

    def _draft_counts(self, rows: Rows, budgets: Sequence[int]) -> list[int]:
        """How many tokens each row drafts: as many as its budget, but for a small context."""
        counts = [min(budget, self._reserve) for budget in self._update(rows, budgets)]
        self._make_all_room(counts)
        return counts

    def _update(self, rows: Rows, budgets: Sequence[int] = ()) -> list[int]:
        """Reads what each row has committed since, in own tokens; returns the budgets, but 0 where
        nothing can be drafted."""
        for number, row in enumerate(self._rows[: len(rows)]):
            row.own = row.text.extend(rows.since(number, row.text.read))
        return [
            budget if row.own and not row.text.unfinished else 0
            for row, budget in zip(self._rows, budgets, strict=False)
        ]

    def _make_all_room(self, counts: Sequence[int]) -> None:
        """`_make_room` in each row that drafts something."""
        for number, count in enumerate(counts):
            if count:
                self._make_room(number, len(self._rows[number].own))

    def _make_room(self, number: int, length: int) -> None:
        """Moves the window of a row, if its context is too short for a text of this length and a
        draft after it. Positions count from the window's beginning. A prompt with images has no
        windows: from then on it is read without them."""
        row, begin = self._rows[number], window_start(length, self.runner.max_length)
        if begin and self._image_feeder.close(number, row):
            row.own = row.text.extend([])
            self._make_room(number, len(row.own))
        elif begin != row.begin:
            row.begin = begin
            self.runner.lengths[number] = 0

    def _unread(self, number: int) -> list[int]:
        """The tokens that a row has and the cache has not. What is cached of a draft that came to
        nothing is forgotten here; the last token is fed again, if need be, for its logits."""
        row, lengths = self._rows[number], self.runner.lengths
        self._borrow(number, row.own)
        lengths[number] = self.runner.restorable_length(
            number, max(0, len(row.own) - row.begin - 1)
        )
        return row.own[row.begin + lengths[number] :]

    def _borrow(self, number: int, own: list[int]) -> int:
        """Lets a row that has read nothing of its text ``own`` begin with what is kept of that;
        returns how many tokens these are."""
        row = self._rows[number]
        if not row.can_reuse_prefix or row.begin or self.runner.lengths[number]:
            return 0
        row.can_reuse_prefix = False
        return self._prefixes.restore(number, own[:-1])

    def _unseen(self, number: int) -> list[int]:
        """`_unread`, when what the row is shown of images has been read."""
        row, unread = self._rows[number], self._unread(number)
        if row.prompt is None:
            return unread
        if not self._image_feeder.look(number, row):
            row.own = row.text.extend([])
        return self._unread(number)

    def _catch_up(self, live: Sequence[bool]) -> Tensor:
        """Feeds what each live row has committed since; returns the logits after it, ``[B, V]``."""
        return self._feed(live)[0][:, 0]

    def _feed(
        self, live: Sequence[bool], guesses: Sequence[Sequence[int]] = (), **asked: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Feeds what each live row has committed since, and guesses after it; returns the logits
        ``[B, 1 + L, V]`` after the text and after each of up to L guessed tokens, and the last
        hidden states ``[B, 1 + L, H]`` there. Guesses are fed, and do not count as cached. asked:
        further arguments of the model, `WITH_STATES` if there are to be states."""
        guesses = guesses or [[] for _ in live]
        pending = [self._unseen(row) if drafting else [] for row, drafting in enumerate(live)]
        alike = len({len(unseen) for unseen in pending}) == 1
        most = PREFILL_CHUNK if alike else CATCH_UP_TOKENS
        for row, unseen in enumerate(pending):
            if len(unseen) > most:
                left = (len(unseen) - 1) % PREFILL_CHUNK + 1 if alike else 1
                self.runner.prefill(row, [unseen[:-left]])
                pending[row] = unseen[-left:]
        more = max(map(len, guesses))
        fed = [[*unseen, *guess] for unseen, guess in zip(pending, guesses, strict=True)]
        width = max(map(len, pending)) + more
        device = self.runner.device
        # Where all rows end together, only their last logits are needed.
        keep = 1 + more if alike else width
        tokens = padded(fed, device, width)
        if self._frequent is not None:
            self._frequent.start_round([row.own for row in self._rows[: len(live)]], live)
        logits, states = self._score(tokens, keep, **asked)
        self.runner.advance([len(unseen) for unseen in pending])
        if alike:
            return logits, None if states is None else states[:, -keep:]
        last = to_device([max(0, len(unseen) - 1) for unseen in pending], device)
        row_index = torch.arange(len(pending), device=device)[:, None]
        columns = last[:, None] + torch.arange(1 + more, device=device)
        at = row_index, columns
        return logits[at], None if states is None else states[at]

    def _score(self, tokens: Tensor, keep: int, **options: Any) -> tuple[Tensor, Tensor | None]:
        """One pass: the logits ``[B, keep, V]`` over the target's tokens, and the last hidden
        states ``[B, T, H]`` if they were asked for. options: as for `Runner.forward`."""
        if self._frequent is None:
            output = self.runner.forward(tokens, keep=keep, **options)
            return self._vocab_mapping.to_target_logits(output.logits), _last(output)
        if self.runner.supports_partial_logits and self._frequent.needed is not None:
            options["subset"] = self._frequent.needed
        output = self.runner.forward(tokens, keep=keep, **options)
        return self._vocab_mapping.to_target_logits(self._frequent.only(output.logits)), _last(
            output
        )


def _last(output: Any) -> Tensor | None:
    """The last hidden states ``[B, T, H]`` of a pass, if they were asked for."""
    return output.hidden_states[-1] if output.hidden_states else None
