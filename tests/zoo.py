"""Every causal model type of transformers, tiny: what runs it, and whether drafts change a token.

    PYTHONPATH=src:tests python -m zoo [TYPE ...]

records `zoo.json`, from which docs/reference/models.md is made. `exactness/test_zoo.py` measures a
sample again and compares; with OUTRIDER_ZOO=1 (`make zoo`) all of it.
"""

from __future__ import annotations

import inspect
import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from exactness.same_tokens import assert_same, run
from family_models import FAMILY_CONFIGS
from native_models import random_tokens
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.errors import OutriderError
from outrider.model import load_model
from outrider.model.driver import Driver
from outrider.model.families import FAMILIES
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama
from tiny_models import CONFIGS, SMALL, logits, reference, worst, write

RECORD = Path(__file__).with_name("zoo.json")
PROPOSERS = ("suffix", "lookahead", "draft-model", "draft-tree", "early-exit", "quantized")
PATHS = {"NativeDecoder": "native", "TorchDecoder": "torch", "TransformersModel": "transformers"}
TOLERANCE = 1e-4  # of the range of the logits
TOKENS = random_tokens(48, 64)
PROMPTS = [random_tokens(4, 64, seed) * 3 for seed in (1, 2)]
PARAMS = (
    SamplingParams(max_tokens=24),
    SamplingParams(temperature=1.0, top_p=0.95, seed=3, max_tokens=24),
)

# Types beside those of the own decoder: what people run, and what has parts of its own.
_OTHERS = """
afmoe apertus aria_text bitnet cohere2_moe cpmant ctrl deepseek_v4 diffllama doge exaone_moe flint
granite_swa granitemoe_swa granitemoeshared hrm_text hy_v3 hy_v4 jais2 jetmoe
kimi_linear kolibri1 laguna longcat_flash mellum mimo_v2_flash minicpm3 nanochat
persimmon recurrent_gemma rwkv solar_open xlstm youtu
"""
# Sizes by the names that any configuration gives them.
_SIZES: dict[str, Any] = {
    **SMALL,
    **dict.fromkeys(("n_embd", "d_model", "n_inner", "ffn_dim"), 32),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("n_positions", "max_seq_len", "max_position_embeddings"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "rotary_dim"), 8),
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "sliding_window": 30,
}
_LATENT = ("longcat_flash", "minicpm3", "youtu")
_MORE = {model_type: {"num_key_value_heads": 4} for model_type in _LATENT}


def _own() -> dict[str, Any]:
    """The first tiny configuration of every type that a family describes."""
    found: dict[str, Any] = {}
    for config in [*CONFIGS.values(), *FAMILY_CONFIGS.values()]:
        found.setdefault(config.model_type, config)
    return found


OWN = _own()
TYPES = sorted({*OWN, *_OTHERS.split()})


def config_of(model_type: str) -> Any:
    if model_type in OWN:
        return OWN[model_type]
    kind = CONFIG_MAPPING[model_type]
    known = set(inspect.signature(kind.__init__).parameters) | set(SMALL)
    known |= set(getattr(kind, "__dataclass_fields__", {}))
    sizes = {key: value for key, value in _SIZES.items() if key in known}
    return kind(**sizes | _MORE.get(model_type, {}))


def measure(model_type: str) -> dict[str, Any]:
    """What runs a tiny model of this type, and what it was compared with; see the module."""
    with tempfile.TemporaryDirectory() as room, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = write(Path(room) / model_type, config_of(model_type))
        try:
            model = load_model(folder)
        except OutriderError as error:
            return {"refused": str(error).replace(f"{folder}", model_type)}
        length = min(len(TOKENS), model.spec.max_positions)
        expected = logits(reference(folder), TOKENS[:length])
        off = worst(Driver(model, seed=1).forward({"a": TOKENS[:length]}).logits["a"], expected)
        spec = model.spec
        return {
            "path": PATHS[type(model).__name__],
            "exact": off < TOLERANCE * float(expected.max() - expected.min()),
            "context": f"{spec.max_positions}: {spec.shortened}" if spec.shortened else "",
            "proposers": _proposers(folder, Path(room) / "draft", type(model).__name__),
        }


def _proposers(folder: Path, draft: Path, path: str) -> list[str]:
    """Those that draft for the model; every one must leave the tokens as they are."""
    write_tiny_llama(draft, num_layers=1, max_positions=128)
    shutil.copy(draft / "tokenizer.json", folder)

    def engine(proposer: str, k: int) -> Engine:
        return build(
            EngineConfig(
                model=str(folder),
                draft_model=str(draft) if proposer.startswith("draft") else None,
                proposer=proposer,
                num_draft_tokens=k,
                block_size=8,
            )
        )

    plain = engine("ngram", 0)
    expected = [run(plain, PROMPTS, params) for params in PARAMS]
    working = []
    for proposer in PROPOSERS:
        try:
            drafting = engine(proposer, 4)
        except OutriderError:
            continue
        drafted = 0
        for params, plain_results in zip(PARAMS, expected, strict=True):
            results = run(drafting, PROMPTS, params)
            label = f"{folder.name} {proposer}"
            exact = path == "NativeDecoder"
            assert_same(drafting, results, plain_results, params, label, bitwise=exact)
            drafted += sum(result.stats.num_drafted for result in results)
        if drafted:  # else it failed, and the request went on without drafts
            working.append(proposer)
    return working


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    asked = sys.argv[1:]
    found = json.loads(RECORD.read_text()) if asked and RECORD.exists() else {}
    for model_type in asked or TYPES:
        try:
            found[model_type] = measure(model_type)
        except Exception as error:
            found[model_type] = {"wrong": f"{type(error).__name__}: {str(error)[:200]}"}
        print(model_type, found[model_type], flush=True)
        ordered = {key: found[key] for key in sorted(found) if key in TYPES}
        RECORD.write_text(json.dumps(ordered, indent=1) + "\n")


assert set(OWN) <= set(FAMILIES)

if __name__ == "__main__":
    main()
