"""Tool calls and structured output with drafts are those without: `outrider prove --tools`.

The requests are those of a server: chat template, grammar, reader. Forced text is drafted by the
grammar itself, so these drafts are compared as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from outrider.engine.engine import Engine, Result
from outrider.engine.lane import Group
from outrider.engine.request import Request, Speculation
from outrider.grammar import Grammar, GrammarVocabulary
from outrider.model.chat_template import load_template
from outrider.prove.checks import PLAIN, Check, Tell, describe, near_tie
from outrider.prove.identity import explain
from outrider.sampling import SamplingParams
from outrider.server import conversation
from outrider.server.reading import Manner, read_whole
from outrider.server.reading.grammar import grammar_of_calls
from outrider.server.request import AUTO, Choice, Conversation, Tool
from outrider.server.service import Forms
from outrider.server_config import ServerConfig

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Za-z ]{1,20}$"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = (
    Tool(name="get_weather", description="The weather in a city.", parameters=SCHEMA),
    Tool(name="get_time", description="The time."),
)
SETTINGS = (SamplingParams(), SamplingParams(temperature=0.8, seed=1))


class _Case(NamedTuple):
    name: str
    choice: Choice
    forced: bool
    schema: bool = False


CASES = (
    _Case("free calls", AUTO, False),
    _Case("required calls", Choice("required"), True),
    _Case("a named call", Choice("required", "get_weather"), True),
    _Case("a schema", AUTO, False, True),
)


def check_tools(engine: Engine, texts: Sequence[str], max_tokens: int, tell: Tell) -> Check:
    """The same tokens, text and calls; forced calls are correct ones."""
    num_outputs = num_calls = num_drafted = num_accepted = 0
    ties: list[float] = []
    troubles: list[str] = []
    for case, prompts, manner, grammar in _cases(engine, texts, max_tokens):
        for setting in SETTINGS:
            params = replace(setting, max_tokens=max_tokens)
            what = f"{case.name}, {describe(params)}"
            tell(what)
            wishes = (PLAIN, engine.default)
            plain, drafted = (_decode(engine, prompts, params, w, grammar) for w in wishes)
            for i, (one, other) in enumerate(zip(plain, drafted, strict=True)):
                num_outputs += 1
                num_drafted += other.stats.num_drafted
                num_accepted += other.stats.num_accepted
                if one.tokens != other.tokens:
                    request = Request(
                        "explain", prompts[i], params, PLAIN, _seed(params, i), grammar=grammar
                    )
                    found = explain(engine, request, 0, one.tokens, other.tokens)
                    if found is not None and found.margin < near_tie(engine):
                        ties.append(found.margin)
                    else:
                        troubles.append(f"{what}, prompt {i + 1}: the tokens differ")
                    continue
                calls = read_whole(manner, other.text).calls
                num_calls += len(calls)
                if one.text != other.text:
                    troubles.append(f"{what}, prompt {i + 1}: the texts differ")
                elif case.forced and other.completions[0].finish_reason == "stop":
                    wrong = [call.arguments for call in calls if not _is_json(call.arguments)]
                    if not calls or wrong:
                        troubles.append(f"{what}, prompt {i + 1}: a call is not correct")
    found_text = (
        f"{num_outputs} outputs of {len(CASES)} kinds, {num_calls} calls, "
        f"{num_accepted} of {num_drafted} drafted tokens accepted: "
        f"{len(troubles) or 'none'} differ"
    )
    if ties:
        found_text += f", {len(ties)} parted at a near-tie (margin {max(ties):.1g} at most)"
    figures = {
        "num_outputs": num_outputs,
        "num_calls": num_calls,
        "num_drafted": num_drafted,
        "num_accepted": num_accepted,
        "near_ties": ties,
        "num_different": len(troubles),
    }
    passed = not troubles if num_drafted or troubles else None
    return Check("tool calls", passed, found_text, figures, troubles)


def _cases(
    engine: Engine, texts: Sequence[str], max_tokens: int
) -> Iterator[tuple[_Case, list[list[int]], Manner, Grammar | None]]:
    template, _ = load_template(engine.tokenizer, None)
    forms = Forms.of(ServerConfig(), template, engine.tokenizer)
    spec = engine.target.spec
    vocabulary = GrammarVocabulary(engine.tokenizer, spec.num_tokens, spec.eos_ids)
    room = engine.scheduler.max_positions - max_tokens
    for case in CASES:
        prompts = []
        for text in texts:
            talk = Conversation(
                messages=[{"role": "user", "content": text}],
                tools=() if case.schema else TOOLS,
                choice=case.choice,
            )
            rendered = conversation.render(template, talk, forms.tools)
            prompts.append(engine.tokenizer.encode(rendered, special=False)[-room:])
        manner = Manner(tools=forms.tools, schemas={tool.name: tool.parameters for tool in TOOLS})
        grammar = None
        if case.schema:
            grammar = Grammar.json_schema(vocabulary, SCHEMA)
        elif case.forced:
            name = case.choice.name
            source = grammar_of_calls(
                forms.tools,
                [tool for tool in TOOLS if name in (None, tool.name)],
                must=True,
                several=name is None,
                loose=False,
                reasoning=None,
                opened=False,
                otherwise=None,
                added=engine.tokenizer.added,
            )
            grammar = Grammar.lark(vocabulary, source)
        yield case, prompts, manner, grammar


def _decode(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    wish: Speculation,
    grammar: Grammar | None,
) -> list[Result]:
    params = replace(params, skip_special_tokens=False)
    group = Group(engine)
    for i, prompt in enumerate(prompts):
        seeded = replace(params, seed=_seed(params, i))
        group.add(prompt, seeded, speculation=wish, grammar=grammar)
    return group.run()


def _seed(params: SamplingParams, index: int) -> int:
    return 1000 * (params.seed or 0) + index


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
