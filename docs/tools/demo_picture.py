"""Draws docs/demo.svg: the last picture of `outrider demo`, for the README.

    python docs/tools/demo_picture.py [MODEL] [--draft-model MODEL]

It runs the races of the demo on this machine and renders the demo's own view. Run it on a quiet
machine.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console

from outrider.cli.demo import conclude, has_template, plan, race_rounds
from outrider.cli.demo_view import Stage
from outrider.llm import LLM
from outrider.origins import spelling
from outrider.sampling import SamplingParams

PICTURE = Path(__file__).parents[1] / "demo.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--draft-model")
    parser.add_argument("--output", type=Path, default=PICTURE)
    options = parser.parse_args()
    llm = LLM(options.model, draft_model=options.draft_model, max_sequences=2, prefix_caching=False)
    console = Console(
        record=True, file=io.StringIO(), width=104, height=34, force_terminal=True, highlight=False
    )
    rounds = plan(None, None, is_chat=has_template(llm.engine))
    stage = Stage(console, spelling(llm.engine.tokenizer), len(rounds))
    params = SamplingParams(seed=1, max_tokens=128)
    outcomes, _ = race_rounds(llm.engine, rounds, params, stage)
    console.print(stage.frame())
    conclude(outcomes, console, llm.engine)
    picture = console.export_svg(title="outrider demo")
    # rich names a web font; a picture in a repository must not load anything.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    options.output.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
