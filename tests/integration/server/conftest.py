"""Servers for the tests: tiny models, written in milliseconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.engine.build import EngineConfig
from outrider.testing import write_tiny_llama

from .live import Live, Target

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def brisk_threads() -> Iterator[None]:
    """Client, server and engine share one interpreter here: let them take turns quickly."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft that agrees with it now and then."""
    root = tmp_path_factory.mktemp("served")
    target = write_tiny_llama(root / "target", vocab_size=320, num_tokens=300)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    draft = write_tiny_llama(root / "draft", vocab_size=320, num_tokens=300, num_layers=1)
    return target, draft


@pytest.fixture(scope="session")
def engine_config(folders: tuple[Path, Path]) -> EngineConfig:
    return EngineConfig(
        model=str(folders[0]),
        draft_model=str(folders[1]),
        num_draft_tokens=3,
        threads=1,
        block_size=8,
        kv_tokens=8192,
        max_sequences=32,
    )


@pytest.fixture(scope="session")
def shared(engine_config: EngineConfig) -> Iterator[Live]:
    with Live(engine_config) as live:
        yield live


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    """The server most tests share; every one of them leaves it as it found it."""
    yield shared
    shared.check()


@pytest.fixture
def target(live: Live, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Control over the shared server's target, until the test ends."""
    return Target(live, monkeypatch)
