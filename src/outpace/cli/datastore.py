"""``outpace datastore``: what look-ups know from the start."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outpace.cli.flags.options import Model, TrustRemoteCode
from outpace.cli.loading import starting
from outpace.cli.progress import working

if TYPE_CHECKING:
    from outpace.methods.lookup.datastore import Datastore

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="What look-ups know from the start: build a datastore, look at one.",
)

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FILES...]",
        help='Texts, or *.jsonl or *.json whose records have a "text", a "prompt" with a '
        '"completion", or a chat in "messages".',
        show_default=False,
    ),
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder to write the datastore into.")]
FromAnswers = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PATH",
        help="Answers of the target as token ids: a folder or a file that `outpace train "
        "--self-distill` has written, or a folder of lab/answers. May be given several times.",
    ),
]
WithTexts = Annotated[
    bool,
    typer.Option(
        "--texts/--no-texts",
        help="Keep the texts, which the method 'retrieval' needs, and not only the table of their "
        "n-grams: 6 or 8 bytes a token against 2 MB at most.",
    ),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="ID_OR_PATH",
        help="Folder or hub name to take the tokenizer from, instead of --model.",
    ),
]


@app.command()
def build(
    out: Out,
    files: Files = None,
    from_answers: FromAnswers = None,
    texts: WithTexts = True,
    model: Model = None,
    tokenizer: TokenizerName = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Tokenise files as the target does, sort all their places, and count what follows what."""
    with starting():
        from outpace.methods.lookup.corpus import answer_files, answers, tokenised
        from outpace.methods.lookup.datastore import Datastore, fingerprint_of

    files, answered = files or [], answer_files(from_answers or [])
    _check(files, answered, out)
    name, known = _tokenizer(model, tokenizer, trust_remote_code)
    vocabulary = max(known.get_vocab().values()) + 1
    size, read = max(1, sum(file.stat().st_size for file in [*files, *answered])), 0
    with working(Console(stderr=True), "building the datastore") as report:

        def count(more: int) -> None:
            nonlocal read
            read += more
            report("reading", read / size)

        datastore = Datastore.of(
            chain(tokenised(files, known, count), answers(answered, vocabulary, count)),
            vocabulary,
            name,
            fingerprint_of(known),
            lambda share: report("sorting", share),
            with_texts=texts,
        )
        report("counting", 0.0)
        datastore.save(out)
    Console().print(_table(out, datastore))


@app.command()
def info(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a datastore.")],
) -> None:
    """Check a datastore's files, and say what is in it."""
    with starting():
        from outpace.methods.lookup.datastore import Datastore

    datastore = Datastore.open(folder)
    Console().print(_table(folder, datastore))


def _tokenizer(model: str | None, tokenizer: str | None, trust: bool) -> tuple[str, Any]:
    """The tokenizer to build with, and its name."""
    from outpace.errors import ConfigError
    from outpace.llm import BUNDLED
    from outpace.targets.hf.loading.reading import read_tokenizer
    from outpace.targets.hf.loading.source import check_path

    if model is not None and tokenizer is not None:
        raise ConfigError("--model and --tokenizer exclude each other: give one of them.")
    name = model or tokenizer or str(BUNDLED / "target")
    if not (Path(name) / "tokenizer.json").exists():
        check_path(name)
    found = read_tokenizer(name, trust)
    if found is None:
        raise ConfigError(f"{name!r} has no tokenizer: name a model that has one.")
    return (name if model or tokenizer else "the bundled pair"), found


def _check(files: list[Path], answered: list[Path], out: Path) -> None:
    """Raises ``ConfigError`` for what would make a long build fail at its end."""
    from outpace.errors import ConfigError

    if not files and not answered:
        raise ConfigError("there is nothing to build a datastore of: name FILES or --from-answers.")
    for file in files:
        if not file.is_file():
            what = "is a folder" if file.is_dir() else "does not exist"
            raise ConfigError(f"{str(file)!r} {what}: name text or JSON files.")
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"--out {str(out)!r} exists already: name a new or an empty folder.")


def _table(folder: Path, datastore: Datastore) -> Table:
    about = datastore.description
    title = Text(f"Datastore {folder}")  # no markup: a folder may be called "[a]"
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_row("texts", f"{about.texts}{'' if datastore.has_texts else ' (left out)'}")
    table.add_row("tokens", str(about.tokens))
    table.add_row("n-grams", str(len(datastore.table)))
    table.add_row("in memory", f"{datastore.nbytes / 1e6:.1f} MB")
    table.add_row("tokenizer", about.tokenizer or "none: token ids")
    table.add_row("fingerprint", about.fingerprint or "none")
    return table
