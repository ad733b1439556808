"""A chat model writes the text that its drafter is trained on: `python family/smollm2/text.py`.

1. The model continues the beginning of a user's turn, so it writes the questions itself. It also
   writes passages and code.
2. It answers these questions, and tasks of `prompts.py` on its passages and its code, at
   temperatures 0, 0.8 and 1. Some answers get a second turn.

Writes tokens [R, L], the length of each prompt and the end of each answer to one file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import prompts
import torch
from target import load_target, load_tokenizer
from torch import Tensor

from outrider.train.sampler import _StaticDecoder

SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n"
)
USER, END, ANSWER = "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n"
ANSWERS = {1.0: 0.15, 0.8: 0.45, 0.0: 0.4}  # share of each temperature
LEAST_ANSWER = 200  # tokens of room for one
LONGEST_ANSWER = 256  # no token after these counts: people read beginnings of answers most
LONGEST_TEXT = 640  # characters of a passage or a program inside a question


def chat(turns: Sequence[str]) -> str:
    parts = [(USER, ANSWER)[number % 2] + turn + END for number, turn in enumerate(turns)]
    return SYSTEM + "".join(parts) + ANSWER


def cut(text: str, size: int = LONGEST_TEXT) -> str:
    """The beginning, up to the end of a sentence or a line where there is one."""
    if len(text) <= size:
        return text
    end = max(text.rfind(mark, 0, size) for mark in (". ", ".\n", "\n"))
    return text[: end + 1].rstrip() if end > size // 3 else text[:size]


class Rows:
    """Written rows: tokens [R, L], the prompt's length and the answer's end of each, [R]."""

    def __init__(self, tokens_RL: Tensor, prompt_R: Tensor, ends: Sequence[int]) -> None:
        self.tokens, self.prompt = tokens_RL, prompt_R
        length = tokens_RL.shape[1]
        place_L = torch.arange(length)
        is_end_RL = torch.zeros_like(tokens_RL, dtype=torch.bool)
        for token in ends:
            is_end_RL |= tokens_RL == token
        is_end_RL &= place_L >= prompt_R[:, None]
        first_R = is_end_RL.int().argmax(1) + 1
        self.is_finished = is_end_RL.any(1)
        self.end = torch.where(self.is_finished, first_R, length)


def joined(parts: Sequence[Rows], kinds: Sequence[int]) -> dict[str, Tensor]:
    prompt_R = torch.cat([part.prompt for part in parts])
    end_R = torch.cat([part.end for part in parts])
    return {
        "tokens": torch.cat([part.tokens for part in parts]),
        "prompt": prompt_R,
        "end": torch.minimum(end_R, prompt_R + LONGEST_ANSWER),
        "kind": torch.tensor(kinds),
    }


class Writer:
    def __init__(self, model: Any, tokenizer: Any, random: Random, batch: int) -> None:
        self.model, self.tokenizer, self.random, self.batch = model, tokenizer, random, batch
        self.ends = [tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")]
        self.seed = 0

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def write(self, given: list[list[int]], length: int, shares: dict[float, float]) -> Rows:
        """Continues every prompt to `length` tokens, past the end of its answer."""
        parts, sizes = [], []
        for start in range(0, len(given), self.batch):
            chosen = given[start : start + self.batch]
            size_B = torch.tensor([len(ids) for ids in chosen])
            prompts_BP = torch.zeros(len(chosen), int(size_B.max()), dtype=torch.long)
            for row_P, ids in zip(prompts_BP, chosen, strict=True):
                row_P[: len(ids)] = torch.tensor(ids)
            warmth = self.random.choices(list(shares), list(shares.values()), k=len(chosen))
            decoder = _StaticDecoder(self.model, prompts_BP, length, torch.tensor(warmth))
            decoder.num_prompt = size_B.to(self.model.device)
            began = time.monotonic()
            self.seed += 1
            parts.append(decoder.run(self.seed).cpu().int())
            sizes.append(size_B)
            seconds = time.monotonic() - began
            print(f"{len(chosen)} rows of {length} tokens in {seconds:.1f} s", flush=True)
        return Rows(torch.cat(parts), torch.cat(sizes), self.ends)

    def texts(self, rows: Rows) -> list[str]:
        """The finished answers."""
        found = []
        for index in rows.is_finished.nonzero()[:, 0].tolist():
            ids = rows.tokens[index, rows.prompt[index] : rows.end[index] - 1].tolist()
            found.append(self.tokenizer.decode(ids).strip())
        return [text for text in found if text]


def write_all(writer: Writer, scale: float, length: int) -> dict[str, Tensor]:
    random = writer.random

    def size(number: int) -> int:
        return max(4, int(number * scale))

    def answers(ask: Callable[[Random], str], number: int, least: int) -> list[str]:
        given = [writer.ids(chat([ask(random)])) for _ in range(size(number))]
        rows = writer.write(given, 320, {1.0: 0.4, 0.8: 0.6})
        return [text for text in writer.texts(rows) if len(text) > least]

    head = writer.ids(SYSTEM + USER)
    rows = writer.write([head] * size(32768), len(head) + 96, {1.0: 0.7, 0.9: 0.3})
    asked = sorted({text for text in writer.texts(rows) if 8 < len(text) < LONGEST_TEXT})
    passages = [cut(text) for text in answers(prompts.paragraph, 8192, 120)]
    code = [_code(text) for text in answers(prompts.program, 4096, 40)]
    code = [text for text in code if 40 < len(text) < LONGEST_TEXT]
    print(f"{len(asked)} questions, {len(passages)} passages, {len(code)} programs", flush=True)
    todo: list[list[int]] = []
    kinds: list[int] = []
    while len(todo) < size(81920):
        kind, turns = conversation(random, asked, passages, code)
        ids = writer.ids(chat(turns))
        if len(ids) <= length - LEAST_ANSWER:
            todo.append(ids)
            kinds.append(kind)
    first = writer.write(todo, length, ANSWERS)
    again = []
    for index in first.is_finished.nonzero()[:, 0].tolist():
        ids = first.tokens[index, : first.end[index]].tolist()
        turn = "\n" + USER + prompts.follow_up(random) + END + ANSWER
        ids += writer.ids(turn)
        if len(again) < size(20480) and len(ids) <= length - LEAST_ANSWER:
            again.append(ids)
    parts = [first]
    if again:
        parts.append(writer.write(again, length, ANSWERS))
    return joined(parts, kinds + [KINDS.index("chat")] * len(again))


def _code(answer: str) -> str:
    """The first block of code of an answer, or all of it."""
    parts = answer.split("```")
    return parts[1].removeprefix("python").strip() if len(parts) > 2 else answer


KINDS = ("chat", "rewrite", "summary", "question", "mathematics", "retrieval", "edit", "records")
SHARES = (0.44, 0.09, 0.09, 0.09, 0.08, 0.06, 0.07, 0.08)


def conversation(
    random: Random, asked: list[str], passages: list[str], code: list[str]
) -> tuple[int, list[str]]:
    """A kind and the turns up to the answer to write."""
    (kind,) = random.choices(range(len(KINDS)), SHARES)
    text = random.choice(passages)
    match KINDS[kind]:
        case "chat":
            turns = [random.choice(asked) if random.random() < 0.7 else prompts.question(random)]
            if random.random() < 0.15:
                turns += [text, prompts.follow_up(random)]
        case "rewrite":
            turns = [prompts.rewrite(random, cut(text, random.choice((160, 320, LONGEST_TEXT))))]
        case "summary":
            turns = [prompts.summary(random, text)]
        case "question":
            turns = [prompts.question_about(random, text)]
        case "mathematics":
            turns = [prompts.sum_of_words(random)]
        case "retrieval":
            chosen = random.sample(passages, min(3, len(passages)))
            turns = [prompts.retrieval(random, [cut(part, 220) for part in chosen])]
        case "edit":
            turns = [prompts.edit(random, random.choice(code))]
        case _:
            turns = [prompts.records(random, cut(text, 320))]
    return kind, turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="the model's GGUF file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="1: 102,000 rows")
    parser.add_argument("--length", type=int, default=448)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    model, tokenizer = load_target(given.target), load_tokenizer(given.target)
    writer = Writer(model, tokenizer, Random(given.seed), given.batch)
    rows = write_all(writer, given.scale, given.length)
    torch.save(rows, given.out)
    written = int((rows["end"] - rows["prompt"]).sum())
    print(f"{len(rows['tokens'])} rows with {written} tokens of answers")


if __name__ == "__main__":
    main()
