"""Other programs on the same prompts, if they are installed.

Each decodes plainly and speculatively. Speedups are against its own plain decoding; greedy outputs
are compared with that and with ours. Programs run after us, one at a time, because a program that
waits in a loop for work takes processor time from the next.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.bench.peers.base import Peer, Way
from outrider.bench.peers.process import ProcessPeer
from outrider.bench.peers.unpacked import NUM_DRAFTS, Unpacked
from outrider.bench.settings import Peers
from outrider.errors import ConfigError

WORKERS = Path(__file__).parent / "workers"
LOOKUP = 10  # what prompt lookup copies at once


def find_peers(model: str, draft_model: str | None, wanted: Peers) -> list[Peer]:
    """The chosen programs, not started yet; raises ConfigError for what cannot work."""
    from outrider.model.bundled import find_folder
    from outrider.model.gguf.files import is_gguf
    from outrider.model.named import default_drafter

    drafter = draft_model or default_drafter(model)
    target = find_folder(model)
    pair = Unpacked(target, None if drafter is None else find_folder(drafter))
    found: list[Peer] = []
    if wanted.transformers:
        from outrider.bench.peers.with_transformers import TransformersPeer

        found.append(TransformersPeer(pair, wanted.peer_dtype))
    if wanted.vllm_python is not None:

        def ways() -> list[Way]:
            return vllm_ways(pair.target(), pair.vllm_drafter(), wanted.peer_dtype)

        found.append(ProcessPeer("vllm", wanted.vllm_python, WORKERS / "vllm_worker.py", ways))
    if wanted.llama_python is not None:
        gguf = wanted.gguf or (target if is_gguf(target) else None)
        if gguf is None:
            raise ConfigError("llama.cpp reads GGUF files: pass the target's with --gguf FILE")
        worker, own = WORKERS / "llama_worker.py", llama_ways(gguf)
        found.append(ProcessPeer("llama.cpp", wanted.llama_python, worker, lambda: own))
    return found


def vllm_ways(target: str, drafter: dict[str, Any] | None, dtype: str) -> list[Way]:
    plain = {"model": target, "dtype": dtype}
    look_up = {
        "method": "ngram",
        "num_speculative_tokens": NUM_DRAFTS,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    ways = [Way("plain", plain), Way("ngram", {**plain, "speculative_config": look_up})]
    if drafter is not None:
        name = str(drafter["method"]).replace("_", " ")
        ways.append(Way(name, {**plain, "speculative_config": drafter}))
    return ways


def llama_ways(gguf: Path) -> list[Way]:
    return [
        Way("plain", {"model": str(gguf)}),
        Way("prompt lookup", {"model": str(gguf), "lookup": LOOKUP}),
    ]
