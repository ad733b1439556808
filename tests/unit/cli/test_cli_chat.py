"""`outrider chat`: with a model of its own and with a server, at a terminal and in a script."""

from __future__ import annotations

import builtins
import io
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.server.live import Live
from outrider.cli.app import app
from outrider.cli.errors import run
from outrider.engine.build import EngineConfig
from outrider.engine.engine import Engine

from .calling import Command, Ran

SHORT = ["-m", "12", "--seed", "3"]


@pytest.fixture(scope="module")
def server(target: Path, draft: Path) -> Iterator[Live]:
    config = EngineConfig(model=str(target), draft_model=str(draft), threads=1)
    with Live(config) as live:
        yield live


class Terminal:
    """Somebody at a keyboard: lines, and exceptions for the keys that raise them."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *args: str, keys: list[str | type[BaseException]]) -> Ran:
        typed = iter([*keys, EOFError])

        def read(prompt: str) -> str:
            key = next(typed)
            if isinstance(key, str):
                return key
            raise key

        stdin = io.StringIO()
        stdin.isatty = lambda: True  # type: ignore[method-assign]
        self._monkeypatch.setattr("sys.stdin", stdin)
        self._monkeypatch.setattr(builtins, "input", read)
        self._capsys.readouterr()
        code = run(app, args)
        return Ran(code, *self._capsys.readouterr())


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "120")
    return Terminal(capsys, monkeypatch)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, num_steps: int, times: int = 1) -> None:
    """Ctrl-C inside the n-th step of the engine, as a signal at any moment would come."""
    step, seen = Engine.step, [0]

    def interrupted(self: Engine) -> Any:
        seen[0] += 1
        if seen[0] == num_steps:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)


# --- with a model of its own ------------------------------------------------------------------


def test_an_answer_for_every_line(command: Command, pair: list[str]) -> None:
    ran = command("chat", *pair, *SHORT, stdin="hello\n\nthere\n")
    assert ran.code == 0
    assert len(ran.out) > 10
    assert ran.out.endswith("\n")
    assert ran.err.count("tokens per target pass") + ran.err.count("nothing was drafted") == 2
    assert "\x1b" not in ran.out
    assert "seed 3" in ran.err


@pytest.mark.parametrize("wish", ["off", "2", "ngram", "ngram 3", "draft-tree auto"])
def test_speculation_changes_no_answer(command: Command, pair: list[str], wish: str) -> None:
    args = ["chat", *pair, *SHORT, "-t", "0.9"]
    plain = command(*args, "-k", "0", stdin="hello there\n")
    ran = command(*args, stdin=f"/speculation {wish}\nhello there\n")
    assert ran.code == 0
    assert ran.out == plain.out
    assert "there are: cascade" in ran.err
    if wish == "off":
        assert "plain decoding" in ran.err
    else:
        assert f"{wish.split()[0] if wish != '2' else 'draft-model'} drafts" in ran.err


def test_a_plain_start_can_be_changed(command: Command, pair: list[str]) -> None:
    plain = ["chat", *pair, *SHORT, "-k", "0"]
    assert "ngram drafts, K auto" in command(*plain, stdin="/speculation ngram\n").err
    ran = command(*plain, stdin="/speculation 3\n")
    assert ran.code == 2
    assert "name a proposer" in ran.err


def test_turns_are_remembered_until_reset(command: Command, pair: list[str]) -> None:
    one = command("chat", *pair, *SHORT, stdin="hello\n").out
    two = command("chat", *pair, *SHORT, stdin="hello\nhello\n").out
    again = command("chat", *pair, *SHORT, stdin="hello\n/reset\nhello\n").out
    assert again == one + one
    assert two.startswith(one)
    assert two != again
    system = command("chat", *pair, *SHORT, "--system", "be brief", stdin="hello\n").out
    assert system != one


def test_the_seed_can_be_changed(command: Command, pair: list[str]) -> None:
    args = ["chat", *pair, "-m", "12", "-t", "1"]
    first = command(*args, "--seed", "8", stdin="hello\n").out
    ran = command(*args, stdin="/seed 8\nhello\n/seed\n/seed off\n/quit\nunread\n")
    assert ran.code == 0
    assert ran.out == first
    assert "seed 8\n" in ran.err
    assert "a fresh seed" in ran.err


def test_a_message_of_several_lines(command: Command, pair: list[str]) -> None:
    joined = command("chat", *pair, *SHORT, stdin="hello\\\nthere\n")
    assert joined.out != command("chat", *pair, *SHORT, stdin="hello there\n").out
    assert joined.err.count("tok/s") == 1


def test_help_lists_every_command(command: Command, pair: list[str]) -> None:
    ran = command("chat", *pair, stdin="/help\n")
    assert ran.out == ""
    for name in ("/speculation", "/seed", "/reset", "/quit"):
        assert name in ran.err


def test_colours_and_traces(
    command: Command, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["chat", *pair, *SHORT, "-k", "3", "-t", "0"]
    traced = command(*args, "--trace", stdin="hello\n").out
    assert "✗" in traced
    assert "→" in traced
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = command(*args, stdin="hello\n").out
    assert "\x1b[1;33m" in coloured  # a correction, bold yellow as in `generate --trace`
    assert "\x1b[9;31m" not in coloured
    assert "\x1b[9;31m" in command(*args, "--trace", stdin="hello\n").out


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/sped 3", "Did you mean 'seed'?"),
        ("/", "unknown command"),
        ("/seed x", "whole number"),
        ("/seed 1 2", "whole number"),
        (f"/seed {1 << 63}", "whole number"),
        ("/speculation nonesuch", "unknown proposer"),
        ("/speculation ngram 3 4", "a proposer and K"),
        ("/speculation prediction", "unknown proposer"),
        ("/speculation cascade", "cascade"),
        ("word " * 200, "context"),
    ],
)
def test_a_mistake_is_one_line_and_ends_a_script(
    command: Command, terminal: Terminal, pair: list[str], line: str, complaint: str
) -> None:
    ran = command("chat", *pair, *SHORT, stdin=f"{line}\nhello\n")
    assert ran.code == 2
    assert ran.out == ""
    assert complaint in ran.err
    assert ran.err.count("\n") == 1
    goes_on = terminal("chat", *pair, *SHORT, keys=[line, "hello"])
    assert goes_on.code == 0
    assert complaint in goes_on.err
    assert goes_on.out == command("chat", *pair, *SHORT, stdin="hello\n").out


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--url", "ftp://x"], "--url is something like"),
        (["--url", "http://h:port"], "--url is something like"),
        (["--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["--url", "http://127.0.0.1:1", "--device", "cuda"], "--device is a parameter of"),
        (["--url", "http://127.0.0.1:1", "--draft-model", "x"], "--draft-model is a parameter of"),
        (["--api-key-file", "x"], "goes with --url"),
        (["--proposer", "prediction"], "chat cannot use"),
        (["-k", "many"], "a number or auto"),
        (["no/such/model"], "no/such/model"),
    ],
)
def test_a_wrong_call_is_one_line(command: Command, args: list[str], complaint: str) -> None:
    ran = command("chat", *args, stdin="hello\n")
    assert ran.code == 2
    assert complaint in ran.err
    assert ran.err.count("\n") == 1


# --- Ctrl-C -----------------------------------------------------------------------------------


def test_ctrl_c_stops_the_answer_and_the_talk_goes_on(
    terminal: Terminal, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["chat", *pair, "-m", "40", "--seed", "3", "-k", "2"]
    whole = terminal(*args, keys=["hello"])
    interrupt_at(monkeypatch, 3)
    ran = terminal(*args, keys=["hello", "/reset", "hello"])
    assert ran.code == 0
    assert "stopped" in ran.err
    stopped, rest = ran.out.split("\n", 1) if "\n" in ran.out else (ran.out, "")
    assert whole.out.startswith(stopped)
    assert len(stopped) < len(whole.out)
    assert rest.endswith(whole.out)


def test_ctrl_c_twice_leaves(
    terminal: Terminal, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["chat", *pair, *SHORT, "-k", "2"]
    once = terminal(*args, keys=[KeyboardInterrupt, "hello", KeyboardInterrupt, "/quit"])
    assert once.code == 0
    assert once.err.count("Ctrl-C again leaves") == 2
    assert terminal(*args, keys=[KeyboardInterrupt, KeyboardInterrupt]).code == 130
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        after_an_answer = terminal(*args, keys=["hello", KeyboardInterrupt, "hello"])
    assert after_an_answer.code == 130
    interrupt_at(monkeypatch, 2, times=2)
    assert terminal(*args, keys=["hello", "hello"]).code == 130


def test_ctrl_c_ends_a_script(
    command: Command, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, 2)
    assert command("chat", *pair, *SHORT, stdin="hello\nhello\n").code == 130


# --- with a server ----------------------------------------------------------------------------


def test_a_server_answers_the_same(command: Command, pair: list[str], server: Live) -> None:
    talk = "hello\n/speculation ngram 2\nthere\n/speculation off\nagain\n"
    here = command("chat", *pair, *SHORT, stdin=talk)
    there = command("chat", "--url", server.url, *SHORT, stdin=talk)
    assert there.code == 0
    assert there.out == here.out
    assert "ngram drafts, K 2" in there.err
    assert there.err.count("seed 3") == 3
    trace = ["--trace", "-k", "3", "--proposer", "draft-model"]
    traced = command("chat", *pair, *SHORT, *trace, stdin="hello\n").out
    assert command("chat", "--url", server.url, *SHORT, *trace, stdin="hello\n").out == traced


def test_what_the_server_refuses_is_one_line(command: Command, server: Live) -> None:
    for args, complaint in [
        (["no-such-model"], "no-such-model"),
        (["--proposer", "medusa"], "unknown proposer"),
        (["-t", "-1"], "temperature"),
    ]:
        ran = command("chat", *args, "--url", server.url, stdin="hello\n")
        assert ran.code == 2
        assert complaint in ran.err
        assert ran.err.count("\n") == 1


def test_keys_and_hidden_steps(
    command: Command,
    pair: list[str],
    server: Live,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A paced server has no live stream: the text comes without colours."""
    with Live(server.core, api_keys=("sesame",), paced=5000.0) as keyed:
        args = ["chat", "--url", keyed.url, *SHORT]
        refused = command(*args, stdin="hello\n")
        assert refused.code == 2
        assert "OUTRIDER_API_KEY" in refused.err
        monkeypatch.setenv("OUTRIDER_API_KEY", "sesame")
        ran = command(*args, stdin="hello\n")
    assert ran.out == command("chat", *pair, *SHORT, stdin="hello\n").out
    assert "no figures" in ran.err


def test_a_server_that_dies_is_one_line(
    command: Command, server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    from http.client import HTTPResponse

    monkeypatch.setattr(HTTPResponse, "__iter__", lambda self: iter([b'data: {"start":{}}\n']))
    ran = command("chat", "--url", server.url, *SHORT, stdin="hello\n")
    assert ran.code == 2
    assert "the connection was lost" in ran.err
    assert ran.err.count("\n") == 1


def test_an_answer_that_the_limit_cut_says_so(command: Command, pair: list[str]) -> None:
    assert (
        "cut after 6 tokens (--max-tokens)"
        in command("chat", *pair, "-m", "6", stdin="hello\n").err
    )
    # The context of 96 ends first; a limit that is not reached cuts nothing.
    assert "cut after 6" not in command("chat", *pair, "-m", "7", stdin="hello\n").err


def test_only_proposers_that_can_draft_here_are_listed(command: Command, pair: list[str]) -> None:
    with_draft = command("chat", *pair, stdin="/speculation\n").err
    assert "draft-tree" in with_draft
    assert "medusa" not in with_draft
    alone = command("chat", pair[0], stdin="/speculation\n").err
    assert "there are: hybrid, lookahead, ngram, suffix)" in alone
