"""A GGUF file with its weights in another kind of blocks: ``requantized.py IN OUT KIND``.

KIND: ``Q8_0``, ``BF16``, ``Q4_0`` or another kind that the gguf library writes. So the weights of a
Q4_K_M file become a target as people have it, with more bytes a pass and nearly the same texts: it
tells what a draft model brings where it costs a smaller share of a pass. Vectors stay as they are.
"""

import sys
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType as Kind
from gguf_copy import write_like
from usage import usage

usage(__doc__, needed=3)


def add_tensors(writer: gguf.GGUFWriter) -> None:
    for tensor in reader.tensors:
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)


reader, kind = gguf.GGUFReader(Path(sys.argv[1])), Kind[sys.argv[3]]
write_like(reader, Path(sys.argv[2]), add_tensors)
