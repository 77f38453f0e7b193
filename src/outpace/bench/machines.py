"""Predicted times of passes and drafts on a machine, from its bandwidth and compute speed: for
machines that nobody has measured. `theory` says what follows from such times, measured or not.

A pass over n columns (tokens) reads its weights once and multiplies by them n times (the roofline
of Williams, Waterman and Patterson 2009). Before it multiplies, a core spreads the codes of a block
to bytes, once for each tile of columns. Near the corner, reading and computing wait for each other,
so that a pass takes longer than the slower of the two: the root of the sum of their squares.
`lab/predicted.py` compares this with passes and speed-ups that were measured."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from outpace.bench.theory import Times

SPREADING = 2
"""Spreading the codes for a tile takes as long as the products of this many columns."""


@dataclass(frozen=True)
class Machine:
    """What a machine does in a second."""

    bandwidth: float
    """Bytes that all cores together read from memory in a pass."""
    multiply_adds: float
    """Multiply-adds of one core, with the instructions that our kernels use there."""
    cores: int
    tile: int = 8
    """Columns that are computed together."""
    overhead: float = 0.0
    """Seconds that a pass, a drafted token, and a draft take besides."""
    layer_overhead: float = 0.0
    """Seconds that each layer takes besides."""
    dequantizes: bool = False
    """Whether weights in blocks are dequantised to 16 bits, as on a GPU."""


@dataclass(frozen=True)
class PassWork:
    """What a pass of one model has to do."""

    nbytes: float
    """Bytes that are read, however many columns the pass has."""
    multiply_adds: float
    """Multiply-adds of one column: one for each weight."""
    layers: int = 0


def pass_seconds(work: PassWork, machine: Machine, columns: float) -> float:
    """Returns the seconds of a pass over some columns.

    >>> half = Machine(bandwidth=20e9, multiply_adds=50e9, cores=2)
    >>> [round(pass_seconds(PassWork(1e9, 1e9), half, n), 3) for n in (1, 2, 4, 8)]
    [0.058, 0.064, 0.078, 0.112]
    """
    reading = (2 * work.multiply_adds if machine.dequantizes else work.nbytes) / machine.bandwidth
    computing = computing_seconds(work, machine, columns)
    return _besides(work, machine) + math.hypot(reading, computing)


def computing_seconds(work: PassWork, machine: Machine, columns: float) -> float:
    """Returns the seconds of a pass on a machine that reads in no time."""
    products = _products(columns, machine.tile) * work.multiply_adds
    return products / (machine.multiply_adds * machine.cores)


def predicted_times(
    target: PassWork, draft: PassWork | None, machine: Machine, longest: int, width: float = 1.0
) -> Times:
    """Returns the times of drafts of up to ``longest`` tokens and of the passes that score them.

    draft: the work for one drafted token; None: a look-up, which reads no weights. width: nodes of
    a level of a tree, on average; lengths are then numbers of levels.
    """
    level = 0.0 if draft is None else pass_seconds(draft, machine, 1)
    return Times(
        draft={k: machine.overhead + k * level for k in range(1, longest + 1)},
        verify={1 + k: pass_seconds(target, machine, 1 + width * k) for k in range(longest + 1)},
    )


def fitted(work: PassWork, seconds: Mapping[int, float], like: Machine) -> Machine:
    """Returns a machine like that one, on which passes over the fewest and the most columns take
    these measured seconds."""
    fewest, most = min(seconds), max(seconds)
    few, many = _products(fewest, like.tile), _products(most, like.tile)
    least, all_of_it = (max(seconds[n] - _besides(work, like), 0.0) for n in (fewest, most))
    more = max(all_of_it**2 - least**2, (1e-3 * seconds[fewest]) ** 2)
    product = math.sqrt(more / (many**2 - few**2))
    reading = math.sqrt(max(least**2 - (few * product) ** 2, 0.0))
    return replace(
        like,
        bandwidth=work.nbytes / reading if reading else math.inf,
        multiply_adds=work.multiply_adds / (product * like.cores),
    )


def _besides(work: PassWork, machine: Machine) -> float:
    return machine.overhead + work.layers * machine.layer_overhead


def _products(columns: float, tile: int) -> float:
    """Columns, and what spreading codes for them is worth."""
    return columns + SPREADING * math.ceil(columns / tile)


# -- machines that nobody has measured -------------------------------------------------------------

A_CYCLE = {"AVX2": 33, "AVX-VNNI": 42, "AVX-512 VNNI": 84, "NEON": 32}
"""Multiply-adds of a core in a cycle, by its instructions. AVX2 and AVX-512 VNNI follow from passes
that were timed on EPYCs, if their clocks are 3.4 and 3.8 GHz; AVX-VNNI has half the width of the
latter; NEON is half of what four `sdot` in a cycle would do."""
TILES = {"AVX2": 4, "AVX-VNNI": 4, "AVX-512 VNNI": 8, "NEON": 4}
"""Columns of a tile: `BLOCK_TILE_ROWS` of targets/cpu/csrc/block_products.h."""


def tile_of(flags: Collection[str]) -> int:
    """Returns the columns of a tile on a processor with these flags."""
    return TILES["AVX-512 VNNI" if "avx512f" in flags else "AVX2"]


OVERHEAD, LAYER_OVERHEAD = 2e6, 0.2e6
"""Cycles on a CPU; the first are mostly Python's."""


def cpu(instructions: str, gigahertz: float, cores: int, bandwidth: float) -> Machine:
    """Returns a machine with a CPU. instructions: a key of `A_CYCLE`."""
    hertz = 1e9 * gigahertz
    return Machine(
        bandwidth,
        A_CYCLE[instructions] * hertz,
        cores,
        TILES[instructions],
        overhead=OVERHEAD / hertz,
        layer_overhead=LAYER_OVERHEAD / hertz,
    )


OTHERS: Mapping[str, Machine] = {
    "desktop, 8 cores, AVX2, 60 GB/s": cpu("AVX2", 4.4, 8, 60e9),
    "desktop, 8 cores, AVX-512 VNNI, 60 GB/s": cpu("AVX-512 VNNI", 4.4, 8, 60e9),
    "laptop, 6 cores, AVX-VNNI, 70 GB/s": cpu("AVX-VNNI", 3.5, 6, 70e9),
    "Graviton 4, 8 cores, 100 GB/s": cpu("NEON", 2.8, 8, 100e9),
    "H100, bfloat16": Machine(2.9e12, 4e14, 1, 64, 0.3e-3, 0.125e-3, dequantizes=True),
}
"""By what they are. Clocks and bandwidths are assumed. What the H100 takes besides reading was
chosen so that a pass takes what was measured there."""
