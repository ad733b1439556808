"""Two processes that share a model write the same tokens as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from outrider.contracts import Model
from outrider.engine.build import EngineConfig, assemble
from outrider.errors import ConfigError, EngineError
from outrider.llm import LLM
from outrider.model import load_model
from outrider.model.driver import Driver
from outrider.model.selfcheck import self_check
from outrider.model.tensor_parallel import TensorParallelModel
from outrider.model.tokenizer import load_tokenizer
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama, write_tiny_tokenizer
from tiny_models import SMALL, write

PROMPT = [(i * i * 7 + i) % 64 for i in range(21)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "draft", num_layers=1)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[TensorParallelModel]:
    model = load_model(folder, tensor_parallel_size=2)
    assert isinstance(model, TensorParallelModel)
    yield model
    model.close()


def write_tokens(model: Model, folder: Path, draft: Path, k: int, heat: float) -> list[list[int]]:
    config = EngineConfig(
        model=str(folder), draft_model=str(draft), num_draft_tokens=k, kv_tokens=1024
    )
    engine = assemble(config, model, load_tokenizer(str(folder)))
    params = SamplingParams(max_tokens=40, temperature=heat, seed=3, ignore_eos=True)
    requests = [engine.add(PROMPT[:length], params) for length in (21, 4)]
    for _ in engine.run(requests):
        pass
    return [engine.collect(request).tokens for request in requests]


@pytest.mark.parametrize("heat", [0.0, 0.9])
@pytest.mark.parametrize("k", [0, 4])
def test_two_write_the_same_tokens_as_one(
    shared: TensorParallelModel, folder: Path, draft: Path, k: int, heat: float
) -> None:
    one = load_model(folder, backend="torch")
    assert write_tokens(shared, folder, draft, k, heat) == write_tokens(one, folder, draft, k, heat)
    assert shared.spec.num_parameters == one.spec.num_parameters
    assert shared.spec.kv_bytes_per_token == one.spec.kv_bytes_per_token // 2


def test_trees_rollback_and_taps(shared: TensorParallelModel) -> None:
    self_check(shared)


def test_only_one_at_a_time(shared: TensorParallelModel, folder: Path) -> None:
    with pytest.raises(ConfigError, match="one tensor-parallel model"):
        load_model(folder, tensor_parallel_size=2)


def test_what_cannot_be_shared_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="does not divide this model's 2 key/value heads"):
        load_model(folder, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="needs the compact torch decoder"):
        load_model(folder, tensor_parallel_size=2, backend="transformers")
    with pytest.raises(ConfigError, match="tensor_parallel_size must be at least 1"):
        EngineConfig(model=str(folder), tensor_parallel_size=0)


def test_a_lost_process_is_an_error_and_not_a_hang(shared: TensorParallelModel) -> None:
    """The last one to use the shared model."""
    driver = Driver(shared)
    driver.forward({"a": PROMPT})
    shared.workers[0].kill()
    with pytest.raises(EngineError, match="a tensor-parallel process failed"):
        driver.forward({"b": PROMPT})
    with pytest.raises(EngineError, match="load the model again"):
        driver.forward({"c": PROMPT})


def test_command_line(tmp_path: Path) -> None:
    """Biases, norms of queries and keys, a vocabulary that does not divide by two.

    In a process of its own, which ends its worker by ending.
    """
    config = transformers.Qwen3Config(
        **SMALL | {"vocab_size": 63}, head_dim=16, attention_bias=True
    )
    folder = write(tmp_path / "m", config)
    write_tiny_tokenizer(folder, num_tokens=63)
    plain = LLM(str(folder), backend="torch", num_draft_tokens=0)
    expected = plain.generate("hello", max_tokens=24, ignore_eos=True)
    arguments = ["generate", str(folder), "-p", "hello", "-m", "24", "-k", "3", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "outrider", *arguments, "--ignore-eos", "--tp", "2"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["tokens"] == expected.tokens
