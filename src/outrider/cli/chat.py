"""`outrider chat`: a conversation in the terminal, each token in the colour of its origin."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from outrider.cli.console import busy, stderr, stdout
from outrider.config import EngineConfig, SamplingParams
from outrider.errors import ConfigError, OutriderError, RequestError, UnknownName
from outrider.options import (
    KEY_VARIABLE,
    Options,
    expanded,
    of,
    option,
    read_count,
    read_keys,
)
from outrider.parameters import INPUT, OUTPUT, default_of, params

if TYPE_CHECKING:
    from outrider.cli.partners import Partner, Settings, Step

LOCAL = ("device", "dtype", "backend", "threads")  # parameters that a server has set for itself
EXAMPLE = "Example: outrider chat --url http://127.0.0.1:8000"

HELP = """\
/speculation            what drafts now, and who could
/speculation off        plain decoding
/speculation NAME [K]   another proposer, K drafts a step or auto
/speculation K          K drafts a step, or auto
/seed [N|off]           the same seed gives the same answer; off: a fresh one each time
/reset                  forget the conversation
/quit                   leave (also Ctrl-D)
A line that ends in \\ continues. Ctrl-C stops the answer; twice: leave."""

Url = Annotated[
    str | None,
    option(INPUT, "Talk to a running server instead.", "--url", metavar="URL"),
]
KeyFile = Annotated[
    Path | None,
    option(
        INPUT,
        f"The server's API key; {KEY_VARIABLE} may hold it too.",
        "--api-key-file",
        metavar="FILE",
    ),
]
System = Annotated[
    str | None,
    option(INPUT, "A system message to begin with.", "--system", metavar="TEXT"),
]
EngineOptions = Annotated[
    Options,
    of(
        EngineConfig,
        *("model", "draft_model", "proposer", "num_draft_tokens"),
        *LOCAL,
        model={
            "default": None,
            "help": "Target: a folder, a GGUF file, a hub name, bundled or smollm2. With --url, "
            "the server's name for it.",
            "none": "bundled, or the server's",
        },
        num_draft_tokens={"default": None, "none": "auto, or the server's"},
    ),
]
SamplingOptions = Annotated[
    Options,
    of(
        SamplingParams,
        *("temperature", "top_p", "seed", "max_tokens"),
        temperature={"default": 0.7},
        max_tokens={"default": 256},
    ),
]
Trace = Annotated[bool, option(OUTPUT, "Show the rejected drafts too, struck out.", "--trace")]


@expanded
def chat(
    *,
    url: Url = None,
    api_key_file: KeyFile = None,
    system: System = None,
    engine: EngineOptions,
    sampling: SamplingOptions,
    show_trace: Trace = False,
) -> None:
    """Talk to a model, loaded here or on a server, and see which tokens were drafted."""
    if url is not None:
        for name in ("draft_model", *LOCAL):
            if engine.get(name) != default_of(EngineConfig, name):
                flag = params(EngineConfig)[name].flag
                raise ConfigError(f"{flag} is a parameter of the server: leave it out with --url")
    elif api_key_file is not None:
        raise ConfigError("--api-key-file goes with --url")

    model = engine.pop("model", None)
    with busy(f"loading {model or 'bundled'}" if url is None else f"asking {url}"):
        from outrider.cli import partners
        from outrider.cli.partners import Settings

        settings = Settings(**sampling)
        partner: Partner
        if url is None:
            partner = partners.load_local(model or "bundled", engine)
        else:
            keys = read_keys(api_key_file)
            partner = partners.Remote(url, keys[0] if keys else None, model)
            settings.speculation = partners.wish(
                engine.get("proposer"), engine.get("num_draft_tokens")
            )
    Conversation(partner, settings, system, show_trace=show_trace)()


class Conversation:
    """Reads messages until the input ends, and prints the answers.

    At a terminal, an error is printed and the conversation goes on; in a script it ends it.
    """

    def __init__(
        self, partner: Partner, settings: Settings, system: str | None, *, show_trace: bool
    ) -> None:
        from outrider.cli import trace

        self._partner = partner
        self._settings = settings
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._out = stdout()
        self._err = stderr()
        self._trace = show_trace
        self._marks = trace.needs_marks(self._out)
        self._is_interactive = sys.stdin.isatty()
        self._interrupted = False  # by the last event
        self._commands: dict[str, Callable[[list[str]], None]] = {
            "help": self._help,
            "speculation": self._speculation,
            "seed": self._seed,
            "reset": self._reset,
        }

    def __call__(self) -> None:
        if self._is_interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  (gives input() its line editing)
            self._note(f"{self._partner.title} · /help lists the commands, Ctrl-D leaves")
        for message in self._read():
            if message.split()[0] == "/quit":
                return
            try:
                if message.startswith("/"):
                    self._obey(message)
                else:
                    self._answer(message)
            except OutriderError as error:
                if not self._is_interactive:
                    raise
                line = f"outrider: {' '.join(str(error).split())}"
                self._err.print(line, soft_wrap=True, markup=False)

    def _read(self) -> Iterator[str]:
        """The user's messages, empty ones left out."""
        lines: list[str] = []
        while True:
            try:
                line = self._line("… " if lines else "› ")
            except EOFError:
                return
            except KeyboardInterrupt:
                if self._interrupted or not self._is_interactive:
                    raise
                self._interrupted = True
                lines.clear()
                self._note("\nCtrl-C again leaves")
                continue
            lines.append(line.removesuffix("\\"))
            if line.endswith("\\"):
                continue
            message = "\n".join(lines)
            lines.clear()
            if message.strip():
                self._interrupted = False
                yield message

    def _line(self, prompt: str) -> str:
        if self._is_interactive:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _answer(self, message: str) -> None:
        self._messages.append({"role": "user", "content": message})
        pieces: list[str] = []
        try:
            for step in self._partner.answer(self._messages, self._settings):
                pieces += step.pieces
                self._show(step)
        except KeyboardInterrupt as interrupt:
            from outrider.cli.partners import Impatience

            if isinstance(interrupt, Impatience) or not self._is_interactive:
                raise
            self._interrupted = True
        except OutriderError:
            if not pieces:
                self._messages.pop()  # the conversation stays as before this message
            raise
        answer = "".join(pieces)
        self._messages.append({"role": "assistant", "content": answer})
        if not answer.endswith("\n"):
            self._out.print()
        figures = self._partner.figures(self._settings)
        self._note(f"stopped · {figures}" if self._interrupted else figures)

    def _show(self, step: Step) -> None:
        from outrider.cli import report, trace

        if self._trace:
            self._out.print(trace.styled(step.tokens, marks=self._marks), end="")
        elif self._out.is_terminal:
            for kind, piece in zip(step.kinds, step.pieces, strict=True):
                text = report.printable(piece)
                self._out.print(text, style=kind.style, end="", markup=False)
        else:
            sys.stdout.write("".join(step.pieces))
        sys.stdout.flush()

    def _note(self, text: str) -> None:
        self._err.print(text, style="dim", soft_wrap=True, markup=False)

    # --- commands -----------------------------------------------------------------------------

    def _obey(self, line: str) -> None:
        name, *words = line[1:].split() or [""]
        if name not in self._commands:
            raise UnknownName("command", name, [*self._commands, "quit"])
        self._commands[name](words)

    def _help(self, words: list[str]) -> None:
        self._note(HELP)

    def _reset(self, words: list[str]) -> None:
        self._messages = list(self._opening)
        self._note("a new conversation")

    def _seed(self, words: list[str]) -> None:
        if words == ["off"]:
            self._settings.seed = None
        elif words:
            if len(words) > 1 or not words[0].isdecimal() or int(words[0]) >= 1 << 63:
                raise RequestError("/seed takes one whole number from 0 on, or off", "seed")
            self._settings.seed = int(words[0])
        seed = self._settings.seed
        self._note("a fresh seed for every answer" if seed is None else f"seed {seed}")

    def _speculation(self, words: list[str]) -> None:
        from outrider.cli.partners import wish

        wanted = self._settings.speculation
        if words == ["off"]:
            wanted = {"off": True}
        elif words:
            *names, last = words
            is_count = last == "auto" or last.isdecimal()
            name = None if is_count and not names else (names[0] if is_count else last)
            if len(words) > 2 or (len(words) == 2 and not is_count):
                raise RequestError("/speculation takes off, or a proposer and K", "speculation")
            if name is not None and name not in self._partner.proposers:
                raise UnknownName("proposer", name, self._partner.proposers)
            count = read_count(last) if is_count else None
            wanted = wish(name, count)
        now = self._partner.describe(wanted)
        self._settings.speculation = wanted
        self._note(f"{now} (there are: {', '.join(sorted(self._partner.usable()))})")
