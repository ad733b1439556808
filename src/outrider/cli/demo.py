"""`outrider demo`: plain and speculative decoding of the same prompts, side by side, live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from outrider.cli.console import Json, busy, print_json, stderr, stdout
from outrider.cli.generate import refuse_unused
from outrider.config import EngineConfig, SamplingParams
from outrider.errors import ConfigError
from outrider.options import Options, expanded, of
from outrider.parameters import INPUT, SAMPLING, SPECULATION
from outrider.registry import PREDICTION

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.cli.demo_view import View
    from outrider.cli.race import Outcome, Totals
    from outrider.engine.engine import Engine

EXAMPLE = "Example: outrider demo --prompt 'def is_prime(n):' --temperature 0.7"

# (title, text): everyday Python. The last one is sampled, the others are greedy.
PROMPTS = (
    (
        "a point",
        'class Point:\n    """A point in the plane."""\n\n    def __init__(self, x, y):\n'
        "        self.x = x\n",
    ),
    (
        "read JSON",
        "import json\nfrom pathlib import Path\n\n\ndef load_config(path):\n"
        '    """Read the configuration from a JSON file."""\n',
    ),
    (
        "retry",
        "import time\n\n\ndef retry(function, attempts=3, delay=1.0):\n"
        '    """Call function until it succeeds."""\n    for attempt in range(attempts):\n',
    ),
    (
        "a client",
        'class Client:\n    """Talks to the server."""\n\n'
        "    def __init__(self, host, port, timeout=None):\n",
    ),
)
# For a model with a chat template. The last one is sampled here, too.
CHATS = (
    ("a question", "Why is the sky blue?"),
    ("a rewrite", "Rewrite in simple words: The council resolved to prohibit motor traffic in the "
     "old town during the summer, in order to reduce noise and improve the quality of the air."),
    ("a list", "List five animals that live in the sea, with one fact about each."),
    ("a letter", "Write a short, polite letter that asks a neighbour to play music less loudly."),
)  # fmt: skip
SECOND_ACT = "smollm2"  # follows the bundled code model
Round = tuple[str, str, float]  # title, prompt, temperature
SAMPLED = 0.7  # temperature of the last round
WARM_UP_TOKENS = 8

Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="T",
        help="Use this temperature throughout.",
        rich_help_panel=SAMPLING,
        show_default=f"greedy rounds, then one at {SAMPLED}",
    ),
]
Prompt = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        "-p",
        metavar="TEXT",
        help="Your own text to continue.",
        rich_help_panel=INPUT,
        show_default=f"{len(PROMPTS)} pieces of Python",
    ),
]
Seed = Annotated[
    int, typer.Option(metavar="INT", help="Of the sampled rounds.", rich_help_panel=SAMPLING)
]


EngineOptions = Annotated[Options, of(EngineConfig, "model", SPECULATION, without=("verifier",))]


@expanded
def demo(
    *,
    prompt: Prompt = None,
    engine: EngineOptions,
    temperature: Temperature = None,
    seed: Seed = 1,
    sampling: Annotated[Options, of(SamplingParams, "max_tokens")],
    as_json: Json = False,
) -> None:
    """Watch plain and speculative decoding side by side, and see that the outputs are identical."""
    if engine["num_draft_tokens"] == 0:
        raise ConfigError(
            "the demo compares with speculation: --num-draft-tokens must be 1 or more"
        )
    if engine.get("proposer") == PREDICTION:
        raise ConfigError(f"the demo cannot use proposer {PREDICTION!r}; choose another one")
    # With --json, stdout holds the object only.
    console = stderr() if as_json else stdout()
    settings = dict(sampling, temperature=temperature or 0.0, seed=seed)
    outcomes = act(engine, prompt, settings, temperature, console, as_json=as_json)
    is_default = engine["model"] == EngineConfig.model and not {"draft_model", "proposer"} & {
        *engine
    }
    if is_default and prompt is None and not as_json:
        outcomes += second_act(engine, settings, temperature, console)
    if any(outcome.first_difference is not None for outcome in outcomes):
        raise typer.Exit(1)


def act(
    engine: Options,
    prompt: str | None,
    sampling: Options,
    temperature: float | None,
    console: Console,
    *,
    as_json: bool = False,
) -> list[Outcome]:
    """One model: its races, the verdict, and with `as_json` the object."""
    model = engine["model"]
    with busy(f"loading {model}"):
        from outrider.llm import LLM

        params = SamplingParams(**sampling)
        # With a prefix cache, the second lane would use the prompt that the first computed.
        llm = LLM(**engine, max_sequences=2, prefix_caching=False)
    refuse_unused(llm)
    rounds = plan(prompt, temperature, is_chat=has_template(llm.engine))
    outcomes, total = show(llm.engine, rounds, params, console)
    conclude(outcomes, console, llm.engine)
    if as_json:
        print_json(record(outcomes, total, llm.engine, model))
    return outcomes


def second_act(
    engine: Options, sampling: Options, temperature: float | None, console: Console
) -> list[Outcome]:
    """A real chat model answers; one line where it is not installed."""
    from outrider.errors import ModelError
    from outrider.model.named import PACKAGED, packaged_file

    console.print()
    try:
        packaged_file(SECOND_ACT)
    except ModelError as error:
        console.print(f"no second act: {error}", style="dim", soft_wrap=True)
        return []
    console.print(f"── {PACKAGED[SECOND_ACT].about} ──")
    return act(engine | {"model": SECOND_ACT}, None, sampling, temperature, console)


def has_template(engine: Engine) -> bool:
    from outrider.model.chat_template import load_template

    return load_template(engine.tokenizer, None)[1]


def plan(prompt: str | None, temperature: float | None, *, is_chat: bool = False) -> list[Round]:
    """Greedy rounds and one sampled round; or only what the user asked for."""
    prompts = CHATS if is_chat else PROMPTS
    if prompt is not None:
        values = [0.0, SAMPLED] if temperature is None else [temperature]
        return [("your prompt", prompt, value) for value in values]
    if temperature is not None:
        return [(title, text, temperature) for title, text in prompts]
    rounds = [(title, text, 0.0) for title, text in prompts[:-1]]
    return [*rounds, (*prompts[-1], SAMPLED)]


def show(
    engine: Engine, rounds: Sequence[Round], params: SamplingParams, console: Console
) -> tuple[list[Outcome], Totals]:
    """Shows every round: live on a terminal, else in lines."""
    from outrider.cli.demo_view import LiveView, PlainView
    from outrider.origins import spelling

    view: View = PlainView(console)
    if console.is_terminal and not console.is_dumb_terminal:
        view = LiveView(console, spelling(engine.tokenizer), len(rounds))
    return race_rounds(engine, rounds, params, view)


def race_rounds(
    engine: Engine, rounds: Sequence[Round], params: SamplingParams, view: View
) -> tuple[list[Outcome], Totals]:
    """All rounds, after a short one to warm up; the view is always closed."""
    from outrider.cli.race import lanes, race, totals
    from outrider.model.chat_template import chat_ids

    def ids(text: str) -> list[int]:
        if not is_chat:
            return engine.tokenizer.encode(text)
        return chat_ids(engine.tokenizer, [{"role": "user", "content": text}])

    is_chat = has_template(engine)
    with busy("warming up"):
        warm_up = replace(params, max_tokens=WARM_UP_TOKENS)
        race(lanes(engine), "", rounds[0][1], warm_up, ids=ids(rounds[0][1]))
    outcomes: list[Outcome] = []
    total: Totals | None = None
    try:
        for title, text, temperature in rounds:
            setting = f"T={temperature:g}" if temperature else "greedy"
            pair = lanes(engine)
            view.begin(f"{title}, {setting}", f"{text}\n\n" if is_chat else text, pair)
            asked = replace(params, temperature=temperature)
            outcomes.append(race(pair, title, text, asked, view.watch, ids=ids(text)))
            view.finished(outcomes[-1])
        total = totals(outcomes)
    finally:
        view.close(total)  # also after Ctrl-C: what was shown stays
    return outcomes, total


def conclude(outcomes: Sequence[Outcome], console: Console, engine: Engine) -> None:
    """Prints whether the outputs are identical, or where they first differ."""
    console.print()
    different = [o for o in outcomes if o.first_difference is not None]
    if not different:
        console.print(
            f"outputs identical: [bold green]yes[/bold green], all {len(outcomes)}, "
            f"{sum(o.num_tokens for o in outcomes)} tokens compared"
        )
    for outcome in different:
        at = outcome.first_difference
        assert at is not None
        plain, ours = (
            engine.tokenizer.decode(result.tokens[at : at + 1], skip_special=False)
            for result in (outcome.plain, outcome.speculative)
        )
        console.print(
            f"outputs identical: [bold red]NO[/bold red], {outcome.title} at "
            f"T={outcome.temperature:g} differs first at token {at}:",
            Text(f"plain {plain!r}, speculative {ours!r}"),
        )


def record(
    outcomes: Sequence[Outcome], total: Totals, engine: Engine, model: str
) -> dict[str, Any]:
    """The JSON object of `outrider demo --json`."""
    stats = total.stats
    return {
        "text": outcomes[0].speculative.text,
        "model": model,
        "proposer": engine.default.proposer,
        "num_draft_tokens": engine.default.num_draft_tokens,
        "seed": outcomes[0].speculative.seed,
        "identical": all(o.first_difference is None for o in outcomes),
        "speedup": total.speedup,
        "plain_tokens_per_s": total.plain_tokens_per_s,
        "tokens_per_s": total.tokens_per_s,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "tokens_per_pass": stats.tokens_per_pass,
        "num_tokens": total.num_tokens,
        "rounds": [
            {
                "title": o.title,
                "temperature": o.temperature,
                "prompt": o.prompt,
                "text": o.speculative.text,
                "num_tokens": o.num_tokens,
                "identical": o.first_difference is None,
                "first_difference": o.first_difference,
                "speedup": o.speedup,
                "plain_tokens_per_s": len(o.plain.tokens) / o.plain_s,
                "tokens_per_s": o.num_tokens / o.speculative_s,
                "acceptance_length": o.speculative.stats.acceptance_length,
                "tokens_per_pass": o.speculative.stats.tokens_per_pass,
            }
            for o in outcomes
        ],
    }
