"""Writes the parts of docs/ and of the README that follow from code or result files.

    python docs/tools/reference.py            writes (`make reference`)
    python docs/tools/reference.py --check    names what is out of date, exit code 1

A page is generated as a whole, or has generated parts between `<!-- generated: NAME -->` and
`<!-- end -->`. A test compares all of them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]

import claims  # noqa: E402
import cli_reference  # noqa: E402
import drafters_page  # noqa: E402
import keywords  # noqa: E402
import models_page  # noqa: E402
import parameter_rows  # noqa: E402
import results  # noqa: E402
import vllm_tables  # noqa: E402

GENERATED = "Generated from the code by `make reference`; a test compares it."


def cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def table(head: list[str], rows: list[list[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(map(cell, row)) + " |" for row in rows)]


# --- dataclasses ----------------------------------------------------------------------------------


def comments_of(kind: type) -> dict[str, str]:
    """Field -> the comment beside it in the source."""
    lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    definition = ast.parse("\n".join(lines)).body[0]
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            rest = lines[(node.end_lineno or 1) - 1].encode()[node.end_col_offset or 0 :].decode()
            found[node.target.id] = rest.partition("#")[2].strip()
    return found


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return "required"


def fields_table(kind: type) -> list[str]:
    comments = comments_of(kind)
    rows: list[list[object]] = [
        [
            f"`{field.name}`",
            f"`{_type(field.type)}`",
            default_of(field),
            comments.get(field.name, ""),
        ]
        for field in dataclasses.fields(kind)
        if not field.name.startswith("_")
    ]
    head = ["field", "type", "default", "meaning"]
    if not any(row[3] for row in rows):  # the text above says it
        head, rows = head[:3], [row[:3] for row in rows]
    return table(head, rows)


def _type(annotation: object) -> str:
    return str(annotation).replace("dataclasses.", "")


def described(kind: type) -> list[str]:
    return ["", f"## {kind.__name__}", "", doc(kind), "", *fields_table(kind)]


def doc(thing: object) -> str:
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "")


# --- pages ----------------------------------------------------------------------------------------


def configuration() -> str:
    from outrider.config import EngineConfig, SamplingParams, Speculation
    from outrider.registry import GROUP, own_entries
    from outrider.server_config import ServerConfig, VllmConfig

    lines = ["# Configuration", "", GENERATED, ""]
    lines += [
        "In Python these are frozen dataclasses. `LLM(model, ...)` takes the fields of",
        "`EngineConfig` as keywords, `LLM.generate(prompt, ...)` those of `SamplingParams`. On the",
        "[command line](cli.md) a field is the option in the second column, where there is one. A",
        "wrong value costs one line that says what to do.",
    ]
    head = ["field", "option", "type", "default", "meaning"]
    for kind in (EngineConfig, SamplingParams, Speculation, ServerConfig, VllmConfig):
        rows: list[list[object]] = [list(row) for row in parameter_rows.docs_rows(kind)]
        lines += ["", f"## {kind.__name__}", "", doc(kind), "", *table(head, rows)]
    lines += [
        "",
        "## Options of the proposers",
        "",
        "`EngineConfig(proposer_options={NAME: {OPTION: VALUE}})`, for instance",
        '`LLM("bundled", proposer_options={"ngram": {"max_n": 3}})`. An option that a proposer',
        "does not have is an error.",
    ]
    for name, entry in sorted(own_entries().items()):
        module = import_module(f"{GROUP}.{entry.place.partition(':')[0]}")
        for config in configs_of(module):
            said = config.__doc__ or ""
            generic = said.startswith(f"{config.__name__}(")  # dataclass wrote it
            lines += ["", f"### {name}", "", "" if generic else doc(config), ""]
            lines += fields_table(config)
    lines += ["", "## Environment variables", "", *table(["variable", "meaning"], VARIABLES)]
    return tidy(lines)


def configs_of(module: ModuleType) -> list[type]:
    return [
        thing
        for name, thing in vars(module).items()
        if inspect.isclass(thing)
        and thing.__module__ == module.__name__
        and name.endswith("Config")
        and dataclasses.is_dataclass(thing)
    ]


VARIABLES: list[list[object]] = [
    ["`OUTRIDER_API_KEY`", "the server's only key, and the key of `chat` and `prove --endpoint`"],
    ["`OUTRIDER_CACHE`", "where measured costs are kept; else the user's cache folder"],
    ["`OUTRIDER_DEBUG`", "not empty: tracebacks, as with `--debug`"],
    [
        "`OUTRIDER_ISA`",
        "the native kernels to use instead of the best: "
        "[names](../explanation/determinism.md#between-machines)",
    ],
    ["`OUTRIDER_NATIVE_LIBRARY`", "another build of the native kernels"],
    ["`OUTRIDER_VLLM`", "the `vllm` program of another environment"],
    ["`CXX`", "the compiler that builds the native kernels"],
    ["`OUTRIDER_NATIVE`", "native kernels at installation: `auto`, `require` or `off`"],
    ["`OUTRIDER_BUNDLED`", "at installation: `off` leaves the bundled models out"],
]


MEANINGS = {
    "generation_tokens": "Tokens emitted.",
    "kv_cache_usage_perc": "Share of KV blocks in use, 0 to 1.",
    "num_preemptions": "Sequences whose K/V was dropped because memory was short.",
    "num_requests_running": "Sequences in the batch.",
    "num_requests_waiting": "Sequences in the queue.",
    "prompt_tokens": "Tokens of prompts of finished requests.",
    "prompt_tokens_cached": "Those from the prefix cache.",
    "cache_config_info": "The KV cache, as labels; `num_gpu_blocks` are its blocks on any device.",
    "prefix_cache_hits": "The same as `prompt_tokens_cached`.",
    "prefix_cache_queries": "Tokens that were looked for in the prefix cache.",
    "request_success": "Requests that ended, by reason.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
    "spec_decode_num_accepted_tokens_per_pos": "Accepted tokens by position in the draft (from 0).",
    "spec_decode_num_draft_tokens": "Drafted tokens.",
    "spec_decode_num_drafts": "Steps of a sequence with at least one draft.",
}


def metrics() -> str:
    from outrider.server.metrics import Metrics

    gathered = Metrics("model")
    gathered.accepted_at = [0]
    rows: list[list[object]] = []
    for family in sorted(gathered.collect(), key=lambda family: family.name):
        suffix = {"counter": "_total", "histogram": "_bucket, _sum, _count"}.get(family.type, "")
        labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
        name = family.name + suffix if family.type == "counter" else family.name
        shown = f"`{name}`" + (f" (`{suffix}`)" if family.type == "histogram" else "")
        meaning = MEANINGS.get(family.name.removeprefix("vllm:"), family.documentation)
        rows.append([shown, family.type, ", ".join(f"`{x}`" for x in labels), meaning])
    lines = ["# Metrics", "", GENERATED, ""]
    lines += [
        "`GET /metrics` is a page for Prometheus. Most names are vLLM's, so dashboards and load",
        "generators made for vLLM read them; `llamacpp:` ones are llama-server's.",
        "`deploy/grafana.json` is a dashboard for Outrider.",
        "",
        *table(["name", "type", "labels", "meaning"], rows),
        "",
        "## Figures that follow",
        "",
        *table(
            ["figure", "how"],
            [
                [
                    "acceptance rate",
                    "`rate(vllm:spec_decode_num_accepted_tokens_total)` / "
                    "`rate(vllm:spec_decode_num_draft_tokens_total)`",
                ],
                [
                    "acceptance length, with the correction or bonus token",
                    "1 + `rate(vllm:spec_decode_num_accepted_tokens_total)` / "
                    "`rate(vllm:spec_decode_num_drafts_total)`",
                ],
                [
                    "share of prompt tokens found in the prefix cache",
                    "`rate(vllm:prompt_tokens_cached_total)` / `rate(vllm:prompt_tokens_total)`",
                ],
            ],
        ),
    ]
    return tidy(lines)


def events() -> str:
    from outrider import events as module
    from outrider.statistics import SpeculationStats

    lines = ["# Events", "", GENERATED, ""]
    lines += [
        "Every step of the engine reports one `StepReport`. Streams, statistics, metrics, the live",
        "page and traces read it; it is their only source. `LLM.stream` yields",
        "`StepEvent`s, `Engine.run` yields whole `StepReport`s.",
    ]
    for kind in (module.StepReport, module.StepEvent, module.StepTiming, module.TokenLogprob):
        lines += described(kind)
    lines += [*described(SpeculationStats), "", "Figures computed from them:", ""]
    properties: list[list[object]] = [
        [f"`{name}`", doc(value)]
        for name, value in vars(SpeculationStats).items()
        if isinstance(value, property)
    ]
    return tidy([*lines, *table(["property", "meaning"], properties)])


def python_api() -> str:
    import outrider

    lines = ["# Python API", "", GENERATED, ""]
    lines += [
        "These names are public: `from outrider import ...`. They are imported on first use.",
        "Records and configurations have pages of their own: [events](events.md),",
        "[configuration](configuration.md).",
    ]
    for name in outrider.__all__:
        thing = getattr(outrider, name)
        lines += ["", f"## {name}", ""]
        if not inspect.isclass(thing):
            lines += ["```text", f"{name}{_signature(thing)}", "```", "", doc(thing)]
            continue
        own = "" if dataclasses.is_dataclass(thing) else _signature(thing.__init__)
        lines += ["```text", f"class {name}{own}", "```", ""]
        if not (thing.__doc__ or "").startswith(f"{name}("):
            lines += [doc(thing)]
        for member, value in vars(thing).items():
            if member.startswith("_"):
                continue
            if inspect.isfunction(value):
                lines += ["", f"### {name}.{member}", ""]
                lines += ["```text", f"{member}{_signature(value)}", "```", "", doc(value)]
            elif isinstance(value, property) and doc(value):
                lines += ["", f"`{name}.{member}`: {doc(value)}"]
    lines += ["", "## Exceptions", "", "```text", exceptions(), "```"]
    return tidy(lines)


def _signature(function: Callable[..., object]) -> str:
    text = re.sub(r"(: |-> )(['\"])(.*?)\2", r"\1\3", str(inspect.signature(function)))
    text = re.sub(r"\(self(, )?", "(", text)
    if len(text) < 80:
        return text
    inner = re.sub(r", (?=[\w*]+[:,=)]|\*)", ",\n    ", text[1:].replace("\n", ""))
    return "(\n    " + inner.replace(") -> ", "\n) -> ") if ") -> " in inner else text


def exceptions() -> str:
    from outrider import errors

    tree = (errors.__doc__ or "").split("\n\n")[1]
    return textwrap.dedent(tree)


# --- HTTP -----------------------------------------------------------------------------------------

ROUTES = {
    "/health": "200 when ready, else 503; needs no key",
    "/version": "version",
    "/metrics": "figures for Prometheus ([names](metrics.md))",
    "/v1/models": "the model, with `max_model_len`",
    "/v1/models/{model}": "the same, by name",
    "/v1/completions": "prompts as text, token ids, or lists of either",
    "/v1/chat/completions": "messages of text, formatted by the model's chat template",
    "/ping": "`/health` for SageMaker; its `POST /invocations` finds the right route by the body",
    "/load": "how many sequences run or wait, as `server_load`",
    "/predict": "chats in `instances`, as Google's Vertex AI sends them (`@requestFormat`)",
    "/v1/chat/completions/batch": "several conversations in `messages`, one choice each (vLLM's)",
    "/v1/chat/completions/input_tokens": "the number of tokens of such a request",
    "/v1/responses/input_tokens": "the number of tokens of such a request",
    "/v1/responses": "OpenAI's responses, with `previous_response_id`",
    "/v1/responses/{id}": "a response that is kept; DELETE forgets it",
    "/v1/responses/{id}/input_items": "what the request of a kept response said",
    "/v1/responses/{id}/cancel": "ends a response that runs in the `background`",
    "/v1/conversations": "an id under which `/v1/responses` keeps what was said",
    "/v1/conversations/{id}": "a conversation; POST changes its metadata, DELETE forgets it",
    "/v1/conversations/{id}/items": "what was said; POST adds items",
    "/v1/conversations/{id}/items/{item_id}": "one item; DELETE removes it",
    "/v1/messages": "Anthropic's messages",
    "/v1/messages/count_tokens": "the number of tokens of such a request",
    "/api/chat": "Ollama's chat",
    "/api/generate": "Ollama's generate; `raw` skips the chat template",
    "/api/tags": "the models, for Ollama's clients",
    "/api/ps": "the models in memory, for Ollama's clients",
    "/api/show": "facts about the model, for Ollama's clients",
    "/api/version": "version, for Ollama's clients",
    "/api/embed": "vectors of texts, for Ollama's clients",
    "/v1/embeddings": "vectors of texts or messages: the target's hidden states, pooled",
    "/v1/rerank": "documents by their likeness to a query; also `/rerank`",
    "/v1/score": "the likeness of pairs of texts, or with `label_token_ids` how probable these "
    "tokens are after a text (SGLang's); also `/score`",
    "/generative_scoring": "the share of the first of `label_token_ids` after a text (vLLM's)",
    "/generate": "SGLang's own completion, with scores of prompt and output",
    "/model_info": "the model, for SGLang's clients; also `/get_model_info`",
    "/server_info": "the limits, for SGLang's clients; also `/get_server_info`",
    "/completion": "llama-server's completion; also `/completions`",
    "/infill": "the text between two others, for models with such tokens",
    "/apply-template": "messages in the model's chat template",
    "/embedding": "llama-server's vectors; also `/embeddings`",
    "/props": "the model and its defaults, for llama-server's clients",
    "/slots": "how many sequences run, for llama-server's clients",
    "/tokenize": "`{prompt}` or `{messages}` to `{count, tokens}`",
    "/detokenize": "`{tokens}` to `{prompt}`",
    "/tokenizer_info": "the tokenizer's special tokens and the chat template",
}
FIELDS = {
    "model": "the served name; default: any",
    "prompt": "a text, token ids, or a list of either",
    "messages": "of text, each with `role` and `content`",
    "max_completion_tokens": "OpenAI's newer name for it",
    "stream": "server-sent events",
    "stream_options": "see below",
    "speculation": "see below; default: the server's setting",
    "response_format": "`text`, `json_object` or `json_schema`; `schema` may stand beside the type",
    "structured_outputs": "one of `json`, `regex`, `choice`, `grammar`, `json_object`",
    "cache_salt": "separates this request's cached prefixes from others'",
    "logprobs": "completions: that many alternatives; chat: whether",
    "top_logprobs": "that many alternatives",
    "prediction": "OpenAI's guess of the output, to draft from",
    "add_generation_prompt": "open the assistant's turn",
    "continue_final_message": "continue the last message instead",
    "suffix": "the text after the completion, for models with tokens for filling gaps",
    "timings_per_token": "adds `timings` to the reply or its last chunk",
    "n_predict": "llama-server's name for `max_tokens`; -1: the default",
    "truncate_prompt_tokens": "of a longer prompt, that many tokens are read; -1: as many as fit",
    "truncation_side": "the side that is cut off; default: `left`",
    "separate_reasoning": "false: the text holds the reasoning (SGLang's name)",
    "allowed_token_ids": "no other tokens are chosen",
    "echo": "the reply begins with the prompt; chat: with the message that it continues",
    "return_token_ids": "adds `token_ids` and `prompt_token_ids`",
    "return_tokens_as_token_ids": "tokens of log-probabilities as `token_id:5`",
    "guided_json": "`structured_outputs.json`, by the name of other servers",
    "guided_regex": "`structured_outputs.regex`",
    "guided_choice": "`structured_outputs.choice`",
    "guided_grammar": "`structured_outputs.grammar`, or GBNF",
    "json_schema": "`structured_outputs.json`",
    "regex": "`structured_outputs.regex`",
    "ebnf": "GBNF or Lark",
    "grammar": "GBNF or Lark",
    "verbose": "adds `__verbose`: the prompt as the model read it, the raw output, all settings",
    "best_of": "generates that many, returns the `n` with the highest log-probability per token; "
    "without `stream`",
    "modalities": "only text",
    "tools": "functions that the model may call ([how](../how-to/call-tools.md))",
    "tool_choice": "`auto`, `none`, `required` or `{type: function, function: {name}}`; "
    "`{type: allowed_tools, ...}` offers only these",
    "parallel_tool_calls": "false: at most one call in a reply",
    "reasoning_effort": "for the chat template; `none` also sets `enable_thinking` to false",
    "enable_thinking": "for the chat template",
    "chat_template_kwargs": "further variables of the chat template",
    "include_reasoning": "false: the reasoning is left out of the reply",
    "off": "plain decoding",
    "metrics": "adds `metrics.speculative_decoding` to the reply or its last chunk",
    "include_usage": "a last chunk without choices, with `usage`",
    "continuous_usage_stats": "`usage` in every chunk",
    "include_obfuscation": "pad frames; default: the server's setting",
}


def openapi() -> dict[str, Any]:
    from outrider.server.app import make_routes
    from outrider.server.service import Service
    from outrider.server_config import ServerConfig

    def load() -> Any:
        raise AssertionError("nothing is loaded to read a schema")

    app = make_routes(Service(ServerConfig(), load))
    schema: dict[str, Any] = app.openapi()
    return schema


def http_routes() -> list[str]:
    rows: list[list[object]] = []
    for path, methods in openapi()["paths"].items():
        for method in methods:
            rows.append([f"`{method.upper()} {path}`", ROUTES.get(path, "")])
            assert path in ROUTES or path.startswith("/live"), f"what is {path}?"
    rows.append(["`GET /live`", "a page that shows every step ([how](../how-to/watch-it-live.md))"])
    rows = [row for row in rows if row[1]]
    return table(["route", "what"], [*rows, ["`GET /openapi.json`", "all this, for machines"]])


def http_fields(name: str, without: str = "") -> Callable[[], list[str]]:
    def make() -> list[str]:
        from outrider.config import SamplingParams, Speculation

        notes = FIELDS | parameter_rows.http_notes(SamplingParams, Speculation)
        schemas = openapi()["components"]["schemas"]
        skip = set(schemas[without]["properties"] if without else ())
        rows: list[list[object]] = []
        for field, schema in schemas[name]["properties"].items():
            if field in skip:
                continue
            default = schema.get("default")
            rows.append(
                [
                    f"`{field}`",
                    _range(schema),
                    "" if default in (None, False) else f"`{default!r}`",
                    notes[field],
                ]
            )
        return table(["field", "type", "default", "meaning"], rows)

    return make


def _range(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "anyOf" in schema:
        parts = [_range(part) for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(parts))
    if "$ref" in schema:
        return "object"
    if "const" in schema:
        return f"`{schema['const']!r}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list of {_range(schema['items'])}{most}" if schema.get("items") else "list"
    low, high = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    left = f"({above:g}" if above is not None else None if low is None else f"[{_short(low)}"
    if left is not None or high is not None:
        return f"{kind} {left or '('}, {_short(high)}]"
    return str(kind)


def _short(value: float | None) -> str:
    if value is None:
        return ""
    for bits in (31, 63):
        if abs(value) >= (1 << bits) - 1 and abs(value) <= 1 << bits:
            return f"-2^{bits}" if value < 0 else f"2^{bits} - 1"
    return f"{value:g}"


def models() -> str:
    lines = [*models_page.about(), "", GENERATED, ""]
    head = ["model type", "path", "as transformers", "drafts exactly with", "context", "GGUF"]
    runs = table([*head, "parts beyond Llama's"], models_page.rows())
    refused = table(["refused type", "reason"], models_page.refused())
    return tidy([*lines, *runs, "", "## Refused", "", *refused, "", *models_page.measured()])


def drafters() -> list[str]:
    head = ["layout", "proposer", "drafts", "as the reference", "native float32", "native int8"]
    return table(head, drafters_page.loaded())


def refused_drafters() -> list[str]:
    return table(["folder", "answer"], drafters_page.refused())


# --- all of it ------------------------------------------------------------------------------------

WHOLE: dict[str, Callable[[], str]] = {
    "docs/reference/cli.md": cli_reference.reference,
    "docs/reference/configuration.md": configuration,
    "docs/reference/metrics.md": metrics,
    "docs/reference/models.md": models,
    "docs/reference/events.md": events,
    "docs/reference/python-api.md": python_api,
}
PARTS: dict[str, dict[str, Callable[[], list[str]]]] = {
    "docs/reference/http-api.md": {
        "routes": http_routes,
        "completions": http_fields("CompletionBody"),
        "chat": http_fields("ChatBody", without="CompletionBody"),
        "speculation": http_fields("SpeculationBody"),
        "stream options": http_fields("StreamOptions"),
    },
    "docs/reference/drafters.md": {"layouts": drafters, "refused": refused_drafters},
    **results.PARTS,
}


def tidy(lines: list[str]) -> str:
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
    return text.strip() + "\n"


def fill(text: str, parts: dict[str, Callable[[], list[str]]]) -> str:
    """`text` with new generated parts."""
    for name, make in parts.items():
        start = f"<!-- generated: {name} -->\n"
        assert start in text, f"no place for {name!r}"
        before, _, rest = text.partition(start)
        _, end, after = rest.partition("<!-- end -->")
        assert end, f"no end of {name!r}"
        text = f"{before}{start}\n" + "\n".join(make()) + f"\n\n{end}{after}"
    return text


def wanted() -> dict[Path, str]:
    """The correct text of every page with generated parts."""
    pages = {ROOT / name: make() for name, make in WHOLE.items()}
    for name, parts in PARTS.items():
        pages[ROOT / name] = fill((ROOT / name).read_text(encoding="utf-8"), parts)
    page = vllm_tables.PAGE
    pages[page] = vllm_tables.page(page.read_text(encoding="utf-8"))
    pages[keywords.MODULE] = keywords.filled(keywords.MODULE.read_text(encoding="utf-8"))
    pages[claims.PAGE] = claims.page_text(pages)
    return pages


def main() -> int:
    stale = []
    for page, text in wanted().items():
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            stale.append(str(page.relative_to(ROOT)))
            if "--check" not in sys.argv:
                page.write_text(text, encoding="utf-8")
    if "--check" in sys.argv and stale:
        print("out of date, run `make reference`:", ", ".join(stale))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
