"""The torch models on a CUDA device: the same numbers as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from outrider.model import load_model
from outrider.model.driver import Driver
from outrider.model.selfcheck import self_check
from outrider.testing import write_tiny_llama
from tiny_models import SMALL, worst, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TOKENS = [(i * i * 7 + i) % 64 for i in range(60)]
PARENTS = [-1, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("backend", ["torch", "transformers"])
def test_same_as_on_the_cpu(backend: str, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", head_dim=16, hidden_size=64)
    got = []
    for device in ("cpu", "cuda"):
        model = load_model(folder, device=device, backend=backend, dtype="float32")  # type: ignore[arg-type]
        driver = Driver(model, seed=1)
        driver.forward({"a": TOKENS[:7], "b": TOKENS[:40]})
        driver.keep("a", range(7))
        driver.keep("b", range(40))
        out = driver.forward({"a": TOKENS[10:16], "b": TOKENS[40:42], "c": TOKENS}, {"a": PARENTS})
        got.append(torch.cat([x.cpu() for x in out.logits.values()]))
    assert worst(*got) < 1e-3


def test_stored_type_by_default(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**SMALL, head_dim=16)
    folder = write(tmp_path, config, dtype=torch.bfloat16)
    model = load_model(folder, device="cuda")
    assert getattr(model, "dtype", None) == torch.bfloat16
    self_check(model)
    gpt2 = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    load_model(write(tmp_path / "gpt2", gpt2, dtype=torch.bfloat16), device="cuda")
