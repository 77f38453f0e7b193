"""Flags that verbs share and that are no options of the library, or an option alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outpace.arguments import EngineArgs
from outpace.cli.flags.grouped import flag_of
from outpace.cli.flags.names import LOSSLESS, LOSSY, METHODS, complete_method, complete_rule
from outpace.core.params import SamplingParams

MODEL = "Model"
SPECULATION = "Speculation"
SAMPLING = "Sampling (unset: as the model's generation_config says)"
BEAMS = "Beam search (instead of sampling and speculation)"
STOPPING = "Stopping"
PROMPTS = "Prompts"
OUTPUT = "Output"

# -- prompts -----------------------------------------------------------------------------------

Prompt = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT",
        help="The text to continue; '-' reads standard input, as a pipe does without it.",
        show_default=False,
    ),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Read the prompt from a text file (all of it but the last line break), or many from a "
        '*.jsonl or *.json file ({"prompt": ...} records; an "id" is carried through).',
        rich_help_panel=PROMPTS,
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="The prompt is a user's message: answer it through the tokenizer's chat template.",
        rich_help_panel=PROMPTS,
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help="System message before a --chat prompt.", rich_help_panel=PROMPTS
    ),
]

ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="Jinja template of a chat, for a model whose tokenizer has none.",
        rich_help_panel=PROMPTS,
    ),
]

# -- model -------------------------------------------------------------------------------------

Model = Annotated[str | None, flag_of(EngineArgs, "model", MODEL)]
TrustRemoteCode = Annotated[bool, flag_of(EngineArgs, "trust_remote_code", MODEL)]
MaxModelLen = Annotated[int | None, flag_of(EngineArgs, "max_model_len", MODEL)]

# -- speculation -------------------------------------------------------------------------------

SpeculativeJson = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help="All about speculation in one object, as in Python: "
        '{"method": ..., "model": ..., "num_speculative_tokens": ..., "verify": ...}, or a file '
        "(*.json) that holds it.",
        rich_help_panel=SPECULATION,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="ID_OR_PATH",
        help="Draft with this smaller model, or with this head that was trained for the model.",
        rich_help_panel=SPECULATION,
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help=f"How to draft: {', '.join(METHODS)}. Unset: auto; for the bundled pair, and "
        "with --draft and -k or --verify, what --draft names, alone.",
        autocompletion=complete_method,
        rich_help_panel=SPECULATION,
    ),
]
NumSpeculativeTokens = Annotated[
    str | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        metavar="N|auto",
        help="Tokens to draft per round. auto, as unset: what pays, measured on the way.",
        rich_help_panel=SPECULATION,
    ),
]
Verify = Annotated[
    str | None,
    typer.Option(
        "--verify",
        metavar="RULE",
        help=f"How to decide which tokens to keep: {', '.join(LOSSLESS)}; or, for another text "
        f"than the model's own: {', '.join(LOSSY)}. Unset: what suits the drafter.",
        autocompletion=complete_rule,
        rich_help_panel=SPECULATION,
    ),
]

# -- audits ------------------------------------------------------------------------------------

Workers = Annotated[int, typer.Option(min=0, help="Processes at once. 0: one for each processor.")]

# -- output ------------------------------------------------------------------------------------

Number = Annotated[int, flag_of(SamplingParams, "n", SAMPLING)]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="After the text, measure plain against speculative decoding, in turns.",
        rich_help_panel=OUTPUT,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object per text: text, tokens, what it cost.",
        rich_help_panel=OUTPUT,
    ),
]
NoStream = Annotated[
    bool,
    typer.Option(
        "--no-stream",
        help="Print the text when it is finished, not as it comes.",
        rich_help_panel=OUTPUT,
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="N",
        help="With --json: each token's log-probability, and this many most probable ones.",
        rich_help_panel=OUTPUT,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        help="Before the run, say how the models are computed (kernels, threads, quantisation), "
        "and what is slow and why.",
        rich_help_panel=OUTPUT,
    ),
]
