"""A GGUF file with its weights in another kind of blocks: ``requantized.py IN OUT KIND``.

KIND: ``Q8_0``, ``BF16``, ``Q4_0`` or another kind that the gguf library writes. So the weights of a
Q4_K_M file become a target as people have it, with more bytes a pass and nearly the same texts: it
tells what a draft model brings where it costs a smaller share of a pass. Vectors stay as they are.
"""

import sys
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType as Kind
from usage import usage

usage(__doc__, needed=3)

OWN = ("GGUF.", "general.architecture")
"""Entries that the writer makes by itself."""


def copy_values(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for name, field in reader.fields.items():
        if not name.startswith(OWN):
            kind, *of_list = field.types
            writer.add_key_value(name, field.contents(), kind, *of_list[-1:])


def requantized(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, kind: Kind) -> None:
    for tensor in reader.tensors:
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)


before, after, kind = Path(sys.argv[1]), Path(sys.argv[2]), Kind[sys.argv[3]]
reader = gguf.GGUFReader(before)
writer = gguf.GGUFWriter(
    after, reader.fields["general.architecture"].contents(), use_temp_file=True
)
copy_values(reader, writer)
requantized(reader, writer, kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
print(f"{after}: {after.stat().st_size / 1e9:.2f} GB")
