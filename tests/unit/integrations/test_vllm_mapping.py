"""Our options as vLLM's: every one is passed on, done by the front, or refused in one line."""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import typer

from outrider.cli.app import app
from outrider.cli.errors import run
from outrider.cli.serve import serve
from outrider.errors import ConfigError, UnknownName
from outrider.integrations.vllm import child
from outrider.integrations.vllm.command import read_wish
from outrider.integrations.vllm.mapping import (
    MAX_BATCH,
    OPTIONS,
    Wish,
    command,
    read_table,
    refuse,
    speculative_config,
    table_of,
)
from outrider.registry import own_entries
from outrider.server_config import ServerConfig
from outrider.testing import write_tiny_llama

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("vllm") / "target", vocab_size=128))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("vllm") / "draft"
    return str(write_tiny_llama(folder, vocab_size=128, num_layers=1))


def head(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    return str(folder)


# --- the table ------------------------------------------------------------------------------------


def test_every_option_of_serve_has_a_row() -> None:
    names = {option.name for option in OPTIONS}
    assert names == set(inspect.signature(serve).parameters) - {"context"}
    assert len(names) == len(OPTIONS)


def test_options_are_called_what_users_write() -> None:
    root: Any = typer.main.get_command(app)
    known = root.get_command(typer.Context(root), "serve").params
    flags = {flag for param in known for flag in (*param.opts, *param.secondary_opts)}
    assert {option.flag for option in OPTIONS} - flags == {"MODEL"}


REFUSED = {
    "proposers": ("--proposers", "ngram"),
    "proposer_options": ("--proposer-option", "ngram.min_n=2"),
    "queue_timeout_s": ("--queue-timeout", "5"),
    "buckets": ("--buckets", "1x4"),
    "kv_tokens": ("--kv-tokens", "4096"),
    "log_prompts": ("--log-prompts",),
    "tool_call_parser": ("--tool-call-parser", "hermes"),
    "reasoning_parser": ("--reasoning-parser", "think"),
    "sampling": ("--sampling", "temperature=0.7"),
    "strict": ("--strict",),
    "learn": ("--learn",),
    "learn_per_key": ("--learn", "--learn-per-key"),
    "learn_every": ("--learn-every", "512"),
    "learn_cpu": ("--learn-cpu", "0.2"),
    "learn_folder": ("--learn", "--learn-folder", "learnt"),
    "models_dir": ("--models-dir", "models"),
    "model_idle_s": ("--model-idle", "60"),
    "models_memory": ("--models-memory", "8GiB"),
    "kv_memory": ("--kv-memory", "1GiB"),
    "kv_dtype": ("--kv-dtype", "int8"),
    "max_model_len": ("--max-model-len", "64"),
    "model_aliases": ("--model-alias", "x"),
    "any_model_name": ("--any-model-name",),
    "generation_defaults": ("--no-generation-defaults",),
    "pad": ("--pad",),
    "paced": ("--paced", "20"),
    "device": ("--device", "cpu"),
    "threads": ("--threads", "1"),
}


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.fate == "refused"])
def test_what_has_no_counterpart_is_refused_in_one_line(
    option: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["serve", "--backend", "vllm", *REFUSED[option.name]]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    flag = "--learn" if "--learn" in REFUSED[option.name] else option.flag
    assert f"{flag} has no effect with --backend vllm" in lines[0]


class Started:
    """What `outrider serve --backend vllm` would start, instead of starting it."""

    front: Any = None
    logs: tuple[str, str] = ("", "")

    @property
    def line(self) -> str:
        return " ".join(self.front.make_child().command)

    @property
    def environment(self) -> dict[str, str]:
        found: dict[str, str] = self.front.make_child().environment
        return found


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    found = Started()
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv(child.VARIABLE, str(program))

    def run_front(front: Any, *rest: object) -> int:
        found.front = front
        return 0

    monkeypatch.setattr("outrider.server.run.run", run_front)
    monkeypatch.setattr("outrider.server.logs.set_up", lambda *how: setattr(found, "logs", how))
    return found


def serve_with(*flags: str, model: str) -> int:
    port = [] if "--port" in flags else ["--port", str(child.free_port())]
    return run(app, ["serve", model, "--backend", "vllm", *port, *flags])


# Of each option that is passed on: a use of it, and its trace in what starts vLLM.
PASSED: dict[str, tuple[tuple[str, ...], str]] = {
    "model": ((), "serve TARGET"),
    "draft_model": (("--draft-model", "D"), '"model": "DRAFT"'),
    "proposer": (("--proposer", "ngram"), '"method": "ngram"'),
    "num_draft_tokens": (("--num-draft-tokens", "3"), '"num_speculative_tokens": 3'),
    "draft_table": (
        ("--draft-table", "1-4:5,5-16:2,17-:0"),
        '"num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 16, 2]',
    ),
    "verifier": (("--verifier", "token"), '"draft_sample_method": "probabilistic"'),
    "model_name": (("--served-model-name", "m"), "--served-model-name m"),
    "chat_template": (("--chat-template", "T"), "--chat-template TEMPLATE"),
    "max_sequences": (("--max-num-seqs", "8"), "--max-num-seqs 8"),
    "prefix_caching": (("--no-prefix-caching",), "--no-enable-prefix-caching"),
    "dtype": (("--dtype", "float32"), "--dtype float32"),
    "otlp_endpoint": (
        ("--otlp-endpoint", "http://localhost:4318/v1/traces"),
        "--otlp-traces-endpoint http://localhost:4318/v1/traces",
    ),
    "log_level": (("--log-level", "warning"), "VLLM_LOGGING_LEVEL=WARNING"),
    "tensor_parallel_size": (("--tensor-parallel-size", "2"), "--tensor-parallel-size 2"),
    "pipeline_parallel_size": (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size 2"),
    "data_parallel_size": (("--data-parallel-size", "2"), "--data-parallel-size 2"),
    "executor": (
        ("--distributed-executor-backend", "mp"),
        "--distributed-executor-backend mp",
    ),
    "vllm_args": (("--vllm-arg", "--enforce-eager"), "--enforce-eager"),
}


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.fate == "passed"], ids=lambda o: o.name)
def test_what_is_passed_on_arrives(
    option: Any, started: Started, target: str, draft: str, tmp_path: Path
) -> None:
    (tmp_path / "T").write_text("{{ messages }}")
    places = {"D": draft, "T": str(tmp_path / "T")}
    example = [places.get(part, part) for part in PASSED[option.name][0]]
    if option.name not in ("draft_model", "proposer"):
        example += ["--draft-model", draft]
    assert serve_with(*example, model=target) == 0
    variables = [f"{name}={value}" for name, value in started.environment.items()]
    line = " ".join([started.line, *variables])
    for path, name in ((target, "TARGET"), (draft, "DRAFT"), (places["T"], "TEMPLATE")):
        line = line.replace(path, name)
    assert PASSED[option.name][1] in line


def test_what_is_ours_reaches_the_front(started: Started, target: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    port = child.free_port()
    given: dict[str, tuple[str, ...]] = {
        "host": ("--host", "localhost"),
        "port": ("--port", str(port)),
        "api_keys": ("--api-key-file", str(tmp_path / "keys")),
        "max_queue": ("--max-queue", "7"),
        "allow_hosts": ("--allow-host", "example.org"),
        "cors_origins": ("--cors-origin", "http://localhost:3000"),
        "root_path": ("--root-path", "/llm"),
        "drain_timeout_s": ("--drain-timeout", "3"),
        "stall_timeout_s": ("--stall-timeout", "4"),
        "log_format": ("--log-format", "json"),
        "restarts": ("--restarts", "5"),
        "backend": (),
    }
    assert set(given) == {option.name for option in OPTIONS if option.fate == "ours"}
    flags = [part for parts in given.values() for part in parts]
    assert serve_with(*flags, "--max-num-seqs", "8", model=target) == 0
    config = started.front.config
    assert (config.host, config.port, config.api_keys) == ("localhost", port, ("secret",))
    assert (config.max_queue, started.front.max_requests) == (7, 15)
    assert config.root_path == "/llm"
    assert (config.drain_timeout_s, config.stall_timeout_s) == (3.0, 4.0)
    assert started.logs == ("json", "info")
    assert started.front.restarts_left == 5
    assert "secret" not in started.line + str(started.environment)


@pytest.fixture
def maker() -> Any:
    """docs/tools/vllm_tables.py"""
    spec = importlib.util.spec_from_file_location("vllm_tables", ROOT / "docs/tools/vllm_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documented_tables_are_these(maker: Any) -> None:
    """`make reference` would change nothing."""
    text = maker.PAGE.read_text()
    assert maker.page(text) == text
    assert all(f"| `{name}` |" in text for name in own_entries())
    assert all(f"| `{option.flag}` |" in text for option in OPTIONS)


def test_every_drafter_is_greedy_only_on_the_cpu_build(maker: Any) -> None:
    for name in own_entries():
        refused = maker.in_vllm(name).startswith("refused")
        assert maker.on_cpu_build(name).startswith("–" if refused else "temperature 0 only")


# --- the speculative configuration ----------------------------------------------------------------


def test_a_draft_model_samples_its_drafts(target: str, draft: str) -> None:
    assert speculative_config(Wish(model=target, draft_model=draft)) == {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }


def test_without_a_drafter_the_text_drafts(target: str) -> None:
    config = speculative_config(Wish(model=target))
    assert config == {
        "method": "ngram",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
        "num_speculative_tokens": 8,
    }


@pytest.mark.parametrize("name", ["suffix", "prediction", "hybrid"])
def test_look_ups_of_ours_are_classes_that_exist(name: str, target: str) -> None:
    from outrider.integrations.vllm.proposers import CLASSES

    config = speculative_config(Wish(model=target, proposer=name))
    assert config is not None
    assert config["method"] == "custom_class"
    assert config["model"] == CLASSES[name]


def test_no_drafts_no_configuration(target: str) -> None:
    assert speculative_config(Wish(model=target, num_draft_tokens=0)) is None
    args, _ = command(Wish(model=target, num_draft_tokens=0), host="h", port=1)
    assert "--speculative-config" not in args


def test_heads_are_recognised_and_limit_k(target: str, tmp_path: Path) -> None:
    dflash = head(
        tmp_path / "dflash",
        architectures=["DFlashDraftModel"],
        block_size=8,
        num_attention_heads=8,
        dflash_config={},
    )
    config = speculative_config(Wish(model=target, draft_model=dflash))
    assert config is not None
    assert (config["method"], config["num_speculative_tokens"]) == ("dflash", 7)
    with pytest.raises(ConfigError, match="at most 7"):
        speculative_config(Wish(model=target, draft_model=dflash, num_draft_tokens=8))


def test_dspark_additions_are_exported_away_first(target: str, tmp_path: Path) -> None:
    spark = head(
        tmp_path / "spark",
        architectures=["DFlashDraftModel"],
        block_size=8,
        dflash_config={"markov_rank": 32},
    )
    with pytest.raises(ConfigError, match="outrider export vllm"):
        speculative_config(Wish(model=target, draft_model=spark))


def test_the_block_rule_forces_the_runner_that_has_it(target: str, draft: str) -> None:
    wish = Wish(model=target, draft_model=draft, verifier="block")
    args, environment = command(wish, host="h", port=1)
    assert '"rejection_sample_method": "block"' in " ".join(args)
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"verifier": "coupled"}, "same distribution"),
        ({"verifier": "tree"}, "no tree rule"),
        ({"proposer": "suffix", "verifier": "block"}, "block rule does not run with suffix"),
        ({"proposer": "lookahead"}, "refused"),
        ({"proposer": "medusa"}, "needs --draft-model"),
        ({"proposer": "suffix", "draft_table": [(1, 9, 2)]}, "no --draft-table for custom_class"),
        ({"draft_table": [(1, 9, 2)], "data_parallel_size": 2}, "drops --draft-table"),
        ({"draft_table": [(1, 9, 2)], "num_draft_tokens": 1}, "more than the 1"),
        ({"draft_table": [(1, 9, 0)]}, "never drafts"),
    ],
)
def test_what_vllm_would_drop_is_refused(wish: dict[str, Any], message: str, target: str) -> None:
    with pytest.raises(ConfigError, match=message):
        speculative_config(Wish(model=target, **wish))


def test_a_draft_that_cannot_be_split_is_refused(target: str, draft: str) -> None:
    with pytest.raises(ConfigError, match="cannot split"):
        speculative_config(Wish(model=target, draft_model=draft, tensor_parallel_size=3))


def test_vocabularies_must_agree(target: str, tmp_path: Path) -> None:
    other = str(write_tiny_llama(tmp_path / "other", vocab_size=64))
    with pytest.raises(ConfigError, match="one size"):
        speculative_config(Wish(model=target, draft_model=other))
    config = speculative_config(Wish(model=target, draft_model=other, proposer="cross-vocab"))
    assert config is not None
    assert config["use_heterogeneous_vocab"] is True
    assert "draft_sample_method" not in config


def test_unknown_names_are_told_apart(target: str) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'ngram'"):
        speculative_config(Wish(model=target, proposer="ngrams"))


# --- tables of K ----------------------------------------------------------------------------------


def test_tables_are_read_from_text_and_files(tmp_path: Path) -> None:
    assert read_table("1-4:5,5-16:2,17-:0") == [(1, 4, 5), (5, 16, 2), (17, MAX_BATCH, 0)]
    assert read_table("1:3") == [(1, 1, 3)]
    file = tmp_path / "k.json"
    file.write_text("[[1, 2, 3], [3, 9, 1]]")
    assert read_table(str(file)) == [(1, 2, 3), (3, 9, 1)]


def test_the_doctors_advice_becomes_a_table(tmp_path: Path) -> None:
    from outrider.doctor.advice import Advice

    advice = [Advice(1, "draft-model", 5, 2.0, 0.3), Advice(8, None, 0, 1.0, None)]
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps({"advice": [entry.to_dict() for entry in advice]}))
    assert read_table(str(file)) == [(1, 7, 5), (8, MAX_BATCH, 0)]
    file.write_text("{}")
    with pytest.raises(ConfigError, match="--draft-table"):
        read_table(str(file))


@pytest.mark.parametrize("text", ["", "2-4:1", "1-4:2,6-:1", "1-4", "4-1:2", "1-4:-1", "no.json"])
def test_bad_tables_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--draft-table"):
        read_table(text)


def test_a_recommendation_becomes_a_table() -> None:
    assert table_of({1: 5, 4: 3, 16: 0}) == [(1, 3, 5), (4, 15, 3), (16, MAX_BATCH, 0)]


# --- from the command line ------------------------------------------------------------------------


def options(**given: Any) -> dict[str, Any]:
    return {"model": "bundled", "verifier": "coupled", "num_draft_tokens": "auto", **given}


def test_only_a_chosen_rule_counts() -> None:
    server = ServerConfig()
    assert read_wish(server, options(), set()).verifier is None
    assert read_wish(server, options(verifier="token"), {"verifier"}).verifier == "token"


def test_auto_needs_a_table() -> None:
    server = ServerConfig()
    with pytest.raises(ConfigError, match="K by itself"):
        read_wish(server, options(), {"num_draft_tokens"})
    assert read_wish(server, options(draft_table="1-:2"), {"num_draft_tokens"}).draft_table


def test_flags_of_vllm_need_its_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["serve", "--pipeline-parallel-size", "2"]) == 2
    assert "needs --backend vllm" in capsys.readouterr().err


def test_nothing_given_is_nothing_refused() -> None:
    refuse(set())


def test_vllm_is_found_or_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(child.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no program"):
        child.find_vllm()
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv(child.VARIABLE, str(program))
    assert child.find_vllm() == program
    monkeypatch.delenv(child.VARIABLE)
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="not installed"):
        child.find_vllm()
