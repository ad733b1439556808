"""Prints confirmed text with accepted drafts marked; confirmed text never changes.

python examples/streaming.py [--prompt TEXT] [--max-tokens 80]
"""

from __future__ import annotations

import argparse

from outrider import LLM


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", default="class Stack:")
    parser.add_argument("--max-tokens", type=int, default=80)
    chosen = parser.parse_args(arguments)

    llm = LLM("bundled")
    print(chosen.prompt, end="")
    drafted = accepted = 0
    for event in llm.stream(chosen.prompt, max_tokens=chosen.max_tokens):
        print(event.text, end="", flush=True)
        drafted += len(event.draft_tokens)
        accepted += len(event.path)
    print(f"\n[{accepted} of {drafted} drafted tokens were accepted]")


if __name__ == "__main__":
    main()
