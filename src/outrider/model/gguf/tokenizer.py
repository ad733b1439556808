"""The tokenizer in a GGUF file's metadata -> a `tokenizers.Tokenizer`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from outrider.errors import ModelError
from outrider.model.gguf.config import num_used
from outrider.model.gguf.container import Container
from outrider.model.gguf.pretokenizers import rule_of

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"  # how SentencePiece spells a space
_LONGEST_PIECE = 512  # characters: splits of a piece are tried one by one


def build_tokenizer(container: Container) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer, and what a tokenizer_config.json says beside it. `ModelError` of one line."""
    source = _Source(container)
    built = source.build()
    built.add_special_tokens(source.added(_CONTROL, _UNKNOWN))
    built.add_tokens(source.added(_USER_DEFINED))
    if source.adds_bos and source.bos is not None:
        text, id = source.tokens[source.bos], source.bos
        built.post_processor = processors.TemplateProcessing(
            single=[_quoted(text), "$A"], pair=None, special_tokens=[(text, id)]
        )
    return built, source.config()


def _quoted(text: str) -> str:
    """A token as a template names it: always with its type, since it may hold a colon."""
    return f"{text}:0"


class _Source:
    def __init__(self, container: Container) -> None:
        self._path = container.path
        self._metadata: Mapping[str, Any] = container.metadata
        tokens = self._get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise ModelError(f"{self._path} holds no tokenizer; convert the model again")
        self.tokens: list[str] = tokens[: num_used(container)]
        tokens = self.tokens
        self.vocab = {token: id for id, token in enumerate(tokens)}
        if len(self.vocab) != len(tokens):
            repeated = next(token for id, token in enumerate(tokens) if self.vocab[token] != id)
            raise ModelError(
                f"{self._path} repeats the token {repeated[:40]!r}; convert the model again"
            )
        self._kinds = self._array("token_type")
        self._model = str(self._get("model"))
        self._rule = None
        if self._model == "gpt2":
            self._rule = rule_of(str(self._get("pre", "default")), self._path)
        # The defaults of models whose file does not say.
        default = self._model == "llama" if self._rule is None else self._rule.bos
        self.adds_bos = bool(self._get("add_bos_token", default))
        self.bos = self._id("bos_token_id")

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _array(self, key: str) -> np.ndarray[Any, np.dtype[Any]] | None:
        """One number per token, or None."""
        found = self._get(key)
        if found is None:
            return None
        if not isinstance(found, np.ndarray) or len(found) < len(self.tokens):
            raise ModelError(
                f"{self._path} has no {key} for each of its {len(self.tokens)} tokens; "
                "convert the model again"
            )
        return found[: len(self.tokens)]

    def _id(self, key: str) -> int | None:
        id = self._get(key)
        if id is None:
            return None
        if not isinstance(id, int) or not 0 <= id < len(self.tokens):
            raise ModelError(
                f"{self._path} has {key} = {id!r} beyond its {len(self.tokens)} tokens; "
                "convert the model again"
            )
        return id

    def added(self, *kinds: int) -> list[tokenizers.AddedToken]:
        """The tokens that are found in a text as they are."""
        if self._kinds is None:
            return []
        special = _USER_DEFINED not in kinds
        return [
            tokenizers.AddedToken(self.tokens[i], special=special, normalized=False)
            for i in np.flatnonzero(np.isin(self._kinds, kinds))
            if self.tokens[i]
        ]

    def config(self) -> dict[str, Any]:
        """In the spelling of tokenizer_config.json."""
        found: dict[str, Any] = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            id = self._id(f"{key}_token_id")
            if id is not None:
                found[f"{name}_token"] = self.tokens[id]
        template = self._metadata.get("tokenizer.chat_template")
        if isinstance(template, str):
            found["chat_template"] = template
        return found

    def build(self) -> tokenizers.Tokenizer:
        builders = {"gpt2": self._byte_level, "llama": self._pieces, "t5": self._unigram}
        if self._model not in builders:
            raise ModelError(
                f"{self._path} has a tokenizer of the kind {self._model!r}, not "
                f"{', '.join(builders)}; use the model's safetensors folder"
            )
        try:
            return builders[self._model]()
        except ModelError:
            raise
        except Exception as error:  # the library raises plain Exception
            line = " ".join(str(error).split())[:200]
            raise ModelError(
                f"{self._path} holds a tokenizer that does not fit together ({line}); "
                "convert the model again"
            ) from error

    def _byte_level(self) -> tokenizers.Tokenizer:
        assert self._rule is not None
        merges = self._get("merges")
        if not isinstance(merges, list):
            raise ModelError(f"{self._path} holds no merges; convert the model again")
        pairs = []
        for merge in merges:
            at = merge.find(" ", 1)
            if at < 0:
                raise ModelError(f"{self._path} has the merge {merge[:40]!r}; convert it again")
            pairs.append((merge[:at], merge[at + 1 :]))
        built = tokenizers.Tokenizer(
            models.BPE(self.vocab, pairs, ignore_merges=self._rule.ignore_merges)
        )
        built.pre_tokenizer = self._rule.pre_tokenizer()
        built.decoder = decoders.ByteLevel()
        return built

    def _scores(self) -> list[float]:
        scores = self._array("scores")
        if scores is None:
            raise ModelError(f"{self._path} holds no scores of its tokens; convert it again")
        return [float(score) for score in scores]

    def _pieces(self) -> tokenizers.Tokenizer:
        """SentencePiece BPE: of all pairs of neighbours that form a piece, the one with the highest
        score merges first."""
        unknown = self._id("unknown_token_id")
        built = tokenizers.Tokenizer(
            models.BPE(
                self.vocab,
                self._merges(self._scores()),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        prefix = bool(self._get("add_space_prefix", True))
        steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if prefix else []
        built.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
        built.decoder = self._piece_decoder(prefix)
        return built

    def _merges(self, scores: list[float]) -> list[tuple[str, str]]:
        """Every way to form a piece of two others, the best piece first."""
        found = []
        normal = {token: id for token, id in self.vocab.items() if self._is_normal(id)}
        for token, id in normal.items():
            if len(token) > _LONGEST_PIECE:
                raise ModelError(f"{self._path} has a token of {len(token)} characters; convert it")
            for at in range(1, len(token)):
                left, right = normal.get(token[:at]), normal.get(token[at:])
                if left is not None and right is not None:
                    found.append((-scores[id], left, right, token[:at], token[at:]))
        found.sort()
        return [(left, right) for *_, left, right in found]

    def _is_normal(self, id: int) -> bool:
        return self._kinds is None or int(self._kinds[id]) not in (_UNKNOWN, _CONTROL)

    def _piece_decoder(self, prefix: bool) -> decoders.Decoder:
        steps: list[decoders.Decoder] = [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
        return decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))

    def _unigram(self) -> tokenizers.Tokenizer:
        scores = self._scores()
        unknown = self._id("unknown_token_id")
        bytes_ = sum(token.startswith("<0x") for token in itertools.islice(self.tokens, 1024))
        built = tokenizers.Tokenizer(
            models.Unigram(
                list(zip(self.tokens, scores, strict=True)), unknown, byte_fallback=bytes_ >= 256
            )
        )
        steps: list[normalizers.Normalizer] = []
        charsmap = self._get("precompiled_charsmap")
        if isinstance(charsmap, np.ndarray):
            steps.append(normalizers.Precompiled(charsmap.tobytes()))
        if self._get("remove_extra_whitespaces", False):
            steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
        built.normalizer = normalizers.Sequence(steps)
        prefix = bool(self._get("add_space_prefix", True))
        built.pre_tokenizer = pre_tokenizers.Metaspace(
            _SPACE, prepend_scheme="always" if prefix else "never"
        )
        built.decoder = self._piece_decoder(prefix)
        return built
