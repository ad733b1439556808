"""Base of the native models: a handle, packed weights, a paged cache, drafts in one call.

Shape legend: T tokens of the pass, R rows with logits, S sequences, V vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from outrider import native
from outrider.contracts import NUM_LEVELS, Begun, IntArray, StepBatch, StopRule
from outrider.errors import ConfigError, ModelError
from outrider.model.capabilities import TreeDraft, TreeLimits
from outrider.model.rope import RopeConfig
from outrider.model.stored import Blocks, InFile, OpenFile
from outrider.sampling import RowParams

WEIGHT_TYPES = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
SOURCE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 4}
_MAX_POSITIONS = 1 << 22
_DRAFT_DTYPES = tuple(
    np.dtype(t) for t in (np.uint64, np.float32, np.int32, np.int32, np.float32, np.float32)
)
_ALL_INT32 = (np.dtype(np.int32),) * 7


class _Drafts(NamedTuple):
    """The places in a flat result where the parts of sequence i start."""

    values: ctypes.Array[ctypes.c_int32]
    width: int

    def of(self, index: int, count: int) -> list[int]:
        start = index * self.width
        found: list[int] = self.values[start : start + count]
        return found


def _room(num_seqs: int, width: int) -> _Drafts:
    return _Drafts((ctypes.c_int32 * (num_seqs * width or 1))(), width)


class NativeStopRules(NamedTuple):
    """Stop rules as the library reads them."""

    chances: array[float]
    floors: array[float]
    toll: float

    @classmethod
    def of(cls, rules: Iterable[StopRule | None]) -> NativeStopRules:
        """`rules` has None for a sequence without a rule."""
        chances, floors, toll = array("f"), array("f"), 0.0
        for rule in rules:
            chances.extend(_NEVER_STOPS if rule is None else rule.chances)
            if rule is not None and not floors:
                floors, toll = array("f", rule.floors), rule.toll
        return cls(chances, floors, toll)

    def fill_in(self, rules: native.StopRules) -> None:
        """`self` must live as long as `rules` is used."""
        rules.chances, _ = self.chances.buffer_info()
        rules.floors, rules.num_floors = self.floors.buffer_info()
        rules.toll = self.toll


_NEVER_STOPS = [float("inf")] * NUM_LEVELS  # above every floor


class NativeModel:
    """A model of the native library. Not for use from two threads at once."""

    def __init__(
        self,
        config: native.Config,
        rope: RopeConfig,
        threads: int | None,
        *,
        other_ropes: tuple[RopeConfig, ...] = (),
    ) -> None:
        if threads is not None and not 1 <= threads <= 256:
            raise ConfigError(f"threads must be between 1 and 256, not {threads}")
        lib = native.library()
        native.isa()  # raises if the processor cannot run the instruction set of OUTRIDER_ISA
        self._threads = threads
        self._files: set[OpenFile] = set()  # that the library reads
        self._handle: int | None = lib.outrider_new(ctypes.byref(config))
        if not self._handle:
            raise ModelError(native.error_message())
        self._lib = lib
        self._vocab_size: int = config.vocab
        self._rotary_dim: int = config.rotary_dim
        self._hidden_size: int = config.hidden
        self._ropes = (rope, *other_ropes)
        self._step = native.Step()
        self._model_arg = ctypes.c_void_p(self._handle)
        self._step_arg = ctypes.byref(self._step)
        self._logits = torch.empty(0, self._vocab_size)
        self._views: dict[int, torch.Tensor] = {}
        self._rope_positions = 0

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            self._lib.outrider_free(handle)

    def set_tensor(self, kind: int, layer: int, tensor: torch.Tensor) -> None:
        self._give(self._lib.outrider_set_tensor, (kind, layer), tensor)

    def set_expert(self, part: int, layer: int, expert: int, tensor: torch.Tensor) -> None:
        """`part` as in outrider.h."""
        self._give(self._lib.outrider_set_expert, (part, layer, expert), tensor)

    def set_blocks(self, kind: int, layer: int, blocks: Blocks, type: int, columns: int) -> None:
        """`type` as `Checkpoint.kind_of` says, with flags. Blocks in a file stay there until passes
        have packed them."""
        self._give_blocks(self._lib.outrider_set_tensor, (kind, layer), blocks, type, columns)

    def set_expert_blocks(
        self, part: int, layer: int, expert: int, blocks: Blocks, type: int, columns: int
    ) -> None:
        """`part` as in outrider.h; the rest as of `set_blocks`."""
        place = (part, layer, expert)
        self._give_blocks(self._lib.outrider_set_expert, place, blocks, type, columns)

    def _give(
        self, function: Callable[..., int], place: tuple[int, ...], tensor: torch.Tensor
    ) -> None:
        tensor = tensor.detach().contiguous()
        if tensor.dtype not in SOURCE_TYPES:
            tensor = tensor.float()
        shape = tensor.shape if tensor.dim() == 2 else (1, len(tensor))
        data, type = tensor.data_ptr(), SOURCE_TYPES[tensor.dtype]
        if function(self._handle, *place, data, type, *shape, self.threads) != native.OK:
            raise ModelError(native.error_message())

    def _give_blocks(
        self,
        function: Callable[..., int],
        place: tuple[int, ...],
        blocks: Blocks,
        type: int,
        columns: int,
    ) -> None:
        if isinstance(blocks, InFile):
            self._files.add(blocks.file)
            where = native.Stored(blocks.offset, blocks.file.descriptor)
            data, type = ctypes.addressof(where), type | native.IN_FILE
        else:
            blocks = np.ascontiguousarray(blocks)
            data = blocks.ctypes.data
        if function(self._handle, *place, data, type, len(blocks), columns, self.threads):
            raise ModelError(native.error_message())

    def pack(self) -> None:
        """Packs what is still in files; passes over few tokens would do it little by little."""
        native.check(self._lib.outrider_pack(self._handle, self.threads))

    def _check_ready(self) -> None:
        if self._lib.outrider_ready(self._handle) != native.OK:
            raise ModelError(native.error_message())

    @property
    def handle(self) -> int | None:
        """The handle of the library's model."""
        return self._handle

    @property
    def threads(self) -> int:
        return self._threads or native.num_threads()

    def extend_positions(self, num_positions: int) -> None:
        """Makes the rotary table at least this long."""
        if self._rope_positions < num_positions:
            self._extend_rope(max(num_positions, 2 * self._rope_positions))

    def logits_address(self, num_rows: int) -> int:
        """The address of room for this many rows of logits, valid until the next pass."""
        self._rows(num_rows)
        address: int = self._step.logits
        return address

    def populate(self, offset: int, num_bytes: int) -> int:
        """Makes the system allocate a part of the KV memory before its first use.

        Returns the number of bytes; 0 at the end. The only method that other threads may call.
        """
        return int(self._lib.outrider_populate(self._handle, offset, num_bytes))

    @property
    def weight_bytes(self) -> int:
        """The memory of the packed weights, without the embedding, which is not copied."""
        return int(self._lib.outrider_weight_bytes(self._handle))

    def _extend_rope(self, positions: int) -> None:
        for index, rope in enumerate(self._ropes):
            angles = torch.arange(positions).float()[:, None] * rope.frequencies(self._rotary_dim)
            cosine = (angles.cos() * rope.attention_factor).contiguous()
            sine = (angles.sin() * rope.attention_factor).contiguous()
            native.check(
                self._lib.outrider_set_rope(
                    self._handle, index, cosine.data_ptr(), sine.data_ptr(), positions
                )
            )
        self._rope_positions = positions

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Replaces the KV store by an empty one of `num_blocks * block_size` slots."""
        native.check(self._lib.outrider_allocate(self._handle, num_blocks, block_size))

    def _describe(self, batch: StepBatch) -> bytes:
        """Fills the argument block with the sizes; returns the arrays packed for the call."""
        num_tokens, num_seqs = batch.tokens_T.size, batch.context_S.size
        tables, parents = batch.tables_SW, batch.parents_T
        if (
            batch.positions_T.size != num_tokens
            or batch.starts_S1.size != num_seqs + 1
            or tables.ndim != 2
            or len(tables) != num_seqs
            or (parents is not None and parents.size != num_tokens)
        ):
            raise ValueError("the arrays of the batch do not fit together")
        step = self._step
        step.num_tokens = num_tokens
        step.num_seqs = num_seqs
        step.table_width = tables.shape[1]
        step.num_rows = batch.logit_rows_R.size
        step.has_parents = parents is not None
        step.num_taps = 0
        step.exit_layer = -1 if batch.exit_layer is None else batch.exit_layer
        step.start_layer, step.begun = 0, None
        if batch.begun is not None:
            self._begin(batch.begun, num_tokens)
        step.threads = self.threads
        arrays = [
            batch.tokens_T,
            batch.positions_T,
            batch.starts_S1,
            batch.context_S,
            tables,
            batch.logit_rows_R,
        ]
        if parents is not None:
            arrays.append(parents)
        return native.joined(arrays, _ALL_INT32[: len(arrays)])

    def _begin(self, begun: Begun, num_tokens: int) -> None:
        states = begun.states_NH
        if states.dtype != torch.float32 or states.shape != (num_tokens, self._hidden_size):
            raise ValueError("a pass continues from one float32 state per token")
        self._begun = states.contiguous()  # keeps the memory alive during the call
        self._step.start_layer, self._step.begun = begun.layer, self._begun.data_ptr()

    def _rows(self, num_rows: int) -> torch.Tensor:
        """The first `num_rows` rows of the logits buffer, which grows as needed.

        Its address is `self._step.logits`. Views are cached: after a pass, each torch call takes
        tens of microseconds.
        """
        rows = self._views.get(num_rows)
        if rows is None:
            if num_rows > len(self._logits):
                self._views.clear()
                self._logits = torch.empty(max(16, num_rows * 5 // 4), self._vocab_size)
                self._step.logits = self._logits.data_ptr()
            rows = self._views[num_rows] = self._logits[:num_rows]
        return rows

    def _repair(self, code: int, batch: StepBatch, extra: int) -> None:
        """Extends the rotary table if it was too short; raises for other errors."""
        if code != native.ROPE_SHORT:
            native.check(code)
        need = int(batch.positions_T.max()) + extra + 1
        if need > _MAX_POSITIONS:
            raise ValueError(f"position {need - 1} is beyond the {_MAX_POSITIONS} we go to")
        self._extend_rope(max(need, 2 * self._rope_positions))

    def draft_chain(
        self,
        batch: StepBatch,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
    ) -> list[list[int]]:
        """See `capabilities.DraftsInOneCall`: the whole autoregressive loop in one native call."""
        return self._draft_chain(batch, num_tokens_S, rows, key_S)

    def _draft_chain(
        self,
        batch: StepBatch,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
        states_SNH: torch.Tensor | None = None,
    ) -> list[list[int]]:
        """`states_SNH`: room for the states of all fed tokens; with it, the last draft is fed."""
        packed = self._describe(batch)
        counts = num_tokens_S.tolist()
        out = _room(self._step.num_seqs, max(counts, default=0))
        states = None if states_SNH is None else states_SNH.data_ptr()
        draft = native.Draft(ctypes.addressof(out.values), out.width, 0, states)
        self._draft(self._lib.outrider_draft, batch, packed, num_tokens_S, rows, key_S, draft)
        return [out.of(i, count) for i, count in enumerate(counts)]

    def draft_with_stop_rules(
        self,
        batch: StepBatch,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
        stop_rules: Seq[StopRule | None],
    ) -> tuple[list[list[int]], list[list[int]]]:
        """See `capabilities.DraftsWithStopRules`."""
        packed = self._describe(batch)
        num_seqs, most = self._step.num_seqs, max(num_tokens_S.tolist(), default=0)
        out, levels, drawn, counts = (_room(num_seqs, width) for width in (most, most, 1, 1))
        draft = native.Draft(ctypes.addressof(out.values), out.width)
        draft.levels, draft.drawn, draft.counts = (
            ctypes.addressof(room.values) for room in (levels, drawn, counts)
        )
        rules = NativeStopRules.of(stop_rules)
        rules.fill_in(draft.stop_rules)
        self._draft(self._lib.outrider_draft, batch, packed, num_tokens_S, rows, key_S, draft)
        return (
            [out.of(i, counts.values[i]) for i in range(num_seqs)],
            [levels.of(i, drawn.values[i]) for i in range(num_seqs)],
        )

    def draft_tree(
        self,
        batch: StepBatch,
        num_nodes_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
        limits: TreeLimits,
    ) -> list[TreeDraft]:
        """See `capabilities.DraftsInOneCall`: all passes of a growing tree in one native call."""
        packed = self._describe(batch)
        num_seqs, most = self._step.num_seqs, max(num_nodes_S.tolist(), default=0)
        num_fed = limits.passes * limits.width
        widths = (most, most, 1, num_fed, num_fed, 1)
        rooms = [_room(num_seqs, width) for width in widths]
        tree = native.Tree(
            *(ctypes.addressof(room.values) for room in rooms),
            most,
            limits.passes,
            limits.width,
            limits.children,
        )
        self._draft(self._lib.outrider_grow, batch, packed, num_nodes_S, rows, key_S, tree, num_fed)
        tokens, parents, counts, fed_tokens, fed_parents, fed_counts = rooms
        return [
            TreeDraft(
                tokens.of(i, counts.values[i]),
                parents.of(i, counts.values[i]),
                fed_tokens.of(i, fed_counts.values[i]),
                fed_parents.of(i, fed_counts.values[i]),
            )
            for i in range(num_seqs)
        ]

    def _draft(
        self,
        function: Callable[..., int],
        batch: StepBatch,
        packed: bytes,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
        result: native.Draft | native.Tree,
        extra: int = 0,
    ) -> None:
        parameters = (
            key_S,
            rows.temperature_R,
            num_tokens_S,
            rows.top_k_R,
            rows.top_p_R,
            rows.min_p_R,
        )
        if any(array.size != self._step.num_seqs for array in parameters):
            raise ValueError("one count, key and set of parameters per sequence")
        arguments = (
            self._model_arg,
            packed,
            self._step_arg,
            native.joined(parameters, _DRAFT_DTYPES),
            ctypes.byref(result),
        )
        code = function(*arguments)
        if code:
            self._repair(code, batch, extra + result.out_width + 1)
            native.check(function(*arguments))
