"""What states cost and what drafts bring, on a hybrid of random weights.

``python lab/measure/states.py Qwen3.5``; with ``object`` after it the model is handed over as
transformers made it. The drafter has seen the text before (`suffix`), so that it agrees.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import transformers
from usage import usage

from outpace import LLM, SamplingParams
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.recurrent.history import StateHistory
from outpace.targets.hf.recurrent.states import StateCache
from outpace.targets.hf.runner import Runner

usage(__doc__, needed=1)

COMMON = {
    "vocab_size": 16000, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12,
    "num_key_value_heads": 4, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
FOURTH = ["linear_attention"] * 3 + ["full_attention"]
CONFIGS = {
    "Qwen3.5": transformers.Qwen3_5TextConfig(
        **COMMON, num_hidden_layers=12, layer_types=FOURTH * 3, head_dim=64,
        linear_num_key_heads=8, linear_num_value_heads=16, linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    "Bamba": transformers.BambaConfig(
        **COMMON, num_hidden_layers=12, attn_layer_indices=[3, 7, 11], mamba_n_heads=24,
        mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128, mamba_expand=2,
    ),
    "LFM2": transformers.Lfm2Config(
        **COMMON, num_hidden_layers=12, layer_types=(["conv"] * 2 + ["full_attention"]) * 4
    ),
    "Mamba": transformers.MambaConfig(
        vocab_size=16000, hidden_size=768, num_hidden_layers=24, state_size=16, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    ),
    "RWKV": transformers.RwkvConfig(
        vocab_size=16000, hidden_size=768, num_hidden_layers=12, bos_token_id=None,
        eos_token_id=None,
    ),
    "xLSTM": transformers.xLSTMConfig(
        vocab_size=16000, hidden_size=768, num_hidden_layers=12, num_heads=4, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    ),
}  # fmt: skip
PROMPT, TOKENS = list(range(100, 132)), 48
CONTEXT = 256


def milliseconds(step: Callable[[], object], times: int = 7) -> float:
    """The median of some repetitions."""
    took = []
    for _ in range(times):
        begin = time.perf_counter()
        step()
        took.append(time.perf_counter() - begin)
    return statistics.median(took) * 1e3


def timed(spent: list[float], method: Callable[..., object]) -> Callable[..., object]:
    """The same method, whose seconds are added up."""

    def wrapped(*args: object) -> object:
        begin = time.perf_counter()
        try:
            return method(*args)
        finally:
            spent[0] += time.perf_counter() - begin

    return wrapped


def passes(model: torch.nn.Module) -> str:
    """ms of passes over 1 and 6 columns, of the latter's states, and of 6 columns read at once."""
    runner = Runner(model, 1, CONTEXT)
    runner.admit(1)
    runner.prefill(0, [PROMPT])
    one, six = torch.tensor([[5]]), torch.tensor([[5, 6, 7, 8, 9, 10]])
    single = milliseconds(lambda: runner.forward(one, keep=1))
    several = milliseconds(lambda: runner.forward(six, keep=6))
    at_once = milliseconds(lambda: runner.forward(six, keep=6, num_committed=6))
    own, spent = (StateHistory._before, StateHistory.keep), [0.0]
    StateHistory._before, StateHistory.keep = (timed(spent, method) for method in own)  # type: ignore[assignment]
    for _ in range(5):
        runner.forward(six, keep=6)
    StateHistory._before, StateHistory.keep = own  # type: ignore[method-assign]
    cache = runner.cache
    assert isinstance(cache, StateCache)
    size = cache.state_bytes / 7 / 1e6  # the state of the prompt, and of six columns
    return f"{size:.1f} | {single:.1f} | {several:.1f} | {spent[0] / 5 * 1e3:.1f} | {at_once:.1f}"


def rate(llm: LLM) -> float:
    """Tokens a second of the second time that a prompt is answered."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    llm.generate([PROMPT], params)
    begin = time.perf_counter()
    llm.generate([PROMPT], params)
    return TOKENS / (time.perf_counter() - begin)


def main() -> None:
    transformers.logging.set_verbosity_error()
    print(
        "| model | M parameters | MB of states | 1 column | 6 columns | of it states "
        "| 6 columns at once | plain | 5 drafted | gain |"
    )
    name = sys.argv[1]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    size = sum(weight.numel() for weight in model.parameters()) / 1e6
    if "object" in sys.argv[2:]:
        loaded = load(model.eval())
    else:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = load(folder)  # with the linear layers that outpace has for this machine
    nothing = {"method": "none"}
    plain = rate(LLM(loaded, speculative_config=nothing, max_num_seqs=1, max_model_len=CONTEXT))
    speculation = {"method": "suffix", "num_speculative_tokens": 5}
    llm = LLM(loaded, speculative_config=speculation, max_num_seqs=1, max_model_len=CONTEXT)
    drafted = rate(llm)
    row = f"| {name} | {size:.0f} | {passes(loaded.model)} | {plain:.1f} | {drafted:.1f}"
    print(f"{row} | {drafted / plain:.2f} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
