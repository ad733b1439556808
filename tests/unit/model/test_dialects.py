"""What a published drafter's folder may not be: each fault is one line that names it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gguf_files import write as write_gguf
from outrider.engine.build import EngineConfig, build
from outrider.errors import ModelError
from outrider.model.head_kinds import head_kind
from outrider.model.heads import load_head
from outrider.testing import write_tiny_llama
from published import CASES, TARGET, L, cases, eagle3

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def changed(folder: Path, name: str, change: Change) -> Path:
    """The folder of a case after a change of its config and tensors."""
    CASES[name][1](folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def config_change(**fields: Any) -> Change:
    return lambda config, tensors: config.update(fields)


def inner_change(name: str, **fields: Any) -> Change:
    return lambda config, tensors: config.setdefault(name, {}).update(fields)


def put(name: str, value: Callable[[dict[str, Tensor]], Tensor]) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = value(tensors)

    return change


def drop(name: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def ones(*shape: int) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda tensors: torch.ones(shape)


def spoiled(name: str) -> Callable[[dict[str, Tensor]], Tensor]:
    def make(tensors: dict[str, Tensor]) -> Tensor:
        value = tensors[name].clone()
        value.view(-1)[0] = float("nan")
        return value

    return make


def far(tensors: dict[str, Tensor]) -> Tensor:
    return tensors["d2t"] + 100


def twice(tensors: dict[str, Tensor]) -> Tensor:
    offsets = tensors["d2t"].clone()
    offsets[1] = offsets[0] - 1
    return offsets


FAULTS: dict[str, tuple[str, Change, str]] = {
    "unknown field": ("specforge", config_change(residual_scale=0.5), "residual_scale = 0.5"),
    "unknown field inside": (
        "nvidia_yarn", inner_change("eagle_config", use_gate=True), "eagle_config.use_gate = True"),
    "a switch of the trainer": (
        "nvidia_yarn", inner_change("eagle_config", use_mtp_layernorm=True), "use_mtp_layernorm"),
    "unknown tensor": ("specforge", put("gate.weight", ones(4)), "has gate.weight"),
    "missing tensor": ("specforge", drop("midlayer.mlp.up_proj.weight"), "lacks layers.0.mlp.up"),
    "missing norm": ("specforge", config_change(fc_norm=True), "lacks the tensor fc_norm.0"),
    "missing bias": ("specforge", config_change(attention_bias=True), "q_proj.bias"),
    "another activation": ("specforge", config_change(hidden_act="gelu"), "hidden_act = 'gelu'"),
    "quantised": ("specforge", config_change(quantization_config={"bits": 4}), "quantization"),
    "rope variant": (
        "specforge", config_change(rope_scaling={"rope_type": "odd", "factor": 2}), "'odd'"),
    "part of the head rotates": (
        "specforge", config_change(rope_parameters={"partial_rotary_factor": 0.5}), "part of"),
    "d2t out of range": ("specforge", put("d2t", far), "d2t leads out of the target's 64 ids"),
    "d2t names an id twice": ("specforge", put("d2t", twice), "d2t names a target id twice"),
    "no d2t": ("specforge", drop("d2t"), "lacks the tensor d2t"),
    "draft vocabulary": ("specforge", config_change(draft_vocab_size=20), "lm_head.weight has 24"),
    "two sets of taps": (
        "sglang_nested_taps", config_change(eagle_aux_hidden_state_layer_ids=[0, 3, 6]),
        "are taps \\[1, 4, 7\\]"),
    "too few taps": (
        "specforge", config_change(eagle_aux_hidden_state_layer_ids=[1, 2]), "names 2 taps"),
    "not a number": ("specforge", put("norm.weight", spoiled("norm.weight")), "norm.weight"),
    "shape": ("specforge", put("norm.weight", ones(31)), r"shape \[31\], not \[32\]"),
    "integers": (
        "specforge", put("norm.weight", lambda t: torch.ones(32, dtype=torch.int64)), "int64"),
    "MLA": (
        "specforge", put("midlayer.self_attn.kv_a_proj_with_mqa.weight", ones(4, 4)), "MLA"),
    "EAGLE-1 without its bias": ("eagle1_without_bias", config_change(bias=True), "fc.bias"),
    "no mask token": ("p_eagle_specforge", config_change(pard_token=None), "mask_token_id"),
    "mask token out of range": (
        "p_eagle_specforge", config_change(pard_token=64), "mask_token_id 64, which is none"),
    "DFlash mask out of range": (
        "dflash_zlab", inner_change("dflash_config", mask_token_id=-1), "mask_token_id -1"),
    "taps below the first layer": (
        "specforge", config_change(eagle_aux_hidden_state_layer_ids=[-2, 1, 2]), "-2"),
    "NaN in the output head": (
        "specforge", put("lm_head.weight", spoiled("lm_head.weight")), "lm_head.weight"),
    "NaN in Medusa": (
        "medusa_vllm", put("lm_heads.1.weight", spoiled("lm_heads.1.weight")), "no numbers"),
    "NaN in an MLP speculator": (
        "mlp_ibm", put("speculator.emb.0.weight", spoiled("speculator.emb.0.weight")), "no numb"),
    "field of DFlash": (
        "dflash_zlab", inner_change("dflash_config", attention_sink_bias=True), "attention_sink"),
    "DFlash without a mask": (
        "dflash_zlab", inner_change("dflash_config", mask_token_id=None), "mask_token_id"),
    "DFlash without a block": ("dflash_zlab", config_change(block_size=None), "block_size"),
    "DFlash taps": (
        "dflash_zlab", inner_change("dflash_config", target_layer_ids=[1, 2, 3]), "names 3"),
    "Markov head": (
        "dspark_fill_in", config_change(markov_head_type="mlp"), "markov_head_type 'mlp'"),
    "token map": (
        "medusa_vllm_token_map", put("token_map", lambda t: t["token_map"] + 60), "token_map"),
    "Medusa bias": ("medusa_vllm", config_change(medusa_fc_bias=True), "medusa_fc_bias is True"),
    "LSTM": ("mlp_ibm", config_change(method="sum_lstm"), "LSTM"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, tmp_path: Path) -> None:
    name, change, expected = FAULTS[fault]
    folder = changed(tmp_path, name, change)
    with pytest.raises(ModelError, match=expected) as error:
        load_head(folder, num_layers=L)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("harmless", ["t2d", "verifier_norm.weight", "rotary_emb.inv_freq"])
def test_leftovers_of_training_are_ignored(harmless: str, tmp_path: Path) -> None:
    folder = changed(tmp_path, "specforge", put(harmless, ones(3)))
    assert load_head(folder, num_layers=L).kind == "eagle3"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["DominoDraftModel"]}, None),
        ({"architectures": ["DFlash2DraftModel"]}, None),
        ({"speculators_model_type": "mtp"}, "mtp"),
        ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "mtp"),
        ({"speculators_model_type": "peagle"}, "p-eagle"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "mlp"),
        ({"medusa_num_heads": 2}, "medusa"),
    ],
)
def test_kinds_are_read_from_the_config(
    config: dict[str, Any], kind: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if kind is None:
        with pytest.raises(ModelError, match="cannot draft here"):
            head_kind(tmp_path)
    else:
        assert head_kind(tmp_path) == kind


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("eagle3.target_layers", None, "lacks the metadata entry eagle3.target_layers"),
        ("eagle3.target_layers", [2, 4], "config.json names 2 taps"),
        ("eagle3.embedding_length", 0, "embedding_length = 0; it must be positive"),
        ("eagle3.rope.scaling.type", "yarn", "rope scaling 'yarn', which is not supported"),
    ],
)
def test_a_wrong_gguf_head_is_refused_in_one_line(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    metadata, tensors = eagle3.as_gguf(cases.eagle3())
    changes = metadata | {key: value}
    file = tmp_path / "head.gguf"
    write_gguf(file, {k: v for k, v in changes.items() if v is not None}, tensors)
    with pytest.raises(ModelError, match=message) as raised:
        load_head(file, num_layers=L)
    assert "\n" not in str(raised.value)


def test_ids_of_a_gguf_head_may_be_differences(tmp_path: Path) -> None:
    """As early converters wrote them."""
    metadata, tensors = eagle3.as_gguf(cases.eagle3())
    loaded = []
    offsets = cases.eagle3()["d2t"]
    for number, d2t in enumerate((tensors["d2t"].data, offsets.numpy().astype("<i8").tobytes())):
        stored = tensors | {"d2t": replace(tensors["d2t"], data=d2t)}
        file = write_gguf(tmp_path / f"{number}.gguf", metadata, stored)
        loaded.append(load_head(file, num_layers=L).state_dict()["d2t"])
    assert torch.equal(loaded[0], offsets)
    assert torch.equal(loaded[1], offsets)


def test_a_llama_model_is_no_head(tmp_path: Path) -> None:
    assert head_kind(write_tiny_llama(tmp_path)) is None


class Harmful:
    def __reduce__(self) -> Any:
        return (print, ("ran",))


@pytest.mark.parametrize("content", [b"cut short", pickle.dumps({"fc.weight": Harmful()})])
def test_pickles_hold_tensors_only(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CASES["safeailab"][1](tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError, match="damaged or holds more than tensors"):
        load_head(tmp_path, num_layers=L)
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize("kept", [40, 4000, -100])
def test_a_truncated_gguf_head_is_named(kept: int, tmp_path: Path) -> None:
    file = tmp_path / "head.gguf"
    eagle3.eagle3_gguf(file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError) as raised:
        load_head(file, num_layers=L)
    assert "head.gguf" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_gguf_head_with_ids_out_of_range_is_refused(tmp_path: Path) -> None:
    metadata, tensors = eagle3.as_gguf(cases.eagle3())
    ids = torch.arange(cases.W) + 60
    tensors["d2t"] = replace(tensors["d2t"], data=ids.numpy().astype("<i8").tobytes())
    file = write_gguf(tmp_path / "head.gguf", metadata, tensors)
    with pytest.raises(ModelError, match="d2t leads out of the target's 64 ids"):
        load_head(file, num_layers=L)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    CASES["specforge"][1](tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="damaged or cut short"):
        load_head(tmp_path, num_layers=L)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"hidden_size": 48, "head_dim": 12}, "width 32"),
        ({"vocab_size": 80}, "64 ids"),
        ({"num_layers": 4}, "reads layer 7; .* has only 4"),
    ],
)
def test_a_head_of_another_target_is_refused(
    other: dict[str, int], expected: str, tmp_path: Path
) -> None:
    target = write_tiny_llama(tmp_path / "target", **TARGET | other)
    CASES["sglang_nested_taps"][1](tmp_path / "head")
    with pytest.raises(ModelError, match=expected):
        build(EngineConfig(model=str(target), draft_model=str(tmp_path / "head")))
