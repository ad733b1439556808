"""`outrider plan`: how many machines a load needs, with and without speculation."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outrider.cli.console import Json, print_json, stderr, stdout
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.options import option

if TYPE_CHECKING:
    from outrider.plan.fleet import Fleet, Replica

EXAMPLE = "Example: outrider plan --parameters 8e9 --rate 50 --alpha 0.7 --price 2.5"
LOAD, MODELS, HARDWARE, MONEY = "Load and goal", "Models", "Hardware", "Money"


def number(panel: str, help: str, name: str, **more: Any) -> Any:
    return option(panel, help, name, metavar="X", **more)


def plan(
    rate: Annotated[float, number(LOAD, "Requests per second.", "--rate")] = 10.0,
    prompt_tokens: Annotated[int, number(LOAD, "Of a prompt.", "--prompt-tokens")] = 512,
    output_tokens: Annotated[int, number(LOAD, "Of an output.", "--output-tokens")] = 256,
    ttft: Annotated[float, number(LOAD, "Seconds to the first token, p95.", "--ttft")] = 1.0,
    tpot: Annotated[float, number(LOAD, "Seconds per token after it, p95.", "--tpot")] = 0.05,
    alpha: Annotated[float, number(LOAD, "Acceptance of a draft.", "--alpha")] = 0.7,
    parameters: Annotated[float, number(MODELS, "Of the target.", "--parameters")] = 8e9,
    draft_parameters: Annotated[
        float, number(MODELS, "Of the draft model; 0: look-ups.", "--draft-parameters")
    ] = 5e8,
    bytes_per_parameter: Annotated[
        float, number(MODELS, "2 is bfloat16.", "--bytes-per-parameter")
    ] = 2.0,
    kv_bytes: Annotated[
        float, number(MODELS, "Of the target's KV, per token.", "--kv-bytes-per-token")
    ] = 131072.0,
    bandwidth: Annotated[float, number(HARDWARE, "Bytes per second.", "--bandwidth")] = 3.35e12,
    flops: Annotated[float, number(HARDWARE, "Per second.", "--flops")] = 9.9e14,
    memory: Annotated[float, number(HARDWARE, "Bytes of one device.", "--memory")] = 8e10,
    efficiency: Annotated[
        float, number(HARDWARE, "What real kernels reach of it.", "--efficiency")
    ] = 0.7,
    max_sequences: Annotated[
        int, number(HARDWARE, "Of one replica.", "--max-num-seqs")
    ] = EngineConfig.max_sequences,
    curves: Annotated[
        Path | None,
        option(
            HARDWARE,
            "Measured costs instead: what outrider doctor --json printed.",
            "--curves",
            metavar="FILE",
        ),
    ] = None,
    proposer: Annotated[
        str, option(HARDWARE, "Proposer whose curves are used.", "--proposer", metavar="NAME")
    ] = "draft-model",
    price: Annotated[
        float | None, number(MONEY, "Of a device and hour.", "--price", show_default="not counted")
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan a fleet: replicas, tensor parallelism and K by load, simulated request by request."""
    from outrider.plan.costs import Curves, Hardware, ModelSize, Roofline
    from outrider.plan.fleet import Goal, Replica
    from outrider.plan.fleet import plan as find
    from outrider.plan.simulate import Load

    if not 0 <= alpha <= 1:
        raise ConfigError(f"--alpha must be in [0, 1], not {alpha}")
    check_positive(
        {
            "rate": rate,
            "prompt-tokens": prompt_tokens,
            "output-tokens": output_tokens,
            "ttft": ttft,
            "tpot": tpot,
            "parameters": parameters,
            "bytes-per-parameter": bytes_per_parameter,
            "bandwidth": bandwidth,
            "flops": flops,
            "memory": memory,
            "max-num-seqs": max_sequences,
            "price": price,
        }
    )
    check_positive(
        {"draft-parameters": draft_parameters, "kv-bytes-per-token": kv_bytes}, zero=True
    )
    load = Load(rate=rate, prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    def make(degree: int) -> Replica | None:
        if curves is not None:
            measured = Curves.read(read_record(curves), proposer)
            return Replica(costs=measured, max_sequences=max_sequences) if degree == 1 else None
        hardware = Hardware(bandwidth=bandwidth, flops=flops, memory=memory, efficiency=efficiency)
        target = ModelSize(
            num_parameters=parameters,
            bytes_per_parameter=bytes_per_parameter,
            kv_bytes_per_token=kv_bytes,
        )
        share = draft_parameters / parameters
        draft = ModelSize(
            num_parameters=draft_parameters,
            bytes_per_parameter=bytes_per_parameter,
            kv_bytes_per_token=kv_bytes * share,
            num_layers=8,
        )
        costs = Roofline(
            hardware=hardware,
            target=target,
            draft=draft if draft_parameters else None,
            degree=degree,
        )
        room = costs.capacity()
        if room < prompt_tokens + output_tokens:
            return None
        return Replica(costs=costs, degree=degree, capacity=room, max_sequences=max_sequences)

    goal = Goal(ttft_s=ttft, tpot_s=tpot)
    fleets = {
        name: find(make, load, goal, alpha=alpha, speculate=speculate, price=price)
        for name, speculate in (("without", False), ("with", True))
    }
    console = stderr() if as_json else stdout()
    console.print(page(fleets))
    if as_json:
        print_json({name: fleet.figures() for name, fleet in fleets.items()})


def check_positive(given: dict[str, float | None], *, zero: bool = False) -> None:
    """ConfigError for the first that is no positive finite number; None is left out."""
    for name, value in given.items():
        if value is None or (isfinite(value) and (value > 0 or (zero and value == 0))):
            continue
        what = "0 or a positive number" if zero else "a positive number"
        raise ConfigError(f"--{name} must be {what}, not {value}")


def read_record(file: Path) -> dict[str, Any]:
    """The object in a file, or on its last line; raises ConfigError."""
    try:
        text = file.read_text()
        record: dict[str, Any] = json.loads(text.splitlines()[-1] if "\n{" in text else text)
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"cannot read curves from {file} ({type(error).__name__})") from None
    return record


def page(fleets: dict[str, Fleet]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in fleets:
        table.add_column(f"{name} speculation", justify="right")
    rows = [fleet.figures() for fleet in fleets.values()]
    for key in rows[0]:
        table.add_row(key.replace("_", " "), *(_cell(row[key]) for row in rows))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, dict):
        return ", ".join(f"{batch}:{k}" for batch, k in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
