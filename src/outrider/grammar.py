"""Structured output: the model's distribution conditioned on a grammar, token by token.

The allowed next tokens are a function of the output so far (computed by llguidance), so a grammar
is one more edit of the logits. Applied at every draft position with the history of that position,
it keeps speculation exact. Forced tokens are free drafts.

Needs the extra `[grammar]`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from outrider.contracts import Edits
from outrider.errors import ConfigError, RequestError
from outrider.model.tokenizer import Tokenizer

MAX_SOURCE_CHARS = 1 << 16
# Work, not time: the same grammar is refused on a fast machine and on a slow one.
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "max_items_in_row": 2_000,
    "verbose_errors": False,
}


class GrammarVocabulary:
    """A tokenizer in the grammar engine's form. Slow to build, once per model."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int, eos_ids: Sequence[int]) -> None:
        """`ConfigError` where the extra is missing or the model cannot end a text."""
        try:
            import llguidance
        except ImportError:
            raise ConfigError(
                "structured output needs another package: pip install 'outrider[grammar]'"
            ) from None
        if not eos_ids:
            raise ConfigError("structured output needs a model with an end-of-text token")
        self.num_tokens = num_tokens
        self.only_end_V = torch.zeros(num_tokens, dtype=torch.bool)
        self.only_end_V[list(eos_ids)] = True
        self.library: Any = llguidance
        self.inner: Any = llguidance.LLTokenizer(
            tokenizer.serialized(), n_vocab=num_tokens, eos_token=list(eos_ids)
        )


class Grammar:
    """A compiled grammar. Immutable: every sequence gets a `Matcher` of its own."""

    def __init__(self, vocabulary: GrammarVocabulary, source: str) -> None:
        """`source` in the form of the class methods; `RequestError` if it cannot be used."""
        self._vocabulary = vocabulary
        library = vocabulary.library
        limits = library.LLParserLimits(**LIMITS)
        self._start: Any = library.LLMatcher(vocabulary.inner, source, log_level=0, limits=limits)
        if self._start.is_error():
            reason = self._start.get_error().split("\n")[0][:200]
            raise RequestError(f"the grammar cannot be used: {reason}", "response_format")
        trial = self._start.deep_copy()
        trial.compute_bitmask()
        if trial.is_error():
            raise RequestError("the grammar matches no text, or is too large", "response_format")

    @classmethod
    def json_schema(cls, vocabulary: GrammarVocabulary, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that satisfies a schema; an empty one means any object."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            parsed = json.loads(_bounded(text))
        except ValueError as error:
            raise RequestError(f"the schema is not JSON: {error}", "response_format") from error
        if not isinstance(parsed, dict):
            raise RequestError("the schema must be a JSON object", "response_format")
        source = vocabulary.library.LLMatcher.grammar_from_json_schema(
            json.dumps(parsed or {"type": "object"}), overrides={"whitespace_flexible": False}
        )
        return cls(vocabulary, source)

    @classmethod
    def regex(cls, vocabulary: GrammarVocabulary, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole. No look-around, no back-references."""
        return cls(vocabulary, vocabulary.library.LLMatcher.grammar_from_regex(_bounded(pattern)))

    @classmethod
    def lark(cls, vocabulary: GrammarVocabulary, grammar: str) -> Grammar:
        """A context-free grammar in Lark's notation, with the rule `start`."""
        return cls(vocabulary, vocabulary.library.LLMatcher.grammar_from_lark(_bounded(grammar)))

    @classmethod
    def gbnf(cls, vocabulary: GrammarVocabulary, grammar: str) -> Grammar:
        """A context-free grammar in llama.cpp's notation, with the rule `root`."""
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            lark = gbnf_to_lark(_bounded(grammar))
        except RequestError:
            raise
        except Exception as error:  # the converter raises anything
            reason = " ".join(str(error).split())[:200]
            raise RequestError(f"the grammar cannot be used: {reason}", "grammar") from None
        return cls.lark(vocabulary, lark)

    @classmethod
    def choice(cls, vocabulary: GrammarVocabulary, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        rule = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return cls.lark(vocabulary, f"start: {rule}")

    def matcher(self, num_prompt_tokens: int, inner: Edits | None) -> Matcher:
        """For one sequence; `inner` are the request's other edits."""
        return Matcher(self._start, self._vocabulary, num_prompt_tokens, inner)


class Matcher:
    """contracts.Edits of one sequence under a grammar, before its other edits.

    Has a position in the text, committed or guessed, and moves from there to the requested one:
    back to the last common token, then forward. At a dead end of the grammar, or beyond its limit
    of work, only the end of the text is allowed. This too is a function of the text alone, so it is
    the same with and without speculation.
    """

    def __init__(
        self,
        start: Any,
        vocabulary: GrammarVocabulary,
        num_prompt_tokens: int,
        inner: Edits | None,
    ) -> None:
        self._start = start
        self._vocabulary = vocabulary
        self._num_prompt_tokens = num_prompt_tokens
        self._inner = inner
        self._restart()

    def apply(self, row_V: torch.Tensor, tokens: list[int], path: Sequence[int]) -> None:
        """Edits `row_V` in place for the position after `tokens + path`.

        A row after a guess that the grammar rules out is not changed, since it is never used. If
        the other edits would leave no token, only the grammar applies.
        """
        allowed_V = self._allowed(tokens, path)
        if allowed_V is None:
            return
        row_V.masked_fill_(~allowed_V.to(row_V.device), -torch.inf)
        if self._inner is not None:
            before_V = row_V.clone()
            self._inner.apply(row_V, tokens, path)
            if bool((row_V == -torch.inf).all()):
                row_V.copy_(before_V)

    def forced(self, tokens: list[int]) -> list[int]:
        """Tokens that spell the forced text; a guess, since other tokens may spell it too."""
        found: list[int] = self._matcher.compute_ff_tokens() if self._walk(tokens, ()) else []
        if self._matcher.is_error():
            self._restart()
            return []
        return found

    def is_complete(self, tokens: list[int]) -> bool:
        """Whether the grammar accepts `tokens` as they stand, without an end-of-text token."""
        return self._walk(tokens, ()) and bool(self._matcher.is_accepting())

    def _allowed(self, tokens: list[int], path: Sequence[int]) -> torch.Tensor | None:
        """None if the grammar rules the text out."""
        bits = self._matcher.compute_bitmask() if self._walk(tokens, path) else None
        if self._matcher.is_error():
            self._restart()
            return self._vocabulary.only_end_V
        if bits is None:
            return None
        mask = np.frombuffer(bits, np.uint8)
        mask = np.unpackbits(mask, count=self._vocabulary.num_tokens, bitorder="little")
        return torch.from_numpy(mask).bool()

    def _restart(self) -> None:
        """An error is permanent: start again from the prompt."""
        self._matcher: Any = self._start.deep_copy()
        self._num_read = self._num_prompt_tokens  # committed tokens, never read again
        self._ahead: list[int] = []  # what was read after these

    def _walk(self, tokens: list[int], path: Sequence[int]) -> bool:
        """Moves to the end of `tokens + path`; False if the grammar rules it out."""
        wanted = [*tokens[self._num_read :], *path]
        common = 0
        for there, here in zip(wanted, self._ahead, strict=False):
            if there != here:
                break
            common += 1
        if common < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - common)
            del self._ahead[common:]
        for token in wanted[common:]:
            if self._matcher.try_consume_tokens([token]) != 1:
                return False
            self._ahead.append(token)
        num_committed = len(tokens) - self._num_read
        del self._ahead[:num_committed]
        self._num_read = len(tokens)
        return True


def _bounded(text: str) -> str:
    if len(text) > MAX_SOURCE_CHARS:
        raise RequestError(
            f"a grammar may have {MAX_SOURCE_CHARS} characters, not {len(text)}", "response_format"
        )
    return text
