"""What answers in `outrider chat`: an engine in this process, or a server."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Protocol
from urllib.parse import urlsplit

from outrider.cli.report import decoding_rate, prompt_s, speed
from outrider.engine.lane import Group
from outrider.engine.request import Speculation
from outrider.errors import ConfigError, EngineError, RequestError
from outrider.llm import LLM
from outrider.model.bundled import find_folder
from outrider.model.chat_template import load_template
from outrider.model.head_kinds import head_kind
from outrider.model.named import default_drafter
from outrider.origins import Kind, judged, spelling
from outrider.registry import PREDICTION, WITH_MODEL, proposer_names, usable_names
from outrider.sampling import SamplingParams

CONNECT_S = 10.0
SILENCE_S = 300.0  # a long prompt takes minutes to read

Message = Mapping[str, str]
Wish = dict[str, Any]  # the body field `speculation`; empty: the partner's own setting


@dataclass(slots=True)
class Settings:
    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None = None
    speculation: Wish = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of the target: the drafted tokens with their verdicts, and the confirmed text."""

    tokens: list[tuple[Kind, str]]
    pieces: list[str]  # by confirmed token

    @property
    def kinds(self) -> list[Kind]:
        """Of the confirmed tokens."""
        return [kind for kind, _ in self.tokens if kind not in (Kind.REJECTED, Kind.UNUSED)]


class Partner(Protocol):
    title: str
    proposers: list[str]  # that can be asked for by name

    def usable(self) -> list[str]:
        """Those of them that can draft for what is loaded."""
        ...

    def answer(self, messages: Sequence[Message], settings: Settings) -> Iterator[Step]:
        """Leaving early stops it. KeyboardInterrupt: the user stopped it."""
        ...

    def figures(self, settings: Settings) -> str:
        """The figures of the last answer, in one line."""
        ...

    def describe(self, wish: Wish) -> str:
        """What would draft; raises for a setting that is not possible."""
        ...


class Impatience(KeyboardInterrupt):
    """Ctrl-C for the second time."""


def wish(proposer: str | None, num_draft_tokens: int | str | None) -> Wish:
    if num_draft_tokens == 0:
        return {"off": True}
    given = {"proposer": proposer, "num_draft_tokens": num_draft_tokens}
    return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one answer."""

    stats: Mapping[str, Any]
    rate: float | None  # tokens per second after the first
    prompt: str
    seed: int | None
    finish_reason: str | None


def summary(figures: Figures, max_tokens: int, *, sampled: bool) -> str:
    """One line; it says so where the limit cut the answer."""
    stats, seed = figures.stats, figures.seed if sampled else None
    parts = speed(stats["num_tokens"], figures.rate, figures.prompt)
    if figures.finish_reason == "length":
        parts.insert(0, f"cut after {max_tokens} tokens (--max-tokens)")
    if stats["num_drafted"]:
        parts.append(f"{stats['tokens_per_pass']:.2f} tokens per target pass")
        parts.append(f"{100 * stats['acceptance_rate']:.0f} % of the drafts accepted")
    else:
        parts.append("nothing was drafted")
    if seed is not None:
        parts.append(f"seed {seed}")
    return " · ".join(parts)


# --- in this process --------------------------------------------------------------------------


def load_local(model: str, engine: Mapping[str, Any]) -> Local:
    """Loads a model; `engine` holds further fields of EngineConfig."""
    if engine.get("proposer") == PREDICTION:
        raise ConfigError(f"chat cannot use proposer {PREDICTION!r}; choose another one")
    return Local(LLM(model, **engine))


class Local:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._engine = llm.engine
        self._template, is_real = load_template(llm.engine.tokenizer, None)
        self._spell = spelling(llm.engine.tokenizer)
        self._last: Figures | None = None
        self.proposers = [name for name in proposer_names() if name != PREDICTION]
        self.title = f"{llm.config.model}, {self.describe({})}"
        if not is_real:
            self.title += ", no chat template: it continues your text"

    def answer(self, messages: Sequence[Message], settings: Settings) -> Iterator[Step]:
        self._last = None
        text = self._template.render(messages)
        params = SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed,
            max_tokens=settings.max_tokens,
        )
        engine = self._engine
        group = Group(engine)
        try:
            with between_steps() as interrupted, group:
                group.add(
                    engine.tokenizer.encode(text, special=False),
                    params,
                    speculation=self._speculation(settings.speculation),
                )
                for report in group:
                    for event in report.events:
                        tokens = [(kind, self._spell(t)) for kind, t in judged(event)]
                        yield Step(tokens, event.pieces)
                    if interrupted():
                        raise KeyboardInterrupt
        finally:
            for result in group.results:
                self._last = Figures(
                    result.stats.to_dict(),
                    decoding_rate(result),
                    f"prompt of {len(result.prompt_tokens)} in {prompt_s(result):.2f} s",
                    result.seed,
                    result.completions[0].finish_reason,
                )

    def figures(self, settings: Settings) -> str:
        assert self._last is not None
        return summary(self._last, settings.max_tokens, sampled=settings.temperature > 0)

    def usable(self) -> list[str]:
        config, default = self._llm.config, self._engine.default.proposer
        drafter = config.draft_model or default_drafter(config.model)
        kind = None if drafter is None else head_kind(find_folder(drafter)) or WITH_MODEL
        wanted = {*usable_names(kind), default}
        return [name for name in self.proposers if name in wanted]

    def describe(self, wish: Wish) -> str:
        speculation = self._speculation(wish)
        if speculation.proposer is None:
            return "plain decoding"
        return f"{speculation.proposer} drafts, K {speculation.num_draft_tokens}"

    def _speculation(self, wish: Wish) -> Speculation:
        default = self._engine.default
        if wish.get("off"):
            return Speculation(proposer=None, verifier=default.verifier)
        wanted = replace(default, **wish)
        if wish and wanted.proposer is None:
            raise RequestError("plain decoding has no K: name a proposer too", "speculation")
        if wish and not wanted.num_draft_tokens:
            wanted = replace(wanted, num_draft_tokens="auto")
        if wanted.proposer is not None:
            _ = self._engine.proposers[wanted.proposer]  # built now, or refused
        return wanted


@contextmanager
def between_steps() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the end of the step; a second one does not."""
    presses = 0

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise Impatience

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, before)


# --- on a server ------------------------------------------------------------------------------


class Remote:
    """Steps come from Outrider's live stream; where there is none, the text alone from OpenAI's."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"--url is something like http://127.0.0.1:8000, not {url!r}")
        self._secure = parts.scheme == "https"
        self._address = (host, port)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._url = url
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._last: Figures | None = None
        self._num_first = 0  # tokens of the first step
        info = self._get("/live/info")
        self._is_live = info is not None
        if info is None:  # another kind of server
            listed = self._get("/v1/models") or {}
            names = [str(entry.get("id")) for entry in listed.get("data", [])]
            info = {"model": names[0] if names else "", "proposers": [], "proposer": None}
        self._info = info
        self._model = model or info["model"]
        self.proposers: list[str] = info["proposers"]
        self.title = f"{self._model} at {url}, {self.describe({})}"

    def answer(self, messages: Sequence[Message], settings: Settings) -> Iterator[Step]:
        self._last = None
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_tokens,
        }
        if settings.seed is not None:
            body["seed"] = settings.seed
        if settings.speculation:
            body["speculation"] = settings.speculation
        with closing(self._connect()) as connection:
            response = self._post(connection, body)
            self._check(response)
            for event in self._events(response):
                step = self._live_step(event) if self._is_live else _plain_step(event)
                if step is not None:
                    yield step

    def figures(self, settings: Settings) -> str:
        if self._last is None:
            return "no figures from this server"
        return summary(self._last, settings.max_tokens, sampled=settings.temperature > 0)

    def usable(self) -> list[str]:
        return self.proposers  # what a server offers is loaded there

    def describe(self, wish: Wish) -> str:
        if wish.get("off"):
            return "plain decoding"
        proposer = wish.get("proposer", self._info["proposer"])
        count = wish.get("num_draft_tokens", self._info.get("num_draft_tokens", "auto"))
        if proposer is None:
            return "plain decoding" if self._is_live else "speculation unknown"
        return f"{proposer} drafts, K {count or 'auto'}"

    def _live_step(self, event: dict[str, Any]) -> Step | None:
        if "end" in event and self._last is not None:
            self._last = replace(self._last, seed=event["end"]["seed"])
        if "step" not in event:
            return None
        stats, seconds = event["stats"], event["at_s"]  # since the first step, the prompt's
        if self._last is None:
            self._num_first = stats["num_tokens"]
        rate = (stats["num_tokens"] - self._num_first) / seconds if seconds else None
        self._last = Figures(stats, rate, "", None, event["finish_reason"])
        nodes, path = event["nodes"], event["path"]
        kept = set(path)
        tokens = [nodes[i] for i in path]
        tokens += [node for i, node in enumerate(nodes) if i not in kept]
        tokens += event["own"]
        return Step([(Kind[t["kind"].upper()], t["text"]) for t in tokens], event["pieces"])

    # --- HTTP ---

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(*self._address, timeout=CONNECT_S)
        with self._unreachable():
            connection.connect()
            connection.sock.settimeout(SILENCE_S)
        return connection

    def _post(
        self, connection: http.client.HTTPConnection, body: dict[str, Any]
    ) -> http.client.HTTPResponse:
        if self._is_live:
            response = self._send(connection, "POST", "/live/chat", body)
            if response.status not in (403, 404):
                return response
            response.read()
            self._is_live = False  # its live stream is off
        return self._send(connection, "POST", "/v1/chat/completions", body | {"stream": True})

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
    ) -> http.client.HTTPResponse:
        content = None if body is None else json.dumps(body).encode()
        with self._unreachable():
            connection.request(method, self._prefix + path, content, self._headers)
            return connection.getresponse()

    @contextmanager
    def _unreachable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"no server answers at {self._url} ({_reason(error)}): outrider serve starts one"
            ) from None

    def _get(self, path: str) -> dict[str, Any] | None:
        """None where there is no such route."""
        with closing(self._connect()) as connection:
            response = self._send(connection, "GET", path)
            if response.status == 404:
                return None
            self._check(response)
            found = _json(response.read())
            return found if isinstance(found, dict) else None

    def _check(self, response: http.client.HTTPResponse) -> None:
        if response.status == 200:
            return
        if response.status == 401:
            raise ConfigError("the server wants an API key: --api-key-file or OUTRIDER_API_KEY")
        found = _json(response.read(1 << 16))
        error = found.get("error") if isinstance(found, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        raise RequestError(f"the server refuses: {message or f'status {response.status}'}")

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        try:
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    return
                event = _json(line[6:])
                if not isinstance(event, dict):
                    break
                if "error" in event:
                    raise EngineError(f"the server failed: {event['error'].get('message')}")
                yield event
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"the connection was lost ({_reason(error)})") from None
        raise EngineError("the connection was lost")


def _plain_step(event: dict[str, Any]) -> Step | None:
    text = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))
    return Step([(Kind.TARGET, text)], [text]) if text else None


def _json(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or type(error).__name__)
