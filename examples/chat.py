"""A conversation with memory and the model's own chat template, if it has one.

The bundled model only completes code. With a chat model:

python examples/chat.py --model my/target [--draft-model my/draft]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from outrider import LLM


def framed(llm: LLM, messages: list[dict[str, str]]) -> str:
    """The messages as one prompt; for a base model one line per message."""
    template = getattr(llm.engine.tokenizer, "chat_template", None)
    if template is None:
        return "\n".join(message["content"] for message in messages) + "\n"
    from jinja2 import Environment

    made: str = (
        Environment().from_string(template).render(messages=messages, add_generation_prompt=True)
    )
    return made


def main(arguments: list[str] | None = None, lines: Iterable[str] = sys.stdin) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--draft-model")
    parser.add_argument("--max-tokens", type=int, default=64)
    chosen = parser.parse_args(arguments)

    llm = LLM(chosen.model, draft_model=chosen.draft_model)
    messages: list[dict[str, str]] = []
    for line in lines:
        messages.append({"role": "user", "content": line.rstrip("\n")})
        answer = ""
        # The prefix cache has the earlier turns, so only the new one is computed.
        for event in llm.stream(framed(llm, messages), max_tokens=chosen.max_tokens):
            answer += event.text
            print(event.text, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
