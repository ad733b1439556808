"""The target in a GGUF file as transformers' module, on the GPU if there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.model.gguf.checkpoint import GgufCheckpoint
from outrider.model.gguf.config import read_gguf_config
from outrider.model.gguf.container import open_gguf
from outrider.model.gguf.tokenizer import build_tokenizer


def load_target(path: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    container = open_gguf(path)
    fields = dict(read_gguf_config(container))
    for name in ("architectures", "torch_dtype", "dtype"):
        fields.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**fields, attn_implementation="sdpa")).to(dtype)
    checkpoint = GgufCheckpoint(container)
    state = {
        name: checkpoint.tensor(name, tuple(value.shape)).to(dtype)
        for name, value in model.named_parameters()
        if name in checkpoint
    }
    missing, _ = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.to("cuda" if on_gpu else "cpu").eval()


def load_tokenizer(path: Path) -> Any:
    return build_tokenizer(open_gguf(path))[0]
