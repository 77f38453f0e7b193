"""One turn of `paired.py`: imports outpace, loads a pair once for each method, writes some texts,
and prints what each of that took as JSON.

Its one argument is JSON: "source" (the ``src`` folder that outpace has to come from), "pairs" (name
-> target, draft, prompts; no target: the bundled pair), "methods", "tokens".
"""

import json
import sys
import time

PLAIN = "plain"
WARM_UP = 16
"""Tokens of a first text, which is not timed: buffers grow and kernels are made ready in it."""


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if len(sys.argv) == 2 else 2)
    job = json.loads(sys.argv[1])
    begin = time.perf_counter()
    import outpace

    first = time.perf_counter()
    if not outpace.__file__.startswith(job["source"]):
        sys.exit(f"outpace comes from {outpace.__file__}, and not from {job['source']}.")
    from outpace import LLM, SamplingParams  # loads torch and transformers

    found = {
        "import outpace": first - begin,
        "from outpace import LLM": time.perf_counter() - first,
    }
    ids = {}
    for name, pair in job["pairs"].items():
        for method in job["methods"]:
            begin = time.perf_counter()
            llm = LLM(pair["target"], speculative_config=config(method, pair), max_num_seqs=1)
            found[f"{name}, {method}: loading"] = time.perf_counter() - begin
            greedy = {"temperature": 0, "ignore_eos": True}
            llm.generate(pair["prompts"][0], SamplingParams(**greedy, max_tokens=WARM_UP))
            asked = SamplingParams(**greedy, max_tokens=job["tokens"])
            begin = time.perf_counter()
            texts = [llm.generate(prompt, asked)[0].token_ids for prompt in pair["prompts"]]
            found[f"{name}, {method}"] = time.perf_counter() - begin
            ids[f"{name}, {method}"] = texts
            del llm
    print(json.dumps({"seconds": found, "ids": ids}))


def config(method: str, pair: dict) -> dict:
    """Returns the ``speculative_config`` of a method, under names that every version knows."""
    if method == PLAIN:
        return {"method": "none"}
    if method in ("draft_model", "auto") and pair["draft"] is not None:
        return {"method": method, "model": pair["draft"]}
    return {"method": method}


if __name__ == "__main__":
    main()
