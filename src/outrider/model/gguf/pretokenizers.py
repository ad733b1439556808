"""How a text is cut into words before byte-level BPE, by the name in `tokenizer.ggml.pre`.

A word never crosses a cut, so a wrong rule gives other tokens than the model was trained on. A
name that is not listed is therefore refused, not guessed. Each rule is a list of expressions that
are applied one after the other: what one of them matches is a piece, what lies between is cut on.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers
from tokenizers import pre_tokenizers

from outrider.errors import ModelError


@dataclass(frozen=True, slots=True)
class Rule:
    """`ignore_merges`: a word that is itself in the vocabulary becomes one token, whatever the
    merges make of it. `bos`: whether a begin-of-text is the default."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        cuts: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
            for expression in self.expressions
        ]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, to_bytes])


_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _modern(digits: str, letters: str = r"\p{L}") -> str:
    return (
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|\p{{N}}{digits}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _by_case(digits: str, endings: str) -> str:
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{first}{_UPPER}*{_LOWER}+{endings}|{first}{_UPPER}+{_LOWER}*{endings}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_SEED = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
_DEFAULT = Rule((r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"))
_GPT2 = Rule((_WORDS,))
_DIGITS = Rule((r"\p{N}", _WORDS))
_LLAMA3 = Rule((_modern("{1,3}"),), ignore_merges=True, bos=True)
_QWEN2 = Rule((_modern(""),))
_GPT4O = Rule((_by_case("{1,3}", f"{_ENDINGS}?"),))
_DEEPSEEK3 = Rule(
    (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    )
)

RULES: dict[str, Rule] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion"), _GPT2),
    **dict.fromkeys(("exaone4", "granite-docling", "gigachat", "mellum", "a.x-4.0"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("falcon-h1", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Rule((_modern("{1,3}"),))),
    **dict.fromkeys(("glm4", "glm5"), Rule((_modern("{1,3}"),), ignore_merges=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _QWEN2),
    **dict.fromkeys(("kormo", "grok-2", "solar-open"), _QWEN2),
    "qwen35": Rule((_modern("", letters=r"\p{L}\p{M}"),)),
    "seed-coder": Rule((_SEED,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "tekken": Rule((_by_case("", ""),), ignore_merges=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
}


def rule_of(name: str, path: object) -> Rule:
    """The rule with this name; `ModelError` if there is none."""
    found = RULES.get(name)
    if found is None:
        raise ModelError(
            f"{path} names the pre-tokenizer {name!r}, which we do not know; use the model's "
            "safetensors folder, which holds its tokenizer.json"
        )
    return found
