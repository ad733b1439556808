"""Runs inside vLLM's environment: decodes what it is sent. Imports nothing of ours."""

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")


def main() -> None:
    from vllm import LLM, SamplingParams

    options = json.loads(sys.argv[1])
    llm = LLM(
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=8,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **options,
    )
    print('@@{"ready": true}', flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        params = SamplingParams(
            temperature=order["temperature"],
            max_tokens=order["max_tokens"],
            seed=order["seed"],
            ignore_eos=True,
            stop_token_ids=order["ends"],
            detokenize=False,
        )
        prompt = {"prompt_token_ids": order["prompt"]}
        [result] = llm.generate([prompt], params, use_tqdm=False)
        times = result.metrics
        answer = {
            "tokens": list(result.outputs[0].token_ids),
            "seconds": times.last_token_ts - times.first_token_ts,
        }
        print("@@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
