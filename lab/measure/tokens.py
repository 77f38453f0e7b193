"""CPU ms per token of each CPU kernel, plain and with 5 drafted: ``tokens.py FOLDER_OF_PAIR``."""

import sys
import time

import torch
from usage import usage

from outpace import LLM, SamplingParams

usage(__doc__, needed=1)

torch.set_num_threads(1)
for kind, kernels in ((None, "off"), (None, "blocked"), (None, "packed"), ("int8", "auto")):
    config = {"model": f"{sys.argv[1]}/drafter", "num_speculative_tokens": 5, "quantization": kind}
    llm = LLM(
        f"{sys.argv[1]}/target", speculative_config=config, quantization=kind, cpu_kernels=kernels
    )
    llm.generate("Hi", SamplingParams(max_tokens=4))
    for drafted in ("off", 5):
        params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True, speculative=drafted)
        begin = time.thread_time()
        for prompt in ("Once upon a time", "The cat"):
            llm.generate(prompt, params)
        print(kind, kernels, drafted, f"{(time.thread_time() - begin) / 96 * 1e3:.1f} ms")
