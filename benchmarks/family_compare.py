"""The shipped family beside a first try and beside a rebuild of itself.

    python benchmarks/family_compare.py --measure FOLDER OUT    # on a GPU: a first try's figures
    python benchmarks/family_compare.py --first-try OUT --rebuild RECORDS --seconds N

FOLDER holds target, draft and mid of the first try; RECORDS the JSON records that family/build.py
wrote, N the time that `build.py && card.py` took. All figures come from the same code with as many
rows: each drafter against the target of its own family, law by law, on packages never trained on
and on what the target itself writes after prompts from these.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import report

FAMILY = Path(__file__).parents[1] / "family"
sys.path.insert(0, str(FAMILY))


def measure_family(folder: Path, out: Path) -> None:
    """Writes OUT/{draft,mid}.json, as family/build.py records them."""
    from build import Build, measure_drafter  # type: ignore[import-not-found]

    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(FAMILY / ".work" / "heldout.txt.xz", out)
    shutil.copytree(folder / "target", out / "tokenizer", dirs_exist_ok=True)
    build = Build(argparse.Namespace(tiny=False, work=out, out=folder, rows=64))
    for name in ("draft", "mid"):
        results = measure_drafter(build, name)
        (out / f"{name}.json").write_text(json.dumps({"results": results}))
        print(name, json.dumps(results), flush=True)


def beside(label: str, records: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Per drafter and kind of text: the other build's figures and the shipped one's."""
    rows = []
    for name in names:
        other = json.loads((records / f"{name}.json").read_text())["results"]
        shipped = json.loads((FAMILY / "provenance" / f"{name}.json").read_text())["results"]
        for kind, figures in shipped.items():
            if not isinstance(figures, dict) or "alpha" not in figures:
                continue
            row: dict[str, Any] = {"drafter": name, "text": kind.replace("_", " ")}
            for measure in ("alpha", "agreement"):
                row[f"{measure}, {label}"] = round(other[kind][measure], 3)
                row[f"{measure}, shipped"] = round(figures[measure], 3)
                row[f"{measure}, gain"] = round(figures[measure] - other[kind][measure], 3)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--measure", type=Path, nargs=2, metavar=("FOLDER", "OUT"))
    parser.add_argument("--first-try", type=Path, metavar="OUT")
    parser.add_argument("--rebuild", type=Path, metavar="RECORDS")
    parser.add_argument("--seconds", type=float, metavar="N")
    options = parser.parse_args()
    if options.measure:
        measure_family(*options.measure)
        return
    machine = json.loads((options.rebuild / "target.json").read_text())["environment"]
    report.write(
        "family-compare",
        "The family beside a first try and a rebuild",
        {
            "A first try and the shipped family": beside(
                "first try", options.first_try, ("draft", "mid")
            ),
            "The shipped family and its rebuild": beside(
                "rebuilt", options.rebuild, ("draft", "mid", "eagle3", "dflash", "medusa")
            ),
        },
        "The first try: the same sizes, 90 seconds of plain forward KL on text. The rebuild: "
        "`python family/build.py && python family/card.py`, all stages in one go from the fetched "
        f"text, {options.seconds / 60:.1f} minutes on one {machine['device']} (torch "
        f"{machine['torch']}). Its heads saw all of the text, the shipped ones a sixth. alpha: "
        "mean of sum min(p, q) at temperature 1; agreement: of the greedy tokens.",
    )


if __name__ == "__main__":
    main()
