"""Fine-tune a drafter on your own text and see its acceptance before and after.

python examples/train_draft.py FILE... --out my-draft [--steps 200]
"""

from __future__ import annotations

import argparse

from outrider.cli.app import app
from outrider.cli.errors import run


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    chosen = parser.parse_args(arguments)

    # What `outrider train draft` does on the command line; it prints both figures.
    command = ["train", "draft", *chosen.files, "--from", "bundled:draft", "--out", chosen.out]
    command += ["--steps", str(chosen.steps), "--batch", str(chosen.batch)]
    command += ["--length", str(chosen.length), "--device", "cpu"]
    assert run(app, command) == 0
    print(f"use it: outrider generate --draft-model {chosen.out} -p 'def main('")


if __name__ == "__main__":
    main()
