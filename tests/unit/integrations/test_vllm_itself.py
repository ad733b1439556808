"""The short part of `make vllm-test`, where `make vllm` has set vLLM up."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from outrider import LLM
from outrider.integrations.vllm.build import examine
from outrider.integrations.vllm.proposers import CLASSES
from outrider.model.bundled import bundled_path

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / os.environ.get("VLLM_VENV", ".venv-vllm") / "bin/python"


@pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not set up: make vllm")
def test_its_build_is_recognised() -> None:
    build = examine(PYTHON.with_name("vllm"))
    assert build is not None
    assert build.version.startswith("0.32.0")
    assert build.has_cpu_kernels


@pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not set up: make vllm")
def test_our_suffixes_draft_inside_vllm(tmp_path: Path) -> None:
    prompt = "def f(x):\n    return x\n\n\ndef g(x):\n    return x\n\n\ndef h(x):\n"
    llm = LLM("bundled", dtype="float32", num_draft_tokens=0)
    config = {
        "method": "custom_class",
        "model": CLASSES["suffix"],
        "num_speculative_tokens": 4,
    }
    work = {
        "name": "edit",
        "prompts": [llm.engine.tokenizer.encode(prompt)],
        "temperature": 0,
        "max_tokens": 24,
        "repaired": False,
        "logprobs": None,
    }
    job = {
        "model": str(bundled_path()),
        "max_sequences": 8,
        "engines": {"suffix": {"config": config, "works": ["edit"]}},
        "works": [work],
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    worker = ROOT / "benchmarks/vllm_worker.py"
    subprocess.run(
        [PYTHON, worker, tmp_path / "job.json", tmp_path / "found.json"], check=True, timeout=300
    )
    record = json.loads((tmp_path / "found.json").read_text())
    found = record["engines"]["suffix"]["works"]["edit"]
    plain = llm.generate(prompt, max_tokens=24, ignore_eos=True)
    assert found["tokens"] == [plain.completions[0].tokens]
    assert found["accepted"] > 0
