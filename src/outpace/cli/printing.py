"""Output that all verbs share: texts, tables, the cost of texts, and errors that name flags."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from outpace.core.account import Account, Mode
from outpace.core.stats import Metrics

if TYPE_CHECKING:
    from outpace.cli.flags.prompts import Entry
    from outpace.engine.request import Logprob
    from outpace.outputs import CompletionOutput

# -- texts -----------------------------------------------------------------------------------------

_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Characters that could move the cursor or change the terminal, by which a model could deceive."""


def harmless(text: str) -> str:
    """Returns the text for a terminal, without characters that would control it.

    >>> harmless("a\\x1b[2Jb")
    'a\ufffd[2Jb'
    """
    return text.translate(_CONTROLS)


def write(text: str) -> None:
    """Writes a text to standard output at once: for a terminal `harmless`, else as it is."""
    # typer.echo would leave escape sequences out of a file or a pipe.
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_line(record: Mapping[str, Any]) -> None:
    """Prints a record as a line of JSON."""
    # Escaped where the terminal or pipe could not carry the characters themselves.
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    typer.echo(json.dumps(record, ensure_ascii=not unicode))
    sys.stdout.flush()


def say(console: Console, *lines: str) -> None:
    """Prints lines as they are: a path may look like markup, and a command is copied."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Returns a table of names, in the first column, and figures."""
    made = Table(title=title, title_justify="left")
    for name in header:
        made.add_column(name, justify="left" if name == header[0] else "right")
    for row in rows:
        made.add_row(*row)
    return made


# -- what texts cost -------------------------------------------------------------------------------


def summary(metrics: Metrics, seed: int | None = None) -> str:
    """Returns one line about what a text, or several, cost."""
    parts = [
        f"{metrics.num_emitted_tokens} tokens in {metrics.total_seconds:.2f} s "
        f"({metrics.tokens_per_second:.1f} tokens/s)"
    ]
    rate = metrics.acceptance_rate
    if rate is not None:
        parts.append(f"acceptance rate {rate:.0%}")
        parts.append(f"mean acceptance length {metrics.mean_acceptance_length:.2f}")
    else:
        parts.append("nothing drafted")
    parts.append(f"{metrics.num_target_passes} target passes")
    if seed is not None:
        parts.append(f"seed {seed}")
    return ", ".join(parts)


def drafting(metrics: Metrics) -> str | None:
    """Returns a line about what texts were drafted with and why not with more; None where nothing
    could have drafted."""
    account = metrics.account
    if account is None or account.mode is Mode.NONE:
        return None
    return f"drafting: {account.sentence}"


def cost(metrics: Metrics, seed: int | None = None) -> str:
    """Returns the lines about what a text, or several, cost, and about what drafted."""
    return "\n".join(filter(None, (summary(metrics, seed), drafting(metrics))))


def merged(parts: Sequence[Metrics], seconds: float) -> Metrics:
    """Returns the counters of several texts together, over ``seconds`` of wall time."""
    return Metrics(
        num_target_passes=sum(part.num_target_passes for part in parts),
        num_draft_tokens=sum(part.num_draft_tokens for part in parts),
        num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
        num_emitted_tokens=sum(part.num_emitted_tokens for part in parts),
        total_seconds=seconds,
        account=Account.merged(part.account for part in parts),
    )


def id_of(entry: Entry) -> dict[str, Any]:
    """Returns the id that a prompt came with, as a part of its record."""
    return {} if entry.id is None else {"id": entry.id}


def record(entry: Entry, output: CompletionOutput, several: bool) -> dict[str, Any]:
    """Returns what ``--json`` prints about one text. several: it is one of n."""
    found = {**id_of(entry), "prompt": entry.text}
    if several:
        found["index"] = output.index
    found |= {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
    }
    if output.error is not None:
        found["error"] = output.error
    if output.logprobs is not None:
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        found["logprobs"] = [_logprobs(token, known) for token, known in pairs]
    return found | {"metrics": output.metrics.as_dict()}


def _logprobs(token: int, known: Mapping[int, Logprob]) -> dict[str, Any]:
    ranked = sorted(known.items(), key=lambda item: item[1].rank)
    # Tokens that the options rule out are no alternatives.
    top = [_logprob(*item) for item in ranked if math.isfinite(item[1].logprob)]
    return {**_logprob(token, known[token]), "top": top}


def _logprob(token: int, logprob: Logprob) -> dict[str, Any]:
    return {
        "token_id": token,
        "token": logprob.decoded_token,
        # A lossy rule may keep a token that the options rule out; JSON has no infinity.
        "logprob": logprob.logprob if math.isfinite(logprob.logprob) else None,
        "rank": logprob.rank,
    }


# -- errors ----------------------------------------------------------------------------------------

REMEDIES = {
    "LLM(..., generation_config='none')": "--generation-config none",
    "as SamplingParams": "as flags",
    "trust_remote_code=True": "--trust-remote-code",
    "pass tokenizer=, or give token ids": "name a model that has one",
    "leave compile out": "leave --compile out",
    "leave batch_invariant out": "leave --batch-invariant out",
    "leave kv_cache_dtype out": "leave --kv-cache-dtype out",
    "leave enable_prefix_caching or batch_invariant out": "use --no-prefix-caching, or leave "
    "--batch-invariant out",
    "leave max_batch_total_tokens or batch_invariant out": "leave --max-batch-total-tokens or "
    "--batch-invariant out",
    "use compile=False": "use --no-compile",
    "as lora=PATH": "as --lora PATH",
    "which lora=PATH names": "which --lora PATH names",
    "beam_width": "--num-beams",
    "LLM.beam_search": "--num-beams",
    "or lower n.": "or lower --n.",
    "a trained head needs 'model'": "a trained head needs --draft",
    "needs 'model' in speculative_config": "needs --draft, or 'model' in --speculative-config",
    "in speculative_config": "in --speculative-config",
}
"""From what the library's sentences say to the flag that does the same."""


def for_command_line(sentence: str) -> str:
    """Returns an error's sentence with flags in the place of Python's arguments.

    >>> for_command_line("set trust_remote_code=True.")
    'set --trust-remote-code.'
    """
    for python, flag in REMEDIES.items():
        sentence = sentence.replace(python, flag)
    return sentence
