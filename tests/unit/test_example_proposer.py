"""The proposer of examples/ plugs in through its entry point; nothing of ours knows it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import registry
from outrider.engine.build import EngineConfig, build
from outrider.engine.request import Speculation
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama

EXAMPLE = Path(__file__).parents[2] / "examples" / "echo_proposer"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What an installer would do: the module on the path, its metadata beside it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = tmp_path / f"echo_proposer-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {place}" for name, place in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.plugins.cache_clear()
    yield
    registry.plugins.cache_clear()


@pytest.mark.usefixtures("installed")
def test_the_example_drafts_and_changes_nothing(tmp_path: Path) -> None:
    assert "echo" in registry.proposer_names()
    folder = write_tiny_llama(tmp_path / "target", num_layers=1)
    engine = build(
        EngineConfig(
            model=str(folder), proposer="echo", num_draft_tokens=3, backend="torch", kv_tokens=256
        )
    )
    results = []
    for speculation in (None, Speculation(proposer=None)):
        params = SamplingParams(temperature=1.0, seed=2, max_tokens=40, ignore_eos=True)
        request = engine.add([5, 6, 7, 8], params, speculation=speculation)
        for _ in engine.run([request]):
            pass
        results.append(engine.collect(request))
    echoed, plain = results
    assert echoed.tokens == plain.tokens
    assert echoed.stats.num_drafted > 40
    assert plain.stats.num_drafted == 0


def test_it_stays_small() -> None:
    assert len((EXAMPLE / "echo_proposer.py").read_text(encoding="utf-8").splitlines()) <= 35
