"""ms of one product by kernel and rows, which the fixed choice of kernels follows (decision 5).

``python lab/measure/kernel_choice.py [OUTPUTSxINPUTS ...]``; OMP_NUM_THREADS sets the threads.
Weights come from memory, not from a cache; the best of some turns counts.
"""

import sys
from functools import partial

import torch
from torch import nn
from usage import usage

from outpace.targets.cpu.kernels import available, preferred
from outpace.targets.cpu.library.processor import this_processor
from outpace.targets.cpu.native_layers.linear import NativeLinear
from outpace.targets.cpu.race import best_seconds

usage(__doc__)

ROWS = (1, 2, 4, 6, 8, 12, 64, 512)
ELEMENTS = 1 << 25
CASES = (  # the model's dtype, and the dtype that its weights were saved in
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
)


def layers_of(make, shape, dtype, saved):
    outputs, inputs = shape
    for _ in range(max(2, ELEMENTS // (outputs * inputs))):
        plain = nn.Linear(inputs, outputs, bias=False)
        plain.weight.data = plain.weight.data.to(saved).to(dtype)
        layer = make(plain)
        if isinstance(layer, NativeLinear) and layer.can_prepack:
            layer.prepack()
        yield layer


def product(layers, x):
    for layer in layers:
        layer(x)


torch.manual_seed(0)
processor = this_processor()
print(f"{processor.model}, {processor.instructions}, {torch.get_num_threads()} threads")
with torch.inference_mode():
    for dtype, saved in CASES:
        kernels = {name: each.make for name, each in available().items() if dtype in each.dtypes}
        for shape in sys.argv[1:] or ("1024x1024", "2816x1024"):
            size = tuple(map(int, shape.split("x")))
            layers = {
                name: [*layers_of(make, size, dtype, saved)] for name, make in kernels.items()
            }
            print(f"{shape} {dtype} saved as {saved}; the rule: {preferred(dtype, processor)[0]}")
            print("| rows |", " | ".join(layers), "|")
            for rows in ROWS:
                x = torch.randn(rows, size[1], dtype=dtype)
                used = {n: each if rows < 64 else each[:2] for n, each in layers.items()}
                took = best_seconds({n: partial(product, each, x) for n, each in used.items()})
                ms = (f"{took[name] / len(used[name]) * 1e3:.3f}" for name in layers)
                print(f"| {rows} |", " | ".join(ms), "|")
