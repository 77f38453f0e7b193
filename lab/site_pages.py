"""What a build of the site (`make docs`) adds to docs/: mkdocs calls the `on_...` functions.

The README and other texts of the repository become pages, with their links put right, so that each
has one source. The reference pages are made from the code, so that none can be out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COPIES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "bundle/README.md": "bundled_pair.md",
}
"""Texts that are no pages of docs/, by their paths in the repository."""

_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()\s#]+)(#[^()\s]*)?\)")
_ATTRIBUTE = re.compile(r'\b(src|srcset|href)="([^"#:]+)"')


STYLE = "style.css"
"""Names of options and flags are not cut in the middle."""


def on_config(config: Any) -> Any:
    """Lets the examples of docstrings be shown as code."""
    from markdown.extensions import Extension
    from markdown.preprocessors import Preprocessor

    class Examples(Preprocessor):
        def run(self, lines: list[str]) -> list[str]:
            return examples_as_code("\n".join(lines)).split("\n")

    class ExamplesAsCode(Extension):
        def extendMarkdown(self, md: Any) -> None:
            md.preprocessors.register(Examples(md), "examples", 50)  # before fences are read

    sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # mkdocs takes back what a hook's module adds
    config.markdown_extensions.append(ExamplesAsCode())
    config.extra_css.append(STYLE)
    return config


def examples_as_code(text: str) -> str:
    """Returns a docstring with fences around its examples, and without what only doctest reads."""
    fenced = re.sub(
        r"^>>> .*?(?=\n\s*\n|\Z)", r"```pycon\n\g<0>\n```", text, flags=re.DOTALL | re.M
    )
    return re.sub(r" *# doctest: \+\w+", "", fenced)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are not in docs/."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, STYLE, content="td code { white-space: nowrap; }\n"))
    for source, uri in COPIES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=text))
    for uri, make in REFERENCES.items():
        files.append(File.generated(config, uri, content="\n\n".join(make()) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Makes links between files of the repository links between pages."""
    return with_links_to_pages(markdown, page.file.src_uri, config.repo_url)


def with_links_to_pages(text: str, uri: str, repository: str | None = None) -> str:
    """Returns a page whose links lead to where their files are in the site.

    uri: the page's own place there. repository: where files that are no pages can be read; unset,
    their links become their paths.
    """
    source = {copy: path for path, copy in COPIES.items()}.get(uri, f"docs/{uri}")

    def target(written: str) -> str | None:
        """The path in the repository that a link leads to; None for what is no file of it."""
        path = normpath(PurePosixPath(source).parent / written)
        return path if not path.startswith("..") and (ROOT / path).exists() else None

    def in_site(path: str) -> str | None:
        place = COPIES.get(path, path[5:] if path.startswith("docs/") else None)
        return None if place is None else relpath(place, PurePosixPath(uri).parent)

    def link(found: re.Match[str]) -> str:
        image, words, written, anchor = found.groups(default="")
        path = target(written)
        if path is None:
            return found.group()
        place = in_site(path)
        if place is None and repository is None:
            return f"{words} (`{path}`)"
        where = f"{repository}/blob/main/{path}" if place is None else place
        return f"{image}[{words}]({where}{anchor})"

    def attribute(found: re.Match[str]) -> str:
        name, written = found.groups()
        place = in_site(target(written) or "")
        return found.group() if place is None else f'{name}="{place}"'

    return _ATTRIBUTE.sub(attribute, _LINK.sub(link, text))


# -- pages made from the code --------------------------------------------------------------------


def _command_line() -> Iterator[str]:
    """All commands, with their flags."""
    import typer

    from outpace.cli.main import EPILOG, app

    yield "# All commands and flags"
    yield f"As `outpace COMMAND --help` says them. {EPILOG}"
    group: Any = typer.main.get_command(app)
    context = group.context_class(group, info_name="outpace")
    for name in group.list_commands(context):
        yield from _command(group.get_command(context, name), name, context)


def _command(command: Any, name: str, above: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=name, parent=above)
    yield f"## `{context.command_path}`"
    yield _as_markdown(command.help or "")
    inner = getattr(command, "commands", {})
    if not inner:
        words = " ".join(command.collect_usage_pieces(context))
        yield f"    {context.command_path} {words}"
        rows = [_flag(one) for one in command.get_params(context) if not _hidden(one)]
        yield _table(("flag", "default", ""), rows)
    for each, below in inner.items():
        yield from _command(below, each, context)


def _hidden(one: Any) -> bool:
    return getattr(one, "hidden", False) or one.name in ("help", "install_completion")


def _flag(one: Any) -> tuple[str, str, str]:
    names = one.opts + one.secondary_opts
    flags = names if names[0].startswith("-") else [one.metavar or one.name.upper()]
    shown = getattr(one, "show_default", None)
    value = shown if isinstance(shown, str) else one.default
    empty = value in (None, False, (), []) or callable(value)
    words = _as_markdown(getattr(one, "help", None) or "")
    return " ".join(f"`{flag}`" for flag in flags), "" if empty else f"`{value}`", words


def _as_markdown(text: str) -> str:
    """A help text in paragraphs; the pages that it names become links."""
    paragraphs = (" ".join(each.split()) for each in text.replace("\b", "").split("\n\n"))
    return re.sub(r"docs/((?:\w+/)?(\w+)\.md)", r"[\2](../\1)", "\n\n".join(paragraphs))


def _options() -> Iterator[str]:
    """All methods, rules and length policies, with their options."""
    from tests.option_tables import options, table

    from outpace.cli.flags.names import LOSSLESS, LOSSY, METHODS
    from outpace.cli.methods import _doc
    from outpace.draft.registry import find_drafter
    from outpace.policy.lengths.registry import find_length, length_names
    from outpace.verify.registry import find_rule

    page = ROOT / "docs" / "reference" / "options.md"
    kinds: dict[str, tuple[str, Callable[[str], type[Any]], Mapping[str, str]]] = {
        "method": ("Methods", find_drafter, METHODS),
        "verify": ("Rules", find_rule, {**LOSSLESS, **LOSSY}),
        "length": ("Length policies", find_length, dict.fromkeys(length_names(), "")),
    }
    yield "# All methods, rules and length policies"
    yield (
        "Their options, as `outpace methods NAME` says them. Options of a method stand in "
        "`speculative_config` itself, those of a rule or a length policy in its own entry: "
        '`{"model": DRAFT, "verify": {"name": "ears", "tolerance": 0.1}}`.'
    )
    for place, (title, find, names) in kinds.items():
        yield f"## {title}"
        for name, words in names.items():
            yield f"### `{name}`"
            yield _doc(find(name)) if not words else f"{words[0].upper()}{words[1:]}."
            found = options(f"{place} {name}", None)
            yield table(found, page) if found else "It has no options."


def _server() -> Iterator[str]:
    """All fields of all bodies, from what the server answers at /openapi.json."""
    from outpace.serve.openai.openapi import description

    yield "# All endpoints and fields"
    yield (
        "As `/openapi.json` says them. [Serving](../serving.md) explains the fields that are not "
        "OpenAI's."
    )
    for path, methods in description()["paths"].items():
        for method, call in methods.items():
            yield f"## `{method.upper()} {path}`"
            yield call["summary"]
            body = call.get("requestBody")
            if body:
                yield _table(
                    ("field", "", ""),
                    list(_fields(body["content"]["application/json"]["schema"])),
                )
            failures = [(code, one) for code, one in call["responses"].items() if code != "200"]
            yield "\n".join(f"- {code}: {one['description']}" for code, one in failures)


def _fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    needed = schema.get("required", ())
    for name, one in schema["properties"].items():
        yield f"`{name}`", "needed" if name in needed else "", _kind(one)


def _kind(schema: Mapping[str, Any]) -> str:
    """What a field may hold, in a cell of a table."""
    words = schema.get("description", "")
    if "anyOf" in schema or "oneOf" in schema:
        choices = [_kind(each) for each in schema.get("anyOf", schema.get("oneOf"))]
        found = " or ".join(dict.fromkeys(filter(None, choices)))
    elif "enum" in schema:
        found = ", ".join(f"`{json.dumps(each)}`" for each in schema["enum"])
    elif "const" in schema:
        found = f"`{json.dumps(schema['const'])}`"
    else:
        found = _bounded(schema)
    return f"{found}. {words}" if words and found else words or found


def _bounded(schema: Mapping[str, Any]) -> str:
    kinds = schema.get("type", "anything")
    kinds = kinds if isinstance(kinds, str) else " or ".join(kinds)
    if kinds == "array":
        return f"array of {_kind(schema['items'])}" if schema.get("items") else "array"
    bounds = {
        "minimum": "from {}",
        "exclusiveMinimum": "above {}",
        "maximum": "up to {}",
        "maxLength": "of at most {} characters",
    }
    said = [words.format(schema[key]) for key, words in bounds.items() if key in schema]
    if kinds == "object" and schema.get("properties"):
        said.append("of " + ", ".join(f"`{name}`" for name in schema["properties"]))
    return " ".join([kinds, *said])


def _python() -> Iterator[str]:
    """What `outpace` exports, explained by its docstrings."""
    from outpace import _HOMES, __all__

    yield "# Python reference"
    yield (
        "Made from the docstrings. The arguments of `LLM`, and what the options mean together, are "
        "on [arguments and options](../options.md)."
    )
    places = [f"{_HOMES[name]}.{name}" for name in __all__ if name in _HOMES]
    more = ["outpace.core.stats.Metrics", "outpace.hf.speculative"]
    yield from (f"::: {place}" for place in [*places, *more])
    yield "## Errors"
    yield "::: outpace.errors\n    options:\n      show_root_heading: false\n      heading_level: 3"


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    cells = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(_cell(each) for each in row)} |" for row in cells)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


REFERENCES: Mapping[str, Callable[[], Iterator[str]]] = {
    "reference/command_line.md": _command_line,
    "reference/options.md": _options,
    "reference/server.md": _server,
    "reference/python.md": _python,
}
"""The pages that are made from the code."""
