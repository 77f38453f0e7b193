"""A training run: steps, figures on held-out text, checkpoints; it goes on where it was stopped."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from outpace.core.progress import silent
from outpace.errors import ConfigError
from outpace.files import remove_parts, replacing
from outpace.heads.folder import CONFIG, WEIGHTS, saving
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.train.checkpoint import LOG, STATE, adapter_of, check_same, digest, reading
from outpace.train.distributed import Ranks
from outpace.train.draft_model import remove_unfinished
from outpace.train.metrics import Progress
from outpace.train.quantization import REROUND_EVERY, QuantizedWeights
from outpace.train.recipe import LossOutput
from outpace.train.settings import TrainSettings
from outpace.train.state_cache import HiddenStateCache
from outpace.train.students import (
    check_block,
    check_depths,
    student_for,
)
from outpace.train.teacher import Teacher, loss_mask_of, signature_of

Report = Callable[[Progress], None]


class TrainingRun:
    """Trains one drafter for one target."""

    def __init__(
        self,
        loaded: LoadedModel,
        tokens: Tensor,
        settings: TrainSettings,
        out: Path,
        *,
        own: Tensor | None = None,
        state_cache: HiddenStateCache | None = None,
        ranks: Ranks | None = None,
        preparing: Callable[[str, float], None] = silent,
    ) -> None:
        """tokens: blocks of text ``[N, block]``; out: the folder that the drafter is written to;
        own: ``[N, block]`` bool, which tokens the target has written itself, if that is known: a
        drafter learns to foresee these only; state_cache: where what the target makes of the text
        is kept, if it is; ranks: the processes that make each step together, where there are
        several; preparing: called with what is done before the first step, and the share of it
        that is done."""
        self._ranks = ranks or Ranks.alone()
        self._ranks.check(settings.batch)
        check_block(loaded, settings)
        self.settings, self.out = settings, out
        torch.manual_seed(settings.seed)
        begun = (out / STATE).exists()
        self._student = student_for(loaded, tokens, settings, out, preparing, own, begun)
        self._teacher = Teacher(loaded, self._student.hidden_layers, self._student.top, state_cache)
        self._recipe = self._student.recipe(self._teacher)
        self.network = self._student.network
        """What learns."""
        self._weights = QuantizedWeights(self.network, settings.quantization)
        check_depths(settings, self._student.depths, type(self._recipe))
        own = own if self._student.drafts else None
        self._text, self._held_blocks = tokens, held_out(len(tokens), settings)
        if own is not None:
            self._held_blocks = max(self._held_blocks, self._first_foreseen(own))
        self._optimizer = torch.optim.AdamW(
            self.network.parameters(),
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,  # on a CPU a single pass over the weights, where the usual code takes ten
        )
        self.step, self._spent = 0, 0.0
        self.written: int | None = None
        """The step of the last report, from which the run goes on; None before the first one."""
        self.best = 0.0
        """The highest score of all reports, which is that of the weights that are kept."""
        self.kept: Progress | None = None
        """Where the run was with these weights; None before the first report."""
        self.stale = 0
        """Reports since the score rose, also in earlier sittings."""
        self._target, self._adapter = signature_of(loaded), adapter_of(loaded)
        self._resume()
        self._held, self._tokens = tokens.tensor_split([self._held_blocks])
        self._held_own: Tensor | None = None
        self._own: Tensor | None = None
        if own is not None:
            self._held_own, self._own = own.tensor_split([self._held_blocks])
        self._compared = False
        self._begin_alike()

    def _first_foreseen(self, own: Tensor) -> int:
        """Returns how many blocks there are up to the first one with tokens that a drafter has to
        foresee; that one is held out, for else no report says anything. Raises ``ConfigError``
        where none is left to learn from."""
        places = loss_mask_of(own)[:, 1 : own.shape[1] - self._student.depths]
        found = places.any(1).nonzero()
        if len(found) < 2:
            raise ConfigError(
                f"of the {len(own)} block(s) of text, {len(found)} have enough of the target's own "
                "answers, and one is held out: have more answers written, or longer ones, or give "
                "shorter prompts."
            )
        return int(found[0]) + 1

    def play(
        self,
        report: Report,
        every: int = 50,
        stop: Callable[[], bool] = bool,
        patience: int | None = None,
    ) -> Progress:
        """Trains to the last step and returns where it ended; writes a checkpoint at each report.

        report: called every ``every`` steps. stop: asked after each step whether to end early.
        patience: reports without a higher score than before, after which no step is made any more;
        None: any number.
        """
        begun, losses = time.monotonic() - self._spent, []
        progress = None
        if self._student.is_pretrained and not self.step and self.kept is None:  # as it is
            progress = self._evaluated(math.nan)
            self._keep(progress)
            report(progress)
        for step in range(self.step, self.settings.steps):
            if patience is not None and self.stale >= patience:
                break
            losses.append(self.learn(step))
            self.step = step + 1
            # One rank's clock may be late when another's is not yet, and none may go on alone.
            ended = self._ranks.any(stop()) or self.step == self.settings.steps
            if ended or self.step % every == 0:
                self._spent = time.monotonic() - begun
                self._check_alike()
                progress = self._evaluated(self._ranks.mean(sum(losses) / len(losses)))
                losses = []
                self._keep(progress)
                report(progress)
            if ended:
                break
        return progress or self._evaluated(math.nan)

    def _begin_alike(self) -> None:
        """All ranks begin with the weights of the first: what chooses a drafter's first weights may
        come out otherwise on another device. Raises ``ConfigError`` where one has read other
        files."""
        if self._ranks.count == 1:
            return
        shapes = [(name, value.shape) for name, value in self.network.state_dict().items()]
        known = (asdict(self.settings), self.step, digest(self._text), shapes)
        if not self._ranks.same(repr(known)):
            raise ConfigError(
                f"the processes do not all read the same text, and the same run in {self.out}: "
                "give each of them the same files."
            )
        self._ranks.broadcast(self.network)

    def _check_alike(self) -> None:
        """Compares the weights of all ranks, once: the same steps leave the same weights."""
        if not self._compared and not self._ranks.same_weights(self.network):
            raise ConfigError(
                f"the processes have different weights after step {self.step:,}, although they "
                "have made the same steps: train with one process."
            )
        self._compared = True

    def learn(self, step: int) -> float:
        """Makes a step and returns its loss, on this rank's blocks; ``ConfigError`` where it would
        ruin the weights."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * _share(step, self.settings)
        # What a recipe draws (noise, places) follows from the step, also in a run that goes on.
        torch.manual_seed(self._ranks.seed(self.settings.seed * 1_000_003 + step))
        numbers = self._batch(step)
        mine = self._ranks.share(numbers)
        own, all_own = (None, None) if self._own is None else (self._own[mine], self._own[numbers])
        self._optimizer.zero_grad()
        with self._weights.quantized(step % REROUND_EVERY == 0):
            loss = self._loss(self._tokens[mine], own, all_own).loss
            loss.backward()  # type: ignore[no-untyped-call]
        self._ranks.average(self.network.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.clip)
        if not bool(norm.isfinite()):  # one step with these, and no weight is a number any more
            raise ConfigError(
                f"the gradients of step {step + 1:,} are not finite: begin anew with a lower --lr "
                f"than {self.settings.learning_rate:g}."
            )
        self._optimizer.step()
        return float(loss.detach())

    def _loss(
        self, tokens: Tensor, own: Tensor | None = None, all_own: Tensor | None = None
    ) -> LossOutput:
        """The loss of blocks ``[B, T]``. While it is measured, products are made in float32 too, in
        which drafters are kept. all_own: ``own`` of the blocks of all ranks."""
        batch = self._student.read(self._teacher, tokens)
        device = self._teacher.device
        mixed = torch.is_grad_enabled() and self.settings.is_mixed(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            return self._recipe.compute_loss(batch if own is None else batch.of(own, all_own))

    def _batch(self, step: int) -> Tensor:
        """The numbers of the blocks of a step, of all ranks: each pass through the text has its own
        order, which only the seed decides, so that a resumed run reads on where it stopped."""
        count, size = len(self._tokens), self.settings.batch
        found = []
        for place in range(step * size, (step + 1) * size):
            turn, at = divmod(place, count)
            order = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + turn)
            found.append(torch.randperm(count, generator=order)[at])
        return torch.stack(found)

    @torch.no_grad()
    def _evaluated(self, loss: float) -> Progress:
        torch.manual_seed(self.settings.seed)  # all reports are about the same drafts
        own = self._held_own
        size = self._ranks.part(self.settings.batch)
        batches = torch.split(torch.arange(len(self._held)), size)
        with self._weights.quantized(anew=True, keep=False):  # what is learned does not see it
            turns = self._ranks.turns(batches)
            outputs = [
                self._loss(self._held[numbers], None if own is None else own[numbers])
                for numbers in turns
            ]
            if len(turns) * self._ranks.count < len(batches):
                # Others have one more to read: of a target that is split, all have to make a pass.
                self._loss(self._held[batches[0]])
        hits = self._ranks.gathered(batches, [each.hits for each in outputs]).float()
        if own is not None:
            # The root of the first place, also of a rank that has had no batch.
            begin = self._ranks.largest([each.first for each in outputs]) + 1
            own = loss_mask_of(own)[:, begin : begin + hits.shape[1]].to(hits.device)
        return Progress(
            step=self.step,
            loss=loss,
            metric=self._student.metric,
            score=self._student.metric.score(hits, own),
            shares=self._student.metric.shares(hits if own is None else hits[own]),
            tokens=self.step * self.settings.batch * self.settings.block,
            seconds=self._spent,
        )

    # -- files ---------------------------------------------------------------------------------

    def _keep(self, progress: Progress) -> None:
        """Writes the drafter where it is the best so far, and what is needed to go on. Only the
        first rank writes; all of them know what is kept."""
        best = progress.score >= self.best
        self.stale = 0 if progress.score > self.best or self.kept is None else self.stale + 1
        if self._ranks.first:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / LOG).touch()  # whose a drafter is, if the run is killed before its state
            if best:
                self._student.save(self.out)
        if best:  # now that it is
            self.best, self.kept = progress.score, progress
        if not self._ranks.first:
            return
        state = {
            "settings": asdict(self.settings),
            "target": {
                "shape": asdict(self._target.shape),
                "probe_states": self._target.probe_states,
                "adapter": self._adapter,
            },
            "text": {
                "blocks": len(self._text),
                "digest": digest(self._text),
                "held": self._held_blocks,
            },
            "step": self.step,
            "best": self.best,
            "kept": None if self.kept is None else self.kept.as_state(),
            "stale": self.stale,
            "seconds": self._spent,
            "network": self.network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "rounding": self._weights.differences,
        }
        with saving(self.out / STATE), replacing(self.out / STATE) as part:
            torch.save(state, part)
        self.written = self.step
        with saving(self.out / LOG), (self.out / LOG).open("ab+") as log:
            if log.tell():
                log.seek(-1, os.SEEK_END)
                if log.read() != b"\n":  # a run was killed while it wrote its last line
                    log.write(b"\n")
            log.write(json.dumps(progress.as_dict()).encode() + b"\n")

    def _resume(self) -> None:
        """Goes on where an earlier run stopped, of the same target and settings, and of the same
        text or its beginning; removes what it left unfinished if it was killed."""
        path = self.out / STATE
        if self._ranks.first:  # no other rank writes
            remove_unfinished(self.out)
            for name in (STATE, CONFIG, WEIGHTS):
                remove_parts(self.out / name)
        if not path.exists():
            return
        with reading(path):
            # On the CPU at first: this machine may lack the device that wrote it.
            state = torch.load(path, map_location="cpu", weights_only=True)
            check_same(self.out, state, self.settings, self._target, self._adapter, self._text)
            # Of a text that has grown, what was learned from is not held out now.
            self._held_blocks = int(state["text"]["held"])
            self.network.load_state_dict(state["network"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._weights.differences = [
                each.to(self._teacher.device) for each in state.get("rounding", [])
            ]
            self.step = self.written = int(state["step"])
            self.best = float(state["best"])
            self._spent = float(state["seconds"])
            self.stale = int(state["stale"])
            if state["kept"] is not None:
                self.kept = Progress(metric=self._student.metric, **state["kept"])


def held_out(blocks: int, settings: TrainSettings) -> int:
    """Returns how many blocks of a text are not learned from; ``ConfigError`` if that is all."""
    held = max(1, int(blocks * settings.held_out))
    if blocks <= held:
        raise ConfigError(
            f"{blocks} block(s) of text are too few, one of which is held out: give more text (or "
            "let --self-distill write more: --answers, --answer-tokens), or a smaller --block."
        )
    return held


def _share(step: int, settings: TrainSettings) -> float:
    """The share of the learning rate at a step."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    left = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, left))) / 2
