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


class Repairs:
    """vLLM's two wrong CPU kernels (outrider.integrations.vllm.build), right on demand."""

    def __init__(self) -> None:
        import torch
        from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
        from vllm.utils import cpu_triton_utils

        self.on = False
        their_expand = cpu_triton_utils._expand_kernel_impl
        their_norm = DFlashQwen3Model._normalize_context_k

        def expand(  # vLLM calls it by these names
            output: Any,
            input_val: Any,
            cu_num_tokens: Any,
            replace_from: Any,
            replace_to: Any,
            MAX_NUM_TOKENS: Any = None,
        ) -> None:
            if not self.on:
                their_expand(output, input_val, cu_num_tokens, replace_from, replace_to)
                return
            start = 0
            for value, end in zip(input_val.tolist(), cu_num_tokens.tolist(), strict=True):
                output[start:end] = replace_to if value == replace_from else value
                start = end

        def norm(model: Any, keys: Any) -> Any:
            if not self.on:
                return their_norm(model, keys)
            size, eps = keys.shape[-1:], model._rms_norm_eps
            rows = zip(keys, model._k_norm_weights, strict=True)
            return torch.stack([torch.nn.functional.rms_norm(k, size, w, eps) for k, w in rows])

        cpu_triton_utils._expand_kernel_impl = expand
        DFlashQwen3Model._normalize_context_k = norm


def counts(llm: Any) -> dict[str, int]:
    found = dict.fromkeys(COUNTERS.values(), 0)
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            found[COUNTERS[metric.name]] += int(metric.value)
    return found


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM
    from vllm.version import __version__

    repairs = Repairs()
    results: dict[str, Any] = {}
    for name, engine in job["engines"].items():
        started = time.perf_counter()
        try:
            llm = LLM(
                model=job["model"],
                dtype="float32",
                enforce_eager=True,
                max_model_len=1024,
                max_num_seqs=job["max_sequences"],
                disable_log_stats=False,
                enable_prefix_caching=False,
                speculative_config=engine["config"],
                additional_config=engine.get("additional", {}),
                **job.get("options", {}),
            )
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        found: dict[str, Any] = {"load_s": time.perf_counter() - started, "works": {}}
        for work in job["works"]:
            if work["name"] in engine["works"]:
                repairs.on = work["repaired"]
                found["works"][work["name"]] = generate(llm, work)
        results[name] = found
        llm.llm_engine.engine_core.shutdown()
        took = {key: round(value["seconds"], 1) for key, value in found["works"].items()}
        print(f"{name}: loaded in {found['load_s']:.1f} s, worked {took}", flush=True)
    return {"version": __version__, "engines": results}


def generate(llm: Any, work: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=work["temperature"],
        max_tokens=work["max_tokens"],
        ignore_eos=True,
        logprobs=work["logprobs"],
    )
    before, started = counts(llm), time.perf_counter()
    prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    seconds, after = time.perf_counter() - started, counts(llm)
    found: dict[str, Any] = {
        "seconds": seconds,
        "tokens": [list(output.token_ids) for output in outputs],
        **{key: after[key] - before[key] for key in after},
    }
    if work["logprobs"]:
        found["tops"] = [
            [
                {str(token): entry.logprob for token, entry in place.items()}
                for place in out.logprobs
            ]
            for out in outputs
        ]
    return found


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
    found = run(work)
    if "command_lines" in work:
        found["parsed"] = parse(work)
    Path(sys.argv[2]).write_text(json.dumps(found))
