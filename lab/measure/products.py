"""ms per product of each CPU kernel by rows: ``python lab/measure/products.py 1024x1024 [ROWS ...]``."""

import statistics
import sys
import time
import warnings

import torch
from torch import nn
from torch.nn.functional import linear
from usage import usage

from outpace.targets.cpu.linear import PackedLinear, RowLinear
from outpace.targets.cpu.weights.quantize import Int8Linear

usage(__doc__, needed=1)

warnings.simplefilter("ignore")
torch.set_num_threads(1)
ROWS = tuple(map(int, sys.argv[2:])) or (1, 2, 4, 6, 8, 12, 16)


def eight(x, high=127):  # rows as bytes with a scale of their own
    step = x.abs().amax(-1, keepdim=True).clamp_min_(1e-30).div_(high)
    return x / step, step


def channels(w):
    scale = w.abs().amax(1) / 127
    return (w / scale[:, None]).round().to(torch.int8), scale


def fbgemm(w):
    torch.backends.quantized.engine = "fbgemm"
    b, s = channels(w)
    q = torch._make_per_channel_quantized_tensor(
        b, s.double(), torch.zeros(len(s), dtype=torch.long), 0
    )
    return torch.ops.quantized.linear_prepack(q, None)


def by_fbgemm(x, p):
    t, step = eight(x)
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(t, 1.0, 128, p).mul_(
        step
    )


def qlinear(w):
    b, s = channels(w)
    return (
        torch.ops.onednn.qlinear_prepack(b, [16, w.shape[1]]),
        s,
        torch.zeros(len(s), dtype=torch.int32),
    )


def by_qlinear(x, p):
    t, step = eight(x)
    return torch.ops.onednn.qlinear_pointwise(
        t.add_(128.5).to(torch.uint8), 1.0, 128, *p, None, 1.0, 0, torch.float32, "none", [], ""
    ).mul_(step)


def by_int_mm(x, p):
    t, step = eight(x)
    return torch._int_mm(t.round_().to(torch.int8), p[0].t()).float().mul_(p[1]).mul_(step)


def ao(w, compiled=False):
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    m = nn.Sequential(nn.Linear(w.shape[1], w.shape[0], bias=False))
    m[0].weight = nn.Parameter(w.clone(), requires_grad=False)
    quantize_(m, Int8DynamicActivationInt8WeightConfig())
    return torch.compile(m, dynamic=True) if compiled else m


call = lambda x, p: p(x)
KERNELS = {
    "F.linear": (lambda w: w, linear),
    "blocks": (lambda w: RowLinear(nn.Parameter(w), None), call),
    "oneDNN, plain": (
        lambda w: w,
        lambda x, w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""),
    ),
    "oneDNN, packed": (lambda w: PackedLinear(w, None), call),
    "fp16 weights, FBGEMM": (
        lambda w: torch.ops.quantized.linear_prepack_fp16(w, None),
        torch.ops.quantized.linear_dynamic_fp16,
    ),
    "Int8Linear": (lambda w: Int8Linear(RowLinear(nn.Parameter(w), None), 127), call),
    "8 bits, qlinear": (qlinear, by_qlinear),
    "8 bits, FBGEMM": (fbgemm, by_fbgemm),
    "8 bits, _int_mm": (channels, by_int_mm),
    "int8pack, bf16": (
        lambda w: (channels(w)[0], channels(w)[1].bfloat16()),
        lambda x, p: torch.ops.aten._weight_int8pack_mm(x.bfloat16(), *p),
    ),
    "int8pack, float32": (channels, lambda x, p: torch.ops.aten._weight_int8pack_mm(x, *p)),
    "torchao eager": (ao, call),
    "torchao compiled": (lambda w: ao(w, True), call),
}
n, k = map(int, sys.argv[1].split("x"))
ws = [torch.randn(n, k) / k**0.5 for _ in range(max(4, 2 * 10**7 // (n * k)))]
with torch.no_grad():
    made = {}
    for name, (pack, run) in KERNELS.items():
        few = ws[:4] if name.startswith(("torchao", "int8pack, float32")) else ws
        try:
            made[name] = ([pack(w) for w in few], run)
            for r in ROWS:
                run(torch.randn(r, k), made[name][0][0])
        except Exception as e:
            made.pop(name, None)
            print(name, "FAILS", type(e).__name__, str(e)[:120])
    took = {name: {r: [] for r in ROWS} for name in made}
    for _ in range(5):
        for r in ROWS:
            x = torch.randn(r, k)
            for name, (ps, run) in made.items():
                b = time.thread_time()
                for p in ps:
                    run(x, p)
                took[name][r].append((time.thread_time() - b) / len(ps) * 1e3)
print(f"{n} x {k}")
for name in made:
    print(f"| {name} |", " | ".join(f"{statistics.median(took[name][r]):.3f}" for r in ROWS), "|")
