"""Other architectures through transformers, against its own plain forward; and the refusals."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from outrider.errors import ModelError
from outrider.model import load_model, transformers_model
from outrider.model.driver import Driver
from outrider.model.few_rows import FewRowsLinear, use_few_rows
from outrider.model.selfcheck import self_check
from outrider.model.transformers_model import TransformersModel
from outrider.testing import write_tiny_llama
from tiny_models import SMALL, logits, path_to, reference, worst, write

TOKENS = [(i * i * 7 + i) % 64 for i in range(30)]
PARENTS = [-1, 0, 0, 1, 1, 2]
IDS: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
GPT: dict[str, Any] = IDS | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
NO_GROUPS = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
GEMMA: dict[str, Any] = SMALL | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}

CONFIGS: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(**GPT),
    "gpt_neox": transformers.GPTNeoXConfig(**NO_GROUPS),
    "gemma2": transformers.Gemma2Config(**GEMMA, attn_logit_softcapping=2.0),
    "gemma3": transformers.Gemma3TextConfig(**GEMMA),
    "phi": transformers.PhiConfig(**SMALL),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "gpt_oss": transformers.GptOssConfig(
        **SMALL, head_dim=8, sliding_window=6, num_local_experts=4
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_agrees_with_a_plain_forward(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIGS[name])
    model, theirs = load_model(folder, backend="transformers"), reference(folder)
    assert isinstance(model, TransformersModel)

    def plain(tokens: list[int]) -> torch.Tensor:
        return logits(theirs, tokens)

    driver = Driver(model, seed=1)
    first = driver.forward({"a": TOKENS[:9], "b": TOKENS[:20]})
    assert worst(first.logits["a"], plain(TOKENS[:9])) < 1e-4
    assert worst(first.logits["b"], plain(TOKENS[:20])) < 1e-4
    driver.keep("a", range(9))
    driver.keep("b", range(17))
    nodes = TOKENS[9:15]
    second = driver.forward({"a": nodes, "b": TOKENS[20:24]}, {"a": PARENTS})
    assert worst(second.logits["b"], plain(TOKENS[:17] + TOKENS[20:24])[17:]) < 1e-4
    for node in range(len(nodes)):
        whole = TOKENS[:9] + [nodes[i] for i in path_to(PARENTS, node)]
        assert worst(second.logits["a"][node], plain(whole)[-1]) < 1e-4
    path = path_to(PARENTS, 5)
    driver.keep("a", path)
    third = driver.forward({"a": TOKENS[20:22]}).logits["a"]
    whole = TOKENS[:9] + [nodes[i] for i in path] + TOKENS[20:22]
    assert worst(third, plain(whole)[-2:]) < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "mixtral"])
def test_taps_and_exit_layer(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIGS[name])
    model, theirs = TransformersModel.load(folder), reference(folder)
    driver = Driver(model, seed=2)
    everything = theirs(torch.tensor([TOKENS]), output_hidden_states=True, use_cache=False)
    got = driver.forward({"a": TOKENS[:3], "b": TOKENS}, taps=(0, 2, 3))
    for layer in (0, 2):  # transformers normalises its last one
        assert worst(got.taps[layer]["b"], everything.hidden_states[layer][0]) < 1e-4
    assert got.taps[3]["a"].shape == (3, 32)
    assert worst(got.logits["b"], everything.logits[0]) < 1e-4
    shallow = driver.forward({"c": TOKENS}, exit_layer=2, taps=(2,))
    base = theirs.base_model
    norm = base.ln_f if name == "gpt2" else base.norm
    expected = theirs.lm_head(norm(everything.hidden_states[2]))[0]
    assert worst(shallow.logits["c"], expected) < 1e-4
    again = driver.forward({"d": TOKENS}).logits["d"]
    assert worst(again, everything.logits[0]) < 1e-4


def test_same_as_the_compact_decoder(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    theirs = load_model(folder, backend="transformers")
    ours = load_model(folder, backend="torch")
    assert theirs.spec == ours.spec
    got = [Driver(m, seed=3).forward({"a": TOKENS}).logits["a"] for m in (ours, theirs)]
    assert worst(*got) < 1e-4


REFUSED: dict[str, tuple[Any, str]] = {
    "cpmant": (
        transformers.CpmAntConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, dim_head=8
        ),
        "ignore the attention setting",
    ),
    "rwkv": (
        transformers.RwkvConfig(**IDS, hidden_size=32, num_hidden_layers=2),
        "recurrent state",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_it_cannot_serve(name: str, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    folder = write(tmp_path, config)
    with pytest.raises(ModelError, match=reason) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "dropped"),
    [("gemma2", "softcap"), ("mistral", "window"), ("gpt_oss", "sinks_A"), ("gpt2", "scale")],
)
def test_self_check_notices_a_dropped_option(
    name: str, dropped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = TransformersModel.attend

    @functools.wraps(attend)
    def careless(self: TransformersModel, *args: Any, **options: Any) -> torch.Tensor:
        return attend(self, *args, **options | {dropped: 1.0 if dropped == "scale" else None})

    mistral = transformers.MistralConfig(**SMALL, sliding_window=6)
    folder = write(tmp_path, CONFIGS.get(name, mistral))
    monkeypatch.setattr(TransformersModel, "attend", careless)
    with pytest.raises(ModelError, match=r"failed the self-check|context of only 6"):
        TransformersModel.load(folder)


@pytest.mark.parametrize("fault", ["tree as chain", "no compaction", "stale context"])
def test_self_check_notices_a_faulty_model(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(write_tiny_llama(tmp_path / "m"), backend="torch")
    self_check(model)
    forward = model.forward

    def wrong(batch: Any) -> Any:
        if fault == "tree as chain":
            batch.parents_T = None
        elif fault == "stale context":
            batch.context_S = batch.context_S.copy()
            batch.context_S[batch.context_S > 4] -= 1
        return forward(batch)

    monkeypatch.setattr(model, "forward", wrong)
    if fault == "no compaction":
        monkeypatch.setattr(model, "copy_slots", lambda source, target: None)
    with pytest.raises(ModelError, match=r"failed the self-check|context of only 6") as caught:
        self_check(model)
    assert "\n" not in str(caught.value)


def test_refuses_other_kinds_of_models(tmp_path: Path) -> None:
    bert = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    llama = transformers.LlamaConfig(**SMALL)
    transformers.LlamaForSequenceClassification(llama).save_pretrained(tmp_path / "judge")
    for name in ("bert", "judge"):
        with pytest.raises(ModelError, match="not a causal language model"):
            load_model(tmp_path / name)


def test_refuses_random_weights(tmp_path: Path) -> None:
    """transformers would invent missing tensors; we do not."""
    folder = write(tmp_path, CONFIGS["gpt2"])
    text = (folder / "config.json").read_text().replace('"n_layer": 3', '"n_layer": 4')
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"lacks \d+ tensors"):
        load_model(folder, backend="transformers")


def test_length_limits_of_changing_ropes(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = transformers.Phi3Config(
        **SMALL,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
            **factors,
        },
    )
    assert load_model(write(tmp_path, config), backend="transformers").spec.max_positions == 64


def test_length_limit_of_a_window_that_does_not_reach_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = TransformersModel.attend

    def deaf(self: TransformersModel, *args: Any, **options: Any) -> torch.Tensor:
        return attend(self, *args, **options | {"window": None})

    monkeypatch.setattr(TransformersModel, "attend", deaf)
    wide = write(tmp_path / "wide", transformers.Gemma3TextConfig(**GEMMA | {"sliding_window": 32}))
    assert load_model(wide, backend="transformers").spec.max_positions == 32
    narrow = write(tmp_path / "narrow", CONFIGS["gemma3"])
    with pytest.raises(ModelError, match="context of only 6 tokens"):
        load_model(narrow, backend="transformers")


def test_a_window_of_the_mask_alone_limits_the_length(tmp_path: Path) -> None:
    """Phi-MoE's layers request no window: only its mask has one, which we do not use."""
    config = transformers.PhimoeConfig(**SMALL, num_local_experts=4, sliding_window=40)
    model = load_model(write(tmp_path, config), backend="transformers")
    assert model.spec.max_positions == 40
    expected = logits(reference(tmp_path), TOKENS[:40])
    assert worst(Driver(model).forward({"a": TOKENS[:40]}).logits["a"], expected) < 1e-4


def test_attention_without_a_state_in_a_class_that_can_keep_one(tmp_path: Path) -> None:
    config = transformers.GraniteMoeHybridConfig(
        **SMALL,
        num_local_experts=0,
        shared_intermediate_size=48,
        layer_types=["full_attention"] * 3,
        mamba_n_heads=8,
        mamba_d_head=8,
    )
    model = load_model(write(tmp_path, config), backend="transformers")
    assert isinstance(model, TransformersModel)
    expected = logits(reference(tmp_path), TOKENS)
    assert worst(Driver(model).forward({"a": TOKENS}).logits["a"], expected) < 1e-4


def test_the_hub_s_spelling_of_a_class(tmp_path: Path) -> None:
    folder = write(tmp_path, transformers.PhimoeConfig(**SMALL, num_local_experts=4))
    text = (folder / "config.json").read_text().replace("PhimoeFor", "PhiMoEFor")
    (folder / "config.json").write_text(text)
    assert load_model(folder, backend="transformers").spec.num_layers == 3
    assert not isinstance(load_model(folder), TransformersModel)


def test_attention_is_registered_once() -> None:
    assert transformers_model.ATTENTION_NAME in transformers.AttentionInterface()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 2), (7,), (1, 11), (16,), (1, 17), (0,)])
def test_linear_modules_of_few_rows_give_what_torch_gives(
    shape: tuple[int, ...], bias: bool
) -> None:
    plain = torch.nn.Linear(24, 40, bias=bias)
    quick = copy.deepcopy(plain)
    use_few_rows(quick)
    rows = torch.randn(*shape, 24)
    expected = plain(rows)
    assert type(quick) is FewRowsLinear
    assert quick(rows).is_contiguous()
    torch.testing.assert_close(quick(rows), expected, atol=1e-5, rtol=1e-5)


def test_only_plain_linear_modules_in_float32_are_exchanged() -> None:
    class Other(torch.nn.Linear):
        pass

    kinds = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).bfloat16(), Other(4, 4)]
    use_few_rows(torch.nn.ModuleList(kinds))
    assert [type(kind) for kind in kinds] == [FewRowsLinear, torch.nn.Linear, Other]
