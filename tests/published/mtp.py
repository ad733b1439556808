"""Tiny targets that hold an MTP layer, as their authors publish them, each with its reference.

The decoder layer of a reference is transformers' own: of a model that has it as its last layer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as t
from safetensors.torch import load_file, save_file
from torch import Tensor

import gguf_files
from family_models import FAMILY_CONFIGS
from outrider.testing import write_tiny_tokenizer
from published.cases import Json, Tensors, rand, speculators
from published.references import Draw, Shown, norm
from tiny_models import SMALL, reference
from tiny_models import write as write_model

L, H = 3, 32  # layers of a target without the one for prediction


@dataclass(frozen=True)
class Names:
    """Where a layout has things; the order is that of the projection's input."""

    layer: str
    embedding: str
    hidden: str
    projection: str
    last: str = ""
    hidden_first: bool = False
    feeds_normed: bool = True


@dataclass(frozen=True)
class Mtp:
    """x = projection [N(E); N(f)]; y = layer(x); logits = head(N(y)); fed back: N(y), or y."""

    model: Any  # of transformers, with the layer after the target's
    w: Tensors
    names: Names
    shift: float = 0.0  # of norms
    eps: float = 1e-6

    def norm(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.shift + self.w[f"{name}.weight"], self.eps)

    def layer(self, x: Tensor) -> Tensor:
        count, base = len(x), self.model.model
        positions = torch.arange(count)[None]
        hidden = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)
        output = base.layers[L](
            x[None],
            attention_mask=hidden[None, None],
            position_ids=positions,
            position_embeddings=base.rotary_emb(x[None], positions),
        )
        found: Tensor = (output[0] if isinstance(output, tuple) else output)[0]
        return found

    def draft(self, shown: Shown, num_tokens: int, draw: Draw) -> list[int]:
        names, text, f = self.names, list(shown.text), shown.last
        drafted: list[int] = []
        for place in range(num_tokens):
            embeds = self.norm(shown.embedding[text[1:]], names.embedding)
            states = self.norm(f, names.hidden)
            both = [states, embeds] if names.hidden_first else [embeds, states]
            y = self.layer(F.linear(torch.cat(both, -1), self.w[f"{names.projection}.weight"]))
            normed = self.norm(y, names.last) if names.last else y
            drafted.append(draw(shown.logits(normed[-1]), len(shown.text) + place))
            text.append(drafted[-1])
            f = torch.cat([f, (normed if names.feeds_normed else y)[-1:]])
        return drafted


def _inside(layer: str, *names: str, **more: Any) -> Names:
    embedding, hidden, projection, last = (layer + name for name in names)
    return Names(layer, embedding, hidden, projection, last, **more)


_DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_LONG = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
_ERNIE = Names(
    *("model.mtp_block.0.", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0"),
    *("model.mtp_linear_proj.0",),
    feeds_normed=False,
)
_MORE: Json = {"num_nextn_predict_layers": 1}
_QWEN = Names(
    *("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"),
    *("mtp.fc", "mtp.norm"),
)
_MIXED = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_DEEP = {"num_hidden_layers": L + 1}


@dataclass(frozen=True)
class Case:
    config: Any  # of transformers, with one layer more than the target
    names: Names
    more: Json  # of the target's config.json
    apart: Json | None = None  # the config.json of a folder with the layer alone
    native: bool = True
    copies: bool = False  # of the target's embedding and head
    shift: float = 0.0  # of norms


def _with_one_more(config: Any, **changes: Any) -> Any:
    values = {k: v for k, v in config.to_dict().items() if k not in ("layer_types",)}
    return type(config)(**values | _DEEP | changes)


CASES: dict[str, Callable[[], Case]] = {
    "deepseek_v3": lambda: Case(
        _with_one_more(FAMILY_CONFIGS["deepseek_v3"]),
        _inside(f"model.layers.{L}.", *_DEEPSEEK),
        _MORE,
        copies=True,
    ),
    "glm4_moe": lambda: Case(
        _with_one_more(FAMILY_CONFIGS["glm4_moe"]),
        _inside(f"model.layers.{L}.", *_DEEPSEEK, feeds_normed=False),
        _MORE,
        copies=True,
    ),
    "mimo": lambda: Case(
        t.Qwen2Config(**SMALL | _DEEP),
        _inside("model.mtp_layers.0.", *_LONG, hidden_first=True),
        {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "head_dim": 8, **_MORE},
    ),
    "ernie4_5": lambda: Case(
        _with_one_more(FAMILY_CONFIGS["ernie"], tie_word_embeddings=False), _ERNIE, _MORE
    ),
    "ernie4_5_moe": lambda: Case(
        _with_one_more(
            FAMILY_CONFIGS["ernie4_5_moe"], moe_layer_end_index=L - 1, tie_word_embeddings=False
        ),
        _ERNIE,
        _MORE,
    ),
    "qwen3_next": lambda: Case(
        _with_one_more(FAMILY_CONFIGS["qwen3_next"], layer_types=_MIXED),
        _QWEN,
        _MORE,
        shift=1.0,
        native=False,
    ),
    "qwen3_5": lambda: Case(
        _with_one_more(FAMILY_CONFIGS["qwen3_5"], layer_types=_MIXED),
        _QWEN,
        {"mtp_num_hidden_layers": 1},
        shift=1.0,
        native=False,
    ),
    "speculators": lambda: Case(
        t.Qwen3Config(**SMALL | _DEEP, head_dim=16),
        _inside("mtp_layers.0.", *_LONG),
        {},
        speculators("mtp", {"model_type": "qwen3"}, num_nextn_predict_layers=1),
    ),
    "nextn": lambda: Case(
        _with_one_more(FAMILY_CONFIGS["deepseek_v3"]),
        _inside("model.layers.0.", *_DEEPSEEK),
        {},
        {
            "architectures": ["DeepseekV3ForCausalLMNextN"],
            "model_type": "deepseek_v3",
            "num_hidden_layers": 1,
        },
    ),
}


def ends(names: Names) -> Tensors:
    found = {f"{names.embedding}.weight": rand("enorm", H), f"{names.hidden}.weight": rand("h", H)}
    found[f"{names.projection}.weight"] = rand("projection", H, 2 * H) * 1.5
    if names.last:
        found[f"{names.last}.weight"] = rand("last", H)
    return found


def write(name: str, folder: Path) -> tuple[Path, Path | None, Mtp]:
    """The target, the layer's own folder if it has one, and the reference."""
    case = CASES[name]()
    whole = write_model(folder / "whole", case.config)
    tensors = load_file(whole / "model.safetensors")
    after = f"model.layers.{L}."
    moved = {case.names.layer + n.removeprefix(after): x for n, x in tensors.items()
             if n.startswith(after)}  # fmt: skip
    moved |= ends(case.names)
    kept = {n: x for n, x in tensors.items() if not n.startswith(after)}
    if case.copies:
        moved[f"{case.names.layer}embed_tokens.weight"] = kept["model.embed_tokens.weight"].clone()
        moved[f"{case.names.layer}shared_head.head.weight"] = kept["lm_head.weight"].clone()
    target = folder / "target"
    shutil.copytree(whole, target)
    config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": L} | case.more
    for key, value in config.items():
        if key.endswith("layer_types") and value:
            config[key] = value[:L]
    (target / "config.json").write_text(json.dumps(config))
    apart = None if case.apart is None else folder / "apart"
    save_file(kept if apart else kept | moved, target / "model.safetensors")
    if apart is not None:
        apart.mkdir()
        (apart / "config.json").write_text(json.dumps(case.apart))
        save_file(moved, apart / "model.safetensors")
    write_tiny_tokenizer(target)
    eps = config.get("rms_norm_eps", 1e-6)
    return target, apart, Mtp(reference(whole), moved, case.names, case.shift, eps)


def as_gguf(target: Path) -> Path:
    """A GLM-4.5 target as llama.cpp stores it: the layer that drafts is the last block."""
    config = json.loads((target / "config.json").read_text())
    stored: dict[str, gguf_files.Stored] = {}
    stacks: dict[str, list[Tensor]] = {}
    tensors = load_file(target / "model.safetensors")
    for name in sorted(tensors):
        words = name.split(".")
        layer, parts = "".join(words[2:3]), words[3:]
        if "experts" in parts and "shared_experts" not in parts:
            which = parts[3].removesuffix("_proj")
            stacks.setdefault(f"blk.{layer}.ffn_{which}_exps.weight", []).append(tensors[name])
            continue
        module = ".".join(parts).removesuffix(".weight")
        if module.endswith("correction_bias"):
            place = f"blk.{layer}.exp_probs_b.bias"
        elif module in NEXTN:
            place = f"blk.{layer}.nextn.{NEXTN[module]}.weight"
        else:
            place = gguf_files.file_name_of(name)
        stored[place] = gguf_files.plain(tensors[name])
    stored |= {name: gguf_files.plain(torch.stack(some)) for name, some in stacks.items()}
    arch = "glm4moe"
    metadata = gguf_files.metadata_of(config | {"model_type": arch, "num_hidden_layers": L + 1})
    more = {
        "nextn_predict_layers": 1,
        "rope.dimension_count": config["head_dim"] // 2,
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }
    metadata |= {f"{arch}.{key}": value for key, value in more.items()}
    file = target.with_suffix(".gguf")
    return gguf_files.write(file, metadata | gguf_files.tokenizer_of(target), stored)


NEXTN = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "shared_head.norm": "shared_head_norm",
    "shared_head.head": "shared_head_head",
    "embed_tokens": "embed_tokens",
}
