"""The four checks of `outrider prove`, each with its result in one line and in figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from outrider.contracts import Draw, Verifier
from outrider.engine.engine import Engine, Result
from outrider.engine.lane import Group
from outrider.engine.request import Request, Speculation
from outrider.prove.biased import Injection
from outrider.prove.cases import experiments
from outrider.prove.enumerate import Experiment, Model
from outrider.prove.identity import NEAR_TIE, Divergence, explain
from outrider.prove.output_distribution import (
    HORIZON,
    ExperimentSampler,
    OutputTest,
    RuleSampler,
    examine_output,
    in_floats,
    joint_distribution,
)
from outrider.prove.small_pair import SmallPair
from outrider.sampling import SamplingParams

PLAIN = Speculation(num_draft_tokens=0)
# Typical settings: mild, nucleus, high temperature with filters, penalties.
SAMPLED = (
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.0, top_p=0.9, seed=2),
    SamplingParams(temperature=1.3, top_k=20, min_p=0.02, seed=3),
    SamplingParams(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, seed=4),
)
# How much the rounding of a type changes logits; float32 changes them by at most NEAR_TIE.
NEAR_TIES = {torch.bfloat16: 0.125, torch.float16: 0.02}

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """One finished check. `passed` is None if there was nothing to check."""

    name: str
    passed: bool | None
    found: str  # one line
    figures: dict[str, Any] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)  # what went wrong, one line each


# --- (a) enumeration ------------------------------------------------------------------------


def check_rule(verifier: Verifier, draw: Draw, trees: bool, pair: SmallPair, tell: Tell) -> Check:
    """Every outcome of the rule in exact arithmetic: output and target distribution are equal."""
    num_cases, troubles = 0, []
    own = (pair.target, pair.draft)
    for title, experiment in experiments(verifier.name, draw, trees and verifier.trees, own):
        tell(title)
        num_cases += 1
        distance = experiment.total_variation()
        if distance:
            troubles.append(f"{title}: total variation {_shown(distance)}")
    return Check(
        "enumeration",
        not troubles,
        f"{num_cases} experiments with the {verifier.name} rule and {draw.value} drafts, every "
        f"outcome in fractions: {len(troubles) or 'none'} off the target's distribution",
        {"num_experiments": num_cases, "num_failed": len(troubles)},
        troubles,
    )


def check_injection(injection: Injection, pair: SmallPair, tell: Tell) -> Check:
    """The same for a known mistake, on its toy and on the user's distributions."""
    tell("its toy")
    toy = injection.experiment().total_variation()
    tell("your models' distributions")
    own = injection.build(pair.target, pair.draft).total_variation()
    troubles = [f"{injection.name}: {injection.what}"] if toy or own else []
    return Check(
        "enumeration",
        not troubles,
        f"{injection.name}: total variation {_shown(toy)} on its toy, {float(own):.4f} on your "
        "models' distributions",
        {"total_variation_toy": float(toy), "total_variation": float(own)},
        troubles,
    )


def _shown(distance: Fraction) -> str:
    exact = f"{distance} = " if distance.denominator < 1000 else ""
    return f"{exact}{float(distance):.4f}"


# --- (b), (c) identity ----------------------------------------------------------------------


def check_greedy(
    engine: Engine, prompts: Sequence[list[int]], max_tokens: int, tell: Tell
) -> Check:
    """Greedy decoding of the prompts, plain and speculative: the same tokens."""
    return _identity(
        "greedy identity", engine, prompts, [SamplingParams(max_tokens=max_tokens)], tell
    )


def check_seeded(
    engine: Engine, prompts: Sequence[list[int]], max_tokens: int, tell: Tell
) -> Check:
    """Sampling with a seed. Only the coupled rule promises the tokens of plain decoding; the ratio
    rules promise its distribution, and that a seed repeats its tokens."""
    settings = [replace(params, max_tokens=max_tokens) for params in SAMPLED]
    if engine.default.verifier == "coupled":
        return _identity("seeded identity", engine, prompts, settings, tell)
    again = engine.default
    return _identity("seeded repetition", engine, prompts, settings, tell, reference=again)


def _identity(
    name: str,
    engine: Engine,
    prompts: Sequence[list[int]],
    settings: Sequence[SamplingParams],
    tell: Tell,
    reference: Speculation = PLAIN,
) -> Check:
    num_outputs = num_tokens = num_identical = num_drafted = 0
    ties: list[float] = []
    troubles: list[str] = []
    for params in settings:
        tell(describe(params))
        expected = _decode(engine, prompts, params, reference)
        got = _decode(engine, prompts, params, engine.default)
        for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            num_outputs += 1
            num_drafted += mine.stats.num_drafted
            num_tokens += len(theirs.tokens)
            if mine.tokens == theirs.tokens and mine.text == theirs.text:
                num_identical += 1
                continue
            request = Request("explain", prompts[i], params, PLAIN, _seed(params, i))
            found = explain(engine, request, 0, theirs.tokens, mine.tokens)
            if found is not None and found.margin < near_tie(engine):
                ties.append(found.margin)
            else:
                troubles.append(f"prompt {i + 1}, {describe(params)}: {_trouble(engine, found)}")
    parts = [
        f"{num_identical} of {num_outputs} outputs identical ({num_tokens} tokens, "
        f"{num_drafted or 'none'} drafted)"
    ]
    if ties:
        parts.append(f"{len(ties)} parted at a near-tie (margin {max(ties):.1g} at most)")
    if troubles:
        parts.append(f"{len(troubles)} differ")
    if len(settings) > 1:
        parts.insert(0, f"{len(settings)} settings")
    figures = {
        "num_outputs": num_outputs,
        "num_identical": num_identical,
        "num_tokens": num_tokens,
        "num_drafted": num_drafted,
        "near_ties": ties,
        "num_different": len(troubles),
    }
    passed = not troubles if num_drafted or troubles else None
    return Check(name, passed, ", ".join(parts), figures, troubles)


def _decode(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, wish: Speculation
) -> list[Result]:
    """All prompts in one batch, each with a seed of its own."""
    group = Group(engine)
    for i, prompt in enumerate(prompts):
        group.add(prompt, replace(params, seed=_seed(params, i)), speculation=wish)
    return group.run()


def _seed(params: SamplingParams, index: int) -> int:
    return 1000 * (params.seed or 0) + index


def _trouble(engine: Engine, found: Divergence | None) -> str:
    if found is None:
        return "the tokens are equal, but the text differs"
    plain, ours = (
        "the end" if token is None else repr(engine.tokenizer.decode([token], skip_special=False))
        for token in found.tokens
    )
    return (
        f"token {found.position + 1} is {plain} in plain and {ours} in speculative decoding, "
        f"with a margin of {found.margin:.3g}: no near-tie but a bug"
    )


def describe(params: SamplingParams) -> str:
    """The settings that differ from the defaults, in the user's notation."""
    if params.temperature == 0:
        return "greedy"
    default = SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    return ", ".join(
        f"{name} {getattr(params, name):g}"
        for name in names
        if getattr(params, name) != getattr(default, name)
    )


def near_tie(engine: Engine) -> float:
    """The margin below which rounding decides, for the target's type."""
    dtype = getattr(engine.target, "dtype", torch.float32)
    return NEAR_TIES.get(dtype, NEAR_TIE)


# --- (d) the output distribution ------------------------------------------------------------


def check_output(verifier: Verifier, draw: Draw, pair: SmallPair, tell: Tell) -> Check:
    """The tensor rule on the user's distributions, with the power that `prove.power` promises."""
    sampler = RuleSampler(pair.target, pair.draft, verifier, draw)
    test = examine_output(joint_distribution(pair.target, HORIZON), sampler, _progress(tell))
    source = "the drafter's own q" if pair.is_drafters else "a made-up q"
    return _output_check(test, f"{source}, TV(p, q) = {pair.disagreement:.2f}", HORIZON)


def check_injected_output(injection: Injection, pair: SmallPair, tell: Tell) -> Check:
    """A known mistake under the same test: on the user's distributions, else on its toy."""
    test, horizon = _injected(injection.build, pair.target, pair.draft, tell)
    where = "on your models' distributions"
    if not test.verdict.rejected:
        test, horizon = _injected(injection.build, injection.target, injection.draft, tell)
        where = "on its toy (your models' distributions do not show it)"
    return _output_check(test, f"{injection.name} {where}", horizon)


def _injected(
    build: Callable[[Model, Model], Experiment], target: Model, draft: Model, tell: Tell
) -> tuple[OutputTest, int]:
    experiment = build(in_floats(target), in_floats(draft))
    dist = joint_distribution(target, experiment.horizon)
    return examine_output(dist, ExperimentSampler(experiment), _progress(tell)), experiment.horizon


def _output_check(test: OutputTest, what: str, horizon: int) -> Check:
    planned, verdict = test.plan, test.verdict
    promise = f"a total variation of {planned.error:.0%} shows with {planned.power:.0%} power"
    return Check(
        "law of the output",
        not verdict.rejected,
        f"{what}: {verdict.num_samples} of {planned.num_samples} sequences of {horizon} tokens, "
        f"{planned.num_cells} outcomes, chi-squared {verdict.statistic:.1f}, "
        f"p = {verdict.p_value:.2g}; {promise}",
        {
            "num_samples": verdict.num_samples,
            "num_planned": planned.num_samples,
            "num_cells": planned.num_cells,
            "statistic": min(verdict.statistic, 1e300),
            "p_value": verdict.p_value,
            "level": planned.level,
            "detects_total_variation": planned.error,
            "power": planned.power,
        },
        ["the output does not have the target's distribution"] if verdict.rejected else [],
    )


def _progress(tell: Tell) -> Callable[[int, int], None]:
    return lambda done, of: tell(f"{done} of {of} sequences")
