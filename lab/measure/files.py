"""GGUF files of today's models, how fast outpace decodes them, and how fast other programs do.

    python lab/measure/files.py write FOLDER [NAME ...]
    python lab/measure/files.py check FOLDER [NAME ...]
    python lab/measure/files.py run FOLDER [NAME ...]

``write`` writes files with random weights in the layers' real sizes, in the kinds of blocks that a
Q4_K_M file of such a model has, with the tokens of real files in ~/.cache/outpace-models. Of large
models only some layers are written, with the same share of the vocabulary, so that the output
matrix takes its usual share of a pass. ``check`` loads each file with each program, and says how
outpace computes it. ``run`` prints a row of a table for each file: `outpace bench run` on four
prompts, all ways in turns; OUTPACE_LLAMA_SERVER and OUTPACE_IK_LLAMA_SERVER name the others' servers.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from file_models import FILES, GEMMA_TOKENS, Model, tensors_of, values_of
from gguf import GGMLQuantizationType as Kind
from transformers.convert_slow_tokenizer import bytes_to_unicode
from usage import usage

from outpace import LLM, SamplingParams
from outpace.bench.peers.llamacpp import IK_LLAMA_CPP, LLAMA_CPP, LlamaServer, Program, samples
from outpace.bench.results import MethodResult, Report
from outpace.errors import OutpaceError

PROMPTS, TOKENS = 4, 48
OTHERS = (IK_LLAMA_CPP, LLAMA_CPP)  # the last one's `REPACK` stays

Array = Any
"""Of numpy."""

# -- numbers ---------------------------------------------------------------------------------------

CODES = {"Q4_K": 4.61, "Q5_K": 9.23, "Q6_K": 18.5, "Q5_0": 9.23, "Q8_0": 73.9}
"""The standard deviation of random codes."""
MIDDLE = {"Q4_K": 7.5, "Q5_K": 15.5}
"""Their mean, which a smallest value takes away."""


def numbers_of(
    generator: np.random.Generator, model: Model, name: str, shape: tuple[int, ...], kind: str
) -> Array:
    """Returns random numbers of a tensor, as the bytes of a file."""
    if kind == "F32":
        return _plain(generator, name, shape)
    spread = 1 / np.sqrt(shape[-1])
    if name == "token_embd.weight":
        spread = model.table
    elif "attn_output" in name:  # else all texts go on with what their tokens have in common
        spread *= 0.5
    elif re.search("output|down|_out|out_proj", name):  # what residual streams and logits are of
        spread *= 2
    size, nbytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    count = int(np.prod(shape)) // size
    raw = np.frombuffer(generator.bytes(count * nbytes), np.uint8).reshape(count, nbytes).copy()
    _scale(raw, kind, spread)
    return raw.reshape(*shape[:-1], -1)


def _plain(generator: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    if name.endswith("ssm_a"):
        found = -generator.uniform(1, 16, shape)
    elif name.endswith("ssm_dt.bias"):
        found = generator.uniform(-7, -2, shape)
    elif name.endswith("post_ffw_norm.weight"):
        found = np.full(shape, 4.0)
    elif name.endswith("norm.weight") or name.endswith("ssm_d"):
        found = np.ones(shape)
    elif name.endswith("sinks.weight"):
        found = generator.normal(size=shape)
    elif name.endswith(".bias"):
        found = 0.1 * generator.normal(size=shape)
    else:
        found = generator.normal(size=shape) / np.sqrt(shape[-1])
    return found.astype(np.float32)


def _scale(raw: Array, kind: str, spread: float) -> None:
    """Gives random blocks ``[count, bytes]`` scales, so that their numbers have this spread."""
    if kind == "MXFP4":  # numbers of 0 to 6 with a spread of 2.93, times a power of two
        raw[:, 0] = 127 + round(np.log2(spread / 2.93))
        return
    if kind in ("Q4_K", "Q5_K"):
        _put(raw, 0, spread / CODES[kind] / 48)
        _put(raw, 2, spread / CODES[kind] / 48 * MIDDLE[kind])
        scales = 32 + raw[:, 4:12] % 32  # [count, 8], six bits each, and smallest values the same
        low, high = scales[:, :4], scales[:, 4:]
        raw[:, 4:8] = raw[:, 8:12] = low | high >> 4 << 6
        raw[:, 12:16] = (high & 15) | high << 4
    elif kind == "Q6_K":
        raw[:, 192:208] = np.where(raw[:, 192:208] < 128, 64, 160) + raw[:, 192:208] % 32
        _put(raw, 208, spread / CODES[kind] / 80)
    else:
        _put(raw, 0, spread / CODES[kind])


def _put(raw: Array, place: int, number: float) -> None:
    raw[:, place : place + 2] = np.array([number], np.float16).view(np.uint8)


# -- tokens ----------------------------------------------------------------------------------------

NORMAL, CONTROL, UNUSED = 1, 3, 5
ENDS = {"tokenizer.ggml.bos_token_id": "<|endoftext|>", "tokenizer.ggml.eos_token_id": "<|im_end|>"}


def vocabulary_of(model: Model) -> dict[str, Any]:
    """Returns the tokens of a real file, as many as the model has: the first ones and those that
    end a text, or all and unused ones after them."""
    held = {
        name: found.contents()
        for name, found in gguf.GGUFReader(model.tokens).fields.items()
        if name.startswith("tokenizer.") and name != "tokenizer.chat_template"
    }
    tokens, types = held["tokenizer.ggml.tokens"], held["tokenizer.ggml.token_type"]
    if "tokenizer.ggml.merges" in held:
        tokens, types = _whole(tokens, types)
    if len(tokens) > model.vocabulary:
        kept = model.vocabulary - len(ENDS)
        tokens, types = [*tokens[:kept], *ENDS.values()], [*types[:kept], *[CONTROL] * len(ENDS)]
        held |= {name: tokens.index(token) for name, token in ENDS.items()}
        held.pop("tokenizer.ggml.padding_token_id", None)
    if "tokenizer.ggml.merges" in held:
        known = set(tokens)
        pairs = (merge.split(" ") for merge in held["tokenizer.ggml.merges"])
        held["tokenizer.ggml.merges"] = [
            " ".join(pair) for pair in pairs if known.issuperset((*pair, "".join(pair)))
        ]
    more = model.vocabulary - len(tokens)
    tokens = [*tokens, *(f"[PAD{number}]" for number in range(more))]
    types = [*types, *[UNUSED] * more]
    return {**held, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}


def _whole(tokens: list[str], types: list[int]) -> tuple[list[str], list[int]]:
    """Returns byte-level tokens with unused ones in the place of those that are parts of letters:
    in random texts they make no UTF-8, which ik_llama.cpp's server does not send."""
    byte = {letter: value for value, letter in bytes_to_unicode().items()}
    tokens, types = list(tokens), list(types)
    for number, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != NORMAL:
            continue
        try:
            bytes(byte[letter] for letter in token).decode()
        except UnicodeDecodeError:
            tokens[number], types[number] = f"[PART{number}]", UNUSED
    return tokens, types


# -- writing ---------------------------------------------------------------------------------------


def write(path: Path, name: str) -> None:
    """Writes one file."""
    model = FILES[name]
    writer = gguf.GGUFWriter(path, model.arch)
    for key, value in {**values_of(model), **vocabulary_of(model)}.items():
        _add(writer, key, value)
    tensors = list(tensors_of(model))
    for own, shape, kind in tensors:
        size, nbytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
        held = shape if kind == "F32" else (*shape[:-1], shape[-1] // size * nbytes)
        whole = int(np.prod(shape)) // size * nbytes
        dtype: Any = np.dtype(np.float32 if kind == "F32" else np.uint8)
        writer.add_tensor_info(own, held, dtype, whole, None if kind == "F32" else Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    for own, shape, kind in tensors:
        writer.write_tensor_data(numbers_of(generator, model, own, shape, kind))
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    add: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](name, value)


# -- reading ---------------------------------------------------------------------------------------


REPACK = "LLAMA_ARG_REPACK"
"""Of the environment. On a machine with AMX llama.cpp does not start on files with latent attention
unless this is 0; it then computes with its slower products."""


def loaded_by(program: Program, path: Path) -> str | None:
    """Returns why another program does not read a file; None where it writes eight tokens, maybe
    only with `REPACK` at 0, which it then leaves so."""
    os.environ.pop(REPACK, None)
    reason = _asked(program, path)
    if reason is not None and program is LLAMA_CPP:
        os.environ[REPACK] = "0"
        reason = _asked(program, path)
    return reason


def _asked(program: Program, path: Path) -> str | None:
    try:
        server = LlamaServer(program, str(path), None, 0, torch.get_num_threads())
        try:
            found = server.complete(samples([1, 2, 3], 8, 0.0, 0))
        finally:
            server.close()
    except OutpaceError as error:
        return str(error)
    wrote = found["tokens_predicted"]
    return None if wrote == 8 else f"it wrote {wrote} tokens of 8"


def loaded_by_outpace(path: Path) -> dict[str, Any]:
    """Returns how outpace computes a file, and its peak memory in bytes; in a process of its own,
    which loads it and writes eight tokens."""
    words = [sys.executable, __file__, "load", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": _last_words(done)}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def load(path: str) -> None:
    llm = LLM(path)
    (text,) = llm.generate(["def first"], SamplingParams(max_tokens=8, ignore_eos=True))
    status = Path("/proc/self/status").read_text()
    peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    found = {"how": str(llm.describe()), "peak": int(peak) * 1024}
    print(json.dumps({**found, "ids": list(text.token_ids)}))


def read_by_a_token(path: Path) -> int:
    """Returns the bytes of weights that a pass over one token reads: of experts those that it
    chooses; of the table of tokens nothing, unless it is the head, too."""
    reader = gguf.GGUFReader(path)
    names = {tensor.name for tensor in reader.tensors}
    arch = reader.fields["general.architecture"].contents()
    count, used = (reader.fields.get(f"{arch}.expert_{what}") for what in ("count", "used_count"))
    share = used.contents() / count.contents() if count is not None and used is not None else 1.0
    nbytes = 0.0
    for tensor in reader.tensors:
        if tensor.name != "token_embd.weight" or "output.weight" not in names:
            nbytes += int(tensor.n_bytes) * (share if "_exps." in tensor.name else 1.0)
    return round(nbytes)


def check(name: str, path: Path) -> None:
    """Prints who reads a file."""
    found = loaded_by_outpace(path)
    print(f"{name}: {path.stat().st_size / 1e9:.2f} GB", flush=True)
    print(f"  outpace: {found.get('error') or found['how']}")
    if "peak" in found:
        print(
            f"  peak {found['peak'] / path.stat().st_size:.2f} of the file's size; {found['ids']}"
        )
    for program in OTHERS:
        reason = loaded_by(program, path)
        print(f"  {program.title}: {reason or _reads()}", flush=True)


def _reads() -> str:
    return f"reads it with {REPACK}=0" if REPACK in os.environ else "reads it"


# -- the table -------------------------------------------------------------------------------------

NONE = "-"
COLUMNS = (
    "file", "GB", "outpace, tokens/s", "A/A", "over ik_llama.cpp", "over llama.cpp", "`suffix`",
    "`auto`", "of memory bound", "peak memory / file",
)  # fmt: skip


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]


def run(name: str, path: Path) -> tuple[str, list[str]]:
    """Returns a row of the table, and why others are missing in it."""
    reasons = {program.name: loaded_by(program, path) for program in OTHERS}
    others = [f"{other}-plain" for other, reason in reasons.items() if reason is None]
    own = loaded_by_outpace(path)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "run.json"
        words = [sys.executable, "-m", "outpace", "bench", "run", "-m", str(path), "--json", kept]
        words += ["--methods", "suffix,auto", "--vs", ",".join(["plain", *others]), "--again"]
        words += ["--num-prompts", str(PROMPTS), "--max-tokens", str(TOKENS)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode or not kept.exists():
            return (
                f"| {name} | {_last_words(done)} |",
                [],
            )
        report = Report.from_json(kept.read_text())
    methods = {method.name: method for method in report.cells[0].methods}
    methods |= {name.split(" K=")[0]: method for name, method in methods.items()}
    plain, size = methods["plain"], path.stat().st_size
    speed = plain.decode_tokens_per_second or plain.tokens_per_second
    bound = f"{read_by_a_token(path) * speed / report.bandwidth:.0%}" if report.bandwidth else NONE
    row = [
        name, f"{size / 1e9:.2f}", f"{plain.tokens_per_second:.1f}",
        _ratio(methods.get("plain again")),
        *(_ratio(methods.get(other), inverse=True) for other in reasons),
        *(_ratio(methods.get(own)) for own in ("suffix", "auto")), bound,
        f"{own['peak'] / size:.2f}" if "peak" in own else NONE,
    ]  # fmt: skip
    missing = [f"{name}: {other}: {why}" for other, why in reasons.items() if why is not None]
    if REPACK in os.environ:
        missing.append(f"{name}: llama.cpp {_reads()}")
    return f"| {' | '.join(row)} |", [*missing, f"{name}: {own.get('error') or own['how']}"]


def _ratio(method: MethodResult | None, inverse: bool = False) -> str:
    """The speed-up over plain decoding with its interval; inverse: that of plain decoding over it,
    as all are that of outpace."""
    if method is None or method.speedup is None:
        return NONE
    found = method.speedup
    if found.low is None or found.high is None:
        return f"{1 / found.mean if inverse else found.mean:.2f}"
    numbers = (found.mean, found.low, found.high)
    if inverse:
        numbers = (1 / found.mean, 1 / found.high, 1 / found.low)
    return "{:.2f} [{:.2f}, {:.2f}]".format(*numbers)


def main() -> None:
    usage(__doc__, needed=2)
    verb, folder, *names = sys.argv[1:]
    if verb == "load":
        load(folder)
        return
    paths = {name: Path(folder) / f"{name}.gguf" for name in FILES}
    if verb != "write" and (not names or "gemma-3-270m" in names):  # a real one
        paths = {"gemma-3-270m": GEMMA_TOKENS, **paths}
    if verb not in ("write", "check", "run") or not {*names} <= paths.keys():
        sys.exit(__doc__)
    chosen = {name: path for name, path in paths.items() if not names or name in names}
    notes: list[str] = []
    if verb == "run":
        print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    for name, path in chosen.items():
        if verb == "write":
            write(path, name)
            print(f"{path}: {path.stat().st_size / 1e9:.2f} GB, {FILES[name].about}", flush=True)
        elif verb == "check":
            check(name, path)
        else:
            row, more = run(name, path)
            print(row, flush=True)
            notes += more
    print("\n".join(notes))


if __name__ == "__main__":
    main()
