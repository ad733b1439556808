"""Heads in every layout that they are exported to: acceptance length and speed: `heads`.

    python benchmarks/heads.py [--quick] [--out FOLDER]

The bundled heads were trained on the same target and text (`benchmarks/family.py`). One engine
holds them all, and requests name them; all contenders take turns, step by step. Each layout of a
head must draft alike; only what a layout has no form for may be missing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import report

from outrider.bench.contenders import PLAIN, Ours, make_jobs, plain
from outrider.bench.measure import measure
from outrider.bench.workloads import load_workload
from outrider.engine.build import EngineConfig, build
from outrider.engine.request import Speculation
from outrider.export.heads import export_head
from outrider.model.bundled import bundled_path
from outrider.policy.fixed import FixedPolicy

K = 4
LAYOUTS = {
    "eagle3": ("vllm", "speculators", "specforge"),
    "dflash": ("vllm", "speculators", "specforge"),
    "medusa": ("vllm", "specforge"),
}


def exported(root: Path) -> dict[str, str]:
    """Folders of all heads in all layouts, by "kind layout"; "as trained" is the bundled folder."""
    found = {}
    for kind, layouts in LAYOUTS.items():
        found[f"{kind} as trained"] = f"bundled:{kind}"
        for layout in layouts:
            out = root / f"{kind}-{layout}"
            export_head(bundled_path(kind), bundled_path(), out, layout)
            found[f"{kind} {layout}"] = str(out)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look: few prompts, one repeat")
    report.add_out(parser)
    wanted = parser.parse_args()
    prompts, repeats, tokens = (2, 1, 32) if wanted.quick else (16, 5, 128)
    rows = []
    with TemporaryDirectory() as root:
        folders = exported(Path(root))
        drafters = tuple(folders.values())
        config = EngineConfig(num_draft_tokens=K, kv_tokens=4096, other_drafters=drafters)
        engine = build(config)
        jobs = make_jobs(engine, load_workload("code", prompts).prompts, tokens)
        contenders = [
            plain(engine),
            *(
                Ours(name, engine, Speculation(proposer=by, num_draft_tokens=K), FixedPolicy())
                for name, by in zip(folders, engine.drafters, strict=True)
            ),
        ]
        records = measure(contenders, jobs, repeats=repeats)
    for name in folders:
        record = records[name]
        assert record.stats is not None
        gain = record.speedup(records[PLAIN])
        rows.append(
            {
                "head": name,
                "tokens per pass": record.stats.tokens_per_pass,
                "x plain": gain.value,
                "low": gain.low,
                "high": gain.high,
                "same text": record.exactness,
            }
        )
    report.write("heads", "Heads by layout", {f"code, greedy, K = {K}": rows}, "", wanted.out)


if __name__ == "__main__":
    main()
