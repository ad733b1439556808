"""`outrider prove`: the losslessness proof, run on the user's own models and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.bench.workloads import Prompt, parse_prompts
from outrider.cli.checks import MARKS, records, show_checks, timed
from outrider.cli.console import Json, busy, print_json, stderr, stdout
from outrider.cli.demo import PROMPTS
from outrider.cli.generate import read_text, refuse_unused
from outrider.config import EngineConfig
from outrider.errors import ConfigError, RequestError, UnknownName
from outrider.options import Options, expanded, of, option
from outrider.parameters import ENDPOINT, INPUT, OUTPUT, SPECULATION, STOPPING

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.llm import LLM
    from outrider.prove.biased import Injection
    from outrider.prove.checks import Check

EXAMPLE = "Example: outrider prove my/target --draft-model my/draft --prompts prompts.txt"
MOST_PROMPTS = 16
NUM_DRAFT_TOKENS = 4  # auto may find that drafts do not pay, and then there is nothing to prove
LEAST_FOR_TOOLS = 128  # tokens of an output, so that calls can be complete
LEAST_ROOM = 4  # tokens of context after a prompt: the distribution of the output needs them

Prompts = Annotated[
    Path | None,
    option(
        INPUT,
        f"Lines of text, or JSON objects with a 'prompt' or 'messages'; {MOST_PROMPTS} are read.",
        "--prompts",
        metavar="FILE",
        show_default=f"{len(PROMPTS)} pieces of Python",
    ),
]
Inject = Annotated[
    str | None,
    option(
        OUTPUT,
        "Put a known mistake in the rule's place and see it caught; a wrong name lists all.",
        "--inject",
        metavar="NAME",
    ),
]
Tools = Annotated[
    bool,
    option(OUTPUT, "Also compare tool calls and structured output.", "--tools"),
]
Url = Annotated[
    str | None,
    option(
        ENDPOINT,
        "Prove a running server, any OpenAI-compatible one, from outside.",
        "--endpoint",
        metavar="URL",
    ),
]
Baseline = Annotated[
    str | None,
    option(ENDPOINT, "The same model served without speculation.", "--baseline", metavar="URL"),
]
Record = Annotated[
    Path | None,
    option(
        ENDPOINT,
        "Only record greedy outputs there: run it with speculation off ...",
        "--record",
        metavar="FILE",
    ),
]
Against = Annotated[
    Path | None,
    option(
        ENDPOINT,
        "... and compare with it afterwards, with speculation on.",
        "--against",
        metavar="FILE",
    ),
]
ServedModel = Annotated[
    str | None,
    option(
        ENDPOINT,
        "What the server calls the model.",
        "--served-model",
        metavar="NAME",
        show_default="its first",
    ),
]
SampledTokens = Annotated[
    int,
    option(ENDPOINT, "Tokens to sample; 0 leaves sampling out.", "--sampled-tokens", metavar="N"),
]
MaxTokens = Annotated[
    int,
    option(STOPPING, "Tokens of each compared output.", "--max-tokens", "-m", metavar="N"),
]


EngineOptions = Annotated[
    Options,
    of(
        EngineConfig,
        *("model", SPECULATION, "device", "dtype", "backend", "threads"),
        num_draft_tokens={"default": NUM_DRAFT_TOKENS},
    ),
]


@expanded
def prove(
    *,
    prompts: Prompts = None,
    engine: EngineOptions,
    max_tokens: MaxTokens = 48,
    inject: Inject = None,
    tools: Tools = False,
    endpoint: Url = None,
    baseline: Baseline = None,
    record_to: Record = None,
    against: Against = None,
    served_model: ServedModel = None,
    sampled_tokens: SampledTokens = 4096,
    as_json: Json = False,
) -> None:
    """Prove on your own models that speculation changes nothing but the speed."""
    work = read_prompts(prompts)
    if endpoint is not None:
        from outrider.cli.prove_endpoint import Sides, prove_endpoint

        if any(prompt.messages for prompt in work):
            raise ConfigError("--endpoint needs prompts as text: a server's template is its own")
        sides = Sides(endpoint, baseline, record_to, against, served_model)
        prove_endpoint(
            sides, [prompt.text for prompt in work], max_tokens, sampled_tokens, as_json=as_json
        )
        return
    if baseline or record_to or against or served_model:
        raise ConfigError("--baseline, --record, --against and --served-model need --endpoint")
    if engine["num_draft_tokens"] == 0:
        raise ConfigError("nothing to prove without drafts: --num-draft-tokens must be 1 or more")
    with busy(f"loading {engine['model']}"):
        from outrider.llm import LLM

        injection = find_injection(inject)
        llm = LLM(**engine)
    refuse_unused(llm)
    own = prompts is not None
    _prove(llm, work, max_tokens, injection, own=own, tools=tools, as_json=as_json)


def _prove(
    llm: LLM,
    work: list[Prompt],
    max_tokens: int,
    injection: Injection | None,
    *,
    own: bool,
    tools: bool,
    as_json: bool,
) -> None:
    """Runs the checks and prints what they found; `own`: the prompts are the user's."""
    engine = llm.engine
    encoded = fit(
        [prompt.ids(engine.tokenizer) for prompt in work],
        engine.scheduler.max_positions,
        max_tokens,
        own=own,
    )
    results = list(run_checks(engine, encoded, max_tokens, injection))
    if tools and injection is None:
        from outrider.prove.tool_identity import check_tools

        most = max(max_tokens, LEAST_FOR_TOOLS)
        texts = [prompt.text for prompt in work]
        results.append(timed("tool calls", lambda tell: check_tools(engine, texts, most, tell)))
    proven = all(check.passed is not False for check, _ in results)
    console = stderr() if as_json else stdout()
    show_checks(console, results)
    console.print(conclusion(proven, engine, len(work), injection))
    if as_json:
        print_json(record(results, proven, llm, injection))
    if not proven:
        raise typer.Exit(1)


def run_checks(
    engine: Engine, prompts: list[list[int]], max_tokens: int, injection: Injection | None
) -> Iterator[tuple[Check, float]]:
    """Each finished check with its seconds. A mistake goes into the two checks that can hold it."""
    from outrider.prove import checks
    from outrider.prove.checks import Check
    from outrider.prove.small_pair import small_pair
    from outrider.verifiers import exact_pairing

    default = engine.default
    assert default.proposer is not None
    drafter = engine.proposers[default.proposer]
    rule = engine.verifiers[default.verifier]
    draw = exact_pairing(drafter.draws, drafter.trees, rule)
    pair = small_pair(engine, prompts)

    if injection is not None:
        mistake = injection
        yield timed("enumeration", lambda tell: checks.check_injection(mistake, pair, tell))
        for name in ("greedy identity", "seeded identity"):
            yield Check(name, None, "the mistake exists outside the engine only"), 0.0
        yield timed("distribution", lambda tell: checks.check_injected_output(mistake, pair, tell))
        return
    yield timed(
        "enumeration", lambda tell: checks.check_rule(rule, draw, drafter.trees, pair, tell)
    )
    yield timed("greedy", lambda tell: checks.check_greedy(engine, prompts, max_tokens, tell))
    yield timed("seeded", lambda tell: checks.check_seeded(engine, prompts, max_tokens, tell))
    yield timed("distribution", lambda tell: checks.check_output(rule, draw, pair, tell))


def read_prompts(file: Path | None) -> list[Prompt]:
    """The user's prompts: lines, or JSON objects; raises RequestError."""
    text = read_text("prompts", None, file)
    if text is None:
        return [Prompt(prompt) for _, prompt in PROMPTS]
    return parse_prompts(text, file)[:MOST_PROMPTS]


def fit(prompts: list[list[int]], context: int, max_tokens: int, *, own: bool) -> list[list[int]]:
    """Prompts that leave room in the context: the user's own as they are, or a RequestError.

    Ours are cut to their ends: they only have to be text.
    """
    if own:
        for number, prompt in enumerate(prompts, 1):
            if len(prompt) + LEAST_ROOM > context:
                raise RequestError(
                    f"prompt {number} has {len(prompt)} tokens, but the context holds {context} "
                    f"and {LEAST_ROOM} must be left to generate: shorten it",
                    "prompts",
                )
        return prompts
    room = max(context - max_tokens, context // 2)
    return [prompt[-room:] for prompt in prompts]


def find_injection(name: str | None) -> Injection | None:
    """Raises UnknownName with a suggestion and all names."""
    if name is None:
        return None
    from outrider.prove.biased import BIASED

    if name not in BIASED:
        raise UnknownName("mistake", name, BIASED)
    return BIASED[name]


def conclusion(proven: bool, engine: Engine, num_prompts: int, injection: Injection | None) -> str:
    default = engine.default
    what = f"{default.proposer} drafts under the {default.verifier} rule"
    if injection is not None:
        what = f"{injection.name} in place of the {default.verifier} rule"
    return f"{MARKS[proven]}: {what}, {num_prompts} prompts"


def record(
    results: list[tuple[Check, float]],
    proven: bool,
    llm: LLM,
    injection: Injection | None,
) -> dict[str, Any]:
    """The JSON object of `outrider prove --json`."""
    engine = llm.engine
    return {
        "proven": proven,
        "model": llm.config.model,
        "draft_model": llm.config.draft_model,
        "proposer": engine.default.proposer,
        "num_draft_tokens": engine.default.num_draft_tokens,
        "verifier": engine.default.verifier,
        "inject": None if injection is None else injection.name,
        "checks": records(results),
    }
