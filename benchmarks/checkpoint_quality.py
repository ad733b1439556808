"""SmolLM2 in types that llama.cpp makes of it: perplexity and greedy text beside others.

    VENV/bin/python benchmarks/checkpoint_quality.py --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf

VENV holds this package, llama-cpp-python and accelerate. Its width of 576 allows the types with
blocks of 32 values. Perplexity is of the text of this repository's documentation, in windows of 512
tokens of which the second half counts; greedy text is compared with transformers on the
dequantised weights, until the first difference and at most 64 tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import tempfile
from pathlib import Path
from typing import Any

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
USUAL = "F16,Q8_0,Q4_1,Q4_0"
WINDOW, LENGTH = 512, 64
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "1, 2, 3, 4,"]


def requantised(source: Path, kind: str, folder: Path) -> Path:
    path = folder / f"{kind}.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.allow_requantize, params.nthread, params.ftype = True, 1, TYPES[kind]
    params.pure = True
    if llama_cpp.llama_model_quantize(
        str(source).encode(), str(path).encode(), ctypes.byref(params)
    ):
        raise RuntimeError(f"llama.cpp does not make {kind}")
    return path


def surprise(logits_TV: torch.Tensor, tokens: list[int]) -> float:
    """The sum over the second half of the window of -log p(token)."""
    half = len(tokens) // 2
    log_probs = torch.log_softmax(logits_TV[half - 1 : -1].double(), -1)
    return -float(log_probs.gather(1, torch.tensor(tokens[half:])[:, None]).sum())


def windows(tokens: list[int]) -> list[list[int]]:
    return [tokens[i : i + WINDOW] for i in range(0, len(tokens) - WINDOW + 1, WINDOW)]


def our_perplexity(path: Path, pieces: list[list[int]], dtype: str = "auto") -> float:
    model: Any = load_model(path, dtype=dtype)
    total = 0.0
    for piece in pieces:
        driver = Driver(model, num_blocks=WINDOW // 16 + 1, block_size=16)
        total += surprise(driver.forward({"a": piece}).logits["a"], piece)
    return math.exp(total / sum(len(piece) - len(piece) // 2 for piece in pieces))


def their_perplexity(path: Path, pieces: list[list[int]]) -> float:
    llama = llama_cpp.Llama(str(path), n_ctx=WINDOW, n_batch=WINDOW, logits_all=True, verbose=False)
    total = 0.0
    for piece in pieces:
        llama.reset()
        llama.eval(piece)
        total += surprise(torch.from_numpy(np.array(llama.scores[:WINDOW])), piece)
    return math.exp(total / sum(len(piece) - len(piece) // 2 for piece in pieces))


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


def compare_greedy(path: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Equal tokens of all prompts, and the largest gap of logits at a first difference."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    model = load_model(path)
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
    return {"equal tokens": f"{equal} of {len(PROMPTS) * LENGTH}", "largest gap": max(gaps)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smollm2", type=Path, required=True)
    parser.add_argument("--types", default=USUAL)
    parser.add_argument("--windows", type=int, default=12)
    report.add_out(parser)
    options = parser.parse_args()
    tokenizer = Tokenizer(options.smollm2)
    pages = sorted((Path(__file__).parents[1] / "docs" / "explanation").glob("*.md"))
    text = "\n".join(page.read_text() for page in pages)
    pieces = windows(tokenizer.encode(text))[: options.windows]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.types.split(","):
            path = requantised(options.smollm2, kind, Path(folder))
            ours, theirs = our_perplexity(path, pieces), their_perplexity(path, pieces)
            rows.append(
                {
                    "type": kind,
                    "perplexity": ours,
                    "llama.cpp": theirs,
                    "difference %": 100 * (ours / theirs - 1),
                    "float32": our_perplexity(path, pieces, "float32"),
                    **compare_greedy(path, tokenizer),
                }
            )
            path.unlink()
            print(rows[-1], flush=True)
    report.write(
        "checkpoint-quality",
        "Quantised files of SmolLM2: quality beside llama.cpp and transformers",
        {f"{len(pieces)} windows of {WINDOW} tokens, {len(PROMPTS)} prompts": rows},
        folder=options.out,
    )


if __name__ == "__main__":
    main()
