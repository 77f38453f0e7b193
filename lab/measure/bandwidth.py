"""GB/s of weights that products read, by rows: ``python lab/measure/bandwidth.py``."""

import statistics
import time

import torch
from torch import nn
from torch.nn.functional import linear
from usage import usage

from outpace.targets.cpu.linear import BLOCK, PackedLinear, RowLinear

usage(__doc__)

ROWS, ELEMENTS, TURNS = (1, 2, 4, 6, 8, 12), 1 << 26, 7
NAMES = ("F.linear (MKL)", f"blocks of {BLOCK}", "oneDNN, plain weight", "oneDNN, packed")


def products(weight):
    rows, packed = RowLinear(nn.Parameter(weight), None), PackedLinear(weight, None)
    return (
        lambda x: linear(x, weight),
        lambda x: rows._blocked(x),
        lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""),
        packed,
    )


print("| weight | kernel |", " | ".join(map(str, ROWS)), "|")
with torch.inference_mode():
    for size in (1024, 4096):
        count = ELEMENTS // size**2
        layers = [products(torch.randn(size, size)) for _ in range(count)]
        took = {(name, rows): [] for name in NAMES for rows in ROWS}
        for _ in range(TURNS):
            for rows in ROWS:
                x = torch.randn(rows, size)
                for which, name in enumerate(NAMES):
                    begin = time.perf_counter()
                    for layer in layers:
                        layer[which](x)
                    took[name, rows].append(time.perf_counter() - begin)
        for name in NAMES:
            speeds = [4e-9 * count * size**2 / statistics.median(took[name, r][1:]) for r in ROWS]
            print(f"| {size} x {size} | {name} |", " | ".join(f"{s:.0f}" for s in speeds), "|")
