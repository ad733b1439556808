"""Log-likelihoods by lm-eval through a server and by its own transformers backend.

Runs in an environment with lm-eval (`benchmarks/clients.py` does that); prints one JSON object.
"""

from __future__ import annotations

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

PAIRS = [
    ("def add(a, b):\n    return", " a + b"),
    ("def add(a, b):\n    return", " a - b"),
    ("import os\n\n\ndef exists(path):\n    return", " os.path.exists(path)"),
    ("import os\n\n\ndef exists(path):\n    return", " None"),
    ("class Stack:\n    def __init__(self):\n        self", ".items = []"),
    ("class Stack:\n    def __init__(self):\n        self", "._stack = list()\n"),
    ("for i in range(10):\n    print(", "i)"),
    ("for i in range(10):\n    print(", '"hello, wörld: {}".format(i))'),
    ("try:\n    import json\nexcept", " ImportError:\n    json = None\n"),
    ("x = [1, 2, 3]\nassert", " sum(x) == 6"),
    ("", "import sys\n"),
    ('"""A module.\n\nWith a docstring.\n"""\n\n', "from __future__ import annotations\n"),
]


def main() -> None:
    url, folder, name = sys.argv[1:]
    asked = [
        Instance("loglikelihood", {}, pair, index, metadata=("pairs", index, 1))
        for index, pair in enumerate(PAIRS)
    ]
    served = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model=name, tokenizer=folder, num_concurrent=1
    )
    own = HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=1)
    ours = served.loglikelihood(asked, disable_tqdm=True)
    theirs = own.loglikelihood(asked, disable_tqdm=True)
    print(
        json.dumps(
            [
                {
                    "continuation": repr(pair[1])[:40],
                    "served": round(a[0], 5),
                    "transformers": round(b[0], 5),
                    "difference": abs(a[0] - b[0]),
                    "same greedy flag": bool(a[1]) == bool(b[1]),
                }
                for pair, a, b in zip(PAIRS, ours, theirs, strict=True)
            ]
        )
    )


if __name__ == "__main__":
    main()
