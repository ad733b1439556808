"""Plain and speculative decoding against other engines, same weights, same prompts, batch 1.

    python benchmarks/peers.py [--llama PYTHON --gguf FOLDER] [--vllm PYTHON] [--rounds 3]
                               [--only WORD,... --result NAME]

Every engine is a process of its own that answers one request at a time; requests go round in random
order, so a busy moment falls on any of them. Decoding alone is timed: a request for 1 + N tokens
minus the same for one. PYTHON is the interpreter of an environment that has the engine; GGUF files
come from benchmarks/gguf_convert.py. transformers is the one installed here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

HERE = Path(__file__).resolve()
BUNDLED = HERE.parents[1] / "src" / "outrider" / "bundled"
NUM_TOKENS, CONTEXT = 96, 1024
Generate = Callable[[list[int], int, float], list[int]]


# --- the other side of the pipe: one of these runs in each process ------------------------------


def ours(dtype: str, proposer: str, num_drafts: str) -> Generate:
    from outrider.engine.build import EngineConfig, build
    from outrider.engine.lane import fresh_salt
    from outrider.engine.request import Speculation
    from outrider.sampling import SamplingParams

    engine = build(EngineConfig(dtype=dtype, num_draft_tokens=0, prefix_caching=False))
    speculation = Speculation(
        proposer=None if proposer == "plain" else proposer, num_draft_tokens=int(num_drafts)
    )

    def generate(prompt: list[int], num_tokens: int, temperature: float) -> list[int]:
        params = SamplingParams(
            temperature=temperature, seed=1, max_tokens=num_tokens, ignore_eos=True
        )
        request = engine.add(prompt, params, speculation=speculation, salt=fresh_salt())
        for _ in engine.run([request]):
            pass
        return engine.collect(request).tokens

    return generate


def transformers(mode: str) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    def load(name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(BUNDLED / name, dtype=torch.float32).eval()

    model = load("target")
    extra = {"assistant_model": load("draft")} if mode == "assisted" else {}

    def generate(prompt: list[int], num_tokens: int, temperature: float) -> list[int]:
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        )
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=0,
                **sampling,
                **extra,
            )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return generate


def llama(path: str) -> Generate:
    from llama_cpp import Llama

    model = Llama(path, n_ctx=CONTEXT, n_threads=os.cpu_count(), verbose=False)

    def generate(prompt: list[int], num_tokens: int, temperature: float) -> list[int]:
        model.reset()
        tokens: list[int] = []
        greedy = {"temp": 0.0, "top_k": 1}
        free = {"temp": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        sampling = free if temperature else greedy
        for token in model.generate(prompt, repeat_penalty=1.0, **sampling):
            tokens.append(token)
            if len(tokens) == num_tokens:
                break
        return tokens

    return generate


def vllm(mode: str) -> Generate:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    speculative = None
    if mode == "draft":
        speculative = {
            "method": "draft_model",
            "model": str(BUNDLED / "draft"),
            "num_speculative_tokens": 4,
        }
    model = LLM(
        str(BUNDLED / "target"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=CONTEXT,
        enable_prefix_caching=False,
        disable_log_stats=True,
        speculative_config=speculative,
    )

    def generate(prompt: list[int], num_tokens: int, temperature: float) -> list[int]:
        params = SamplingParams(
            temperature=temperature, seed=1, max_tokens=num_tokens, ignore_eos=True
        )
        given = {"prompt_token_ids": prompt}
        [result] = model.generate([given], params, use_tqdm=False)
        return list(result.outputs[0].token_ids)

    return generate


def serve(kind: str, *arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints is not an answer
    makers: dict[str, Callable[..., Generate]] = {
        "ours": ours,
        "transformers": transformers,
        "llama": llama,
        "vllm": vllm,
    }
    generate = makers[kind](*arguments)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        prompt, temperature = json.loads(line)
        seconds = []
        for num_tokens in (1, 1 + NUM_TOKENS):
            started = perf_counter()
            tokens = generate(prompt, num_tokens, temperature)
            seconds.append(perf_counter() - started)
        print(
            json.dumps([(seconds[1] - seconds[0]) / NUM_TOKENS, tokens]), file=answers, flush=True
        )


# --- this side ----------------------------------------------------------------------------------


class Peer:
    def __init__(self, python: str, *arguments: str) -> None:
        path = os.pathsep.join([str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [python, str(HERE), "--serve", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | ({"PYTHONPATH": path} if arguments[0] == "ours" else {}),
        )

    def wait(self) -> bool:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip() == "ready"

    def ask(self, prompt: list[int], temperature: float) -> tuple[float, list[int]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([prompt, temperature]), file=self._process.stdin, flush=True)
        seconds, tokens = json.loads(self._process.stdout.readline())
        return seconds, tokens

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def peers(options: argparse.Namespace) -> dict[str, Peer]:
    here = sys.executable
    found: dict[str, tuple[str, ...]] = {
        "outrider float32, plain": (here, "ours", "float32", "plain", "0"),
        "outrider float32, draft-model": (here, "ours", "float32", "draft-model", "5"),
        "outrider float32, draft-tree": (here, "ours", "float32", "draft-tree", "10"),
        "outrider int8, plain": (here, "ours", "int8", "plain", "0"),
        "outrider int8, draft-model": (here, "ours", "int8", "draft-model", "4"),
        "transformers float32, plain": (here, "transformers", "plain"),
        "transformers float32, assisted": (here, "transformers", "assisted"),
    }
    if options.llama:
        for kind in ("f32", "q8_0"):
            path = str(Path(options.gguf) / f"target-{kind}.gguf")
            found[f"llama.cpp {kind.upper()}, plain"] = (options.llama, "llama", path)
    if options.vllm:
        for mode in ("plain", "draft"):
            found[f"vLLM float32, {mode}"] = (options.vllm, "vllm", mode)
    return {
        name: Peer(*arguments)
        for name, arguments in found.items()
        if options.only is None or any(word in name for word in options.only.split(","))
    }


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve(*sys.argv[2:])
    import report
    from workloads import CODE

    from outrider.model.tokenizer import load_tokenizer

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--llama", help="interpreter with llama-cpp-python")
    parser.add_argument(
        "--gguf", default=".", help="folder of target-f32.gguf and target-q8_0.gguf"
    )
    parser.add_argument("--vllm", help="interpreter with vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", metavar="WORD,...", help="engines whose names have one of these")
    parser.add_argument("--result", default="peers", help="name of the result file")
    options = parser.parse_args()
    engines = peers(options)
    engines = {name: peer for name, peer in engines.items() if peer.wait()}
    tokenizer = load_tokenizer("bundled")
    prompts = [tokenizer.encode(text) for text in CODE[:3]]
    order = random.Random(0)
    tables: dict[str, list[dict[str, Any]]] = {}
    for peer in engines.values():
        peer.ask(prompts[0], 0.0)
    base = "outrider float32, plain"
    for temperature in (0.0, 1.0):
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        same: dict[str, bool] = {}
        for _ in range(options.rounds):
            for index, prompt in enumerate(prompts):
                outputs = {}
                for name in order.sample(list(engines), len(engines)):
                    sleep(0.3)  # threads of the one before spin for a while
                    took, outputs[name] = engines[name].ask(prompt, temperature)
                    seconds[name, index].append(took)
                for name, tokens in outputs.items():
                    same[name] = same.get(name, True) and tokens == outputs[base]
        own = {
            name: sum(statistics.median(seconds[name, i]) for i in range(len(prompts)))
            for name in engines
        }
        tables[f"Temperature {temperature:g}"] = [
            {
                "engine": name,
                "ms/token": own[name] / len(prompts) * 1e3,
                "tokens/s": len(prompts) / own[name],
                "outrider float32 plain is faster by": own[name] / own[base],
                "same tokens": same[name],
            }
            for name in engines
        ]
    for peer in engines.values():
        peer.close()
    report.write(
        options.result,
        "Decoding against other engines on the CPU",
        tables,
        f"Bundled 25M target and 2.4M draft, code completion, {len(prompts)} prompts, {NUM_TOKENS} "
        f"tokens, batch 1, {options.rounds} rounds in random order, medians, two threads each. "
        "Sampled tokens differ between engines: their random numbers do.",
    )


if __name__ == "__main__":
    main()
