"""Runs inside llama-cpp-python's environment: decodes what it is sent. Imports nothing of ours."""

import json
import os
import sys
from time import perf_counter


def main() -> None:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    options = json.loads(sys.argv[1])
    draft = None
    if "lookup" in options:
        draft = LlamaPromptLookupDecoding(num_pred_tokens=options["lookup"], max_ngram_size=4)
    llama = Llama(
        options["model"],
        n_ctx=2048,
        n_threads=os.cpu_count(),
        verbose=False,
        draft_model=draft,
        logits_all=draft is not None,
    )
    print('@@{"ready": true}', flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        llama.reset()
        llama.set_seed(order["seed"])
        tokens = []
        started = 0.0
        temperature = order["temperature"]
        stream = llama.generate(
            order["prompt"],
            temp=temperature,
            top_k=0 if temperature else 1,
            top_p=1.0,
            min_p=0.0,
            repeat_penalty=1.0,
        )
        for token in stream:
            started = started or perf_counter()
            tokens.append(int(token))
            if len(tokens) == order["max_tokens"] or tokens[-1] in order["ends"]:
                break
        answer = {"tokens": tokens, "seconds": perf_counter() - started}
        print("@@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
