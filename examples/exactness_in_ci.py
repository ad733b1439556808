"""For your own test suite: fails the build if speculation changes an output.

python examples/exactness_in_ci.py [MODEL] [--draft-model MODEL]     exit code 1 if it does
"""

from __future__ import annotations

import argparse
import sys

from outrider import LLM, SamplingParams, Speculation

PROMPTS = ["def add(a, b):", "class Stack:", "import os\n"]
SETTINGS = [
    SamplingParams(max_tokens=48),
    SamplingParams(max_tokens=48, temperature=1.0, seed=1),
    SamplingParams(max_tokens=48, temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=2),
]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--draft-model")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    chosen = parser.parse_args(arguments)

    llm = LLM(chosen.model, draft_model=chosen.draft_model)
    plain = Speculation(proposer=None)
    differences = compared = 0
    for params in SETTINGS:
        for prompt in PROMPTS[: chosen.prompts]:
            drafted = llm.generate(prompt, params)
            expected = llm.generate(prompt, params, speculation=plain)
            compared += 1
            if drafted.tokens != expected.tokens:
                differences += 1
                print(f"differs: {prompt!r} with {params}", file=sys.stderr)
    print(f"{compared} outputs compared with plain decoding, {differences} different")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
