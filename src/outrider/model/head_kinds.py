"""Which kind of drafter a folder holds, by its config.json and the names of its tensors.

Many EAGLE heads call themselves plain Llama models, and some Medusa heads have no sizes at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.errors import ModelError
from outrider.model.gguf.files import is_gguf
from outrider.model.weights import read_json

MTP = "mtp"
SPECULATORS = {  # of a speculators_model_type
    "eagle3": "eagle3",
    "peagle": "p-eagle",
    "dflash": "dflash",
    "dspark": "dflash",
    "eagle": "eagle",
    "mtp": MTP,
}
_KINDS = {  # of an architecture
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Qwen3Eagle3Model": "eagle3",
    "LlamaForCausalLMEagle": "eagle",
    "EagleLlamaForCausalLM": "eagle",
    "EAGLEModel": "eagle",
    "PEagleDraftModel": "p-eagle",
    "PeagleLlamaForCausalLM": "p-eagle",
    "PeagleQwen3ForCausalLM": "p-eagle",
    "MedusaModel": "medusa",
    "MLPSpeculatorPreTrainedModel": "mlp",
    "DFlashDraftModel": "dflash",
    "DSparkDraftModel": "dflash",
    "Qwen3DSparkModel": "dflash",
    "Gemma4AssistantForCausalLM": MTP,
}
_TYPES = {"eagle": "eagle", "medusa": "medusa", "mlp_speculator": "mlp"}  # of a model_type
_MTP_ENDS = ("NextN", "MTP", "MTPModel")  # of the names that SGLang and vLLM give to MTP layers
_WORDS = ("eagle", "medusa", "dflash", "dspark", "domino", "hydra", "speculator", "draft")


def head_kind(folder: Path) -> str | None:
    """The kind of heads in a folder, judged by its config and tensors' names; None: a model.

    Raises ModelError for heads of a kind that is not supported.
    """
    if is_gguf(folder):
        from outrider.model.dialects.gguf import is_gguf_head

        return "eagle3" if is_gguf_head(folder) else None
    config = read_json(folder / "config.json")
    published = config.get("speculators_model_type")
    if published is not None:
        if published not in SPECULATORS:
            raise _unsupported(folder, f"a {published} speculator")
        return SPECULATORS[published]
    name = str((config.get("architectures") or [""])[0])
    if name.endswith(_MTP_ENDS):
        return MTP
    kind = _KINDS.get(name) or _TYPES.get(config.get("model_type", ""))
    if kind == "eagle3" and "mask_hidden" in _names(folder):
        return "p-eagle"
    if kind is not None:
        return kind
    if any(word in name.lower() for word in _WORDS):
        raise _unsupported(folder, name)
    return _kind_by_names(folder, config, name)


def _kind_by_names(folder: Path, config: dict[str, Any], name: str) -> str | None:
    """For folders whose config.json says "Llama" or nothing."""
    if "medusa_num_heads" in config:
        return "medusa"
    names = _names(folder)
    if _is_mtp_apart(names):
        return MTP
    if names & {"fc.weight", "eagle_linear.weight"}:
        return "eagle3" if "midlayer.hidden_norm.weight" in names else "eagle"
    if not (name or (folder / "tokenizer.json").exists()):
        raise _unsupported(folder, "no architecture")
    return None


def _is_mtp_apart(names: frozenset[str]) -> bool:
    """Whether there is an MTP layer without the target that it belongs to."""
    from outrider.model.dialects.mtp import find_mtp

    whole = {name if name.startswith("mtp") else f"model.{name}" for name in names}
    return "norm.weight" not in names and find_mtp(whole | names) is not None


def _unsupported(folder: Path, what: str) -> ModelError:
    kinds = ", ".join(dict.fromkeys([*_KINDS.values(), MTP]))
    return ModelError(
        f"the config.json of {folder} names {what}, which cannot draft here: give a language model "
        f"with its tokenizer, or heads of the kinds {kinds}"
    )


def _names(folder: Path) -> frozenset[str]:
    from outrider.model.dialects.folder import stored_names

    return stored_names(folder)
