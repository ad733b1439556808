"""Requests of one batch, each with its own proposer and K; all give the text of plain decoding.

python examples/per_request_proposers.py [--max-tokens 64]
"""

from __future__ import annotations

import argparse

from outrider import LLM, SamplingParams, Speculation

PROMPT = "def area(width, height):\n    return width * height\n\n\ndef area("
CHOICES = {
    "plain": Speculation(proposer=None),
    "draft-model, K = 4": Speculation(proposer="draft-model", num_draft_tokens=4),
    "draft-tree, K = 8": Speculation(proposer="draft-tree", num_draft_tokens=8),
    "ngram, K = 8": Speculation(proposer="ngram", num_draft_tokens=8),
    "suffix, auto": Speculation(proposer="suffix", num_draft_tokens="auto"),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=64)
    chosen = parser.parse_args(arguments)

    engine = LLM("bundled").engine
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=chosen.max_tokens)
    ids = {name: engine.add(PROMPT, params, speculation=s) for name, s in CHOICES.items()}
    for _ in engine.run(list(ids.values())):
        pass
    results = {name: engine.collect(request) for name, request in ids.items()}
    for name, result in results.items():
        print(f"{name:20} {result.stats.tokens_per_pass:.2f} tokens per pass")
    texts = {result.text for result in results.values()}
    print(f"{len(results)} requests, {len(texts)} text")
    assert len(texts) == 1


if __name__ == "__main__":
    main()
