"""`outrider prove`: proven on honest pairs, not proven with any mistake, one page, one object."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from outrider.cli.prove import MOST_PROMPTS, read_prompts
from outrider.contracts import Distributions, Proposal, SequenceView, Verdict
from outrider.errors import RequestError
from outrider.prove import output_distribution, power
from outrider.prove.biased import BIASED
from outrider.verifiers.coupled import CoupledVerifier

from .calling import Command

SHORT = ["--max-tokens", "12"]


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of a tenth instead of a hundredth: a hundred times fewer sequences."""
    monkeypatch.setattr(output_distribution, "plan", partial(_plan, power.plan))


def _plan(plan: Callable[..., object], dist: object, *, error: float) -> object:
    return plan(dist, error=10 * error)


def test_an_honest_pair_is_proven(command: Command, pair: list[str]) -> None:
    ran = command("prove", *pair, *SHORT)
    assert ran.code == 0, ran
    names = ("enumeration", "greedy identity", "seeded identity", "law of the output")
    assert all(name in ran.out for name in names)
    assert "NOT" not in ran.out
    assert "power" in ran.out
    assert len(ran.out.splitlines()) < 30  # one page
    assert ran.err == ""


@pytest.mark.parametrize(
    "options",
    [
        ["--verifier", "token"],
        ["--verifier", "block", "-k", "3"],
        ["--verifier", "tree"],
        ["--num-draft-tokens", "auto"],
    ],
)
def test_every_rule_is_proven(command: Command, pair: list[str], options: list[str]) -> None:
    ran = command("prove", *pair, *SHORT, *options, "--json")
    assert ran.code == 0, ran
    record = ran.record
    assert record["proven"] is True
    vacuous = "auto" in options  # which may find that drafts do not pay on this machine
    passed = [check["passed"] for check in record["checks"]]
    assert [p is not False if vacuous else p for p in passed] == [True] * 4
    seeded = record["checks"][2]
    coupled = record["verifier"] == "coupled"
    assert seeded["name"] == ("seeded identity" if coupled else "seeded repetition")
    assert seeded["num_identical"] + len(seeded["near_ties"]) == seeded["num_outputs"] == 16
    output = record["checks"][3]
    assert output["power"] == 0.99
    assert output["num_samples"] == output["num_planned"]


def test_a_pair_without_a_draft_model(command: Command, target: Path) -> None:
    ran = command("prove", str(target), "--proposer", "ngram", *SHORT, "--json")
    assert ran.code == 0, ran
    assert "a made-up q" in ran.record["checks"][3]["found"]


@pytest.mark.parametrize("name", ["replace-from-p", "greedy-as-soft", "cascade-bottom-q"])
def test_a_mistake_is_not_proven(command: Command, pair: list[str], name: str) -> None:
    ran = command("prove", *pair, "--inject", name, "--json")
    assert ran.code == 1, ran
    record = ran.record
    assert record["proven"] is False
    assert record["inject"] == name
    passed = {check["name"]: check["passed"] for check in record["checks"]}
    assert passed["enumeration"] is False
    assert passed["greedy identity"] is None
    assert name in ran.err  # the page, beside the object


def test_all_mistakes_are_caught_by_enumeration_on_this_pair(
    command: Command, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.prove import checks

    def skipped(*_: object) -> checks.Check:
        return checks.Check("law of the output", None, "")

    monkeypatch.setattr(checks, "check_injected_output", skipped)
    for name in BIASED:
        assert command("prove", *pair, "--inject", name).code == 1, name


def test_a_difference_that_is_no_near_tie_is_a_bug(
    command: Command, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = CoupledVerifier.verify

    def forgetful(
        self: CoupledVerifier,
        views: list[SequenceView],
        proposals: list[Proposal],
        laws: Distributions,
    ) -> list[Verdict]:
        """Emits the second draft instead of the target's own token now and then."""
        verdicts = honest(self, views, proposals, laws)
        for view, proposal, verdict in zip(views, proposals, verdicts, strict=True):
            if len(proposal) > 1 and len(view.tokens) % 5 == 0:
                verdict.next_token = proposal.tokens[1]
        return verdicts

    monkeypatch.setattr(CoupledVerifier, "verify", forgetful)
    ran = command("prove", *pair, *SHORT)
    assert ran.code == 1
    assert "no near-tie but a bug" in ran.out
    assert "NOT PROVEN" in ran.out


def test_refusals(command: Command, pair: list[str], tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    long = tmp_path / "long.txt"
    long.write_text("short\n" + "long " * 100)
    for options, words in [
        (["--inject", "greedy"], ["unknown mistake", "greedy-as-soft"]),
        (["-k", "0"], ["--num-draft-tokens"]),
        (["--prompts", str(tmp_path / "none")], ["No such file"]),
        (["--prompts", str(empty)], ["one per line"]),
        (["--prompts", str(long)], ["prompt 2", "the context holds 96", "shorten"]),
        (["--verifier", "tokens"], ["Did you mean 'token'?"]),
    ]:
        ran = command("prove", *pair, *options)
        assert (ran.code, ran.out) == (2, ""), ran
        assert ran.err.count("\n") == 1
        assert all(word in ran.err for word in words)


def test_prompts_from_a_file(command: Command, pair: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one\\ntwo", "id": 1}\n\nthree\n')
    assert [prompt.text for prompt in read_prompts(file)] == ["one\ntwo", "three"]
    ran = command("prove", *pair, *SHORT, "--prompts", str(file), "--json")
    assert ran.code == 0, ran
    assert ran.record["checks"][1]["num_outputs"] == 2
    chat = {"messages": [{"role": "user", "content": "four"}]}
    file.write_text(json.dumps(chat))
    ran = command("prove", *pair, *SHORT, "--prompts", str(file), "--json")
    assert ran.record["checks"][1]["num_outputs"] == 1
    file.write_text("\n".join(f"line {i}" for i in range(100)))
    assert len(read_prompts(file)) == MOST_PROMPTS
    for wrong in ('{"text": "x"}', '{"prompt": 3}', '{"prompt": ""}', "{"):
        file.write_text(f"fine\n{wrong}\n")
        with pytest.raises(RequestError, match="line 2"):
            read_prompts(file)


def test_the_object_is_plain_json(command: Command, pair: list[str]) -> None:
    ran = command("prove", *pair, *SHORT, "--json")
    assert ran.out.count("\n") == 1
    assert json.loads(ran.out)["model"] == pair[0]
