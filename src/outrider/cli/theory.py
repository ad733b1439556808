"""`outrider theory`: the speedup of speculation from formulas, without a measurement."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from rich.table import Table

from outrider.cli.console import Json, print_json, stdout
from outrider.options import option
from outrider.parameters import OUTPUT
from outrider.theory import (
    VerifyCost,
    best_num_draft_tokens,
    bonus_share,
    break_even_alpha,
    claims,
    cycle_cost,
    expected_tokens,
    linear,
    speedup,
)

EXAMPLE = "Example: outrider theory --alpha 0.7 --num-draft-tokens 4 --cost 0.1"

PAIR = "Pair and machine"
MOST = 64  # drafts per cycle that are considered
Row = dict[str, float | None]


def theory(
    alpha: Annotated[
        float, option(PAIR, "Acceptance probability of a draft.", "--alpha", "-a", metavar="P")
    ] = 0.7,
    num_draft_tokens: Annotated[
        int, option(PAIR, "Drafts per cycle.", "--num-draft-tokens", "-k", metavar="K")
    ] = 4,
    cost: Annotated[
        float, option(PAIR, "One draft step in target steps.", "--cost", "-c", metavar="C")
    ] = 0.1,
    verify_cost: Annotated[
        float,
        option(
            PAIR,
            "What each draft adds to the target's pass, in target steps: v(K) = 1 + V K.",
            "--verify-cost",
            metavar="V",
        ),
    ] = 0.0,
    as_json: Json = False,
    show_claims: Annotated[
        bool, option(OUTPUT, "Common claims beside the numbers that decide them.", "--claims")
    ] = False,
) -> None:
    """Expected tokens, speedup, break-even and the best K, from the formulas."""
    verify = linear(verify_cost)
    record: dict[str, object] = {
        "alpha": alpha,
        "num_draft_tokens": num_draft_tokens,
        "cost": cost,
        "verify_cost": verify_cost,
    }
    chosen = row(alpha, num_draft_tokens, cost, verify)
    best = best_num_draft_tokens(alpha, cost, verify, most=MOST)
    record |= chosen | {
        "best_num_draft_tokens": best,
        "best_speedup": speedup(alpha, best, cost, verify),
    }
    curve = [row(alpha, k, cost, verify) for k in shown(num_draft_tokens, best)]
    record["curve"] = curve
    if show_claims:
        record["claims"] = [asdict(claim) for claim in claims()]
    if as_json:
        print_json(record)
        return
    if show_claims:
        stdout().print(claims_table())
        return
    stdout().print(curve_table(curve, num_draft_tokens, best))
    stdout().print(
        f"alpha = {alpha:g}, a draft step costs {cost:g} target steps, "
        f"verification 1 + {verify_cost:g} K. Tokens include the correction or bonus."
    )
    limit = " (the largest considered)" if best == MOST else ""
    stdout().print(f"Best: K = {best}{limit}, {record['best_speedup']:.2f}x plain decoding.")


def row(alpha: float, num_draft_tokens: int, cost: float, verify: VerifyCost) -> Row:
    """The results of all formulas for one K."""
    return {
        "num_draft_tokens": num_draft_tokens,
        "expected_tokens": expected_tokens(alpha, num_draft_tokens),
        "cycle_cost": cycle_cost(num_draft_tokens, cost, verify),
        "speedup": speedup(alpha, num_draft_tokens, cost, verify),
        "break_even_alpha": break_even_alpha(num_draft_tokens, cost, verify),
        "bonus_share": bonus_share(alpha, num_draft_tokens),
    }


def shown(num_draft_tokens: int, best: int) -> list[int]:
    """Some values of K, among them the requested one and the best one."""
    return sorted({0, 1, 2, 3, 4, 5, 6, 8, 12, 16, num_draft_tokens, best})


def curve_table(curve: list[Row], chosen: int, best: int) -> Table:
    table = Table("K", "tokens per cycle", "cycle cost", "speedup", "break-even alpha", "bonus")
    for column in table.columns:
        column.justify = "right"
    for entry in curve:
        k = entry["num_draft_tokens"]
        even = entry["break_even_alpha"]
        marks = ("*" if k == best else "") + (">" if k == chosen else "")
        table.add_row(
            f"{marks} {k}".strip(),
            f"{entry['expected_tokens']:.3f}",
            f"{entry['cycle_cost']:.3f}",
            f"{entry['speedup']:.2f}x",
            ("-" if k == 0 else "never") if even is None else f"{even:.3f}",
            "-" if k == 0 else f"{entry['bonus_share']:.1%}",
        )
    table.caption = "> the K asked for   * the best K"
    return table


def claims_table() -> Table:
    table = Table("claim", "truth", "our number", show_lines=True)
    for claim in claims():
        numbers = "\n".join(f"{what}: {value:.4g}" for what, value in claim.numbers.items())
        table.add_row(claim.claim, claim.truth, numbers)
    return table
