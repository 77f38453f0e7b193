"""Seconds of processor time by step of loading: ``python lab/measure/loading.py MODEL [int8]``.

Processor time, because it hardly depends on what else runs; the first load of a process counts.
"""

import sys
from time import process_time

from usage import usage

from outpace.targets.hf.loading.load import load

usage(__doc__, needed=1)

begin = last = process_time()
current = "starting"


def report(step, done):
    global last, current
    now = process_time()
    print(f"{now - last:6.2f}  {current}")
    last, current = now, step


load(sys.argv[1], quantization="int8" if "int8" in sys.argv[2:] else None, progress=report)
print(f"{process_time() - begin:6.2f}  in all")
