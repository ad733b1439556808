"""Other programs on the same prompts, if they are installed.

Each decodes plainly and speculatively. Speedups are against its own plain decoding; greedy outputs
are compared with that and with ours. Programs run after us, one at a time, because a program that
waits in a loop for work takes processor time from the next.
"""

from __future__ import annotations

from pathlib import Path

from outrider.bench.peers.base import Peer, Way
from outrider.bench.peers.process import ProcessPeer
from outrider.bench.settings import Peers
from outrider.errors import ConfigError

WORKERS = Path(__file__).parent / "workers"
NUM_DRAFTS = 4
LOOKUP = 10  # what prompt lookup copies at once


def find_peers(model: str, draft_model: str | None, wanted: Peers) -> list[Peer]:
    """The chosen programs, not started yet; raises ConfigError for what cannot work."""
    from outrider.model.bundled import find_folder
    from outrider.model.named import default_drafter

    drafter = draft_model or default_drafter(model)
    target = str(find_folder(model))
    draft = None if drafter is None else str(find_folder(drafter))
    found: list[Peer] = []
    if wanted.transformers:
        from outrider.bench.peers.with_transformers import TransformersPeer

        found.append(TransformersPeer(target, draft))
    if wanted.vllm_python is not None:
        ways = vllm_ways(target, draft)
        found.append(ProcessPeer("vllm", wanted.vllm_python, WORKERS / "vllm_worker.py", ways))
    if wanted.llama_python is not None:
        if wanted.gguf is None:
            raise ConfigError("llama.cpp reads GGUF files: pass the target's with --gguf FILE")
        worker, ways = WORKERS / "llama_worker.py", llama_ways(wanted.gguf)
        found.append(ProcessPeer("llama.cpp", wanted.llama_python, worker, ways))
    return found


def vllm_ways(target: str, draft: str | None) -> list[Way]:
    ways = [
        Way("plain", {"model": target}),
        Way(
            "ngram",
            {
                "model": target,
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": NUM_DRAFTS,
                    "prompt_lookup_max": 4,
                    "prompt_lookup_min": 2,
                },
            },
        ),
    ]
    if draft is not None:
        wish = {"method": "draft_model", "model": draft, "num_speculative_tokens": NUM_DRAFTS}
        ways.append(Way("draft model", {"model": target, "speculative_config": wish}))
    return ways


def llama_ways(gguf: Path) -> list[Way]:
    return [
        Way("plain", {"model": str(gguf)}),
        Way("prompt lookup", {"model": str(gguf), "lookup": LOOKUP}),
    ]
