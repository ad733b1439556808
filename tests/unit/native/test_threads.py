"""One pool for the process: several models at once, several callers, and forked children."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers

from native_models import ODD, batch_of, needs_native, random_tokens
from outrider import native
from outrider.errors import ConfigError
from outrider.model.native_decoder import NativeDecoder
from tiny_models import write

pytestmark = needs_native


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("threads"), transformers.LlamaConfig(**ODD))


def run(model: NativeDecoder, rounds: int = 30) -> torch.Tensor:
    tokens = random_tokens(12, ODD["vocab_size"])
    model.allocate(4, 16)
    for _ in range(rounds):
        result = model.forward(batch_of(tokens, context=0, width=4)).logits_RV.clone()
    return result


def test_engines_in_several_threads(folder: Path) -> None:
    models = [NativeDecoder.load(folder, threads=1 + i % 3) for i in range(6)]
    expected = run(models[0], 1)
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(run, models))
    assert all(torch.equal(result, expected) for result in results)


def test_forked_children_start_their_own_pool(folder: Path) -> None:
    """In a process of its own, since pytest's may not fork once it has threads."""
    code = f"""
import os, sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = {[str(Path(__file__).parents[2]), *sys.path]!r}
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_threads import NativeDecoder, run
import torch
model = NativeDecoder.load({str(folder)!r}, threads=2)
expected = run(model)
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(run(model), expected) else 3)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert torch.equal(run(model), expected)
assert codes == [0, 0, 0], codes
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr


def test_set_threads(folder: Path) -> None:
    before = native.num_threads()
    native.set_threads(None)
    num_cores = native.num_threads()
    try:
        native.set_threads(3)
        assert native.num_threads() == 3
        model = NativeDecoder.load(folder)
        expected = run(NativeDecoder.load(folder, threads=1), 1)
        assert torch.equal(run(model, 1), expected)
        with pytest.raises(ConfigError, match="threads"):
            native.set_threads(0)
        native.set_threads(None)
        assert native.num_threads() == num_cores
    finally:
        native.set_threads(before)
