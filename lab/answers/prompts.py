"""The prompts whose answers heads for the real target learn from: 20,000, of ten kinds, in one order.

They are made of training texts only (`DATA/corpus`, and Python's own library), and none of them is a
prompt of a benchmark here. The same files and the same Python give the same prompts; `fingerprint` says
whether they did.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COUNTS = {
    "maths": 6800,
    "code": 474,
    "complete": 2700,
    "explain": 1000,
    "edit": 2800,
    "chat": 400,
    "essay": 850,
    "summary": 2000,
    "question": 2000,
    "translation": 1000,
}
"""How many of each kind there are."""

IN_BENCHMARKS = [
    "textwrap",
    "shlex",
    "heapq",
    "bisect",
    "statistics",
    "fnmatch",
    "colorsys",
    "difflib",
    "calendar",
    "posixpath",
    "ntpath",
    "gettext",
    "genericpath",
    "string",
]
"""Modules of Python's library of which the benchmark set "editing" is made."""

EDITS = (
    "Add type hints to this function:",
    "Rename the variables of this function so that they say what they hold:",
    "Write a docstring for this function, and leave the code as it is:",
    "Raise a ValueError with a clear message for bad arguments in this function:",
    "Rewrite this function so that it is easier to read, and return the whole function:",
    "Add comments to this code:",
    "Add logging of the arguments to this function, with the module logging:",
)
ESSAYS = (
    "Write a short blog post about {}.",
    "Explain {} to a twelve-year-old.",
    "What are the advantages and disadvantages of {}?",
    "Write an email to a colleague who has asked about {}.",
    "Give me five tips about {}.",
    "Write a short dialogue between two friends about {}.",
    "Imagine you are a teacher. Prepare an outline of a lesson on {}.",
    "Compare {} with what was usual fifty years ago.",
)
TOPICS = """remote work; the water cycle; learning a musical instrument; online privacy; growing tomatoes; black holes;
public transport in large cities; the French Revolution; machine learning; healthy sleep; saving money as a student;
photosynthesis; climate change; writing unit tests; chess openings; electric cars; the history of the printing press;
space travel; bread baking; code review; the stock market; working in a team; volcanoes; vaccines; the Roman Empire;
travelling alone; renewable energy; reading novels; time management; the human heart; relational databases; democracy;
social media; bicycles; coral reefs; job interviews; the theory of evolution; open-source software; coffee; jazz;
version control with git; the internet; first aid; vegetarian cooking; the moon landing; public libraries; plate
tectonics; inflation; learning a foreign language; recursion; the immune system; small talk; hiking in the mountains;
renting or buying a home; nuclear power; keeping a diary; sorting algorithms; pets; the Olympic Games; urban gardening;
artificial intelligence in medicine; board games; the solar system; giving a presentation; bees; quantum computers;
minimalism; the Great Wall of China; concurrency in Python; cloud computing; photography; film music; water shortage;
distributed systems; tea; the Renaissance; exercise for office workers; earthquakes; regular expressions; friendship;
compilers; folk tales; taxes; wildlife in cities; the periodic table; hash tables; road trips; HTTP; migration of birds;
caching; modern architecture; asking for a rise in salary; glaciers; logic puzzles; fashion; memory in computers; antibiotics;
local newspapers; linear regression; swimming; genetics; the Silk Road; design patterns; insects; debugging; volunteering"""
TOGETHER = (
    "Summarize this text in two or three sentences:",
    "What is this text about? Give the main points as a list.",
    "Write a summary of the following text:",
    "Give this text a title and say in one paragraph what happens in it:",
)
LANGUAGES = ("German", "French", "Spanish", "Italian")
LONGEST = 1800
"""Characters of a text or piece of code in a prompt."""


@dataclass(frozen=True)
class Prompt:
    """What a user asks, and of which kind that is."""

    kind: str
    text: str


def prompts(data: Path) -> list[Prompt]:
    """Returns all prompts, in an order in which each beginning of the list holds every kind in
    proportion. data: the folder with `corpus`."""
    corpus = data / "corpus"
    functions = list(_functions())
    stories = _passages(corpus / "fairytaleqa_train.txt")
    texts = [
        *_passages(corpus / "onestop_english.txt"),
        *_passages(corpus / "wikitext2_valid.txt"),
        *_passages(corpus / "peps.txt"),
    ]
    made = {
        "maths": [entry["instruction"] for entry in _records(corpus / "gsm8k_train.jsonl")],
        "code": [_with_tests(entry) for entry in _records(corpus / "mbpp_train.jsonl")],
        "complete": [
            _to_complete(source, at) for at, source in enumerate(functions) if '"""' in source
        ],
        "explain": [
            f"Explain what this code does:\n\n```python\n{source}\n```" for source in functions
        ],
        "edit": [
            f"{EDITS[at % len(EDITS)]}\n\n```python\n{f}\n```" for at, f in enumerate(functions)
        ],
        "chat": [
            "\n\n".join(filter(None, (entry[first], entry[second])))
            for name, first, second in (
                ("oasst_en100", "context", "instruction"),
                ("selfinstruct_seed", "instruction", "context"),
            )
            for entry in _records(corpus / f"{name}.jsonl")
        ],
        "essay": [
            form.format(topic)
            for topic in re.split(r";\s+", TOPICS.replace("\n", " "))
            for form in ESSAYS
        ],
        "summary": [f"{TOGETHER[at % len(TOGETHER)]}\n\n{text}" for at, text in enumerate(texts)],
        "question": list(_questions(stories)),
        "translation": [
            f"Translate into {LANGUAGES[at % len(LANGUAGES)]}: {sentence}"
            for at, sentence in enumerate(_sentences(corpus / "onestop_english.txt"))
        ],
    }
    return _mixed({kind: _chosen(kind, found) for kind, found in made.items()})


def fingerprint(found: list[Prompt]) -> str:
    """Returns a short text that another list of prompts does not have."""
    return hashlib.sha256(json.dumps([prompt.text for prompt in found]).encode()).hexdigest()[:16]


def _chosen(kind: str, found: list[str]) -> list[Prompt]:
    distinct = [text for text in dict.fromkeys(found) if len(text) <= LONGEST + 200]
    random.Random(kind).shuffle(distinct)
    return [Prompt(kind, text) for text in distinct[: COUNTS[kind]]]


def _mixed(found: dict[str, list[Prompt]]) -> list[Prompt]:
    """Each prompt has its place on a line from 0 to 1; those of a kind are evenly spaced."""
    placed = [
        ((at + 0.5) / len(of_kind), kind, prompt)
        for kind, of_kind in found.items()
        for at, prompt in enumerate(of_kind)
    ]
    return [prompt for _, _, prompt in sorted(placed, key=lambda entry: entry[:2])]


def _records(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _documents(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n<|endoftext|>\n")


def _with_tests(entry: dict[str, str]) -> str:
    return f"{entry['instruction']}\nYour code should pass these tests:\n\n{entry['context']}"


def _passages(path: Path) -> list[str]:
    """Returns the first paragraphs of each document, as many as a prompt may hold; for a long one also
    those from its middle."""
    found = []
    for document in _documents(path):
        paragraphs = [part.strip() for part in document.split("\n") if len(part.strip()) > 1]
        for begin in (0, len(paragraphs) // 3, 2 * len(paragraphs) // 3):
            text = ""
            for paragraph in paragraphs[begin:]:
                if len(text) + len(paragraph) > LONGEST:
                    break
                text += paragraph + "\n"
            if len(text) > 400:
                found.append(text.strip())
    return found


def _questions(stories: list[str]) -> Iterator[str]:
    """Yields questions on passages; the answers that stand there are left out."""
    for story in stories:
        passage, _, rest = story.partition("\nQuestion:")
        for question in re.findall(r"(?:^|Question:) ?(.*?\?)\nAnswer:", rest, re.DOTALL)[:1]:
            yield f"{passage.strip()}\n\n{question.strip()}"


def _sentences(path: Path) -> list[str]:
    found = []
    for document in _documents(path):
        sentences = re.split(r"(?<=[.!?]) +", document.replace("\n", " "))
        found += [one for one in sentences if 60 <= len(one) <= 260][:4]
    return found


def _functions() -> Iterator[str]:
    """Yields functions of Python's library, by file and place."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        inside = path.relative_to(root).parts
        if (
            inside[0] in ("test", "site-packages", "lib2to3", "idlelib")
            or path.stem in IN_BENCHMARKS
        ):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                source = textwrap.dedent(
                    "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
                ).strip()
                if 250 <= len(source) <= LONGEST:
                    yield source


def _to_complete(source: str, at: int) -> str:
    """A function up to the end of its docstring, to be completed; every second one without a word of
    explanation, as in HumanEval."""
    head, _, rest = source.partition('"""')
    docstring = rest.partition('"""')[0]
    begun = f'{head}"""{docstring}"""\n'
    return begun if at % 2 else f"Complete this Python function.\n\n```python\n{begun}```"
