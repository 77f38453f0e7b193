"""Options that verbs share: their flags, types and help, stated once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from outpace.cli.flags.names import LOSSLESS, LOSSY, METHODS, complete_method, complete_rule
from outpace.errors import ConfigError

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

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="ID_OR_PATH",
        help="Folder, GGUF file or hub name of a language model. Unset: the bundled pair.",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="TYPE",
        help="auto, float32, float64, bfloat16 or float16. auto: float32 on a CPU, the "
        "checkpoint's own on a GPU.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="cpu, cuda or cuda:1. auto: a GPU where there is one.",
        rich_help_panel=MODEL,
    ),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Compile the models' passes (CPU; loading takes minutes the first time) or record "
        "them as CUDA graphs (GPU). Unset: on a GPU, where it can be done.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="Compute a token's logits with the same bits whatever else is in a pass, so that "
        "greedy text is the same with speculation and without, alone and in company. May take "
        "longer.",
        rich_help_panel=MODEL,
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        metavar="KIND",
        help="int8 or int4: quantise the model as it is loaded. Speculation is then "
        "exact with respect to the quantised model. Unset: not at all.",
        rich_help_panel=MODEL,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        help="Processor cores to compute on. Unset: as many as pay here.",
        rich_help_panel=MODEL,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the Python files that come with the model. Only for models that you trust.",
        rich_help_panel=MODEL,
    ),
]
GenerationConfig = Annotated[
    str,
    typer.Option(
        "--generation-config",
        metavar="WHICH",
        help="auto takes what no flag sets from the model's own generation_config; none ignores "
        "it.",
        rich_help_panel=MODEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Longest prompt and text together. Unset: the model's own limit.",
        rich_help_panel=MODEL,
    ),
]

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

# -- sampling ----------------------------------------------------------------------------------


def _count(flag: str, what: str, panel: str) -> Any:
    return typer.Option(flag, metavar="N", help=what, rich_help_panel=panel)


Number = Annotated[int, _count("--n", "Texts per prompt.", SAMPLING)]

# -- beam search ---------------------------------------------------------------------------------

NumBeams = Annotated[
    int | None,
    _count("--num-beams", "Search for the most likely texts with n beams.", BEAMS),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        "--length-penalty",
        help="Divide a text's log-probability by its length to this power.",
        rich_help_panel=BEAMS,
    ),
]
EarlyStopping = Annotated[
    str | None,
    typer.Option(
        "--early-stopping",
        metavar="WHEN",
        help="'true': end the search when as many texts as beams have ended; 'false': when none "
        "seems likely to become better; 'never': when none can.",
        rich_help_panel=BEAMS,
    ),
]

# -- audits ------------------------------------------------------------------------------------

Workers = Annotated[int, typer.Option(min=0, help="Processes at once. 0: one for each processor.")]


def _renamed(old: str, new: str) -> Callable[[Any], None]:
    def refuse(value: Any) -> None:
        if value is not None:
            raise ConfigError(f"{old} is called {new} now, as in the other verbs: write {new}.")

    return refuse


OldTokens = Annotated[
    int | None,
    typer.Option("--tokens", hidden=True, callback=_renamed("--tokens", "--max-tokens")),
]
"""What `--max-tokens` of some verbs was called once."""

# -- output ------------------------------------------------------------------------------------

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
    _count(
        "--logprobs",
        "With --json: each token's log-probability, and this many most probable ones.",
        OUTPUT,
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
