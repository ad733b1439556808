"""The shipped family beside a first try and beside a rebuild of itself.

    python benchmarks/family_compare.py --measure FOLDER OUT.json   # each family; a GPU helps
    python benchmarks/family_compare.py [--first-try A.json --shipped B.json] \\
        [--rebuild RECORDS --seconds N]

FOLDER holds a family's target, draft and mid; RECORDS the JSON records that family/build.py wrote,
N the time that `build.py && card.py` took. Each drafter is compared with the target of its own
family, position by position, on packages never trained on and on what the target itself writes
after prompts from these.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import report

FAMILY = Path(__file__).parents[1] / "family"
PROMPT, LENGTH = 64, 512  # the first try knows no longer contexts
KINDS = {"held-out text": None, "own samples, T=1": 1.0, "own greedy text": 0.0}


def measure_family(folder: Path, num_rows: int) -> dict[str, dict[str, dict[str, float]]]:
    """drafter -> kind of text -> figures."""
    import torch

    from outrider.train.data import encode, read_documents, to_device
    from outrider.train.measure import measure, model_logits
    from outrider.train.models import load_model, load_tokenizer
    from outrider.train.sampler import generate_rows, prompts

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(folder / "target")
    target = load_model(folder / "target").to(device).eval()
    documents = read_documents([FAMILY / ".work" / "heldout.txt.xz"])
    stream = to_device(encode(documents, tokenizer, len(tokenizer)), device)
    heldout = prompts(stream, num_rows, LENGTH, 1).long()
    texts = {}
    for kind, temperature in KINDS.items():
        if temperature is None:
            texts[kind] = heldout
        else:
            warmth = torch.full((num_rows,), temperature, device=device)
            texts[kind] = generate_rows(target, heldout[:, :PROMPT], LENGTH, warmth, 0).long()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in ("draft", "mid"):
        drafter = load_model(folder / name).to(device).eval()
        both = model_logits(drafter), model_logits(target)
        found[name] = {
            kind: measure(*both, rows, skip=PROMPT).as_dict() for kind, rows in texts.items()
        }
    return found


def gains(first_try: Path, shipped: Path) -> list[dict[str, Any]]:
    before, after = (json.loads(path.read_text()) for path in (first_try, shipped))
    rows = []
    for name, kinds in before.items():
        for kind, figures in kinds.items():
            row: dict[str, Any] = {"drafter": name, "text": kind}
            for measure in ("alpha", "agreement"):
                now = after[name][kind][measure]
                row[f"{measure}, first try"] = round(figures[measure], 3)
                row[f"{measure}, shipped"] = round(now, 3)
                row[f"{measure}, gain"] = round(now - figures[measure], 3)
            rows.append(row)
    return rows


def rebuilt(records: Path) -> list[dict[str, Any]]:
    """Per drafter and kind of text: what both builds recorded."""
    rows = []
    for name in ("draft", "mid", "eagle3", "dflash", "medusa"):
        again = json.loads((records / f"{name}.json").read_text())["results"]
        shipped = json.loads((FAMILY / "provenance" / f"{name}.json").read_text())["results"]
        rows += [
            {"drafter": name, "text": kind.replace("_", " ")}
            | {
                f"{measure}, {label}": round(results[kind][measure], 3)
                for measure in ("alpha", "agreement")
                for label, results in (("shipped", shipped), ("rebuilt", again))
            }
            for kind in ("heldout_text", "own_samples", "own_greedy")
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--measure", type=Path, nargs=2, metavar=("FOLDER", "OUT"))
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--first-try", type=Path)
    parser.add_argument("--shipped", type=Path)
    parser.add_argument("--rebuild", type=Path, metavar="RECORDS")
    parser.add_argument("--seconds", type=float, metavar="N")
    options = parser.parse_args()
    if options.measure:
        folder, out = options.measure
        out.write_text(json.dumps(measure_family(folder, options.rows), indent=1))
        print(out.read_text())
        return
    tables: dict[str, list[dict[str, Any]]] = {}
    notes = "alpha: mean of sum min(p, q) at temperature 1; agreement: of the greedy tokens."
    if options.first_try:
        tables["A first try and the shipped family"] = gains(options.first_try, options.shipped)
        notes += (
            " The first try: the same sizes, 90 seconds of plain forward KL on text; "
            f"{options.rows} rows of {LENGTH} tokens, {PROMPT} of them prompt."
        )
    if options.rebuild:
        tables["The shipped family and its rebuild"] = rebuilt(options.rebuild)
        machine = json.loads((options.rebuild / "target.json").read_text())["environment"]
        notes += (
            " The rebuild: `python family/build.py && python family/card.py`, all stages in one go "
            f"from the fetched text, {options.seconds / 60:.1f} minutes on one {machine['device']} "
            f"(torch {machine['torch']}); its heads saw all of the text, the shipped ones a sixth."
        )
    report.write("family-compare", "The family beside a first try and a rebuild", tables, notes)


if __name__ == "__main__":
    main()
