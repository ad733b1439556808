"""What the grammar allows, the reader understands: random texts of every form's grammar."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from outrider.server.reading import Manner, read_whole
from outrider.server.reading.formats import REASONING_FORMS, TOOL_FORMS, ToolForm
from outrider.server.reading.grammar import grammar_of_calls
from outrider.server.request import Tool
from outrider.testing import write_tiny_tokenizer

llguidance = pytest.importorskip("llguidance")

CITY = {"type": "string", "maxLength": 8, "pattern": "^[a-z]+$"}
SCHEMA = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [Tool(name="get_weather", parameters=SCHEMA, strict=True), Tool(name="now")]
THINK = REASONING_FORMS["think"]
ENDINGS = ("\n</parameter>", "</arg_value>", "</think>", "<tool_call>")
ENDINGS = ("\n</parameter>", "</arg_value>", "</think>", "<tool_call>")
HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|constrain|>")


@cache
def tokenizer(folder: Path, marks: tuple[str, ...]) -> tokenizers.Tokenizer:
    write_tiny_tokenizer(folder, num_tokens=300)
    found = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    found.add_special_tokens(list(marks))
    return found


def written(source: str, words: tokenizers.Tokenizer, seed: int) -> str:
    """A random text of the grammar, with a liking for what ends things."""
    size = words.get_vocab_size()
    vocabulary = llguidance.LLTokenizer(words.to_str(), n_vocab=size, eos_token=[0])
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(source))
    assert not matcher.is_error(), matcher.get_error()
    chance, found = random.Random(seed), list[int]()
    closing = {words.token_to_id(char) for char in '"}/<)]'}
    for _ in range(4000):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, count=size, bitorder="little")).tolist()
        ends = [token for token in allowed if token == 0 or token >= 300 or token in closing]
        token = chance.choice(ends if ends and chance.random() < 0.4 else allowed)
        if token == 0:
            return str(words.decode(found, skip_special_tokens=False))
        if len(found) % 20 == 19:  # texts end with a mark that chance would never spell
            for mark in chance.sample(ENDINGS, len(ENDINGS)):
                spelled = words.encode(mark).ids
                if matcher.validate_tokens(spelled) == len(spelled):
                    assert matcher.try_consume_tokens(spelled) == len(spelled)
                    found += spelled
                    break
            else:
                found.append(token)
                assert matcher.try_consume_tokens([token]) == 1
            continue
        found.append(token)
        assert matcher.try_consume_tokens([token]) == 1
    raise AssertionError(words.decode(found, skip_special_tokens=False)[-300:])


@pytest.mark.parametrize("must", [True, False])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("form", TOOL_FORMS.values(), ids=TOOL_FORMS)
def test_calls_of_the_grammar_are_correct_calls(
    form: ToolForm, special: bool, must: bool, tmp_path: Path
) -> None:
    harmony = form.name == "harmony"
    if harmony and not special:
        pytest.skip("its marks are always tokens")
    marks = HARMONY if harmony else (*form.marks, *form.ends, THINK.opening, THINK.closing)
    words = tokenizer(
        tmp_path, tuple(sorted({m for m in marks if m[0] in "<["})) if special else ()
    )
    added = {token.content: id for id, token in words.get_added_tokens_decoder().items() if id}
    for several in (True, False):
        for thought in (False, True) if special and not harmony else (False,):
            reasoning = THINK if thought else None
            source = grammar_of_calls(
                form,
                TOOLS,
                must=must,
                several=several,
                loose=False,
                reasoning=reasoning,
                opened=thought,
                otherwise=None,
                added=added,
            )
            manner = Manner(reasoning, thought, form, {tool.name: SCHEMA for tool in TOOLS})
            for seed in range(3):
                text = written(source, words, seed)
                found = read_whole(manner, text)
                assert bool(found.calls) or not must, text
                assert len(found.calls) <= (16 if several else 1)
                assert not (must and found.text), text
                for call in found.calls:
                    arguments = json.loads(call.arguments)
                    assert call.name in ("get_weather", "now")
                    if call.name == "get_weather":
                        assert "city" in arguments
                        assert set(arguments) <= {"city", "days", "unit"}
                        assert isinstance(arguments.get("days", 0), int)
                        assert arguments.get("unit", "c") in ("c", "f")
