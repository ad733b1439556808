"""`outrider export gguf`: EAGLE-3 heads as llama.cpp loads them, and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gguf_files import from_folder, write
from outrider.cli.app import app
from outrider.cli.errors import run
from outrider.errors import ConfigError
from outrider.export.gguf import export_gguf
from outrider.llm import LLM
from outrider.model.bundled import bundled_path
from outrider.model.gguf.container import open_gguf
from outrider.model.head_kinds import head_kind
from outrider.testing import write_tiny_llama
from published import CASES, TARGET, cases, eagle3
from published.comparing import Seen, compare, engine_for

# Published layouts that llama.cpp's file has a form for, and what it lacks for the others.
WRITTEN = (
    *("safeailab", "specforge", "sglang_nested_taps", "angelslim_full_vocabulary", "llama3_rope"),
    *("speculators_llama", "norm_before_fc", "narrower_than_the_target", "tied_output_head"),
    *("the_targets_output_head", "wide_heads_and_model_prefix", "sharded"),
)
REFUSED = {
    "vllm_top_level_taps": "reads 4 taps",
    "nvidia_yarn": "scales its rope's waves",
    "deepspec": "reads 5 taps",
    "speculators_two_layers": "has 2 layers",
    "eagle_3_1": "has a norm for each tap",
    "no_aux_hidden_states": "reads",
    "biases": "has biases",
    "sliding_last_layer": "has sliding windows",
    "half_precision_and_scaled_logits": "scales its logits",
    "eagle1_with_bias": "holds eagle heads",
    "p_eagle_specforge": "holds p-eagle heads",
    "dflash_zlab": "holds dflash heads",
    "medusa_authors": "holds medusa heads",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target"), **TARGET)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_file_drafts_as_the_folder(name: str, target: Path, tmp_path: Path) -> None:
    reference = CASES[name][1](tmp_path / "head")
    file = tmp_path / "head.gguf"
    export_gguf(tmp_path / "head", target, file)
    assert head_kind(file) == "eagle3"
    count = compare(engine_for(target, file, "torch", children=1), reference, Seen(target))
    assert count["same"] == count["drafts"] > 0, count


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_file_has_no_form_for_is_refused(name: str, target: Path, tmp_path: Path) -> None:
    CASES[name][1](tmp_path / "head")
    with pytest.raises(ConfigError, match=REFUSED[name]) as refused:
        export_gguf(tmp_path / "head", target, tmp_path / "head.gguf")
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == [tmp_path / "head"]


def test_names_and_metadata_are_those_of_the_converter(target: Path, tmp_path: Path) -> None:
    """All that the file of the converter has, ours has with the same values and shapes."""
    metadata, stored = eagle3.as_gguf(cases.eagle3())
    theirs = open_gguf(write(tmp_path / "theirs.gguf", metadata, stored))
    CASES["safeailab"][1](tmp_path / "head")
    export_gguf(tmp_path / "head", target, tmp_path / "ours.gguf")
    ours = open_gguf(tmp_path / "ours.gguf")
    assert {n: i.shape for n, i in ours.tensors.items()} == {
        n: i.shape for n, i in theirs.tensors.items()
    }
    for name, info in theirs.tensors.items():
        assert (ours.raw(ours.tensors[name]) == theirs.raw(info)).all(), name
    for key in metadata:
        if key.startswith("eagle3."):
            assert list_of(ours.metadata[key]) == list_of(theirs.metadata[key]), key


def list_of(value: object) -> object:
    return value.tolist() if hasattr(value, "tolist") else value


def test_a_target_in_gguf_gives_its_tokenizer(target: Path, tmp_path: Path) -> None:
    CASES["safeailab"][1](tmp_path / "head")
    file = from_folder(target, tmp_path / "target.gguf")
    export_gguf(tmp_path / "head", file, tmp_path / "head.gguf")
    theirs, ours = open_gguf(file).metadata, open_gguf(tmp_path / "head.gguf").metadata
    lists = (list, np.ndarray)
    keys = [  # the format has no empty lists
        key
        for key, value in theirs.items()
        if key.startswith("tokenizer.") and not (isinstance(value, lists) and not len(value))
    ]
    assert "tokenizer.ggml.tokens" in keys
    for key in keys:
        assert list_of(ours[key]) == list_of(theirs[key]), key


def test_the_bundled_head_drafts_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "eagle3.gguf"
    assert run(app, ["export", "gguf", "bundled:eagle3", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "layout": "gguf", "kind": "eagle3", "file": str(file),
    }  # fmt: skip
    drafts = []
    for name in (str(bundled_path("eagle3")), str(file)):
        llm = LLM("bundled", draft_model=name, num_draft_tokens=3)
        events = llm.stream("def add(a, b):", max_tokens=24)
        drafts.append([event.draft_tokens for event in events])
    assert drafts[0] == drafts[1]
    assert sum(map(len, drafts[0])) > 12
    assert run(app, ["export", "gguf", "bundled:eagle3", str(file)]) == 2
    assert "exists: give a new file" in capsys.readouterr().err
