"""Heads in every layout that they are exported to: acceptance length and speed: `heads`.

    python benchmarks/heads.py [--quick] [--out FOLDER]

The bundled heads were trained on the same target and text (`benchmarks/family.py`). One engine
holds them all, and requests name them; all contenders take turns, step by step. Each layout of a
head must draft alike; only what a layout has no form for may be missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import report

from outrider.bench.contenders import PLAIN, Ours, make_jobs, plain
from outrider.bench.measure import measure
from outrider.bench.workloads import CATEGORIES, Prompt, load_category, load_workload
from outrider.engine.build import EngineConfig, build
from outrider.engine.request import Speculation
from outrider.export.gguf import export_gguf
from outrider.export.heads import export_head
from outrider.model.bundled import bundled_path
from outrider.policy.fixed import FixedPolicy
from outrider.sampling import SamplingParams

K = 4
CHAINS: dict[str, object] = {"children": 1}
Drafts = dict[tuple[int, float, int], list[int]]
LAYOUTS = {
    "eagle3": ("vllm", "speculators", "specforge", "gguf"),
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
            if layout == "gguf":
                out = out.with_suffix(".gguf")
                export_gguf(bundled_path(kind), bundled_path(), out)
            else:
                export_head(bundled_path(kind), bundled_path(), out, layout)
            found[f"{kind} {layout}"] = str(out)
    return found


def drafts_by_start(
    config: EngineConfig, kind: str, weights: str, prompts: Sequence[Prompt], tokens: int
) -> tuple[Drafts, float]:
    """The chain drafted after each beginning of each output, and the median seconds of K drafts."""
    options: dict[str, object] = {"weights": weights} | ({} if kind == "dflash" else CHAINS)
    engine = build(replace(config, proposer_options={kind: options}))
    found: Drafts = {}
    seconds = []
    for number, prompt in enumerate(prompts):
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=number)
            request, length = engine.add(prompt.ids(engine.tokenizer), params), 0
            for step in engine.run([request]):
                for event in step.events:
                    found[number, temperature, length] = event.draft_tokens
                    length += len(event.tokens)
                    if len(event.draft_tokens) == K:
                        seconds.append(step.timing.draft_s)
    return found, median(seconds)


def agreement(
    name: str, config: EngineConfig, kind: str, prompts: Sequence[Prompt], tokens: int
) -> list[dict[str, object]]:
    """Drafts with rounded weights beside those in float32, each after the same tokens."""
    exact, exact_s = drafts_by_start(config, kind, "float32", prompts, tokens)
    rows: list[dict[str, object]] = []
    for weights in ("int8", "bfloat16"):
        rounded, seconds = drafts_by_start(config, kind, weights, prompts, tokens)
        same = compared = 0
        for start in exact.keys() & rounded.keys():
            for a, b in zip(exact[start], rounded[start], strict=False):
                compared += 1
                if a != b:
                    break  # what follows was drafted after other tokens
                same += 1
        rows.append(
            {
                "head": name,
                "weights": weights,
                "drafts compared": compared,
                "equal": f"{100 * same / compared:.2f} %",
                f"ms for {K} drafts": 1e3 * seconds,
                "float32's time over it": exact_s / seconds,
            }
        )
    return rows


def agreements(prompts: Sequence[Prompt], tokens: int) -> list[dict[str, object]]:
    """Of the bundled heads on code, and of SmolLM2's on chats of every kind."""
    config = EngineConfig(num_draft_tokens=K, kv_tokens=4096, max_ahead_steps=1)
    rows = []
    for kind in LAYOUTS:
        bundled = replace(config, draft_model=f"bundled:{kind}")
        rows += agreement(kind, bundled, kind, prompts, tokens)
    chats = [load_category(name, 1).prompts[0] for name in CATEGORIES][: len(prompts)]
    chatting = replace(config, model="smollm2")
    return rows + agreement("eagle3 of smollm2", chatting, "eagle3", chats, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look: few prompts, one repeat")
    report.add_out(parser)
    wanted = parser.parse_args()
    prompts, repeats, tokens = (2, 1, 32) if wanted.quick else (10, 4, 96)
    texts, rows = load_workload("code", prompts).prompts, []
    with TemporaryDirectory() as root:
        folders = exported(Path(root))
        drafters = tuple(folders.values())
        config = EngineConfig(num_draft_tokens=K, kv_tokens=4096, other_drafters=drafters)
        engine = build(config)
        jobs = make_jobs(engine, texts, tokens)
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
    notes = (
        "The bundled heads were trained equally long on the same target and text. z-lab's layout "
        "of DFlash has no form for the Markov bias, so that these exports draft without it. Medusa "
        "and EAGLE-3 draft trees of K nodes. The second table has chains, greedy and at "
        "temperature 1, of the bundled heads on code and of SmolLM2's on chats of eight kinds."
    )
    tables = {
        f"code, greedy, K = {K}": rows,
        "rounded weights beside float32, same tokens": agreements(texts, tokens),
    }
    report.write("heads", "Heads by layout", tables, notes, wanted.out)


if __name__ == "__main__":
    main()
