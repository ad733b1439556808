"""The result file of `make vllm-test`: tables from what the parts left under benchmarks/.vllm/."""

from __future__ import annotations

import json
from functools import cache
from math import sqrt
from statistics import variance
from typing import Any

import report
from vllm_served import WORK, Figures

from outrider import LLM
from outrider.engine.request import Request, Speculation
from outrider.prove.endpoint import Output, examine_ranks
from outrider.prove.identity import NEAR_TIE, explain
from outrider.sampling import SamplingParams

Rows = list[dict[str, Any]]
HEADS_AGREE = 0.02
REPAIRED = ", norm repaired"


def load(name: str) -> Figures:
    file = WORK / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


@cache
def plain_engine() -> LLM:
    return LLM("bundled", dtype="float32", num_draft_tokens=0)


def compare(work: Figures, theirs: list[Any], ours: list[Any]) -> tuple[int, int, int]:
    """Outputs that are identical, part at a near-tie, differ otherwise."""
    same = ties = other = 0
    for prompt, mine, yours in zip(work["prompts"], ours, theirs, strict=True):
        if mine == yours:
            same += 1
            continue
        params = SamplingParams(max_tokens=work["max_tokens"], ignore_eos=True)
        request = Request("explain", prompt, params, Speculation(num_draft_tokens=0), 0)
        found = explain(plain_engine().engine, request, 0, mine, yours)
        if found is not None and found.margin < 10 * NEAR_TIE:  # two engines round differently
            ties += 1
        else:
            other += 1
    return same, ties, other


def length(found: Figures) -> float:
    """Tokens of a step with drafts, the correction or bonus token included; over all requests."""
    drafts, accepted = (
        sum(value) if isinstance(value, list) else value
        for value in (found["drafts"], found["accepted"])
    )
    return 1 + accepted / drafts if drafts else 1.0


def spread(found: Figures, num_seeds: int) -> float:
    """The standard error of accepted tokens per step, from how much seeds of one prompt differ.

    The requests are all prompts with the first seed, all with the second and so on.
    """
    drafts, accepted = found["drafts"], found["accepted"]
    mean = sum(accepted) / sum(drafts)
    beyond = [a - mean * d for a, d in zip(accepted, drafts, strict=True)]
    num_prompts = len(beyond) // num_seeds
    prompts = [beyond[first::num_prompts] for first in range(num_prompts)]
    return sqrt(num_seeds * sum(variance(seeds) for seeds in prompts)) / sum(drafts)


def per_pass(found: Figures) -> float:
    num_tokens = sum(len(tokens) for tokens in found["tokens"])
    return float(num_tokens / (num_tokens - found["accepted"]))


def greedy(name: str, engines: Figures, ours: Figures, works: Figures) -> Rows:
    rows = []
    for drafter, engine in engines.items():
        if "error" in engine:
            rows.append(row(drafter, f"not loaded: {engine['error']}"))
            continue
        for key in (name, f"{name} repaired"):
            if key not in engine["works"]:
                continue
            got, mine = engine["works"][key], ours.get(drafter, {}).get(name)
            plain = ours["plain"][name]["tokens"]
            same, ties, other = compare(works[name], got["tokens"], plain)
            identical = f"{same} of {len(plain)}"
            if ties or other:
                identical += f", {ties} near-ties, {other} different"
            shown = drafter if key == name else drafter + REPAIRED
            rows.append(row(shown, identical, got, mine))
    return rows


def row(drafter: str, identical: str, got: Any = None, mine: Any = None) -> dict[str, Any]:
    return {
        "drafter": drafter,
        "identical": identical,
        "accepted / drafted": f"{got['accepted']} / {got['drafted']}" if got else "",
        "tokens per pass": per_pass(got) if got else "",
        "length": length(got) if got else "",
        "native length": length(mine) if mine else "",
        "ratio": length(got) / length(mine) if got and mine else "",
    }


def write_heads() -> None:
    """The result file of part `heads`. SystemExit if vLLM accepts another number of tokens."""
    theirs, ours = load("heads"), load("heads-native")
    works = {work["name"]: work for work in load("heads-job")["works"]}
    tables = {
        f"greedy, {name}": greedy(name, theirs["engines"], ours, works) for name in ("code", "edit")
    }
    notes = (
        f"vLLM {theirs['version']} (CPU build) and our engine draft with the same exported folders "
        "on the bundled target in float32. Lengths are tokens of a step with drafts, the "
        "correction or bonus token included. 'Norm repaired' replaces vLLM's CPU kernel of stacked "
        "RMSNorm weights, which is wrong and which only DFlash uses. The ratio of lengths must be "
        f"within {HEADS_AGREE:.0%} of 1; for DFlash, with that kernel repaired."
    )
    report.write("vllm-heads", "Exported heads in vLLM", tables, notes)
    wrong = [
        f"{row['drafter']} ({title})"
        for title, rows in tables.items()
        for row in rows
        if row["drafter"].startswith("dflash") == row["drafter"].endswith(REPAIRED)
        and not (row["ratio"] and abs(row["ratio"] - 1) <= HEADS_AGREE)
    ]
    if wrong:
        raise SystemExit(f"vLLM does not accept what we accept of {', '.join(wrong)}")


def sampled(engines: Figures, ours: Figures, works: Figures) -> Rows:
    """Acceptance under the same distribution, with vLLM's kernels repaired."""
    rows = []
    for drafter, engine in engines.items():
        name = next((n for n in engine.get("works", {}) if n.startswith("sampled")), None)
        if name is None:
            continue
        got, mine, num_seeds = engine["works"][name], ours[drafter][name], works[name]["seeds"]
        theirs, own = length(got) - 1, length(mine) - 1
        # Both sides draw as much; the spread is taken from ours, which counts by request.
        error = sqrt(2) * spread(mine, num_seeds)
        rows.append(
            {
                "drafter": drafter,
                "accepted / drafted": f"{got['accepted']} / {got['drafted']}",
                "length": 1 + theirs,
                "native length": 1 + own,
                "ratio": (1 + theirs) / (1 + own),
                "95 % of it": f"± {1.96 * error / (1 + own):.3f}",
                "ratio of accepted drafts": theirs / own,
                "95 % of that": f"± {1.96 * error / own:.3f}",
            }
        )
    return rows


def sampled_works(works: Figures) -> Rows:
    """Whether vLLM's tokens with a draft model have the distribution of its logprobs."""
    rows = []
    for name, kernels in (("drawn", "as they are"), ("drawn repaired", "repaired")):
        got = works[name]
        outputs = [
            Output([str(token) for token in tokens], [], tops)
            for tokens, tops in zip(got["tokens"], got["tops"], strict=True)
        ]
        accepted = f"{got['accepted']} / {got['drafted']}"
        found = examine_ranks(outputs).found
        rows.append({"CPU kernels": kernels, "accepted / drafted": accepted, "found": found})
    return rows


def look_ups(engines: Figures) -> Rows:
    """What our proposer classes gain over vLLM's own n-gram on edits."""
    names = ("ngram", "ngram of ours", "suffix of ours", "hybrid of ours")
    found = {name: engines[name]["works"]["edit"] for name in names if "works" in engines[name]}
    base = found["ngram"]
    return [
        {
            "proposer": f"{name} and predictions" if name.startswith("hybrid") else name,
            "accepted / drafted": f"{got['accepted']} / {got['drafted']}",
            "tokens per pass": per_pass(got),
            "of vLLM's n-gram": per_pass(got) / per_pass(base),
        }
        for name, got in found.items()
    ]


def parallel(ours: Figures, works: Figures) -> Rows:
    rows = []
    for drafter, engine in load("parallel").get("engines", {}).items():
        if "error" in engine:
            rows.append({"drafter": drafter, "identical": engine["error"], "length": ""})
            continue
        got = engine["works"]["edit"]
        same, ties, other = compare(works["edit"], got["tokens"], ours["plain"]["edit"]["tokens"])
        shown = f"{same} of {len(got['tokens'])}, {ties} near-ties, {other} different"
        rows.append({"drafter": drafter, "identical": shown, "length": length(got)})
    return rows


def proven(found: Figures) -> Rows:
    return [
        {"speculation": name, "check": check["name"], "found": check["found"]}
        for name, record in found.items()
        for check in record["checks"]
    ]


def write() -> None:
    theirs, ours = load("engines"), load("native")
    engines = theirs["engines"]
    works = {work["name"]: work for work in load("engines-job")["works"]}
    tables = {f"greedy, {name}": greedy(name, engines, ours, works) for name in ("code", "edit")}
    tables["temperature 1, code, vLLM's CPU kernels repaired"] = sampled(engines, ours, works)
    if "works" in engines["draft-model"]:
        tables["temperature 1, code, draft model"] = sampled_works(engines["draft-model"]["works"])
    tables["our look-ups and vLLM's n-gram, greedy, edit"] = look_ups(engines)
    tables["tensor parallel 2, greedy, edit"] = parallel(ours, works)
    served, proofs = load("served"), load("proven")
    if killed := proofs.pop("killed", None):
        served["worker killed in mid-stream, no restarts: the stream ends with"] = killed["stream"]
        served["exit code then"] = killed["exit"]
    tables["served"] = [{"what": what, "found": str(value)} for what, value in served.items()]
    tables["outrider prove --endpoint"] = proven(proofs)
    tables["accepted by vLLM's argument parser, not run here"] = [
        {"command line": name, "parsed": json.dumps(found).replace(str(WORK.parents[1]) + "/", "")}
        for name, found in theirs["parsed"].items()
    ]
    code, hot = works["code"], works["sampled"]
    notes = (
        f"vLLM {theirs['version']} (CPU build), bundled target in float32, prompts from packages "
        f"that no bundled model was trained on: {len(code['prompts'])} of each kind for "
        f"{code['max_tokens']} tokens greedily; at temperature 1 {len(hot['prompts'])} requests "
        f"(every prompt {hot['seeds']} times; medusa and dflash half of them) for "
        f"{hot['max_tokens']} tokens. K = 4 (Medusa and "
        "DFlash: as many as the head has). Lengths are tokens of a step with drafts, the "
        "correction or bonus token included; tokens per pass count all steps of vLLM. vLLM drafts "
        "beyond the end of an output and counts what is accepted there; the native engine is "
        "counted alike. Identity is against the native engine's plain decoding. DFlash heads are "
        "the export, without Markov bias, on both sides. At temperature 1 both sides use the ratio "
        "rule with sampled drafts (draft-model, eagle3, dflash) or deterministic ones; intervals "
        "come from how much seeds of one prompt differ. vLLM's n-gram is another algorithm than "
        "ours. 'Repaired' replaces vLLM's two wrong CPU kernels (temperatures of "
        "draft positions, stacked RMSNorm weights); without the repair its samples have not the "
        "distribution of its logprobs, and `outrider serve --backend vllm` refuses to sample."
    )
    report.write("vllm", "Outrider and vLLM", {k: v for k, v in tables.items() if v}, notes)
