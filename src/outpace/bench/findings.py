"""The diagnosis that follows from a short measurement of a machine, a model and its drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outpace.bench import roofline
from outpace.bench.diagnosis import (
    Diagnosis,
    DraftCost,
    DrafterResult,
    KindResult,
    MachineFacts,
    PassCost,
    verdict,
    why,
)
from outpace.bench.doctor import COLUMNS, Candidate, Measured, TextRound
from outpace.bench.machines import (
    OTHERS,
    Machine,
    PassWork,
    fitted,
    pass_seconds,
    predicted_times,
    tile_of,
)
from outpace.bench.statistics import geometric_mean, interval_of
from outpace.bench.theory import PlayedDraft, Times, acceptance_by_depth, best_payoff, payoff
from outpace.targets.cpu.library.processor import this_processor
from outpace.targets.cpu.prebuilt import LEVELS
from outpace.targets.cpu.threads import processors, wanted_threads
from outpace.targets.describe import computed_parts, describe, short_name

FEATURES = ("amx_int8", "avx512_vnni", "avx_vnni", "asimddp", "i8mm")
"""Instructions that multiply small numbers, by the names that Linux gives them."""


@dataclass(frozen=True)
class _Roof:
    """What bounds the target's passes on this machine."""

    machine: Machine
    work: PassWork

    def over_one(self, columns: int) -> float:
        """What a pass takes over one of a single column."""
        return pass_seconds(self.work, self.machine, columns) / pass_seconds(
            self.work, self.machine, 1
        )


def findings(measured: Measured) -> Diagnosis:
    """Returns all that follows from what was measured."""
    plain = measured.plain
    described = plain.llm.describe()
    roof = _roof(measured)
    drafters = tuple(_drafter(each, measured, roof) for each in measured.others)
    return Diagnosis(
        provenance=measured.facts,
        model=str(described),
        slow=described.slow,
        parts=computed_parts(plain.llm.target),
        machine=_machine(measured, roof),
        context=plain.meter.context,
        passes=tuple(_pass_cost(columns, measured, roof) for columns in COLUMNS),
        plain_seconds=_plain_seconds(plain),
        max_tokens=measured.tokens,
        chat=measured.chat,
        drafters=drafters,
        best=_best(drafters),
    )


def _plain_seconds(plain: Candidate) -> float:
    seconds = plain.plain_seconds
    assert seconds is not None  # a measurement without a plain round is refused
    return seconds


def _roof(measured: Measured) -> _Roof | None:
    """None for a model of which a pass reads a part that is not known."""
    llm = measured.plain.llm
    if roofline.reads_a_part(llm):
        return None
    verify = measured.plain.meter.times.verify
    nbytes = roofline.target_traffic(llm).of_pass(1, measured.plain.meter.context)
    on_cpu = llm.target.device.type == "cpu"
    numbers = float(roofline.traffic_of(llm.target.model, 1).weights)
    work = PassWork(nbytes, numbers, int(llm.target.config.num_hidden_layers))
    cores = wanted_threads() if on_cpu else 1
    tile = tile_of(this_processor().flags) if on_cpu else max(COLUMNS)
    like = Machine(measured.bandwidth, 0.0, cores, tile)
    return _Roof(fitted(work, {n: verify[n] for n in COLUMNS}, like), work)


def _machine(measured: Measured, roof: _Roof | None) -> MachineFacts:
    processor, facts = this_processor(), measured.facts
    most, verify = max(COLUMNS), measured.plain.meter.times.verify
    return MachineFacts(
        processor=facts["cpu"],
        instructions=processor.instructions,
        level=next((k for k, (_, needed) in LEVELS.items() if needed <= processor.flags), None),
        features=tuple(flag for flag in FEATURES if flag in processor.flags),
        processors=processors(),
        threads=wanted_threads(),
        load=facts["load"],
        gpu=facts["gpu"],
        bandwidth=measured.bandwidth,
        multiply_adds=most * roof.work.multiply_adds / verify[most] / roof.machine.cores
        if roof
        else None,
    )


def _pass_cost(columns: int, measured: Measured, roof: _Roof | None) -> PassCost:
    verify = measured.plain.meter.times.verify
    seconds = verify[columns]
    return PassCost(
        columns,
        seconds,
        over_one=seconds / verify[1],
        of_memory_bound=roof.work.nbytes / measured.bandwidth / seconds if roof else None,
        roofline=roof.over_one(columns) if roof else None,
    )


# -- drafters ------------------------------------------------------------------------------------


def _drafter(found: Candidate, measured: Measured, roof: _Roof | None) -> DrafterResult:
    verify, loaded = measured.plain.meter.times.verify, found.llm.engine.drafter.loaded
    kinds, ratios = [], []
    for kind, texts in found.texts.items():
        result, of_prompts = _kind(kind, texts, found, measured, roof)
        kinds.append(result)
        ratios += of_prompts
    return DrafterResult(
        name=_name(found, measured),
        method=found.llm.config.method,
        model=_model_of(found),
        described=None if loaded is None else str(describe(loaded)),
        costs=_draft_costs(found, measured),
        round_seconds=found.besides(Times(found.meter.times.draft, verify)),
        reading_seconds=found.reading_seconds,
        kinds=tuple(kinds),
        speedup=interval_of(ratios),
        elsewhere=_elsewhere(found, roof),
    )


def _name(found: Candidate, measured: Measured) -> str:
    """The name of a drafter: of a model its file's, with the folders where another has the same."""
    own = _model_of(found)
    if own is None:
        return f"look-ups ({found.llm.config.method})"
    named = [_without_folders(each) for each in map(_model_of, measured.others) if each is not None]
    short = _without_folders(own)
    return short if named.count(short) == 1 else own


def _model_of(found: Candidate) -> str | None:
    model = found.llm.config.options.get("model")
    return None if model is None else str(model)


def _without_folders(model: str) -> str:
    short = short_name(model)
    return Path(model).name if short == model else short


def _draft_costs(found: Candidate, measured: Measured) -> tuple[DraftCost, ...]:
    alone, nbytes = measured.plain.meter.times.verify[1], _level_bytes(found)
    costs = []
    for tokens, seconds in sorted(found.meter.times.draft.items()):
        each = seconds / tokens
        bound = nbytes / measured.bandwidth / each if nbytes else None
        costs.append(DraftCost(tokens, each, each / alone, bound))
    return tuple(costs)


def _level_bytes(found: Candidate) -> float | None:
    """Bytes that are read for a drafted token, where one pass of a model drafts one."""
    drafter = found.llm.engine.drafter
    if roofline.reads_a_part(found.llm) or not all(each.is_chain for each in found.rounds):
        return None
    traffic = roofline.drafter_traffic(found.llm)
    return drafter.pass_bytes if traffic is None else traffic.of_pass(1, found.meter.context)


def _kind(
    kind: str,
    texts: Sequence[Sequence[TextRound]],
    found: Candidate,
    measured: Measured,
    roof: _Roof | None,
) -> tuple[KindResult, list[float]]:
    """What a drafter brings on one kind of prompts, and the speed-up of each of these."""
    times = found.times(measured.plain.meter.times.verify)
    plain = _plain_seconds(measured.plain)
    by_text = [[each.draft for each in text] for text in texts]
    rounds = [each for text in by_text for each in text]
    best = best_payoff(rounds, times, plain, found.lengths)
    ratios = [payoff(text, times, plain, best.length).speedup for text in by_text]
    shown = interval_of(ratios)
    means = verdict(best.speedup, shown)
    with_draft, has_model = sum(each.drafted > 0 for each in rounds), _has_model(found)
    result = KindResult(
        kind=kind,
        prompts=len(texts),
        rounds=len(rounds),
        with_draft=with_draft,
        acceptance_by_depth=tuple(acceptance_by_depth(rounds)),
        length=best.length if with_draft else 0,
        tokens_per_pass=best.tokens,
        acceptance=best.acceptance,
        cost=best.cost,
        affordable=best.affordable,
        needed=best.needed if with_draft else None,
        speedup=shown,
        roofline=_by_the_roofline(rounds, found, roof),
        verdict=means,
        why=why(best, len(rounds), with_draft, has_model, means),
    )
    return result, [1.0] * len(ratios) if means == "no gain" else ratios


def _has_model(found: Candidate) -> bool:
    return found.llm.engine.drafter.pass_bytes > 0


def _by_the_roofline(
    rounds: Sequence[PlayedDraft], found: Candidate, roof: _Roof | None
) -> float | None:
    """The speed-up by predicted passes and measured drafts; None for trees, and where nothing
    bounds a pass."""
    if roof is None or not all(each.is_chain for each in found.rounds):
        return None
    longest = max(found.lengths)
    verify = predicted_times(roof.work, None, roof.machine, longest).verify
    times = Times(found.meter.times.draft, verify)
    return max(1.0, best_payoff(rounds, times, verify[1], found.lengths).speedup)


def _elsewhere(found: Candidate, roof: _Roof | None) -> dict[str, float]:
    """The speed-up that is predicted for other machines, the mean of all kinds of prompts. Nothing
    for what this model does not predict: trees, weights that are not in blocks, and drafters of
    whose weights a pass reads a part that is not known."""
    nbytes, loaded = _level_bytes(found), found.llm.engine.drafter.loaded
    if roof is None or nbytes is None or not found.llm.target.packed:
        return {}
    layers = 1 if loaded is None else int(loaded.config.num_hidden_layers)
    if loaded is None:  # a head, taken to have as many bits each as the target
        numbers = roof.work.multiply_adds * nbytes / roof.work.nbytes
    else:
        numbers = float(roofline.traffic_of(loaded.model, 1).weights)
    draft = PassWork(nbytes, numbers, layers) if nbytes else None
    predicted = {}
    for name, machine in OTHERS.items():
        times = predicted_times(roof.work, draft, machine, max(found.lengths))
        by_kind = [
            best_payoff(
                [r.draft for text in texts for r in text], times, times.verify[1], found.lengths
            )
            for texts in found.texts.values()
        ]
        predicted[name] = geometric_mean([max(1.0, each.speedup) for each in by_kind])
    return predicted


def _best(drafters: Sequence[DrafterResult]) -> str | None:
    """The named model that gains most over all, of those that gain more than look-ups on some kind
    of prompts; None if there is none."""
    look_ups, *models = drafters
    usual = {each.kind: each.speedup.mean for each in look_ups.kinds}
    worth = [
        model
        for model in models
        if any(k.verdict == "gain" and k.speedup.mean > usual.get(k.kind, 0.0) for k in model.kinds)
    ]
    return max(worth, key=lambda each: each.speedup.mean).name if worth else None
