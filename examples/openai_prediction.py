"""OpenAI's client with `prediction`: drafts for an edited file come from the old one.

Start a server first (`outrider serve`), then run

python examples/openai_prediction.py [--url http://127.0.0.1:8000]
"""

from __future__ import annotations

import argparse

from openai import OpenAI

OLD = '''def area(width, height):
    """The area of a rectangle."""
    return width * height


def perimeter(width, height):
    """The perimeter of a rectangle."""
    return 2 * (width + height)
'''


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=96)
    chosen = parser.parse_args(arguments)

    with OpenAI(base_url=f"{chosen.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": OLD + "\n\n" + OLD.partition("\n")[0]}],
            prediction={"type": "content", "content": OLD.partition("\n")[2]},
            max_tokens=chosen.max_tokens,
            temperature=0,
        )
    print(answer.choices[0].message.content)
    assert answer.usage is not None
    counted = answer.usage.completion_tokens_details
    assert counted is not None
    print(
        f"[{counted.accepted_prediction_tokens} tokens of the prediction were accepted, "
        f"{counted.rejected_prediction_tokens} rejected]"
    )


if __name__ == "__main__":
    main()
