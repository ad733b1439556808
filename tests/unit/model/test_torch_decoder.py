"""The compact decoder against transformers' forward, and against itself in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import tiny_models
from outrider.contracts import StepBatch
from outrider.model.driver import Driver
from outrider.model.torch_decoder import TorchDecoder
from tiny_models import CONFIGS, SMALL, logits, path_to, reference, worst, write

TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 64, size=48)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TorchDecoder:
    """Grouped heads, biases and a window: whatever could go wrong, does."""
    config = transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=2
    )
    return TorchDecoder.load(write(tmp_path_factory.mktemp("llama"), config))


def plain(model: TorchDecoder, tokens: list[int]) -> torch.Tensor:
    return Driver(model, block_size=16).forward({"only": tokens}).logits["only"]


@pytest.mark.parametrize("name", CONFIGS)
def test_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIGS[name])
    model = TorchDecoder.load(folder)
    driver = Driver(model, seed=1)
    expected = logits(reference(folder), TOKENS)
    assert worst(driver.forward({"a": TOKENS}).logits["a"], expected) < 1e-4
    # and in pieces, the KV read back from shuffled blocks
    got = []
    for piece in (TOKENS[:19], TOKENS[19:20], TOKENS[20:25], TOKENS[25:]):
        got.append(driver.forward({"b": piece}).logits["b"])
        driver.keep("b", range(len(piece)))
    assert worst(torch.cat(got), expected) < 1e-4


def test_agrees_with_transformers_on_old_config_spelling(tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIGS["llama llama3"])
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling
    config["torch_dtype"] = config.pop("dtype", None) or "float32"
    expected = logits(reference(folder), TOKENS)
    (folder / "config.json").write_text(json.dumps(config))
    assert worst(plain(TorchDecoder.load(folder), TOKENS), expected) < 1e-4


def test_sharded_and_bfloat16(tmp_path: Path) -> None:
    config = CONFIGS["llama biased"]
    folder = write(tmp_path, config, dtype=torch.bfloat16, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").is_file()
    assert not (folder / "model.safetensors").exists()
    exact = TorchDecoder.load(folder)
    assert exact.dtype == torch.float32
    assert worst(plain(exact, TOKENS), logits(reference(folder), TOKENS)) < 1e-4
    # bfloat16 rounds, and differently from transformers: as near to the truth is all one can ask
    truth = logits(reference(folder), TOKENS)
    theirs = logits(reference(folder, dtype=torch.bfloat16), TOKENS)
    ours = plain(TorchDecoder.load(folder, dtype=torch.bfloat16), TOKENS)
    assert ours.dtype == torch.float32
    assert float((ours - truth).abs().mean()) < 1.5 * float((theirs - truth).abs().mean())


def test_spec(tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIGS["llama tied"])
    spec = TorchDecoder.load(folder).spec
    parameters = sum(p.numel() for p in reference(folder).parameters())
    assert spec.num_parameters == parameters
    assert (spec.vocab_size, spec.num_tokens, spec.num_layers, spec.hidden_size) == (64, 64, 3, 32)
    assert spec.kv_bytes_per_token == 2 * 3 * 2 * 8 * 4
    assert spec.eos_ids == (0,)
    assert spec.max_positions == 128


def test_ragged_batch_equals_separate_forwards(llama: TorchDecoder) -> None:
    prompts = {"a": TOKENS[:5], "b": TOKENS[5:30], "c": TOKENS[30:31], "d": TOKENS[31:36]}
    expected = {name: plain(llama, tokens) for name, tokens in prompts.items()}
    for seed in (None, 3):
        driver = Driver(llama, seed=seed)
        got = driver.forward(prompts)
        for name in prompts:
            assert worst(got.logits[name], expected[name]) < 1e-4


def test_decode_beside_prefill(llama: TorchDecoder) -> None:
    driver = Driver(llama, seed=2)
    driver.forward({"a": TOKENS[:10], "b": TOKENS[10:12]})
    driver.keep("a", range(10))
    driver.keep("b", range(2))
    got = driver.forward({"a": TOKENS[20:24], "c": TOKENS[24:40], "b": TOKENS[40:41]})
    assert worst(got.logits["a"], plain(llama, TOKENS[:10] + TOKENS[20:24])[10:]) < 1e-4
    assert worst(got.logits["b"], plain(llama, TOKENS[10:12] + TOKENS[40:41])[2:]) < 1e-4
    assert worst(got.logits["c"], plain(llama, TOKENS[24:40])) < 1e-4


PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 5]


def test_tree_equals_each_of_its_paths(llama: TorchDecoder) -> None:
    driver = Driver(llama, seed=4)
    driver.forward({"a": TOKENS[:11], "b": TOKENS[:3]})
    driver.keep("a", range(11))
    driver.keep("b", range(3))
    nodes = TOKENS[11:20]
    got = driver.forward({"a": nodes, "b": TOKENS[3:7]}, {"a": PARENTS})
    for node in range(len(nodes)):
        tokens = TOKENS[:11] + [nodes[i] for i in path_to(PARENTS, node)]
        assert worst(got.logits["a"][node], plain(llama, tokens)[-1]) < 1e-4
    assert worst(got.logits["b"], plain(llama, TOKENS[:7])[3:]) < 1e-4


@pytest.mark.parametrize("leaf", range(9))
def test_compaction_keeps_a_path(llama: TorchDecoder, leaf: int) -> None:
    driver = Driver(llama, seed=5)
    driver.forward({"a": TOKENS[:6]})
    driver.keep("a", range(6))
    nodes, path = TOKENS[11:20], path_to(PARENTS, leaf)
    driver.forward({"a": nodes}, {"a": PARENTS})
    driver.keep("a", path)
    got = driver.forward({"a": TOKENS[20:22]}).logits["a"]
    whole = TOKENS[:6] + [nodes[i] for i in path] + TOKENS[20:22]
    assert worst(got, plain(llama, whole)[-2:]) < 1e-4


def test_rolled_back_tokens_leave_no_trace(llama: TorchDecoder) -> None:
    driver = Driver(llama, seed=6)
    driver.forward({"a": TOKENS[:9]})
    driver.keep("a", range(4))
    got = driver.forward({"a": TOKENS[20:30]}).logits["a"]
    assert worst(got, plain(llama, TOKENS[:4] + TOKENS[20:30])[4:]) < 1e-4


def test_forward_touches_no_other_slot(llama: TorchDecoder) -> None:
    driver = Driver(llama, num_blocks=8, block_size=4, seed=7)
    batch = driver.batch({"a": TOKENS[:6]})
    assert isinstance(llama.store, torch.Tensor)
    llama.store.fill_(7.0)
    llama.forward(batch)
    blocks = batch.tables_SW[0]
    mine = [int(blocks[i // 4]) * 4 + i % 4 for i in range(6)]
    others = [i for i in range(32) if i not in mine]
    assert bool((llama.store[:, :, others] == 7.0).all())
    assert not bool((llama.store[:, :, mine] == 7.0).any())


def test_taps_are_the_hidden_states(tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIGS["llama"])
    model = TorchDecoder.load(folder)
    got = Driver(model).forward({"a": TOKENS[:9], "b": TOKENS[9:20]}, taps=(0, 1, 2, 3))
    theirs = reference(folder)
    inside: list[torch.Tensor] = []
    for layer in theirs.model.layers:
        layer.register_forward_hook(lambda _m, _i, output: inside.append(output))
    logits(theirs, TOKENS[9:20])
    embedded = theirs.model.embed_tokens.weight.detach()[TOKENS[9:20]]
    for layer, expected in enumerate([embedded, *inside]):
        assert worst(got.taps[layer]["b"], expected.reshape(11, -1)) < 1e-4
    assert all(got.taps[layer]["a"].shape == (9, 32) for layer in range(4))


def test_exit_layer(tmp_path: Path) -> None:
    model = TorchDecoder.load(write(tmp_path, CONFIGS["llama"]))
    theirs = reference(tmp_path)
    theirs.model.layers = theirs.model.layers[:2]
    theirs.config.num_hidden_layers = 2
    got = Driver(model).forward({"a": TOKENS[:9]}, exit_layer=2, taps=(2,))
    assert worst(got.logits["a"], logits(theirs, TOKENS[:9])) < 1e-4
    assert got.taps[2]["a"].shape == (9, 32)


def test_only_the_rows_asked_for(llama: TorchDecoder) -> None:
    driver = Driver(llama)
    batch = driver.batch({"a": TOKENS[:5], "b": TOKENS[5:9]})
    everything = llama.forward(batch).logits_RV.clone()
    for rows in ([8, 4], [0], []):
        some = StepBatch(
            tokens_T=batch.tokens_T,
            positions_T=batch.positions_T,
            starts_S1=batch.starts_S1,
            context_S=batch.context_S,
            tables_SW=batch.tables_SW,
            logit_rows_R=np.array(rows, dtype=np.int32),
        )
        got = llama.forward(some).logits_RV
        assert got.shape == (len(rows), 64)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, everything[rows])


def test_long_prefill_takes_the_wide_path(llama: TorchDecoder) -> None:
    tokens = [t % 64 for t in range(120)]
    driver = Driver(llama, block_size=16, seed=8)
    first = driver.forward({"a": tokens[:2]})
    driver.keep("a", range(2))
    from outrider.model import attention

    narrow = attention.MAX_FOLDED_ROWS
    attention.MAX_FOLDED_ROWS = 16
    try:
        rest = driver.forward({"a": tokens[2:]})
    finally:
        attention.MAX_FOLDED_ROWS = narrow
    got = torch.cat([first.logits["a"], rest.logits["a"]])
    assert worst(got, plain(llama, tokens)) < 1e-4


def test_factory_models_load(tmp_path: Path) -> None:
    from outrider.testing import write_tiny_llama

    folder = write_tiny_llama(tmp_path / "m", vocab_size=80, num_tokens=70, tied=False)
    model = TorchDecoder.load(folder)
    assert (model.spec.vocab_size, model.spec.num_tokens) == (80, 70)
    assert worst(plain(model, TOKENS[:9]), tiny_models.logits(reference(folder), TOKENS[:9])) < 1e-4
