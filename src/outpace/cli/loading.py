"""Loads the model of a verb, with signs of life meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from outpace.cli.progress import Report, working
from outpace.core.progress import silent
from outpace.errors import PromptError
from outpace.files import read_text

if TYPE_CHECKING:
    from outpace.core.params import SamplingParams
    from outpace.llm import LLM

ROWS = 16
"""Texts decoded at once, at most."""
OF_PROCESSORS = "chat_template.json"
"""The file of a chat template that transformers gives to processors only."""


@dataclass(frozen=True)
class ChatTemplate:
    """Where the chat template comes from."""

    file: Path | None = None
    """A Jinja template. Unset: the tokenizer's own."""
    remedy: str = "leave --chat out, or give one with --chat-template FILE"
    """What to do where there is none, for the error's sentence."""

    def put(self, tokenizer: Any, model: str, processor: Any = None) -> None:
        """Gives the tokenizer, if any, the template; ``PromptError`` where it then has none.

        processor: of a vision-language model, whose own template would come first.
        """
        from outpace.inputs.chats import check_template

        if tokenizer is None:
            return  # the chat itself says what to do without one
        if self.file is not None:
            text = read_text(self.file, "chat template")
            if "messages" not in text:
                raise PromptError(
                    f"{str(self.file)!r} is no chat template, since it never uses 'messages': give "
                    "a file with a Jinja template of a chat."
                )
            tokenizer.chat_template = text
            if processor is not None:
                processor.chat_template = text
        check_template(tokenizer, model, self.remedy, processor)


def load_llm(
    model: str | None,
    engine: dict[str, Any],
    sampling: dict[str, Any],
    texts: int,
    template: ChatTemplate | None = None,
    verbose: bool = False,
    rows: int = ROWS,
    report: Report = silent,
) -> tuple[LLM, SamplingParams]:
    """Returns the engine and the checked options; these are checked before anything is loaded.

    texts: how many will be asked for, so that no more rows than these are kept, nor more than
    ``rows``. template: of a chat; a model without one is refused before its weights are read.
    verbose: say on standard error how the models are computed. report: called with each step, too,
    and how much of it is done (0 to 1).
    """
    console = Console(stderr=True)
    with starting(console):
        from outpace.core.params import SamplingParams

        params = SamplingParams(**sampling)
        from outpace.llm import LLM
        from outpace.targets.hf.loading.reading import hide_progress_bars
    # A download has its own bar, with bytes and time left; a folder is read in seconds.
    local = model is None or os.path.exists(model)
    shown = local or not console.is_terminal
    with working(console, f"loading {model or 'the bundled pair'}", shown) as show:
        hide_progress_bars(downloads=local or not console.is_terminal)

        def progress(step: str, done: float) -> None:
            show(step, done)
            report(step, done)

        engine = {"progress": progress, **engine}
        if template is not None and model is not None:
            trust = engine.get("trust_remote_code", False)
            engine = {**engine, "tokenizer": chat_tokenizer(model, trust, template)}
        llm = LLM(model, max_num_seqs=min(rows, max(1, texts)), **engine)
    if template is not None:
        template.put(llm.tokenizer, model or "the bundled pair", llm.target.processor)
    if verbose:
        console.print(str(llm.describe()), highlight=False, markup=False, soft_wrap=True)
    return llm, params


def chat_tokenizer(model: str, trust_remote_code: bool, template: ChatTemplate) -> Any:
    """Returns the model's tokenizer with its template; ``PromptError`` if there is none.

    None where there is no tokenizer: loading the model then says what is wrong with its name.
    """
    from outpace.targets.hf.loading.reading import read_tokenizer
    from outpace.targets.hf.loading.source import check_path, downloaded

    check_path(model)
    tokenizer = read_tokenizer(model, trust_remote_code)
    # Some processors have a template of their own, which is looked at once they are loaded.
    folder = Path(model) if os.path.exists(model) else downloaded(model)
    own = folder is not None and (folder / OF_PROCESSORS).is_file()
    if tokenizer is not None and not own:
        template.put(tokenizer, model)
    return tokenizer


@contextmanager
def starting(console: Console | None = None) -> Iterator[None]:
    """Shows a sign of life while the block imports torch and transformers, which takes seconds."""
    with working(console or Console(stderr=True), "starting", lines=False):
        yield
