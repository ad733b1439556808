"""`outrider plan`: how many machines a load needs, with and without speculation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outrider.cli.console import Json, print_json, stderr, stdout
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.options import Options, expanded, of
from outrider.parameters import HARDWARE, LOAD, MODELS, MONEY, check, param, params
from outrider.registry import WITH_MODEL

if TYPE_CHECKING:
    from outrider.plan.costs import Roofline
    from outrider.plan.fleet import Fleet, Replica

EXAMPLE = "Example: outrider plan --parameters 8e9 --rate 50 --alpha 0.7 --price 2.5"


def number(default: Any, panel: str, help: str, name: str, **limits: Any) -> Any:
    return param(default, help, f"{name} X", panel, **limits)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The options of `outrider plan`."""

    rate: float = number(10.0, LOAD, "Requests per second.", "--rate", above=0)
    prompt_tokens: int = number(512, LOAD, "Of a prompt.", "--prompt-tokens", above=0)
    output_tokens: int = number(256, LOAD, "Of an output.", "--output-tokens", above=0)
    ttft: float = number(1.0, LOAD, "Seconds to the first token, p95.", "--ttft", above=0)
    tpot: float = number(0.05, LOAD, "Seconds per token after it, p95.", "--tpot", above=0)
    alpha: float = number(0.7, LOAD, "Acceptance of a draft.", "--alpha", low=0, high=1)
    parameters: float = number(8e9, MODELS, "Of the target.", "--parameters", above=0)
    draft_parameters: float = number(
        5e8, MODELS, "Of the draft model; 0: look-ups.", "--draft-parameters", low=0
    )
    bytes_per_parameter: float = number(
        2.0, MODELS, "2 is bfloat16.", "--bytes-per-parameter", above=0
    )
    kv_bytes: float = number(
        131072.0, MODELS, "Of the target's KV, per token.", "--kv-bytes-per-token", low=0
    )
    bandwidth: float = number(3.35e12, HARDWARE, "Bytes per second.", "--bandwidth", above=0)
    flops: float = number(9.9e14, HARDWARE, "Per second.", "--flops", above=0)
    memory: float = number(8e10, HARDWARE, "Bytes of one device.", "--memory", above=0)
    efficiency: float = number(0.7, HARDWARE, "What real kernels reach of it.", "--efficiency")
    max_sequences: int = number(
        EngineConfig.max_sequences, HARDWARE, "Of one replica.", "--max-num-seqs", above=0
    )
    curves: Path | None = param(  # noqa: RUF009
        None,
        "Measured costs instead: what outrider doctor --json printed.",
        "--curves FILE",
        HARDWARE,
    )
    proposer: str = param(
        WITH_MODEL, "Proposer whose curves are used.", "--proposer NAME", HARDWARE
    )
    price: float | None = number(
        None, MONEY, "Of a device and hour.", "--price", above=0, none="not counted"
    )

    def __post_init__(self) -> None:
        def error(message: str, name: str) -> ConfigError:
            return ConfigError(message.replace(name, params(PlanConfig)[name].flag, 1))

        check(self, error)

    def replica(self, degree: int) -> Replica | None:
        """A replica of `degree` devices; None if the load does not fit into it."""
        from outrider.plan.costs import Curves
        from outrider.plan.fleet import Replica

        if self.curves is not None:
            measured = Curves.read(read_record(self.curves), self.proposer)
            if degree > 1:
                return None
            return Replica(costs=measured, max_sequences=self.max_sequences)
        costs = self.roofline(degree)
        room = costs.capacity()
        if room < self.prompt_tokens + self.output_tokens:
            return None
        return Replica(costs=costs, degree=degree, capacity=room, max_sequences=self.max_sequences)

    def roofline(self, degree: int) -> Roofline:
        from outrider.plan.costs import Hardware, ModelSize, Roofline

        draft = ModelSize(
            num_parameters=self.draft_parameters,
            bytes_per_parameter=self.bytes_per_parameter,
            kv_bytes_per_token=self.kv_bytes * self.draft_parameters / self.parameters,
            num_layers=8,
        )
        return Roofline(
            hardware=Hardware(
                bandwidth=self.bandwidth,
                flops=self.flops,
                memory=self.memory,
                efficiency=self.efficiency,
            ),
            target=ModelSize(
                num_parameters=self.parameters,
                bytes_per_parameter=self.bytes_per_parameter,
                kv_bytes_per_token=self.kv_bytes,
            ),
            draft=draft if self.draft_parameters else None,
            degree=degree,
        )


@expanded
def plan(*, options: Annotated[Options, of(PlanConfig)], as_json: Json = False) -> None:
    """Plan a fleet: replicas, tensor parallelism and K by load, simulated request by request."""
    from outrider.plan.fleet import Goal
    from outrider.plan.fleet import plan as find
    from outrider.plan.simulate import Load

    config = PlanConfig(**options)
    load = Load(
        rate=config.rate, prompt_tokens=config.prompt_tokens, output_tokens=config.output_tokens
    )
    goal = Goal(ttft_s=config.ttft, tpot_s=config.tpot)
    fleets = {
        name: find(config.replica, load, goal, alpha=alpha, price=config.price)
        for name, alpha in (("without", 0.0), ("with", config.alpha))
    }
    console = stderr() if as_json else stdout()
    console.print(page(fleets))
    if as_json:
        print_json({name: fleet.figures() for name, fleet in fleets.items()})


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
