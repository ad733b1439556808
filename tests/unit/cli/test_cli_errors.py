"""Every mistake: one line on stderr that says what to do, exit code 2, nothing on stdout."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path

import pytest

from outrider.cli.app import app
from outrider.cli.errors import OneLine, run
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.options import read_buckets
from outrider.testing import write_tiny_llama, write_tiny_tokenizer

from .calling import Command, Ran


def assert_refused(ran: Ran, *words: str, code: int = 2) -> None:
    assert ran.code == code, ran
    assert ran.out == ""
    assert ran.err.count("\n") == 1, ran.err
    assert ran.err.startswith("outrider: ")
    for word in words:
        assert word in ran.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--num-draft-tokens", "-1"], ["num_draft_tokens", "-1"]),
        (["-k", "96"], ["num_draft_tokens", "96"]),
        (["--temperature", "-0.5"], ["temperature", "-0.5"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--temperature", "inf"], ["temperature", "inf"]),
        (["--top-p", "nan"], ["top_p", "nan"]),
        (["--top-p", "1.5"], ["top_p", "1.5"]),
        (["--top-p", "0"], ["top_p"]),
        (["--min-p", "2"], ["min_p"]),
        (["--top-k", "-1"], ["top_k"]),
        (["--repetition-penalty", "0"], ["repetition_penalty"]),
        (["--presence-penalty", "nan"], ["presence_penalty"]),
        (["--frequency-penalty", "-inf"], ["frequency_penalty"]),
        (["--n", "0"], ["n must be"]),
        (["--max-tokens", "0"], ["max_tokens"]),
        (["--min-tokens", "200"], ["min_tokens"]),
        (["--stop", ""], ["stop"]),
        (["--logprobs", "21"], ["logprobs"]),
        (["--proposer", "ngrams"], ["ngrams", "Did you mean 'ngram'?"]),
        (["--proposer", "prediction"], ["--prediction"]),
        (["--proposer-option", "ngram"], ["NAME.KEY=VALUE"]),
        (["--proposer-option", "ngrams.min_n=2"], ["Did you mean 'ngram'?"]),
        (["--proposer-option", "ngram.min_m=2"], ["Did you mean 'min_n'?"]),
        (["--proposer-option", "ngram.min_n=two"], ["'min_n'", "whole number", "'two'"]),
        (["--proposer-option", "ngram.factor=true"], ["'factor'", "a number"]),
        (["--proposer-option", "suffix.tree=false"], ["--proposer suffix"]),
        (["--verifier", "tokens"], ["Did you mean 'token'?"]),
        (["--device", "gpu0"], ["gpu0"]),
        (["--dtype", "floot32"], ["Did you mean 'float32'?"]),
        (["--backend", "tortch"], ["Did you mean 'torch'?"]),
        (["--threads", "0"], ["threads"]),
        (["--n", "2", "--stream"], ["--stream"]),
        (["--prediction", "x", "--proposer", "ngram"], ["--proposer prediction"]),
        (["--prediction", "x", "--prediction-file", "y"], ["not both"]),
    ],
)
def test_parameters(command: Command, target: Path, options: list[str], words: list[str]) -> None:
    assert_refused(command("generate", str(target), "-p", "hello", *options), *words)


def test_missing_folder(command: Command) -> None:
    assert_refused(command("generate", "/no/such/folder", "-p", "x"), "/no/such/folder")


def test_missing_draft_folder(command: Command, target: Path) -> None:
    ran = command("generate", str(target), "--draft-model", "/no/draft", "-p", "x")
    assert_refused(ran, "/no/draft")


def test_folder_without_a_model(command: Command, tmp_path: Path) -> None:
    assert_refused(command("generate", str(tmp_path), "-p", "x"), str(tmp_path), "config.json")


def test_not_a_causal_model(command: Command, target: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(target, tmp_path / "encoder")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
    (folder / "config.json").write_text(json.dumps(config))
    assert_refused(command("generate", str(folder), "-p", "x"), "causal", code=1)


def test_a_file_that_does_not_load(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\3\0\0\0")
    ran = command("generate", str(path), "-p", "x")
    assert_refused(ran, str(path), "cut short", "download the file again", code=1)


def test_vocabulary_mismatch(command: Command, target: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other", vocab_size=128, num_layers=1, tokenizer=False)
    write_tiny_tokenizer(other, num_tokens=128, eos="<other>")
    args = ["generate", str(target), "--draft-model", str(other), "-p", "x"]
    assert_refused(command(*args), "vocabulary", "choose a drafter", "cross-vocab")
    # Asked for by name, such a drafter drafts text instead of tokens.
    ran = command(*args, "--proposer", "cross-vocab", "-m", "4", "--json")
    assert ran.record["proposer"] == "cross-vocab"


def test_prompt_longer_than_the_context(command: Command, target: Path) -> None:
    ran = command("generate", str(target), "-p", "e" * 96)
    assert_refused(ran, "96 tokens", "shorten the prompt")


def test_empty_prompt(command: Command, target: Path) -> None:
    assert_refused(command("generate", str(target), "-p", ""), "empty")
    assert_refused(command("generate", str(target), "-f", "-", stdin=""), "empty")


def test_no_prompt(command: Command, target: Path) -> None:
    assert_refused(command("generate", str(target)), "-p TEXT", "-f FILE")


def test_two_prompts(command: Command, target: Path) -> None:
    assert_refused(command("generate", str(target), "-p", "x", "-f", "y"), "not both")


def test_unreadable_prompt_files(command: Command, target: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    ran = command("generate", str(target), "-f", str(missing))
    assert_refused(ran, str(missing), "No such file")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert_refused(command("generate", str(target), "-f", str(binary)), "UTF-8")


def test_draft_model_that_nobody_uses(command: Command, target: Path) -> None:
    ran = command("generate", str(target), "-p", "x", "--proposer", "ngram", "--draft-model", "d")
    assert_refused(ran, "leave out --draft-model")


def test_draft_model_proposer_without_a_draft_model(command: Command, target: Path) -> None:
    ran = command("generate", str(target), "-p", "x", "--proposer", "draft-model")
    assert_refused(ran, "--draft-model")


def test_unknown_option_and_command(command: Command) -> None:
    ran = command("generate", "--tempreature", "1")
    assert_refused(ran, "Did you mean --temperature?", "outrider generate --help")
    assert_refused(command("generat"), "Did you mean 'generate'?")
    assert_refused(command("generate", "--max-tokens", "many"), "--max-tokens")


def test_demo_needs_drafts(command: Command) -> None:
    assert_refused(command("demo", "-k", "0"), "--num-draft-tokens")


def test_a_bug_is_one_line_and_a_hint(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("outrider.cli.generate.read_text", broken)
    ran = command("generate", "-p", "x")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.count("\n") == 1
    assert "RuntimeError: two lines" in ran.err
    assert "--debug" in ran.err
    monkeypatch.setenv("OUTRIDER_DEBUG", "")  # restored after the test, as --debug sets it
    assert run(app, ["--debug", "generate", "-p", "x"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_drafter_that_fails_costs_one_line_and_no_output(
    command: Command, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of\nideas")

    args = ["generate", *pair, "-p", "hello", "-m", "12"]
    plain = command(*args, "-k", "0").out
    for method in ("propose", "plan"):
        monkeypatch.setattr(f"outrider.proposers.draft_model.DraftModelProposer.{method}", broken)
    # Capturing logs, pytest stands where the command's own handler would be.
    record = logging.LogRecord("outrider", logging.WARNING, "", 0, "it failed", (), None)
    try:
        broken()
    except RuntimeError:
        record.exc_info = sys.exc_info()
    assert OneLine().format(record) == "outrider: it failed (RuntimeError: out of ideas)"
    ran = command(*args)
    assert ran.code == 0
    assert ran.out == plain
    assert "nothing was drafted" in ran.err


def test_buckets_are_sequences_and_drafts() -> None:
    assert read_buckets("1x4,16x0") == ((1, 4), (16, 0))
    for wrong in ("4", "1x", "1x4;2x2", "-1x4"):
        with pytest.raises(ConfigError, match="such as 1x4,16x1"):
            read_buckets(wrong)
    with pytest.raises(ConfigError, match="device cuda"):
        LLM("bundled:draft", buckets=((1, 4),), num_draft_tokens=0)
