"""``outpace generate``: text from prompts, streamed, as JSON, or raced against plain decoding."""

from __future__ import annotations

from typing import Any

from outpace.cli import options as opt
from outpace.cli.loading import load_llm
from outpace.cli.prompts import read_prompts
from outpace.cli.speculation import logit_bias, speculation
from outpace.errors import ConfigError, OutpaceError, ParamsError, PromptError

COMPARED_TOKENS = 128


def generate(
    prompt: opt.Prompt = None,
    prompt_file: opt.PromptFile = None,
    chat: opt.Chat = False,
    system: opt.System = None,
    model: opt.Model = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    quantization: opt.Quantize = None,
    max_model_len: opt.MaxModelLen = None,
    generation_config: opt.GenerationConfig = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    threads: opt.Threads = None,
    compile_passes: opt.Compile = False,
    draft: opt.Draft = None,
    method: opt.Method = None,
    num_speculative_tokens: opt.NumSpeculativeTokens = None,
    verify: opt.Verify = None,
    speculative_config: opt.SpeculativeJson = None,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    typical_p: opt.TypicalP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    logit_bias_json: opt.LogitBias = None,
    seed: opt.Seed = None,
    n: opt.Number = 1,
    max_tokens: opt.MaxTokens = None,
    min_tokens: opt.MinTokens = None,
    stop: opt.Stop = None,
    stop_token_id: opt.StopTokenId = None,
    ignore_eos: opt.IgnoreEos = False,
    compare: opt.Compare = False,
    as_json: opt.Json = False,
    no_stream: opt.NoStream = False,
    logprobs: opt.Logprobs = None,
) -> None:
    """Continue a prompt. The text goes to standard output, what it cost to standard error.

    Examples:

    `outpace generate --compare` (the bundled pair, and how much faster it is than one model)

    `outpace generate "Once upon a time" --temperature 0.8 --seed 7`

    `outpace generate -m big-model --draft small-model -k 5 < prompt.txt`

    `outpace generate -m big-model --method ngram --prompt-file prompts.jsonl --json`

    `outpace generate --chat "Tell me a story." --max-tokens 200`
    """
    entries = read_prompts(prompt, prompt_file)
    config = speculation(
        speculative_config, draft, method, num_speculative_tokens, verify, bundled=model is None
    )
    if compare:
        _check_compare(config, bundled=model is None)
    _check_flags(chat, system, as_json, logprobs)
    sampling: dict[str, Any] = {
        "n": n,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "typical_p": typical_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": logit_bias(logit_bias_json),
        "seed": seed,
        "max_tokens": COMPARED_TOKENS if compare and max_tokens is None else max_tokens,
        "min_tokens": min_tokens,
        "stop": stop or None,
        "stop_token_ids": stop_token_id or (),
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
    }
    engine: dict[str, Any] = {
        "speculative_config": config,
        "dtype": dtype,
        "device": device,
        "quantization": quantization,
        "max_model_len": max_model_len,
        "generation_config": generation_config,
        "trust_remote_code": trust_remote_code,
        "compile": compile_passes,
        **({} if threads is None else {"threads": threads}),
    }

    llm, params = load_llm(model, engine, sampling, texts=n * len(entries), chat=chat)

    from outpace.cli.playing import Job, play  # imports torch, which `load_llm` covers by a spinner

    play(llm, params, Job(entries, chat, system, compare, as_json, stream=not no_stream))


def _check_compare(config: dict[str, Any] | None, bundled: bool) -> None:
    if (config or {}).get("method") == "none" or (config is None and not bundled):
        raise ConfigError("--compare needs a drafter to compare: add --draft or --method ngram.")


def _check_flags(chat: bool, system: str | None, as_json: bool, logprobs: int | None) -> None:
    error: OutpaceError | None = None
    if system is not None and not chat:
        error = PromptError("--system needs --chat: a plain prompt has no system message.")
    elif logprobs is not None and not as_json:
        error = ParamsError("--logprobs needs --json, which shows them.")
    if error:
        raise error
