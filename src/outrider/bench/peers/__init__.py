"""Other programs on the same prompts, where they are installed."""

from __future__ import annotations

from pathlib import Path

from outrider.bench.peers.base import Peer


def find_peers(
    model: str,
    draft_model: str | None,
    *,
    transformers: bool,
    vllm_python: Path | None,
    llama_python: Path | None,
    gguf: Path | None,
) -> list[Peer]:
    """Those asked for, not started yet; raises ConfigError for what cannot work."""
    return []
