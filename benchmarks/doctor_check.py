"""What the doctor predicts against what then happens, by workload and batch size.

    python benchmarks/doctor_check.py [--workloads code,edit,json,hot] [-o FILE]

The same as `outrider doctor --prompts FILE --check` with the shipped workloads.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

from outrider.bench.contenders import make_jobs
from outrider.bench.report import Result, Row
from outrider.bench.workloads import load_workload
from outrider.doctor.advice import advise
from outrider.doctor.check import measure_advice
from outrider.doctor.curves import SURVIVAL_TOKENS, measure_curves
from outrider.llm import LLM
from outrider.options import read_names

RESULTS = Path(__file__).parent / "results"
PROPOSERS = ["draft-model", "ngram"]
COLUMNS = ("workload", "batch", "proposer", "num_draft_tokens", "predicted", "measured", "error")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workloads", default="code,edit,json,hot")
    parser.add_argument("--quick", action="store_true", help="batch 1 only")
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "doctor-prediction")
    options = parser.parse_args()
    engine = LLM("bundled", prefix_caching=False).engine
    rows: list[Row] = []
    for name in read_names(options.workloads):
        jobs = make_jobs(engine, load_workload(name, 8).prompts, SURVIVAL_TOKENS)
        advice = advise(measure_curves(engine, jobs, PROPOSERS, lambda what: None))
        if options.quick:
            del advice[1:]
        measured = measure_advice(engine, jobs, advice, lambda what: None)
        for entry in advice:
            got = measured.get(entry.batch)
            if got is not None:
                rows.append(
                    {
                        "workload": name,
                        "batch": entry.batch,
                        "proposer": entry.proposer,
                        "num_draft_tokens": entry.num_draft_tokens,
                        "predicted": entry.predicted_speedup,
                        "measured": got,
                        "error": entry.predicted_speedup / got - 1.0,
                    }
                )
    errors = [abs(row["error"]) for row in rows]
    if not errors:
        sys.exit("plain decoding was advised everywhere: nothing to compare")
    notes = (
        "`predicted`: the doctor's promise for the proposer and K it advises; `measured`: what "
        "these give against plain decoding; `error`: predicted / measured - 1. Batch sizes for "
        "which plain decoding is advised are left out. "
        f"Median |error| {median(errors):.3f}, largest {max(errors):.3f}, "
        f"within 10 %: {sum(error <= 0.1 for error in errors)} of {len(errors)}."
    )
    result = Result("doctor", "Predicted and measured speedup", rows, COLUMNS, notes)
    print(result.markdown())
    result.write(options.out)


if __name__ == "__main__":
    main()
