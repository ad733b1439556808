"""Runs inside llama-cpp-python's environment: evaluates batches and reports times.

Orders are JSON lines: {"load": FILE} or {"eval": tokens, "at": position}.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from time import perf_counter
from typing import Any

import llama_cpp


def load(path: str) -> Any:
    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    model = llama_cpp.llama_load_model_from_file(
        path.encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 1152, 512, 512
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    return llama_cpp.llama_new_context_with_model(model, params), quiet


def evaluate(context: Any, count: int, at: int, all_logits: bool) -> None:
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 0, at, -1)
    batch = llama_cpp.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    for i in range(count):
        batch.token[i] = 5 + i % 50
        batch.pos[i] = at + i
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = all_logits or i == count - 1
    if llama_cpp.llama_decode(context, batch) != 0:
        raise RuntimeError("llama_decode failed")
    llama_cpp.llama_get_logits(context)  # waits for the result
    llama_cpp.llama_batch_free(batch)


def main() -> None:
    context = kept = None
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        started = perf_counter()
        if "load" in order:
            context, kept = load(order["load"])
        else:
            evaluate(context, order["eval"], order["at"], order["eval"] <= 32)
        print(json.dumps({"seconds": perf_counter() - started}), flush=True)
    del kept


if __name__ == "__main__":
    main()
