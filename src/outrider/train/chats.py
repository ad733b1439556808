"""A chat model's own answers, by category, from the batching engine: what its drafter is for.

    questions it writes itself, passages, programs -> tasks on them -> the first tokens of answers

Only answers are trained on, and only their beginning: long answers of a small model repeat
themselves, and a drafter that has mostly seen repetition guesses the rest badly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from outrider.config import EngineConfig, SamplingParams
from outrider.engine.build import build
from outrider.engine.engine import Engine, Result
from outrider.model.chat_template import ChatTemplate, load_template
from outrider.train import prompts
from outrider.train.config import DataError
from outrider.train.data import pack_answers

ANSWER = 224  # tokens
QUESTION = 64
LEAST_ANSWER = 16
WAVE = 96  # chats answered together
TEMPERATURES = {0.0: 0.4, 0.8: 0.35, 1.0: 0.25}
MOST_TEXT = 900  # characters of a passage in a prompt
POOL = 400  # of each kind of text that later prompts quote


@dataclass
class Written:
    """Rows [R, 2 + L], see `data.pack_answers`; by category, how many."""

    rows: Tensor
    kinds: dict[str, int]
    num_answer_tokens: int
    seconds: float
    asked: str = ""  # a digest of what a run asked for

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(vars(self), partial)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Written:
        return cls(**torch.load(path, weights_only=True))


@dataclass
class Pool:
    """Texts of the model that later prompts quote, the newest ones."""

    asked: list[str] = field(default_factory=lambda: ["What can you do?"])
    passages: list[str] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)

    def add(self, kind: str, text: str) -> None:
        text = text.strip()
        found = {"asks": self.asked, "passage": self.passages, "program": self.programs}.get(kind)
        if found is not None and len(text) > 8:
            found.append(text[:MOST_TEXT])
            del found[:-POOL]


@dataclass(frozen=True)
class Chat:
    kind: str
    prompt: list[int]


class Writer:
    def __init__(self, engine: Engine, template: ChatTemplate, length: int, seed: int) -> None:
        self._engine, self._template, self._length = engine, template, length
        self._random, self._pool = Random(seed), Pool()
        self.kinds: dict[str, int] = {}
        self._rows: list[tuple[list[int], int]] = []
        self.num_answer_tokens = 0

    def wave(self, is_first: bool, tell: Callable[[], None]) -> None:
        """Answers a batch of chats and keeps their beginnings; `tell` is called at every step."""
        chats = [self._begin() if is_first else self._next() for _ in range(WAVE)]
        room = self._length - LEAST_ANSWER
        chats = [chat for chat in chats if len(chat.prompt) <= room]
        ids = [self._ask(chat) for chat in chats]
        for _ in self._engine.run(ids):
            tell()
        for chat, id in zip(chats, ids, strict=True):
            self._keep(chat, self._engine.collect(id))

    def _begin(self) -> Chat:
        """Something that later prompts quote."""
        kind = self._random.choice(("asks", "passage", "passage", "program"))
        if kind == "asks":
            return Chat(kind, self._before_a_question())
        turn = (prompts.passage if kind == "passage" else prompts.program)(self._random)
        return Chat(kind, self._chat([turn]))

    def _next(self) -> Chat:
        pool = self._pool
        if self._random.random() < 0.15 or not (pool.passages and pool.programs):
            return self._begin()
        kind, turns = prompts.turns(self._random, pool.asked, pool.passages, pool.programs)
        return Chat(kind, self._chat(turns))

    def _chat(self, turns: Sequence[str]) -> list[int]:
        messages = [
            {"role": ("user", "assistant")[number % 2], "content": turn}
            for number, turn in enumerate(turns)
        ]
        return self._engine.tokenizer.encode(self._template.render(messages), special=False)

    def _before_a_question(self) -> list[int]:
        mark = "\N{SNOWMAN}"
        text = self._template.render([{"role": "user", "content": mark}]).partition(mark)[0]
        tokens = self._engine.tokenizer.encode(text, special=False)
        return tokens or [next(iter(self._engine.target.spec.eos_ids), 0)]

    def _ask(self, chat: Chat) -> str:
        shares = TEMPERATURES if chat.kind != "asks" else {1.0: 1.0}
        (temperature,) = self._random.choices(list(shares), list(shares.values()))
        most = QUESTION if chat.kind == "asks" else ANSWER
        params = SamplingParams(
            temperature=temperature,
            seed=self._random.getrandbits(40),
            max_tokens=min(most, self._length - len(chat.prompt)),
        )
        return self._engine.add(chat.prompt, params)

    def _keep(self, chat: Chat, result: Result) -> None:
        (completion,) = result.completions
        is_whole = completion.finish_reason == "stop"
        if chat.kind == "asks":
            if is_whole:
                self._pool.add(chat.kind, result.text)
            return
        self._pool.add(chat.kind, result.text)
        if len(completion.tokens) < LEAST_ANSWER:
            return
        self.kinds[chat.kind] = self.kinds.get(chat.kind, 0) + 1
        self.num_answer_tokens += len(completion.tokens)
        self._rows.append(([*chat.prompt, *completion.tokens], len(chat.prompt)))

    def rows(self) -> Tensor:
        """Padded with the end of text."""
        end = next(iter(self._engine.target.spec.eos_ids), 0)
        table = torch.full((len(self._rows), self._length), end, dtype=torch.int32)
        for row, (tokens, _) in zip(table, self._rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        first = torch.tensor([first for _, first in self._rows], dtype=torch.int32)
        ends = torch.tensor([len(tokens) for tokens, _ in self._rows], dtype=torch.int32)
        return pack_answers(table, first, ends)


def answers_of(rows: Tensor) -> Tensor:
    """All answer tokens of packed rows, one after the other."""
    places = torch.arange(rows.shape[1] - 2, device=rows.device)
    is_answer = (places >= rows[:, :1]) & (places < rows[:, 1:2])
    return rows[:, 2:][is_answer]


def prompts_of(rows: Tensor, most: int = 8) -> list[list[int]]:
    return [row[2 : 2 + int(row[0])].tolist() for row in rows[:most]]


def write_chats(
    model: str,
    length: int,
    *,
    most_tokens: int,
    most_s: float | None,
    seed: int,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Written:
    """Answers of `most_tokens` in all, or as many as `most_s` seconds give.

    `tell` gets how much is done and how much in all: seconds if there is a limit, else tokens.
    """
    began = time.monotonic()

    def progress() -> None:
        if most_s is None:
            tell(min(writer.num_answer_tokens, most_tokens), most_tokens)
        else:
            tell(int(min(time.monotonic() - began, most_s)), int(most_s))

    tell(0, most_tokens if most_s is None else int(most_s))
    engine = build(EngineConfig(model=model, num_draft_tokens=0))
    template, _ = load_template(engine.tokenizer, None)
    writer = Writer(engine, template, length, seed)
    number, written_s = 0, 0.0
    while writer.num_answer_tokens < most_tokens:
        writer.wave(number == 0, progress)
        number += 1
        progress()
        written_s = time.monotonic() - began
        if not writer.num_answer_tokens and number == 2:
            raise DataError(
                f"in {length} tokens {model} writes no prompt with an answer: give a larger "
                "--length, or files"
            )
        if most_s is not None and written_s * (number + 1) / number > most_s:
            break
    return Written(writer.rows(), writer.kinds, writer.num_answer_tokens, written_s)
