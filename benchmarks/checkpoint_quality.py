"""SmolLM2 in types that llama.cpp makes of it: perplexity and greedy text beside others.

    VENV/bin/python benchmarks/checkpoint_quality.py --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf

VENV holds this package, llama-cpp-python and accelerate. Its width of 576 allows the types with
blocks of 32 values. Perplexity is of the text of this repository's documentation, in windows of 512
tokens of which the second half counts. `+-` is the standard error of a difference over tokens: two
ways to round the same activations differ by about as much. Greedy text is compared with
transformers on the dequantised weights, until the first difference and at most 64 tokens;
`float32 - transformers` is the largest difference of a logit in one window.

The types with blocks of 256 are made of a random model, 512 wide: the root mean square of what its
logits differ by, over their deviation.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_files
import llama_cpp
import numpy as np
import report
import torch
import transformers

from outrider.model.driver import Driver
from outrider.model.load import load_model
from outrider.model.tokenizer import Tokenizer

# ftype of llama.cpp's quantiser
TYPES = {"F16": 1, "Q8_0": 7, "Q5_1": 9, "Q5_0": 8, "Q4_1": 3, "Q4_0": 2, "IQ4_NL": 25}
USUAL = "F16,Q8_0,Q5_1,Q5_0,Q4_1,Q4_0,IQ4_NL"
WIDE = {"Q2_K": 10, "Q3_K": 11, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18, "IQ4_XS": 30}
NARROW = checkpoint_files.Shape(512, 4, 8, 4, 1536, 49152, tied=True)
WINDOW, LENGTH = 512, 64
CORES = len(os.sched_getaffinity(0))
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "1, 2, 3, 4,"]


def requantised(source: Path, kind: str, folder: Path) -> Path:
    path = folder / f"{kind}.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.allow_requantize, params.nthread = True, CORES
    params.ftype = (TYPES | WIDE)[kind]
    params.pure = True
    if llama_cpp.llama_model_quantize(
        str(source).encode(), str(path).encode(), ctypes.byref(params)
    ):
        raise RuntimeError(f"llama.cpp does not make {kind}")
    return path


def surprise(logits_TV: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """-log p(token) of every token in the second half of the window."""
    half = len(tokens) // 2
    log_probs = torch.log_softmax(logits_TV[half - 1 : -1].double(), -1)
    return -log_probs.gather(1, torch.tensor(tokens[half:])[:, None])[:, 0]


def windows(tokens: list[int]) -> list[list[int]]:
    return [tokens[i : i + WINDOW] for i in range(0, len(tokens) - WINDOW + 1, WINDOW)]


def our_logits(path: Path, pieces: list[list[int]], dtype: str = "auto") -> Iterator[torch.Tensor]:
    model: Any = load_model(path, dtype=dtype)
    for piece in pieces:
        driver = Driver(model, num_blocks=WINDOW // 16 + 1, block_size=16)
        yield driver.forward({"a": piece}).logits["a"]


def their_logits(path: Path, pieces: list[list[int]]) -> Iterator[torch.Tensor]:
    llama = llama_cpp.Llama(
        str(path),
        n_ctx=WINDOW,
        n_batch=WINDOW,
        n_threads=CORES,
        n_threads_batch=CORES,
        logits_all=True,
        verbose=False,
    )
    for piece in pieces:
        llama.reset()
        llama.eval(piece)
        yield torch.from_numpy(np.array(llama.scores[: len(piece)]))


def dequantised(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )


def perplexities(path: Path, pieces: list[list[int]]) -> dict[str, Any]:
    ways = {
        "packed": our_logits(path, pieces),
        "float32": our_logits(path, pieces, "float32"),
        "llama.cpp": their_logits(path, pieces),
    }
    found = {
        name: torch.cat([surprise(rows, piece) for rows, piece in zip(way, pieces, strict=True)])
        for name, way in ways.items()
    }
    row: dict[str, Any] = {name: math.exp(values.mean()) for name, values in found.items()}
    for name, other in (("packed", "llama.cpp"), ("packed", "float32"), ("llama.cpp", "float32")):
        gap = found[name] - found[other]
        error = float(gap.std()) / len(gap) ** 0.5
        row[f"{name} over {other} %"] = f"{100 * math.expm1(gap.mean()):+.2f} +- {100 * error:.2f}"
    with torch.no_grad():
        expected = dequantised(path)(torch.tensor(pieces[:1])).logits[0]
    exact = next(our_logits(path, pieces, "float32"))
    return row | {"float32 - transformers": float((exact - expected).abs().max())}


def wide_types(tokenizer: Path, tokens: list[int], folder: Path) -> list[dict[str, Any]]:
    """Types with blocks of 256 values, of a random model."""
    source = checkpoint_files.write(folder / "narrow.gguf", NARROW, "Q8_0", tokenizer)
    rows = []
    for kind in WIDE:
        path = requantised(source, kind, folder)
        packed, exact, theirs = (
            torch.cat(list(way))
            for way in (
                our_logits(path, [tokens]),
                our_logits(path, [tokens], "float32"),
                their_logits(path, [tokens]),
            )
        )
        rows.append(
            {
                "type": kind,
                "packed - float32": float((packed - exact).std() / exact.std()),
                "llama.cpp - float32": float((theirs - exact).std() / exact.std()),
                "packed - llama.cpp": float((packed - theirs).std() / exact.std()),
            }
        )
        path.unlink()
    return rows


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Tokens and the logits that they were chosen by."""
    driver, tokens, rows = Driver(model, num_blocks=64), list(prompt), []
    piece = tokens[:]
    for _ in range(LENGTH):
        logits_V = driver.forward({"a": piece}).logits["a"][-1].clone()
        logits_V[list(model.spec.eos_ids)] = -math.inf  # as in the reference
        driver.keep("a", range(len(piece)))
        piece = [int(logits_V.argmax())]
        tokens += piece
        rows.append(logits_V)
    return tokens[len(prompt) :], torch.stack(rows)


def first_difference(ours: list[int], theirs: list[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(ours))


def compare_greedy(path: Path, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    """Equal tokens of all prompts, and the largest gap of logits at a first difference."""
    reference = dequantised(path)
    model = load_model(path, dtype=dtype)
    equal, gaps = 0, [0.0]
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        ours, rows = greedy(model, ids)
        out = reference.generate(
            torch.tensor([ids]), max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False
        )
        theirs = out[0, len(ids) :].tolist()
        at = first_difference(ours, theirs)
        equal += at
        if at < LENGTH:
            gaps.append(float(rows[at].max() - rows[at][theirs[at]]))
    told = f"{equal} of {len(PROMPTS) * LENGTH}"
    return {f"equal, {dtype}": told, f"largest gap, {dtype}": max(gaps)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smollm2", type=Path, required=True)
    parser.add_argument("--types", default=USUAL)
    parser.add_argument("--windows", type=int, default=40)
    report.add_out(parser)
    options = parser.parse_args()
    tokenizer = Tokenizer(options.smollm2)
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*/*.md"))
    text = "\n".join(page.read_text() for page in pages)
    pieces = windows(tokenizer.encode(text))[: options.windows]
    rows, texts = [], []
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.types.split(","):
            path = requantised(options.smollm2, kind, Path(folder))
            rows.append({"type": kind, **perplexities(path, pieces)})
            texts.append({"type": kind})
            for dtype in ("auto", "float32"):
                texts[-1] |= compare_greedy(path, tokenizer, dtype)
            path.unlink()
            print(rows[-1], texts[-1], flush=True)
        wide = wide_types(options.smollm2, pieces[0], Path(folder))
    count = len(pieces) * (WINDOW - WINDOW // 2)
    report.write(
        "checkpoint-quality",
        "Quantised files of SmolLM2: quality beside llama.cpp and transformers",
        {
            f"Perplexity of {count} tokens": rows,
            f"Greedy text of {len(PROMPTS)} prompts, beside transformers": texts,
            "Logits of a random model in types with blocks of 256": wide,
        },
        folder=options.out,
    )


if __name__ == "__main__":
    main()
