"""Makes the prompt set "editing": a piece of Python code and a small change to make in it.

The answer repeats most of the prompt, which is what editors ask of language models all day, and where a
look-up needs no training to guess well. Half of the pieces are functions of Python's own library (PSF
licence), half are reference solutions of MBPP (CC BY 4.0, `mbpp_test.jsonl`).

    python lab/measure/editing_prompts.py --mbpp DATA/prompts/mbpp_test.jsonl --out src/outpace/bench/sets/editing.jsonl

The same Python version and file give the same prompts.
"""

import argparse
import ast
import json
import pathlib
import random
import sysconfig
import textwrap

FUNCTIONS = (
    "textwrap:dedent",
    "textwrap:indent",
    "textwrap:shorten",
    "string:capwords",
    "shlex:split",
    "shlex:quote",
    "heapq:merge",
    "heapq:nsmallest",
    "heapq:nlargest",
    "bisect:bisect_right",
    "bisect:insort_left",
    "statistics:median",
    "statistics:mode",
    "statistics:median_grouped",
    "statistics:quantiles",
    "fnmatch:filter",
    "colorsys:rgb_to_hsv",
    "colorsys:hsv_to_rgb",
    "colorsys:rgb_to_hls",
    "difflib:get_close_matches",
    "calendar:leapdays",
    "calendar:weekday",
    "posixpath:normpath",
    "posixpath:join",
    "posixpath:commonpath",
    "ntpath:commonpath",
    "ntpath:splitdrive",
    "gettext:find",
    "genericpath:commonprefix",
    "gettext:c2py",
    "bisect:bisect_left",
)
KINDS = ("rename", "hints", "bug", "docstring", "errors")
SHORTEST, LONGEST = 200, 2200  # characters of a piece


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("--mbpp", type=pathlib.Path, required=True)
    ask.add_argument("--out", type=pathlib.Path, required=True)
    given = ask.parse_args()
    draw = random.Random(20)
    entries = [*prompts("library", library(), draw), *prompts("mbpp", mbpp(given.mbpp, draw), draw)]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    print(f"{len(entries)} prompts, {given.out.stat().st_size:,} bytes: {given.out}")


def library() -> list[str]:
    """Functions of the standard library as they stand in its files."""
    sources = [function(*name.split(":")) for name in FUNCTIONS]
    return [source for source in sources if SHORTEST <= len(source) <= LONGEST]


def function(module: str, name: str) -> str:
    """The source of one function of a module, read without importing it."""
    text = pathlib.Path(sysconfig.get_paths()["stdlib"], f"{module}.py").read_text(encoding="utf-8")
    nodes = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    return textwrap.dedent(ast.get_source_segment(text, nodes[0], padded=True) or "")


def mbpp(path: pathlib.Path, draw: random.Random) -> list[str]:
    """Reference solutions of MBPP that parse, tidied by Python's own printer."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = []
    for entry in draw.sample(entries, len(entries)):
        source = ast.unparse(ast.parse(entry["reference"].replace("\r", "")))
        if SHORTEST <= len(source) <= LONGEST:
            found.append(source)
    return found


def prompts(origin: str, sources: list[str], draw: random.Random) -> list[dict[str, str]]:
    """Twenty prompts, the kinds of change in turn."""
    found: list[dict[str, str]] = []
    for source in sources:
        kind = KINDS[len(found) % len(KINDS)]
        asked = instruction(kind, source, draw)
        if asked is not None and len(found) < 20:
            text, code = asked
            prompt = f"{text}\n\n```python\n{code.rstrip()}\n```\n"
            entry = {
                "id": f"editing/{origin}/{len(found)}",
                "task": f"editing/{kind}",
                "prompt": prompt,
            }
            found.append(entry)
    assert len(found) == 20, f"{len(found)} of 20 prompts: give more sources"
    return found


def instruction(kind: str, source: str, draw: random.Random) -> tuple[str, str] | None:
    """What is to be done, and the code to do it in; None where the code has no place for it."""
    whole = "Answer with the whole code."
    if kind == "rename":
        names = variables(source)
        if not names:
            return None
        return (
            f"Rename the variable `{draw.choice(names)}` to `current_item` everywhere. {whole}",
            source,
        )
    if kind == "bug":
        broken = mutated(source, draw)
        if broken is None:
            return None
        return (
            f"This code has a small bug in a comparison or in arithmetic. Fix it. {whole}",
            broken,
        )
    asked = {
        "hints": "Add type hints to all arguments and to the result; change nothing else.",
        "docstring": "Write a docstring of one sentence (replace the one that is there, if there is one).",
        "errors": "Raise ValueError with a short message if an argument is None; change nothing else.",
    }
    return f"{asked[kind]} {whole}", source


def variables(source: str) -> list[str]:
    """Names that the code assigns to, sorted: those that may be renamed."""
    nodes = ast.walk(ast.parse(source))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return sorted(name for name in stored if len(name) > 1)


def mutated(source: str, draw: random.Random) -> str | None:
    """The code with its last comparison or sum of a kind turned around; None where there is none."""
    swaps = {
        " <= ": " < ",
        " >= ": " > ",
        " < ": " <= ",
        " > ": " >= ",
        " + 1": " - 1",
        " - 1": " + 1",
        " == ": " != ",
    }
    places = [(source.rfind(old), old) for old in swaps if old in source]
    if not places:
        return None
    start, old = draw.choice(sorted(places))
    return source[:start] + swaps[old] + source[start + len(old) :]


if __name__ == "__main__":
    main()
