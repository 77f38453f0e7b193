"""What `requantized` and `enlarged` share: a GGUF file that has the values of another one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFWriter

OWN = ("GGUF.", "general.architecture")
"""Entries that the writer makes by itself."""


def write_like(
    reader: GGUFReader,
    after: Path,
    add_tensors: Callable[[GGUFWriter], None],
    changed: Mapping[str, Any] | None = None,
) -> None:
    """Writes a file with the values of another one, but for those that are changed, and with the
    tensors that ``add_tensors`` adds; prints its size."""
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(after, architecture, use_temp_file=True)
    for name, field in reader.fields.items():
        if not name.startswith(OWN):
            kind, *of_list = field.types
            value = (changed or {}).get(name, field.contents())
            writer.add_key_value(name, value, kind, *of_list[-1:])
    add_tensors(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{after}: {after.stat().st_size / 1e9:.2f} GB")
