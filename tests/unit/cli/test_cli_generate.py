"""`outrider generate`: what goes to stdout and stderr; speculation changes neither text nor ids."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.engine.engine import Engine
from outrider.events import StepReport

from .calling import Command


@pytest.fixture
def pair(pair: list[str]) -> list[str]:
    """Four drafts a step: whether they pay on this machine is another test's business."""
    return [*pair, "-k", "4"]


SAMPLED = ["--temperature", "0.9", "--top-k", "20", "--presence-penalty", "0.5", "--seed", "7"]


@pytest.mark.parametrize("sampling", [[], SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", ["1", "4"])
def test_same_text_with_and_without_speculation(
    command: Command, pair: list[str], sampling: list[str], k: str
) -> None:
    args = ["generate", *pair, "-p", "hello there", "-m", "40", *sampling]
    plain = command(*args, "-k", "0")
    speculative = command(*args, "-k", k)
    assert plain.code == speculative.code == 0
    assert len(plain.out) > 10
    assert speculative.out == plain.out
    assert "nothing was drafted" in plain.err
    assert "acceptance length" in speculative.err
    assert "tokens per target pass" in speculative.err


def test_json_is_the_last_line(command: Command, pair: list[str]) -> None:
    ran = command("generate", *pair, "-p", "hello", "-m", "24", "--seed", "3", "--json")
    assert ran.out.count("\n") == 1
    assert ran.err == ""
    record = ran.record
    assert len(record["tokens"]) == record["num_tokens"] == 24
    assert record["finish_reason"] == "length"
    assert record["seed"] == 3
    assert record["model"] == pair[0]
    assert record["proposer"] == "draft-model"
    assert record["num_draft_tokens"] == 4
    assert record["tokens_per_s"] > 0
    assert 1 <= record["acceptance_length"] <= 5
    assert 1 <= record["tokens_per_pass"] <= 5
    assert 0 <= record["acceptance_rate"] <= 1
    assert len(record["conditional_acceptance"]) == len(record["unconditional_acceptance"]) == 4
    assert set(record["time"]) == {"draft_s", "verify_s", "other_s"}


def test_json_agrees_with_the_streamed_text(command: Command, pair: list[str]) -> None:
    args = ["generate", *pair, "-p", "hello", "-m", "24"]
    streamed = command(*args).out
    both = command(*args, "--json", "--stream")
    assert both.record["text"].rstrip("\n") == streamed.rstrip("\n")
    assert both.out.startswith(streamed)


def test_several_completions(command: Command, pair: list[str]) -> None:
    args = ["generate", *pair, "-p", "hello", "-m", "8", "--n", "3", *SAMPLED]
    record = command(*args, "--json").record
    assert len(record["completions"]) == 3
    assert record["completions"][0]["text"] == record["text"]
    shown = command(*args).out
    assert "2 of 3" in shown


def test_logprobs(command: Command, pair: list[str]) -> None:
    args = ["generate", *pair, "-p", "hello", "-m", "6", "--logprobs", "2"]
    entries = command(*args, "--json").record["logprobs"]
    assert len(entries) == 6
    assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in entries)
    assert "alternatives" in command(*args).out


def test_prompts_from_a_file_and_from_standard_input(
    command: Command, pair: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello there")
    rest = ["-m", "8"]
    expected = command("generate", *pair, "-p", "hello there", *rest).out
    assert command("generate", *pair, "-f", str(file), *rest).out == expected
    assert command("generate", *pair, "-f", "-", *rest, stdin="hello there").out == expected
    assert command("generate", *pair, "-p", "-", *rest, stdin="hello there").out == expected


def test_a_right_prediction_is_accepted(command: Command, target: Path) -> None:
    args = ["generate", str(target), "-p", "hello", "-m", "24", "--ignore-eos", "--json"]
    plain = command(*args, "-k", "0").record
    guided = command(*args, "--prediction", plain["text"]).record
    assert guided["proposer"] == "prediction"
    assert guided["tokens"] == plain["tokens"]
    assert guided["num_passes"] < plain["num_passes"]


def test_without_a_draft_model_the_context_drafts(command: Command, target: Path) -> None:
    record = command("generate", str(target), "-p", "hello hello", "-m", "8", "--json").record
    assert record["proposer"] == "ngram"


def test_stop_text_is_not_shown(command: Command, pair: list[str]) -> None:
    args = ["generate", *pair, "-p", "hello", "-m", "24", "--json"]
    text = command(*args).record["text"]
    stop = text[5:7]
    record = command(*args, "--stop", stop).record
    assert record["text"] == text[: text.index(stop)]
    assert record["finish_reason"] == "stop"


def test_names_of_other_tools(command: Command, pair: list[str]) -> None:
    model, _, draft, *_ = pair
    ours = command("generate", *pair, "-p", "hi", "-m", "9", "-k", "2", "--seed", "1", "--json")
    theirs = command(
        *("generate", model, "--speculative-model", draft, "--prompt", "hi"),
        *("--max-new-tokens", "9", "--num_speculative_tokens", "2", "--temp", "0"),
        *("--seed", "1", "--json"),
    )
    assert theirs.record["tokens"] == ours.record["tokens"]
    assert theirs.record["num_draft_tokens"] == 2


def test_ctrl_c_keeps_what_was_confirmed(
    command: Command, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["generate", *pair, "-p", "hello", "-m", "40", "-k", "0"]
    whole = command(*args).out
    run = Engine.run

    def interrupted(self: Engine, request_ids: list[str]) -> Iterator[StepReport]:
        for i, report in enumerate(run(self, request_ids)):
            yield report
            if i == 9:
                raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "run", interrupted)
    ran = command(*args)
    assert ran.code == 130
    assert ran.out.rstrip("\n") == whole[:10]
    record = command(*args, "--json").record
    assert record["finish_reason"] == "cancelled"
    assert len(record["tokens"]) == 10


def test_ctrl_c_while_loading_is_quiet(
    command: Command, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.llm.LLM", interrupted)
    ran = command("generate", *pair, "-p", "hello")
    assert (ran.code, ran.out, ran.err) == (130, "", "")


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def test_chat_asks_in_the_template_of_the_model(
    command: Command, pair: list[str], tmp_path: Path
) -> None:
    model = shutil.copytree(pair[0], tmp_path / "model")
    args = ["generate", str(model), "-m", "12", "--json"]
    ran = command(*args, "-p", "hello", "--chat")
    assert ran.code == 2
    assert "no chat template" in ran.err
    (model / "chat_template.jinja").write_text(TEMPLATE)
    asked = command(*args, "-p", "hello", "--chat").record
    written = command(*args, "-p", "<user>hello\n<assistant>").record
    assert asked["tokens"] == written["tokens"]
    assert asked["prompt_s"] > 0
    assert asked["decoding_tokens_per_s"] > 0


def test_a_chat_model_that_says_nothing_is_explained(
    command: Command, pair: list[str], tmp_path: Path
) -> None:
    model = shutil.copytree(pair[0], tmp_path / "model")
    args = ["generate", str(model), "-p", "hello", "-m", "4"]
    first = command(*args, "--json").record["tokens"][0]
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": first}))
    silent = command(*args)
    assert silent.out.strip() == ""
    assert "--chat" not in silent.err
    (model / "chat_template.jinja").write_text(TEMPLATE)
    assert command(*args).err.endswith("--chat asks it as one\n")


def test_a_short_output_shows_no_speed(command: Command, pair: list[str]) -> None:
    ran = command("generate", *pair, "-p", "hello there", "-m", "1")
    assert "too short for tok/s" in ran.err
    assert "prompt of " in ran.err
    record = command("generate", *pair, "-p", "hello there", "-m", "1", "--json").record
    assert record["decoding_tokens_per_s"] is None
