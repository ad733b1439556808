"""Clients too heavy for CI, unmodified, against our server: lm-eval and vLLM's load generator.

    make clients LM_EVAL=~/lm-eval/bin/python VLLM=~/vllm/bin/python

lm-eval's log-likelihoods through the server must agree with its own transformers backend to 1e-3;
`vllm bench serve` must finish without a failure and print our acceptance.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import report
from serving import TARGET, outrider_server, vllm_command

MAX_DIFFERENCE = 1e-3


def lm_eval(python: Path, url: str) -> list[dict[str, Any]]:
    script = Path(__file__).parent / "lm_eval_check.py"
    done = subprocess.run(
        [str(python), str(script), url, str(TARGET), "bundled"], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"lm-eval failed:\n{done.stderr[-2000:]}")
    rows: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return rows


def bench_serve(python: Path, url: str) -> list[dict[str, Any]]:
    command = [*vllm_command(python), "bench", "serve", "--backend", "openai"]
    command += ["--base-url", url, "--endpoint", "/v1/completions", "--model", "bundled"]
    command += ["--tokenizer", str(TARGET), "--dataset-name", "random", "--seed", "1"]
    command += ["--random-input-len", "64", "--random-output-len", "64", "--num-prompts", "32"]
    command += ["--max-concurrency", "4", "--ignore-eos", "--temperature", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.findall(r"^([A-Z][^:\n]+):\s+([\d.]+)\s*$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        print(f"vllm bench serve failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return [{"figure": name.strip(), "value": float(value)} for name, value in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm-eval", type=Path, help="the Python of an environment with lm-eval")
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vLLM")
    asked = parser.parse_args()
    tables: dict[str, list[dict[str, Any]]] = {}
    failures = []
    with outrider_server("bundled", "--dtype", "float32") as (url, _):
        if asked.lm_eval is not None:
            rows = lm_eval(asked.lm_eval, url)
            tables["lm-eval: log-likelihoods, local-completions against its hf backend"] = rows
            worst = max(row["difference"] for row in rows)
            if worst > MAX_DIFFERENCE or not all(row["same greedy flag"] for row in rows):
                failures.append(f"lm-eval: differences up to {worst:.2g}")
        if asked.vllm is not None:
            rows = bench_serve(asked.vllm, url)
            if rows:
                tables["vllm bench serve"] = rows
            figures = {row["figure"]: row["value"] for row in rows}
            if not any("cceptance" in name for name in figures):
                failures.append("vllm bench serve printed no acceptance")
            if figures.get("Failed requests", 0):
                failures.append("vllm bench serve had failed requests")
    if not tables:
        sys.exit("give --lm-eval or --vllm: the Python of an environment with it")
    report.write("clients", "Other people's clients against our server", tables)
    if failures:
        sys.exit("; ".join(failures))


if __name__ == "__main__":
    main()
