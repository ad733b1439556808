"""Structured output: what the grammar allows, what it forces, and that speculation stays exact."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency

from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine, Result
from outrider.engine.request import Speculation
from outrider.errors import ConfigError, RequestError
from outrider.events import StepEvent
from outrider.grammar import Grammar, GrammarVocabulary
from outrider.sampling import LogitEdits, SamplingParams
from outrider.testing import write_tiny_head, write_tiny_llama

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ada", "grace", "barbara"]},
        "happy": {"type": "boolean"},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["name", "happy", "age"],
    "additionalProperties": False,
}

HEADS: dict[str, dict[str, Any]] = {"medusa": {}, "eagle3": {"draft_vocab_size": 150}, "dflash": {}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("pair")
    target = write_tiny_llama(folder / "target", vocab_size=320, num_tokens=300, sharpness=1.5)
    draft = write_tiny_llama(
        folder / "draft", vocab_size=320, num_tokens=300, sharpness=1.5, num_layers=1
    )
    heads = {
        kind: {"head": str(write_tiny_head(folder / kind, kind, vocab_size=320, **more))}
        for kind, more in HEADS.items()
    }
    return build(
        EngineConfig(model=str(target), draft_model=str(draft), proposer_options=heads, threads=1)
    )


@pytest.fixture(scope="module")
def vocabulary(engine: Engine) -> GrammarVocabulary:
    spec = engine.target.spec
    return GrammarVocabulary(engine.tokenizer, spec.num_tokens, spec.eos_ids)


def run(
    engine: Engine, grammar: Grammar, speculation: Speculation, **params: Any
) -> tuple[Result, list[StepEvent]]:
    options: dict[str, Any] = {"max_tokens": 120, "temperature": 1.0, "seed": 1} | params
    request = engine.add(
        "write: ", SamplingParams(**options), speculation=speculation, grammar=grammar
    )
    events = [event for report in engine.run([request]) for event in report.events]
    return engine.collect(request), events


def speculations() -> list[Speculation]:
    return [
        Speculation(proposer="draft-model", num_draft_tokens=4),
        Speculation(proposer="draft-model", num_draft_tokens=1),
        Speculation(proposer="ngram", num_draft_tokens=6),
        Speculation(proposer="lookahead", num_draft_tokens=4),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_the_output_is_plain_decodings_and_satisfies_the_grammar(
    engine: Engine, vocabulary: GrammarVocabulary, seed: int
) -> None:
    grammars = {
        "json": Grammar.json_schema(vocabulary, SCHEMA),
        "regex": Grammar.regex(vocabulary, r"(ab|cd){2,5}-[0-9]{2}"),
        "lark": Grammar.lark(vocabulary, 'start: "(" start ")" | "x" | start "+" start'),
        "choice": Grammar.choice(vocabulary, ["yes", "no", 'may"be', "né"]),
    }
    for name, grammar in grammars.items():
        # Left to itself a random model may nest forever: let it be brief.
        options = {"seed": seed, "max_tokens": 40 if name == "lark" else 120}
        plain, _ = run(engine, grammar, Speculation(), **options)
        for speculation in speculations():
            result, _ = run(engine, grammar, speculation, **options)
            assert result.tokens == plain.tokens, (name, speculation)
        text = plain.text
        if name == "json":
            assert set(json.loads(text)) == {"name", "happy", "age"}
        elif name == "regex":
            assert re.fullmatch(r"(ab|cd){2,5}-[0-9]{2}", text)
        elif name == "choice":
            assert text in ("yes", "no", 'may"be', "né")
        if name != "lark":
            assert plain.completions[0].finish_reason == "stop"


@pytest.mark.parametrize("proposer", ["draft-tree", "medusa", "eagle3", "dflash"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_and_heads_under_a_grammar(
    engine: Engine, vocabulary: GrammarVocabulary, proposer: str, temperature: float
) -> None:
    """Their drafts know nothing of the grammar: every node is judged by it all the same."""
    num_drafted = num_accepted = 0
    for pattern in ("[a-f]{10,30}", "(ab|cd|[0-9]x){4,9}-[0-9]{2}"):
        grammar = Grammar.regex(vocabulary, pattern)
        for seed in range(4):
            options: dict[str, Any] = {"seed": seed, "temperature": temperature, "max_tokens": 40}
            plain, _ = run(engine, grammar, Speculation(), **options)
            speculation = Speculation(proposer=proposer, num_draft_tokens=6)
            result, events = run(engine, grammar, speculation, **options)
            assert result.tokens == plain.tokens, (pattern, seed)
            assert re.fullmatch(pattern, result.text)
            drafts = [event for event in events if event.source == proposer]
            num_drafted += len(drafts)
            num_accepted += sum(len(event.path) for event in drafts)
    assert num_drafted > 20
    assert num_accepted > 0 or proposer != "draft-tree", "a run in which nothing was ever accepted"


@pytest.mark.parametrize("rule", ["coupled", "token", "block", "tree"])
def test_every_rule_keeps_to_the_grammar(
    engine: Engine, vocabulary: GrammarVocabulary, rule: str
) -> None:
    grammar = Grammar.json_schema(vocabulary, SCHEMA)
    for seed in range(5):
        speculation = Speculation(proposer="draft-model", num_draft_tokens=3, verifier=rule)
        result, _ = run(engine, grammar, speculation, seed=seed)
        assert set(json.loads(result.text)) == {"name", "happy", "age"}


def test_samples_of_one_request_have_matchers_of_their_own(
    engine: Engine, vocabulary: GrammarVocabulary
) -> None:
    grammar = Grammar.regex(vocabulary, "[a-f]{6}")
    result, _ = run(engine, grammar, engine.default, n=6)
    texts = [completion.text for completion in result.completions]
    assert all(re.fullmatch("[a-f]{6}", text) for text in texts)
    assert len(set(texts)) > 1


def test_forced_text_is_drafted_without_a_drafter(
    engine: Engine, vocabulary: GrammarVocabulary
) -> None:
    sentence = "this was never in doubt, not for a moment"
    grammar = Grammar.regex(vocabulary, f"{sentence}[ab]")
    speculation = Speculation(proposer="prediction", num_draft_tokens=8)  # and nothing predicted
    result, events = run(engine, grammar, speculation)
    assert result.text.startswith(sentence)
    assert {event.source for event in events if event.draft_tokens} == {"grammar"}
    assert len(events) <= len(sentence) // 9 + 3
    _, plain = run(engine, grammar, Speculation())
    assert len(plain) > len(sentence)


def allowed(row_V: torch.Tensor) -> set[int]:
    return set((row_V > -torch.inf).nonzero().flatten().tolist())


def test_masks_depend_on_the_place_and_not_on_the_way_there(
    engine: Engine, vocabulary: GrammarVocabulary
) -> None:
    """One matcher asked about places in any order answers like a new one at each of them."""
    grammar = Grammar.regex(vocabulary, "((ab|ba)c?){4,}")
    letters = {c: engine.tokenizer.encode(c)[0] for c in "abc"}
    draw = random.Random(5)
    tokens = [9, 9]
    asked = grammar.matcher(2, None)
    for _ in range(300):
        path = [letters[draw.choice("abc")] for _ in range(draw.randrange(5))]
        row, expected = torch.zeros(300), torch.zeros(300)
        asked.apply(row, tokens, path)
        grammar.matcher(2, None).apply(expected, tokens, path)
        assert allowed(row) == allowed(expected)
        if draw.random() < 0.1:  # commit one token more
            root = torch.zeros(300)
            asked.apply(root, tokens, [])
            tokens = [*tokens, draw.choice(sorted(allowed(root) - {0}))]


def test_after_a_guess_that_is_ruled_out_rows_are_left_alone(
    engine: Engine, vocabulary: GrammarVocabulary
) -> None:
    matcher = Grammar.regex(vocabulary, "abc").matcher(1, None)
    a, b, z = (engine.tokenizer.encode(c)[0] for c in "abz")
    row = torch.zeros(300)
    matcher.apply(row, [9], [a, z])
    assert len(allowed(row)) == 300
    matcher.apply(row, [9], [a])
    assert allowed(row) == {b}


def test_other_edits_give_way_where_the_grammar_leaves_no_choice(
    engine: Engine, vocabulary: GrammarVocabulary
) -> None:
    (a,) = engine.tokenizer.encode("a")
    params = SamplingParams(banned_ids=(a,), min_tokens=5, max_tokens=9)
    inner = LogitEdits(params, 1, 300, [0])
    grammar = Grammar.regex(vocabulary, "a|bb")
    row = torch.zeros(300)
    matcher = grammar.matcher(1, inner)
    matcher.apply(row, [9], [])
    assert allowed(row) == {engine.tokenizer.encode("b")[0]}
    row = torch.zeros(300)
    grammar.matcher(1, inner).apply(row, [9], [a])
    assert allowed(row) == {0}  # the end, though min_tokens would forbid it
    result, _ = run(engine, grammar, engine.default, min_tokens=50, ignore_eos=True)
    assert result.text in ("a", "bb")
    assert result.completions[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "(unclosed"),
        ("regex", r"(a)\1"),
        ("lark", "start: nonesuch"),
        ("lark", "not a grammar"),
        ("json_schema", "{"),
        ("json_schema", '{"$ref": "http://169.254.169.254/schema.json"}'),
        ("json_schema", '{"type": "nonesuch"}'),
        ("regex", "x" * 100_000),
    ],
)
def test_bad_grammars_are_refused(vocabulary: GrammarVocabulary, kind: str, source: str) -> None:
    with pytest.raises(RequestError) as caught:
        getattr(Grammar, kind)(vocabulary, source)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_regexes_that_blow_up_elsewhere_do_not_here(
    engine: Engine, vocabulary: GrammarVocabulary
) -> None:
    grammar = Grammar.regex(vocabulary, "(a+)+b")
    result, _ = run(engine, grammar, engine.default, max_tokens=60)
    assert set(result.text) <= {"a", "b"}


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("lark", "start: a\na: b\nb: a"),
        ("json_schema", '{"$ref": "#"}'),
        ("regex", r"[^\s\S]"),
        ("json_schema", "false"),
        ("json_schema", "[1]"),
    ],
)
def test_grammars_without_a_text_are_refused(
    vocabulary: GrammarVocabulary, kind: str, source: str
) -> None:
    with pytest.raises(RequestError):
        getattr(Grammar, kind)(vocabulary, source)


def test_a_dead_end_cuts_the_text_short_with_and_without_speculation(
    engine: Engine, vocabulary: GrammarVocabulary
) -> None:
    """Also where only a guess runs into it: the rest of the text must not suffer."""
    grammar = Grammar.lark(vocabulary, 'start: "x" a | /[yz]{6}/\na: b\nb: a')
    reasons = set()
    for seed in range(12):
        options = {"seed": seed, "temperature": 6.0}
        plain, _ = run(engine, grammar, Speculation(), **options)
        for speculation in speculations():
            result, _ = run(engine, grammar, speculation, **options)
            assert result.completions == plain.completions
        assert re.fullmatch("x|[yz]{6}", plain.text)
        assert (plain.text == "x") == (plain.completions[0].finish_reason == "length")
        reasons.add(plain.completions[0].finish_reason)
    assert reasons == {"stop", "length"}
    (x,), (y,) = engine.tokenizer.encode("x"), engine.tokenizer.encode("y")
    matcher = grammar.matcher(1, None)
    for path, expected in ([x], {0}), ([y], {y, *engine.tokenizer.encode("z")}), ([x], {0}):
        row = torch.zeros(300)
        matcher.apply(row, [9], path)
        assert allowed(row) == expected


def test_a_text_forced_without_end_is_cut_short(
    engine: Engine, vocabulary: GrammarVocabulary
) -> None:
    loop = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    grammar = Grammar.json_schema(vocabulary, loop | {"additionalProperties": False})
    for speculation in (Speculation(), *speculations()):
        result, _ = run(engine, grammar, speculation)
        assert '{"a":{"a":{"a":'.startswith(result.text[:15])
        assert result.completions[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("proposer", "rule"),
    [
        ("draft-model", "token"),
        ("draft-model", "block"),
        ("draft-model", "tree"),
        ("draft-tree", "tree"),
        ("ngram", "block"),
    ],
)
def test_ratio_rules_keep_the_law_under_a_grammar(
    engine: Engine, vocabulary: GrammarVocabulary, proposer: str, rule: str
) -> None:
    grammar = Grammar.regex(vocabulary, "([abcde]{2}|-fgh[ab])[xy]")
    counts: list[Counter[str]] = []
    speculation = Speculation(proposer=proposer, num_draft_tokens=4, verifier=rule)
    for who, seed in ((Speculation(), 1), (speculation, 2)):
        result, _ = run(engine, grammar, who, seed=seed, n=400)
        counts.append(Counter(completion.text for completion in result.completions))
    texts = [text for text in counts[0] | counts[1] if sum(c[text] for c in counts) >= 8]
    table = [[*(c[text] for text in texts), 400 - sum(c[text] for text in texts)] for c in counts]
    table = [[row[i] for i in range(len(row)) if table[0][i] + table[1][i]] for row in table]
    assert len(table[0]) >= 4
    assert chi2_contingency(table).pvalue > 1e-4


def test_a_preempted_sequence_finds_its_place_again(
    engine: Engine, vocabulary: GrammarVocabulary
) -> None:
    """With KV for about two of them, six requests push each other out."""
    folder = str(engine.tokenizer.folder)
    small = build(
        EngineConfig(model=folder, threads=1, block_size=4, kv_tokens=128, proposer="ngram")
    )
    grammar = Grammar.json_schema(vocabulary, SCHEMA)
    expected = {seed: run(engine, grammar, Speculation(), seed=seed)[0].text for seed in range(6)}
    asked = {
        small.add(
            "write: ", SamplingParams(max_tokens=80, temperature=1.0, seed=seed), grammar=grammar
        ): expected[seed]
        for seed in expected
    }
    for _ in small.run(list(asked)):
        pass
    assert small.scheduler.num_preemptions > 0
    assert {request: small.collect(request).text for request in asked} == asked


def test_a_model_without_an_end_cannot_keep_to_a_grammar(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="end-of-text"):
        GrammarVocabulary(engine.tokenizer, 300, ())
