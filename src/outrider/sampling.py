"""Turns logits into the distribution of a request, and draws tokens from it.

Plain and speculative decoding share this file: a token at absolute position i is always
`argmax(processed_logits / T + gumbel(seed, sample, i))`, whichever step computed the logits.
The order of processing, for each *position* (inside a draft block every row has its own history):

    banned ids, EOS before min_tokens -> logit bias -> repetition, frequency, presence penalty
    -> temperature -> top-k -> top-p -> min-p

The filters are defined by value, so that all implementations agree on ties:
    top-k keeps v iff fewer than k logits are greater than v's;
    top-p keeps v iff the renormalised mass strictly more probable than v is below p;
    min-p keeps v iff its probability is at least min_p times the largest.

Shape legend: R rows of the step (row r predicts the token after its node), V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider import native
from outrider.config import SamplingParams as SamplingParams
from outrider.contracts import Distributions, Edits, Proposal, SequenceView, Stream
from outrider.errors import RequestError
from outrider.noise import gumbel, mix, sequence_key


class LogitEdits:
    """The history-dependent part of one sequence's processing: bans, bias, penalties.

    Keeps token counts of the committed history and adds the drafted ancestors of a row, so the
    distribution inside a draft block is that of plain decoding at the same position.
    """

    def __init__(
        self,
        params: SamplingParams,
        num_prompt_tokens: int,
        vocab_size: int,
        finish_ids: Collection[int],
    ) -> None:
        for token in (*params.logit_bias, *params.banned_ids):
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"token ids must be in 0..{vocab_size - 1}, not {token}",
                    "logit_bias" if token in params.logit_bias else "banned_ids",
                )
        self._params = params
        self._num_prompt = num_prompt_tokens
        self._finish_ids = sorted(finish_ids)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._banned = torch.tensor(params.banned_ids, dtype=torch.int64)
        self._count_V = np.zeros(vocab_size, dtype=np.int32)  # in the output
        self._seen_V = np.zeros(vocab_size, dtype=bool)  # in prompt or output
        self._num_counted = 0

    def _catch_up(self, tokens: list[int]) -> None:
        for i in range(self._num_counted, len(tokens)):
            self._seen_V[tokens[i]] = True
            if i >= self._num_prompt:
                self._count_V[tokens[i]] += 1
        self._num_counted = len(tokens)

    def apply(self, row_V: torch.Tensor, tokens: list[int], path: Sequence[int]) -> None:
        """Edits `row_V` in place for the position after `tokens + path`."""
        p = self._params
        self._catch_up(tokens)
        device = row_V.device
        if len(self._banned):
            row_V[self._banned.to(device)] = -torch.inf
        if len(tokens) - self._num_prompt + len(path) < p.min_tokens and self._finish_ids:
            row_V[self._finish_ids] = -torch.inf
        if len(self._bias_ids):
            row_V[self._bias_ids.to(device)] += self._bias.to(device)
        if p.repetition_penalty != 1.0:
            seen_V = self._seen_V.copy()
            seen_V[list(path)] = True
            penalised_V = torch.where(
                row_V > 0, row_V / p.repetition_penalty, row_V * p.repetition_penalty
            )
            row_V.copy_(torch.where(torch.from_numpy(seen_V).to(device), penalised_V, row_V))
        if p.frequency_penalty or p.presence_penalty:
            count_V = self._count_V.copy()
            np.add.at(count_V, list(path), 1)
            count = torch.from_numpy(count_V).to(device)
            row_V -= p.frequency_penalty * count + p.presence_penalty * (count > 0)


@dataclass(slots=True)
class RowParams:
    """The stateless parameters of the processing, one entry per row."""

    temperature_R: npt.NDArray[np.float32]
    top_k_R: npt.NDArray[np.int32]
    top_p_R: npt.NDArray[np.float32]
    min_p_R: npt.NDArray[np.float32]
    _packed: bytes = b""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], counts: Sequence[int]) -> RowParams:
        """The parameters of rows where sequence i has `counts[i]` consecutive rows."""
        if len(params) == 1:  # one sequence: the same rows step after step
            return _rows_of_one(params[0], counts[0])
        # A greedy row needs no filter, which always keeps the argmax.
        temperature = np.array([p.temperature for p in params], np.float32)
        top_k = np.array([p.top_k if p.temperature else 0 for p in params], np.int32)
        top_p = np.array([p.top_p if p.temperature else 1.0 for p in params], np.float32)
        min_p = np.array([p.min_p if p.temperature else 0.0 for p in params], np.float32)
        return cls(
            np.repeat(temperature, counts),
            np.repeat(top_k, counts),
            np.repeat(top_p, counts),
            np.repeat(min_p, counts),
        )

    @property
    def filters(self) -> bool:
        return bool(self.top_k_R.any() or (self.top_p_R < 1).any() or self.min_p_R.any())

    def row(self, row: int) -> RowParams:
        only = slice(row, row + 1)
        return RowParams(
            self.temperature_R[only], self.top_k_R[only], self.top_p_R[only], self.min_p_R[only]
        )

    def packed(self) -> bytes:
        """All parameters in one piece of memory, for native calls."""
        if not self._packed:
            parts = (self.temperature_R, self.top_k_R, self.top_p_R, self.min_p_R)
            self._packed = b"".join(part.tobytes() for part in parts)
        return self._packed


# By identity, because parameters cannot be hashed; an entry keeps its object alive.
_known: dict[tuple[int, int], tuple[SamplingParams, RowParams]] = {}


def _rows_of_one(p: SamplingParams, count: int) -> RowParams:
    known = _known.get((id(p), count))
    if known is not None:
        return known[1]
    greedy = p.temperature == 0
    rows = RowParams(
        np.full(count, p.temperature, np.float32),
        np.full(count, 0 if greedy else p.top_k, np.int32),
        np.full(count, 1.0 if greedy else p.top_p, np.float32),
        np.full(count, 0.0 if greedy else p.min_p, np.float32),
    )
    if len(_known) >= 64:
        _known.clear()
    _known[id(p), count] = p, rows
    return rows


def true_vocabulary(logits_RV: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Logits over the true ids, without padding; -inf for ids that a smaller model lacks."""
    width = logits_RV.shape[-1]
    if width > num_tokens:
        return logits_RV[:, :num_tokens].contiguous()
    if width < num_tokens:
        return torch.nn.functional.pad(logits_RV, (0, num_tokens - width), value=-torch.inf)
    return logits_RV


def filtered(logits_RV: torch.Tensor, rows: RowParams) -> torch.Tensor:
    """Applies temperature and filters: scaled logits, -inf if filtered out. Greedy rows: T = 1."""
    device = logits_RV.device

    def column(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)[:, None]

    temperature = column(rows.temperature_R)
    scaled = logits_RV / torch.where(temperature > 0, temperature, 1.0)
    if not rows.filters:
        return scaled
    ordered = scaled.sort(dim=-1, descending=True).values
    vocab_size = scaled.shape[-1]
    top_k = column(rows.top_k_R).long()
    top_k = torch.where(top_k > 0, top_k, vocab_size).clamp_(max=vocab_size)
    floor = ordered.gather(1, top_k - 1)  # the k-th largest: everything below is filtered out
    ordered = ordered.masked_fill(ordered < floor, -torch.inf)
    ordered_p = ordered.softmax(dim=-1)
    before = ordered_p.cumsum(dim=-1) - ordered_p
    top_p = column(rows.top_p_R)
    kept = (
        (ordered >= floor)
        & ((before < top_p) | (top_p >= 1))
        & (ordered_p >= column(rows.min_p_R) * ordered_p[:, :1])
    )
    # Rows are sorted: the last kept value is the threshold, so equal values are treated alike.
    floor = ordered.gather(1, kept.sum(dim=-1, keepdim=True).clamp_(min=1) - 1)
    return scaled.masked_fill_(scaled < floor, -torch.inf)


def draw_tokens(logits_RV: torch.Tensor, rows: RowParams, keys_R: list[int]) -> list[int]:
    """One token per row, -1 if the row has a NaN.

    `keys_R` are draw keys (see `outrider.noise`), unused on greedy rows.
    """
    if native.available() and logits_RV.device.type == "cpu":
        return native.sample_rows(
            logits_RV,
            rows.temperature_R,
            rows.top_k_R,
            rows.top_p_R,
            rows.min_p_R,
            np.array(keys_R, dtype=np.uint64),
        )
    scores = logits_RV
    if rows.temperature_R.any():
        scaled = filtered(logits_RV, rows)
        noisy = scaled + gumbel(keys_R, scaled.shape[-1], scaled.device)
        greedy = torch.from_numpy(rows.temperature_R == 0).to(scaled.device)[:, None]
        scores = torch.where(greedy, scaled, noisy)
    best = scores.max(dim=-1)  # of a row with a NaN: NaN
    tokens: list[int] = best.indices.masked_fill(best.values.isnan(), -1).tolist()
    return tokens


def distribution_of(logits_RV: torch.Tensor, rows: RowParams) -> torch.Tensor:
    """The distribution that `draw_tokens` draws from, as normalised float32 probabilities."""
    probs = filtered(logits_RV, rows).softmax(dim=-1)
    greedy = rows.temperature_R == 0
    if greedy.any():
        one_hot = torch.zeros_like(probs)
        one_hot.scatter_(1, logits_RV.argmax(dim=-1, keepdim=True), 1.0)
        probs = torch.where(torch.from_numpy(greedy).to(probs.device)[:, None], one_hot, probs)
    return probs


@dataclass(slots=True)
class RowDraws:
    """The parameters of the draws at every row of a pass, known before the logits."""

    starts: list[int]  # per sequence: the row of its root
    rows: RowParams
    keys_R: list[int]  # 0 on greedy rows

    @classmethod
    def of(
        cls,
        views: Sequence[SequenceView],
        proposals: Sequence[Proposal],
        stream: Stream = Stream.TARGET,
    ) -> RowDraws:
        starts: list[int] = []
        counts: list[int] = []
        keys: list[int] = []
        for view, proposal in zip(views, proposals, strict=True):
            count = len(proposal.tokens) + 1
            starts.append(len(keys))
            counts.append(count)
            if view.params.temperature:
                base = sequence_key(view.seed, view.sample_index, stream) + len(view.tokens)
                keys += [mix(base + depth) for depth in depths(proposal)]
            else:
                keys += [0] * count
        return cls(starts, RowParams.of([view.params for view in views], counts), keys)

    def packed(self) -> bytes:
        return array("Q", self.keys_R).tobytes() + self.rows.packed()


class RowDistributions:
    """contracts.Distributions over the logits of one step. Owns and edits `logits_RV` in place."""

    def __init__(
        self,
        logits_RV: torch.Tensor,
        views: Sequence[SequenceView],
        proposals: Sequence[Proposal],
        edits: Sequence[Edits | None],
        *,
        num_tokens: int,
        stream: Stream = Stream.TARGET,
        how: RowDraws | None = None,
        draws: list[int] | None = None,
    ) -> None:
        """`draws`: the tokens that a model drew in its pass with `how`; requires no `edits`."""
        how = how or RowDraws.of(views, proposals, stream)
        self.starts, self._rows, self._keys_R = how.starts, how.rows, how.keys_R
        self._draws = draws
        self._probs_RV: torch.Tensor | None = None
        self._raw_RV = self._logits_RV = logits_RV = true_vocabulary(logits_RV, num_tokens)
        if draws is None and any(edit is not None for edit in edits):
            if any(view.params.logprobs is not None for view in views):
                self._raw_RV = logits_RV.clone()
            for view, proposal, edit, start in zip(
                views, proposals, edits, self.starts, strict=True
            ):
                if edit is not None:
                    for node in range(-1, len(proposal.tokens)):
                        path = [proposal.tokens[i] for i in path_to(proposal, node)]
                        edit.apply(logits_RV[start + 1 + node], view.tokens, path)

    def draw(self) -> list[int]:
        if self._draws is None:
            self._draws = draw_tokens(self._logits_RV, self._rows, self._keys_R)
        return self._draws

    def probs(self, start: int, stop: int) -> torch.Tensor:
        if self._probs_RV is None:  # one pass over the vocabulary for all rows
            self._probs_RV = distribution_of(self._logits_RV, self._rows)
        return self._probs_RV[start:stop]

    def mend(self) -> list[int]:
        """The rows with a NaN, normally none; they become uniform distributions with draw 0.

        Their sequences fail. Rows do not influence each other, so other sequences are unaffected.
        """
        draws = self.draw()
        if not draws or min(draws) >= 0:
            return []
        broken = [row for row, token in enumerate(draws) if token < 0]
        self._logits_RV[broken] = 0.0
        for row in broken:
            draws[row] = 0
        return broken

    def logprobs(self, row: int) -> torch.Tensor:
        """Log-probabilities of the *model* at a row, before any request processing: [V]."""
        return self._raw_RV[row].log_softmax(dim=-1)

    def margin(self, row: int) -> float:
        """The score difference of the two best tokens: a larger change may alter the draw."""
        one = self._rows.row(row)
        scaled = filtered(self._logits_RV[row : row + 1], one)
        if one.temperature_R[0] > 0:
            scaled = scaled + gumbel(self._keys_R[row : row + 1], scaled.shape[-1], scaled.device)
        best = scaled.topk(2).values[0]
        return float(best[0] - best[1])

    def select(self, indices: Sequence[int]) -> Distributions:
        """The same distributions for a subset of the sequences."""
        return _Selected(self, [self.starts[i] for i in indices])


@dataclass(slots=True)
class _Selected:
    """contracts.Distributions for some of the sequences of a step; rows keep their numbers."""

    whole: RowDistributions
    starts: list[int]

    def draw(self) -> list[int]:
        return self.whole.draw()

    def probs(self, start: int, stop: int) -> torch.Tensor:
        return self.whole.probs(start, stop)


def depths(proposal: Proposal) -> list[int]:
    """The distance from the root of the root (0) and of every node."""
    if proposal.parents is None:
        return list(range(len(proposal.tokens) + 1))
    result = [0]
    for parent in proposal.parents:
        result.append(result[parent + 1] + 1)
    return result


def path_to(proposal: Proposal, node: int) -> list[int]:
    """Node indices from the root's child down to `node` (empty for the root, -1)."""
    if proposal.parents is None:
        return list(range(node + 1))
    path = []
    while node >= 0:
        path.append(node)
        node = proposal.parents[node]
    return path[::-1]
