"""One tree's side of `compare_commits.py`: generates what it is asked for and takes the time.

A line of JSON in, a line out, until the input ends. It runs with PYTHONPATH set to the tree's src,
so it uses only what every commit since 2855b14 has.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

from outrider import LLM, SamplingParams, Speculation

PLAIN = "plain"


def load(dtype: str) -> LLM:
    config: dict[str, Any] = {"num_draft_tokens": 0, "prefix_caching": False, "kv_tokens": 16384}
    return LLM("bundled", dtype=dtype, **config)


def speculation(k: str) -> Speculation:
    if k == PLAIN:
        return Speculation(proposer=None)
    return Speculation(proposer="draft-model", num_draft_tokens="auto" if k == "auto" else int(k))


def main() -> None:
    llms: dict[str, LLM] = {}
    for line in sys.stdin:
        job = json.loads(line)
        if job["dtype"] not in llms:
            llms[job["dtype"]] = load(job["dtype"])
        params = SamplingParams(
            temperature=job["temperature"],
            seed=job["seed"],
            max_tokens=job["max_tokens"],
            ignore_eos=True,
        )
        started = time.perf_counter()
        results = llms[job["dtype"]].generate(
            job["prompts"], params, speculation=speculation(job["k"])
        )
        seconds = time.perf_counter() - started
        tokens = [result.tokens for result in results]
        digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
        answer = {"seconds": seconds, "tokens": sum(map(len, tokens)), "digest": digest}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
