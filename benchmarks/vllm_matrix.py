"""Outrider and vLLM against each other on the bundled models: `make vllm-test`.

    python benchmarks/vllm_matrix.py [PARTS...]   heads engines native parallel served proven report

vLLM's CPU build runs in an environment of its own (VLLM_VENV, .venv-vllm by default), one instance
at a time. Each part leaves its figures under benchmarks/.vllm/ (`vllm_served.py` has the ones that
need a server), `report` writes the result file. `heads` stands alone: it checks that vLLM accepts
as many tokens of our exported heads as we do, and writes a file of its own. Without arguments all
parts run, from scratch, in about twenty minutes with one core; SEEDS=4 in the environment takes
half of that and leaves wider intervals. A part that fails does not stop the others; the exit code
is then 1.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import vllm_report
import vllm_served
from vllm_served import TEXTS, VENV, WORK, Figures, keep

from outrider import LLM
from outrider.export.heads import export_head
from outrider.export.vllm import export_vllm
from outrider.integrations.vllm.mailbox import Mailbox
from outrider.integrations.vllm.mapping import Wish, command
from outrider.integrations.vllm.proposers import CLASSES
from outrider.model.bundled import bundled_path
from outrider.sampling import SamplingParams

K, LENGTH, NUM_PROMPTS, NUM_SEQUENCES = 4, 96, 8, 32
NUM_SEEDS = max(4, int(os.environ.get("SEEDS", "16")))  # of every prompt, at temperature 1
SAMPLED_LENGTH = 48
# Heads that accept little vary less.
SAMPLED = {"sampled": NUM_SEEDS, "sampled less": NUM_SEEDS // 2}
HEADS = ("medusa", "eagle3", "dflash")
EXPORTS = {"eagle3": ("vllm", "speculators", "specforge"), "dflash": ("vllm",), "medusa": ("vllm",)}
GREEDY = ["code", "edit"]


def records(name: str) -> list[Figures]:
    return [json.loads(line) for line in (TEXTS / f"{name}.jsonl").read_text().splitlines()]


def heads() -> dict[str, Figures]:
    """The bundled heads, exported, with the configuration that serves each."""
    found = {}
    for name in HEADS:
        file = WORK / f"{name}.json"
        if not file.exists():
            keep(name, export_vllm(bundled_path(name), bundled_path(), WORK / name))
        found[name] = json.loads(file.read_text())
    return found


def in_vllm(name: str, job: Figures) -> None:
    """Runs the worker; its result is kept under benchmarks/.vllm/NAME.json."""
    job = {"model": str(bundled_path()), "max_sequences": NUM_SEQUENCES, **job}
    keep(f"{name}-job", job)
    worker = Path(__file__).with_name("vllm_worker.py")
    files = [WORK / f"{name}-job.json", WORK / f"{name}.json"]
    subprocess.run([VENV / "bin/python", worker, *files], check=True)


def custom(name: str, k: int = K) -> Figures:
    return {"method": "custom_class", "model": CLASSES[name], "num_speculative_tokens": k}


# --- the work: the same for both sides ------------------------------------------------------------


def work(llm: LLM, name: str, texts: list[str], *, repaired: bool = False, **more: Any) -> Figures:
    given = {"temperature": 0.0, "max_tokens": LENGTH, "logprobs": None, **more}
    encoded = [llm.engine.tokenizer.encode(text) for text in texts]
    return {"name": name, "prompts": encoded, "repaired": repaired, **given}


def works(llm: LLM) -> list[Figures]:
    """Greedy and at temperature 1, with vLLM's CPU kernels as they are and repaired."""
    code, edit = ([r["prompt"] for r in records(name)] for name in GREEDY)
    greedy = {"code": code[:NUM_PROMPTS], "edit": edit[:NUM_PROMPTS]}
    hot: Figures = {"temperature": 1.0, "max_tokens": SAMPLED_LENGTH}
    drawn: Figures = {"logprobs": 5, "temperature": 1.0}
    return [
        *(work(llm, name, texts) for name, texts in greedy.items()),
        *(work(llm, f"{name} repaired", texts, repaired=True) for name, texts in greedy.items()),
        work(llm, "drawn", code, **drawn),
        work(llm, "drawn repaired", code, repaired=True, **drawn),
        *(
            work(llm, name, code * num_seeds, repaired=True, seeds=num_seeds, **hot)
            for name, num_seeds in SAMPLED.items()
        ),
    ]


def engines(exported: dict[str, Figures], mailbox: Path) -> dict[str, Figures]:
    """vLLM's configurations and what each has to do; its n-gram last (see the worker)."""
    draft = {"method": "draft_model", "model": str(bundled_path("draft"))}
    sampled = {"num_speculative_tokens": K, "draft_sample_method": "probabilistic"}
    window = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    return {
        "plain": {"config": None, "works": GREEDY},
        "draft-model": {
            "config": {**draft, **sampled},
            "works": [*GREEDY, "drawn", "drawn repaired", "sampled"],
        },
        "medusa": {"config": exported["medusa"], "works": [*GREEDY, "sampled less"]},
        "eagle3": {"config": exported["eagle3"], "works": [*GREEDY, "sampled"]},
        "dflash": {
            "config": exported["dflash"],
            "works": [*GREEDY, "code repaired", "edit repaired", "sampled less"],
        },
        "ngram of ours": {"config": custom("ngram"), "works": [*GREEDY, "sampled"]},
        "suffix of ours": {"config": custom("suffix"), "works": GREEDY},
        "hybrid of ours": {
            "config": custom("hybrid"),
            "works": ["edit"],
            "additional": {"outrider": {"predictions": str(mailbox)}},
        },
        "ngram": {
            "config": {"method": "ngram", "num_speculative_tokens": K, **window},
            "works": GREEDY,
        },
    }


def native(jobs: list[Figures], names: list[str], **config: Any) -> Figures:
    """The same work on our engine, batched as vLLM batches it."""
    # Heads know nothing of a cached prefix, and vLLM is asked to cache none.
    llm = LLM(
        "bundled",
        dtype="float32",
        max_sequences=NUM_SEQUENCES,
        prefix_caching=False,
        **config,
    )
    shared = set(names) & {*GREEDY, *SAMPLED}
    return {
        job["name"]: counted(llm, job, config["num_draft_tokens"])
        for job in jobs
        if job["name"] in shared
    }


def counted(llm: LLM, job: Figures, k: int) -> Figures:
    """Tokens, and drafts and accepted tokens of each request, counted as vLLM does.

    Near the end of an output our engine drafts no more than is asked for, vLLM goes on. So more
    is asked for here, and the steps that count are those that begin within vLLM's output.
    """
    length, ids = job["max_tokens"], []
    for number, prompt in enumerate(job["prompts"]):
        params = SamplingParams(
            temperature=job["temperature"], max_tokens=length + k, ignore_eos=True, seed=number
        )
        ids.append(llm.engine.add(prompt, params))
    tokens: dict[str, list[int]] = {request: [] for request in ids}
    drafts, accepted = dict.fromkeys(ids, 0), dict.fromkeys(ids, 0)
    for report in llm.engine.run(ids):
        for event in report.events:
            if len(tokens[event.request_id]) < length:
                drafts[event.request_id] += bool(event.draft_tokens)
                accepted[event.request_id] += len(event.path)
            tokens[event.request_id] += event.tokens
    for request in ids:
        llm.engine.collect(request)
    return {
        "tokens": [found[:length] for found in tokens.values()],
        "drafts": list(drafts.values()),
        "accepted": list(accepted.values()),
    }


def run_engines() -> None:
    """Every drafter in vLLM; what vLLM's parser makes of command lines."""
    plain = LLM("bundled", dtype="float32", num_draft_tokens=0)
    jobs, exported = works(plain), heads()
    mailbox = WORK / "predictions"
    mailbox.mkdir(exist_ok=True)
    for record in records("edit")[:NUM_PROMPTS]:
        encode = plain.engine.tokenizer.encode
        Mailbox(mailbox).put(encode(record["prompt"]), encode(record["prediction"]))
    lines, shown = command_lines()
    theirs = engines(exported, mailbox)
    in_vllm("engines", {"engines": theirs, "works": jobs, "command_lines": lines, "shown": shown})


def run_heads() -> None:
    """Every export that vLLM reads, in vLLM and on our engine, greedy: they must accept alike."""
    plain = LLM("bundled", dtype="float32", num_draft_tokens=0)
    jobs = [job for job in works(plain) if job["name"].split()[0] in GREEDY]
    names = [job["name"] for job in jobs]
    theirs: dict[str, Figures] = {}
    for kind, layouts in EXPORTS.items():
        served = heads()[kind]
        for layout in layouts:
            out = WORK / f"{kind}-{layout}-export"
            shutil.rmtree(out, ignore_errors=True)
            export_head(bundled_path(kind), bundled_path(), out, layout)
            config = {**served, "model": str(out)}
            some = names if kind == "dflash" else GREEDY
            theirs[f"{kind} {layout}"] = {"config": config, "works": some}
    in_vllm("heads", {"engines": theirs, "works": jobs})
    ours = {"plain": native(jobs, names, num_draft_tokens=0)}
    for name, engine in theirs.items():
        config = engine["config"]
        chains: Figures = {} if "dflash" in name else {name.split()[0]: {"children": 1}}
        ours[name] = native(
            jobs,
            names,
            draft_model=config["model"],
            num_draft_tokens=config["num_speculative_tokens"],
            verifier="token",
            proposer_options=chains,
        )
    keep("heads-native", ours)
    vllm_report.write_heads()


def run_native() -> None:
    """The same works on our engine, under the same rules."""
    job, exported = json.loads((WORK / "engines-job.json").read_text()), heads()
    chains: Figures = {
        "medusa": {"children": 1},
        "eagle3": {"children": 1},
        "suffix": {"tree": False, "shared_tokens": 0},
    }
    ratio: Figures = {"verifier": "token", "proposer_options": chains}
    ours: dict[str, Figures] = {
        "plain": {"num_draft_tokens": 0},
        "draft-model": {"draft_model": "bundled:draft", **ratio},
        "medusa": {"draft_model": "bundled:medusa", **ratio},
        "eagle3": {"draft_model": exported["eagle3"]["model"], **ratio},
        "dflash": {"draft_model": exported["dflash"]["model"], **ratio},
        "ngram of ours": {"proposer": "ngram", **ratio},
        "suffix of ours": {"proposer": "suffix", **ratio},
    }
    found = {}
    for name, config in ours.items():
        started = time.perf_counter()
        k = exported.get(name, {}).get("num_speculative_tokens", K)
        config = {"num_draft_tokens": k, **config}
        found[name] = native(job["works"], job["engines"][name]["works"], **config)
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    keep("native", found)


def command_lines() -> tuple[dict[str, list[str]], list[str]]:
    wishes = {
        "tensor parallel 2": Wish(proposer="ngram", tensor_parallel_size=2),
        "pipeline parallel 2": Wish(proposer="suffix", pipeline_parallel_size=2),
        "data parallel 2": Wish(proposer="ngram", data_parallel_size=2),
        "ray, 8 of 2": Wish(
            proposer="ngram", tensor_parallel_size=8, pipeline_parallel_size=2, executor="ray"
        ),
        "table of K": Wish(draft_table=[(1, 4, 4), (5, 64, 0)]),
        "hybrid": Wish(proposer="hybrid"),
    }
    shown = [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "distributed_executor_backend",
        "speculative_config",
    ]
    lines = {name: command(wish, host="127.0.0.1", port=1)[0] for name, wish in wishes.items()}
    return lines, shown


def run_parallel() -> None:
    """Two tensor-parallel workers, one core each."""
    plain = LLM("bundled", dtype="float32", num_draft_tokens=0)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    edit = [record["prompt"] for record in records("edit")[:NUM_PROMPTS]]
    in_vllm(
        "parallel",
        {
            "engines": {
                "eagle3": {"config": heads()["eagle3"], "works": ["edit"]},
                "suffix of ours": {"config": custom("suffix"), "works": ["edit"]},
            },
            "works": [work(plain, "edit", edit)],
            "options": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        },
    )


PARTS = {
    "heads": run_heads,
    "engines": run_engines,
    "native": run_native,
    "parallel": run_parallel,
    "served": vllm_served.run_served,
    "proven": vllm_served.run_proven,
    "report": vllm_report.write,
}


def main(chosen: list[str]) -> int:
    if unknown := set(chosen) - set(PARTS):
        print(f"no such part: {min(unknown)}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    if not (VENV / "bin/vllm").exists():
        print(f"no vLLM in {VENV}: run make vllm, or set VLLM_VENV", file=sys.stderr)
        return 2
    if not chosen:
        shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(exist_ok=True)
    failed = []
    for part in chosen or PARTS:
        started = time.perf_counter()
        try:
            PARTS[part]()
        except (Exception, SystemExit):
            traceback.print_exc()
            failed.append(part)
        print(f"--- {part}: {time.perf_counter() - started:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
