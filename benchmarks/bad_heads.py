"""Drafting heads with random weights under K = auto, beside plain decoding: `bad-heads`.

    python benchmarks/bad_heads.py [--quick] [--out FOLDER]

Such heads are never right, so that the policy should stop them. Every round begins with a policy
that knows nothing of the heads, and all contenders take turns, step by step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import report

from outrider.bench.contenders import Job, Ours, make_jobs, plain
from outrider.bench.measure import decode
from outrider.bench.statistics import estimate
from outrider.bench.workloads import CATEGORIES, Prompt, load_category, load_workload
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.policy.controller import AdaptivePolicy
from outrider.testing import write_tiny_head

EAGLE: dict[str, Any] = {"intermediate_size": 1024, "head_dim": 64}
# Of the size of the bundled heads.
HEADS: dict[str, dict[str, dict[str, Any]]] = {
    "bundled": {
        "eagle3": EAGLE
        | {"taps": (2, 4, 6), "num_attention_heads": 8, "num_key_value_heads": 4}
        | {"draft_vocab_size": 4096},
        "medusa": {},
        "dflash": EAGLE | {"taps": (2, 4, 6), "num_attention_heads": 8, "num_key_value_heads": 4},
    },
    "smollm2": {
        "eagle3": EAGLE
        | {"taps": (2, 15, 27), "num_attention_heads": 9, "num_key_value_heads": 3}
        | {"draft_vocab_size": 6144},
    },
}
WIDTH = {"bundled": 512, "smollm2": 576}
VOCAB = {"bundled": 8192, "smollm2": 49152}


def prompts(model: str, count: int) -> list[Prompt]:
    if model == "bundled":
        return load_workload("code", count).prompts
    return [load_category(name, 1).prompts[0] for name in CATEGORIES][:count]


def compare(
    engine: Engine, names: list[str], jobs: list[Job], repeats: int
) -> list[dict[str, Any]]:
    own = engine.policy
    assert isinstance(own, AdaptivePolicy)
    ratios: dict[str, list[float]] = {name: [] for name in names}
    identical = dict.fromkeys(ratios, 0)
    steps, drafting = dict.fromkeys(ratios, 0), dict.fromkeys(ratios, 0)
    for repeat in range(repeats + 1):
        contenders = [plain(engine)]
        for name in ratios:
            wish = Speculation(proposer=name, num_draft_tokens="auto")
            policy = AdaptivePolicy(measure=own.measure, evenly=own.evenly)
            contenders.append(Ours(name, engine, wish, policy))
        base, *runs = decode(contenders, jobs, 1)
        if repeat == 0:  # warms up
            continue
        for name, run in zip(ratios, runs, strict=True):
            assert run.stats is not None
            ratios[name].append(run.num_tokens / run.seconds * base.seconds / base.num_tokens)
            pairs = zip(run.outputs, base.outputs, strict=True)
            identical[name] += sum(ours == theirs for ours, theirs in pairs)
            steps[name] += run.stats.num_steps
            drafting[name] += run.stats.num_drafted
    rows = []
    for name, found in ratios.items():
        gain = estimate(found)
        rows.append(
            {
                "head": name,
                "x plain": gain.value,
                "low": gain.low,
                "high": gain.high,
                "drafts per step": drafting[name] / steps[name],
                "same text": f"{identical[name]}/{len(jobs) * repeats}",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look: few prompts, one repeat")
    report.add_out(parser)
    wanted = parser.parse_args()
    count, repeats, tokens = (2, 1, 32) if wanted.quick else (8, 8, 128)
    tables = {}
    for model, heads in HEADS.items():
        with TemporaryDirectory() as root:
            for kind, sizes in heads.items():
                write_tiny_head(
                    Path(root) / kind,
                    kind,
                    hidden_size=WIDTH[model],
                    vocab_size=VOCAB[model],
                    **sizes,
                )
            first, *others = (str(Path(root) / kind) for kind in heads)
            config = EngineConfig(
                model=model, draft_model=first, other_drafters=tuple(others), kv_tokens=8192
            )
            engine = build(config)
        jobs = make_jobs(engine, prompts(model, count), tokens)
        tables[f"{model}, greedy, batch 1"] = compare(engine, list(heads), jobs, repeats)
    notes = (
        "Heads with random weights, of the size of the bundled ones. Every round begins with a "
        "policy that knows nothing of them; the clock starts when the prompt is read."
    )
    report.write("bad-heads", "Heads that are never right, K = auto", tables, notes, wanted.out)


if __name__ == "__main__":
    main()
