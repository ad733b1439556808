"""Peers: transformers on a tiny pair, and a program that speaks the workers' language."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.bench.peers import find_peers
from outrider.bench.peers.base import Way
from outrider.bench.peers.process import ProcessPeer
from outrider.bench.settings import Peers, Settings
from outrider.bench.workloads import Prompt, Workload
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.testing import write_tiny_llama

WORK = [
    Workload("greedy", [Prompt("the quick brown fox"), Prompt("jumps over")]),
    Workload("warm", [Prompt("the lazy dog", temperature=1.0)]),
]
SETTINGS = Settings(max_tokens=10, repeats=2)
WORKER = """
import json, sys
length = json.loads(sys.argv[1])["length"]
print("a program says what it likes")
print("@@{}", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    tokens = order["prompt"][:1] * length
    print("@@" + json.dumps({"tokens": tokens, "seconds": 0.5}), flush=True)
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("peers")
    target = write_tiny_llama(folder / "target", vocab_size=128)
    return str(target), str(write_tiny_llama(folder / "draft", vocab_size=128, num_layers=1))


@pytest.fixture(scope="module")
def engine(pair: tuple[str, str]) -> Engine:
    return LLM(pair[0], draft_model=pair[1]).engine


def test_transformers_decodes_what_we_decode(engine: Engine, pair: tuple[str, str]) -> None:
    [peer] = find_peers(*pair, Peers(transformers=True))
    rows = peer.rows(engine, WORK, SETTINGS, lambda what: None)
    found = {(row["workload"], row["contender"]): row for row in rows}
    for way in ("plain", "prompt lookup", "assisted"):
        greedy = found["greedy", f"transformers: {way}"]
        assert greedy["identical_to_ours"] == "2/2"
        assert greedy["tokens_per_s"] > 0
        assert found["warm", f"transformers: {way}"]["identical_to_ours"] == "-"
    assert found["greedy", "transformers: plain"]["speedup"] == 1.0


def test_a_program_in_another_environment(engine: Engine, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    ways = [Way("plain", {"length": 5}), Way("fast", {"length": 9})]
    rows = ProcessPeer("other", Path(sys.executable), script, lambda: ways).rows(
        engine, WORK, SETTINGS, lambda what: None
    )
    rates = {row["contender"]: row["tokens_per_s"] for row in rows}
    assert rates == {"other: plain": 8.0, "other: fast": 16.0}  # the first token is not timed
    assert rows[1]["speedup"] == 2.0
    assert rows[0]["identical_to_ours"] == "0/2"


def test_what_cannot_run_is_refused(engine: Engine, pair: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such interpreter"):
        find_peers(*pair, Peers(vllm_python=tmp_path / "x"))
    with pytest.raises(ConfigError, match="--gguf"):
        find_peers(*pair, Peers(llama_python=Path("python")))
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit(1)")
    peer = ProcessPeer("broken", Path(sys.executable), broken, lambda: [Way("plain")])
    with pytest.raises(ConfigError, match="is it installed"):
        peer.rows(engine, WORK, SETTINGS, lambda what: None)
