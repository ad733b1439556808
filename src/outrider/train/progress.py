"""Progress of a run: a rich bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

SHOWN = ("loss", "alpha", "agreement")


class Progress:
    """Context manager; `update` may be called at any rate."""

    def __init__(
        self, title: str, *, every_s: float = 10.0, quiet: bool = False, unit: str = "steps"
    ) -> None:
        self.title, self.every_s, self.quiet, self.unit = title, every_s, quiet, unit
        self._bar: Any = None
        self._task: Any = None
        self._began = self._printed = time.monotonic()

    def __enter__(self) -> Progress:
        if sys.stderr.isatty() and not self.quiet:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=1, figures="")
        elif not self.quiet and self.unit == "steps":
            print(f"{self.title}: the first steps are timed", file=sys.stderr, flush=True)
        return self

    def count(self, done: int, total: int) -> None:
        """Shows how much is done; in lines, the first one at once."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            return
        now = time.monotonic()
        if self.quiet or not (done == 0 or done >= total or now - self._printed >= self.every_s):
            return
        self._printed = now
        left = ""
        if done:
            left = f", {(now - self._began) / done * (total - done):.0f} s left"
        print(f"{self.title}: {done}/{total} {self.unit}{left}", file=sys.stderr, flush=True)

    def beat(self, step: int, num_steps: int | None, left_s: float) -> None:
        """Shows that a step has ended; in lines, every few seconds."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=num_steps or step)
            return
        now = time.monotonic()
        if not self.quiet and now - self._printed >= self.every_s:
            self._printed = now
            line = f"{self.title}: step {step}/{num_steps or '?'}, {left_s:.0f} s left"
            print(line, file=sys.stderr, flush=True)

    def update(self, step: int, num_steps: int | None, row: dict[str, float]) -> None:
        """Show `row`'s figures at `step` of `num_steps` (None while that is measured)."""
        figures = " ".join(f"{name} {row[name]:.4f}" for name in SHOWN if name in row)
        if self._bar is not None:
            total = num_steps or step
            self._bar.update(self._task, completed=step, total=total, figures=figures)
            return
        now = time.monotonic()
        if self.quiet:
            return
        if now - self._printed >= self.every_s or step == num_steps:
            self._printed = now
            rate = row["tokens"] / max(row["seconds"], 1e-9)
            left = (num_steps - step) * row["seconds"] / step if num_steps else float("nan")
            print(
                f"{self.title}: step {step}/{num_steps or '?'} {figures} "
                f"{rate / 1e6:.3f} M tokens/s, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
