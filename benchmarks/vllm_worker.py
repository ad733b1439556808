"""What benchmarks/vllm_matrix.py runs in vLLM's environment: one engine after the other.

    python vllm_worker.py JOB.json RESULT.json

Not an engine per process, since importing vLLM takes longer than all the rest. Its n-gram proposer
must come last: once numba is imported, this vLLM cannot build a second engine in the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


def repair_expand() -> None:
    """vLLM 0.32's CPU kernel computes into a copy of `output` unless that is int64."""
    from vllm.utils import cpu_triton_utils

    def expand(  # vLLM calls it by these names
        output: Any,
        input_val: Any,
        cu_num_tokens: Any,
        replace_from: Any,
        replace_to: Any,
        MAX_NUM_TOKENS: Any = None,
    ) -> None:
        start = 0
        for value, end in zip(input_val.tolist(), cu_num_tokens.tolist(), strict=True):
            output[start:end] = replace_to if value == replace_from else value
            start = end

    cpu_triton_utils._expand_kernel_impl = expand


def counts(llm: Any) -> dict[str, int]:
    found = dict.fromkeys(COUNTERS.values(), 0)
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            found[COUNTERS[metric.name]] += int(metric.value)
    return found


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.version import __version__

    if job.get("repair"):
        repair_expand()
    results: dict[str, Any] = {"version": __version__}
    for name, config in job["engines"].items():
        started = time.perf_counter()
        try:
            llm = LLM(
                model=job["model"],
                dtype="float32",
                enforce_eager=True,
                max_model_len=1024,
                max_num_seqs=8,
                disable_log_stats=False,
                enable_prefix_caching=False,
                speculative_config=config,
                **job.get("options", {}),
            )
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        found: dict[str, Any] = {"load_s": time.perf_counter() - started}
        for work in job["works"]:
            params = SamplingParams(
                temperature=work["temperature"],
                max_tokens=work["max_tokens"],
                ignore_eos=True,
                n=work.get("n", 1),
            )
            before, started = counts(llm), time.perf_counter()
            prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            after = counts(llm)
            found[work["name"]] = {
                "seconds": time.perf_counter() - started,
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                **{key: after[key] - before[key] for key in after},
            }
        results[name] = found
        llm.llm_engine.engine_core.shutdown()
        print(name, {k: v if isinstance(v, float) else v["accepted"] for k, v in found.items()})
        sys.stdout.flush()
    return results


def parse(job: dict[str, Any]) -> dict[str, Any]:
    """Whether vLLM's own parser accepts command lines, and what it makes of them."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    results = {}
    for name, args in job["command_lines"].items():
        try:
            parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(args[1:])
            results[name] = {key: getattr(parsed, key) for key in job["shown"]}
        except SystemExit as stop:
            results[name] = {"error": f"refused with {stop.code}"}
    return results


def name_it() -> None:
    """The CPU build is the package vllm-cpu, but its command line asks for the version of vllm."""
    from importlib.metadata import distribution

    known = distribution("vllm-cpu")
    folder = Path(str(known.locate_file(f"vllm-{known.version}+cpu.dist-info")))
    folder.mkdir(exist_ok=True)
    lines = ["Metadata-Version: 2.1", "Name: vllm", f"Version: {known.version}+cpu", ""]
    (folder / "METADATA").write_text("\n".join(lines))


if __name__ == "__main__":
    if sys.argv[1] == "--name-it":
        name_it()
        sys.exit()
    work = json.loads(Path(sys.argv[1]).read_text())
    if not work.get("options", {}).get("tensor_parallel_size"):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    found = parse(work) if "command_lines" in work else run(work)
    Path(sys.argv[2]).write_text(json.dumps(found))
