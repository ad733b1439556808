"""Many prompts in one batch: continuous batching, one result per prompt, in order.

python examples/batch_generation.py [--prompts 8] [--max-tokens 48]
"""

from __future__ import annotations

import argparse

from outrider import LLM

PROMPTS = ["def add(a, b):", "class Stack:", "import json\n", "def is_prime(n):"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    chosen = parser.parse_args(arguments)

    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(chosen.prompts)]
    llm = LLM("bundled", num_draft_tokens="auto")  # drafts less as the batch grows
    for prompt, result in zip(
        prompts, llm.generate(prompts, max_tokens=chosen.max_tokens), strict=True
    ):
        first_line = result.text.strip().partition("\n")[0]
        print(f"{prompt.strip()!r}: {first_line!r} ({len(result.tokens)} tokens)")


if __name__ == "__main__":
    main()
