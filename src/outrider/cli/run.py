"""One request from first to last token, with everything that the command line shows."""

from __future__ import annotations

import sys
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from outrider.cli import report, trace
from outrider.cli.console import stderr, stdout
from outrider.engine.engine import Completion, Engine, Result
from outrider.engine.lane import Group
from outrider.events import StepEvent
from outrider.model.chat_template import load_template
from outrider.origins import spelling
from outrider.sampling import SamplingParams


class Run:
    """Call it once; `result` is then set, also after Ctrl-C (`interrupted`)."""

    result: Result

    def __init__(self, engine: Engine, *, stream: bool, show_trace: bool, as_json: bool) -> None:
        self.interrupted = False
        self._engine = engine
        self._stream = stream
        self._show_trace = show_trace
        self._as_json = as_json
        self._out = stdout()
        self._spell = spelling(engine.tokenizer)
        self._marks = trace.needs_marks(self._out)
        self._events: dict[int, list[StepEvent]] = {}  # by sample

    def __call__(
        self, prompt: str, params: SamplingParams, prediction: str, ids: list[int] | None = None
    ) -> None:
        """`ids`: the prompt in the model's chat template; None: the text as it is."""
        self._is_chat = ids is not None
        with Group(self._engine) as group:
            group.add(prompt if ids is None else ids, params, prediction=prediction)
            if self._stream and self._out.is_terminal:
                end = "\n" if self._is_chat else ""
                self._out.print(report.printable(prompt), style="dim", end=end, markup=False)
            try:
                for step in group:
                    for event in step.events:
                        self._events.setdefault(event.sample_index, []).append(event)
                        if self._stream:
                            self._show(event)
            except KeyboardInterrupt:  # what is confirmed is kept and reported
                self.interrupted = True
        [self.result] = group.results
        for index, completion in enumerate(self.result.completions):
            self._finish(index, completion)
        self._conclude(params)

    def record(self, model: str) -> dict[str, Any]:
        """The JSON object of this run."""
        return report.record(self.result, self._engine, model, self._spell)

    def _show(self, event: StepEvent) -> None:
        """Prints what a step confirmed; confirmed text does not change later."""
        if self._show_trace:
            self._out.print(trace.running_text(event, self._spell, marks=self._marks), end="")
        else:
            text = report.printable(event.text) if self._out.is_terminal else event.text
            sys.stdout.write(text)
        sys.stdout.flush()

    def _finish(self, index: int, completion: Completion) -> None:
        """The rest of one completion: its text where it was not streamed, its tables."""
        events = self._events.get(index, [])
        wanted = self._show_trace or not self._as_json
        if wanted and len(self.result.completions) > 1:
            heading = f"── {index + 1} of {len(self.result.completions)} ──"
            self._out.print(heading, style="dim")
        if wanted and not self._stream:
            for event in events:
                self._show(event)
        if (wanted or self._stream) and not completion.text.endswith("\n"):
            self._out.print()
        if self._show_trace:
            self._out.print()
            self._out.print(trace.legend(events), soft_wrap=False)
            self._out.print(trace.step_table(events, self._spell), soft_wrap=False)
        if completion.logprobs is not None and not self._as_json:
            self._out.print(self._logprob_table(completion), soft_wrap=False)

    def _conclude(self, params: SamplingParams) -> None:
        stats = self.result.stats
        if self._show_trace and stats.num_drafted:
            table = trace.position_table(
                stats.conditional_acceptance, stats.unconditional_acceptance
            )
            self._out.print(table, soft_wrap=False)
        if not self._as_json:
            line = report.summary(self.result, sampled=params.temperature > 0)
            stderr().print(line, style="dim", soft_wrap=True)
            if not self._is_chat and self._says_nothing():
                hint = "the model ended at once; it is made for chats: --chat asks it as one"
                stderr().print(f"outrider: {hint}", soft_wrap=True)

    def _says_nothing(self) -> bool:
        """Whether a chat model, asked without its template, answered nothing."""
        ends = self._engine.tokenizer.eos_ids
        for completion in self.result.completions:
            if completion.text.strip() or not {*completion.tokens[-1:]} & {*ends}:
                return False
        return load_template(self._engine.tokenizer, None)[1]

    def _logprob_table(self, completion: Completion) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("token", "logprob", "alternatives"):
            table.add_column(name, justify="right" if name == "logprob" else "left")
        for entry in completion.logprobs or ():
            others = (f"{trace.cell(self._spell(t))} {value:.2f}" for t, value in entry.top.items())
            token = trace.cell(self._spell(entry.token))
            table.add_row(Text(token), f"{entry.logprob:.3f}", Text("  ".join(others)))
        return table
