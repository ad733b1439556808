"""The contracts: what travels through one engine step, and which part may change it.

A step is   propose -> reserve -> forward -> verify -> commit.   Each noun below is one arrow.

Shape legend: S sequences in the pass, T tokens of the pass (all sequences, packed), R rows whose
logits were asked for, N draft nodes of one sequence, V vocabulary, H hidden size.
Everything that describes the pass is host data (NumPy, lists of int): models move what they need.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from outrider.kv.cache import KVCache
    from outrider.model.tokenizer import Tokenizer
    from outrider.sampling import RowDraws, SamplingParams

IntArray = npt.NDArray[np.int32]


class Draw(enum.Enum):
    """What a proposal's tokens were drawn from: a verifier must know it to be exact."""

    DETERMINISTIC = "deterministic"  # a function of the context: q is one-hot
    SAMPLED = "sampled"  # each token independently from its row of q
    WITHOUT_REPLACEMENT = "without-replacement"  # siblings from q, earlier siblings removed
    COUPLED = "coupled"  # argmax(log q + g) with the *target's* noise g: sample-match only


class Stream(enum.IntEnum):
    """Independent noise for independent decisions (see `outrider.noise`)."""

    TARGET = 0  # the target's own draw; coupled drafters share it
    DRAFT = 1  # what a SAMPLED drafter draws with
    ACCEPT = 2  # the uniforms of the ratio rules
    RESIDUAL = 3  # correction and bonus tokens of the ratio rules


class Begun(NamedTuple):
    """The states of the last committed token and the drafts after the first `layer` layers.

    Their K/V is in the sequence's slots: the verifying pass may continue from here.
    """

    layer: int
    states_NH: torch.Tensor  # as a tap gives them; one row more than there are drafts


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a drafter stops by itself, for one sequence.

    A draft's *level* says by how much its score beats the runner-up's, the noise of its draw
    included; `chances[level]` is how often such a draft is accepted, and along a chain they
    multiply. If the product is below `floors[n]`, with n drafts in the whole pass so far, the draft
    is left out and the chain ends. It also ends after a draft whose product exceeds its floor by
    less than `toll` divided by the number of sequences still drafting. Without floors nothing is
    left out.
    All sequences of a pass have the same floors and toll.

    For draws that sample-match judges only: under a ratio rule, leaving out a token that was drawn
    is a bias.
    """

    chances: Seq[float]  # NUM_LEVELS of them
    floors: Seq[float] = ()
    toll: float = 0.0


NUM_LEVELS, LEVEL_STEP = 25, 0.25  # the last level has all margins from its own on


class Found(NamedTuple):
    """The result of a look-up, and whether the draft is this or its beginning."""

    tokens: list[int]
    parents: list[int] | None
    is_taken: bool


class Drafted(NamedTuple):
    """What an executor that drafted by plan (see `draft_plans`) adds to the proposal."""

    draft_s: float  # of the step, all sequences together
    pass_s: float
    pass_tokens: int
    num_fed: int | None = None  # drafts whose K/V the drafter's model holds; None: it did not draft
    found: Found | None = None
    # [n, F]: the target's hidden states of the last n tokens that were computed, for drafters that
    # read them.
    states_nF: torch.Tensor | None = None


@dataclass(slots=True)
class Proposal:
    """A tree of drafted tokens for one sequence; a chain is the tree with one child each.

    `parents[i] < i` is the node that node i continues, -1 the root (the last committed token);
    `parents is None` means a chain. Siblings are in the order of their draws. `q` is the
    distribution of the draws, one row per node; None exactly if no rule needs it.
    `levels` of a draft under a `StopRule`: one per node, and of one more token that was
    left out.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] | None = None
    draw: Draw = Draw.DETERMINISTIC
    q: torch.Tensor | None = None  # [N, V] float32
    source: str = ""
    begun: Begun | None = None
    levels: list[int] | None = None
    drafted: Drafted | None = None  # None: the proposer drafted it

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Verdict:
    """The accepted nodes of a proposal, then exactly one token of the target's own.

    `path` are node indices from the root down; `next_token` is the correction (a node was
    rejected) or the bonus (a leaf was reached). A verdict always emits `len(path) + 1` tokens.
    `draws` are the target's draws at every row (root first) when the rule made them.
    """

    path: list[int]
    next_token: int
    draws: list[int] | None = None


class Edits(Protocol):
    """The history-dependent part of a request's processing: bans, bias, penalties."""

    def apply(self, row_V: torch.Tensor, tokens: list[int], path: Seq[int]) -> None:
        """Edits a row of logits in place, for the position after `tokens + path`.

        `tokens` are the committed ones, which only grow from call to call; `path` are guesses.
        """
        ...


class SequenceView(Protocol):
    """What proposers, verifiers and policies may see of a sequence. Read-only for them."""

    id: int  # unique in the engine's life
    tokens: list[int]  # every committed token, prompt first; grows, never shrinks
    num_prompt_tokens: int
    num_computed: int  # tokens whose K/V the target holds: all but the last while decoding
    params: SamplingParams
    seed: int  # resolved: never None
    sample_index: int  # which of the request's n samples
    draw: Draw  # the distribution sampling proposers must use: COUPLED or SAMPLED
    finish_ids: frozenset[int]  # ids that end the sequence: nothing is drafted past them
    prediction: list[int]  # the caller's guess of the output, tokenised; often empty
    salt: str  # tenants with different salts share nothing

    @property
    def stop_rule(self) -> StopRule | None:
        """For this step's draft, if the proposer follows stop rules."""
        ...

    @property
    def edits(self) -> Edits | None:
        """Bans, bias, penalties; None if the request has none."""
        ...


@dataclass(slots=True)
class StepBatch:
    """One ragged pass over S sequences: prefill chunks, roots and draft nodes alike.

    Tokens are packed sequence by sequence; those of sequence s are
    `starts_S1[s]:starts_S1[s+1]`. The j-th of them is written to the *logical slot*
    `context_S[s] + j`, which lies in physical block `tables_SW[s, slot // block_size]`.
    It attends to logical slots `0..context_S[s]-1`, to itself and to its ancestors among the new
    tokens: `parents_T[t]` is the parent's index *within the sequence's new tokens* (-1: only the
    context). `parents_T is None`: every sequence is a chain, i.e. plain causal attention.
    """

    tokens_T: IntArray
    positions_T: IntArray
    starts_S1: IntArray
    context_S: IntArray
    tables_SW: IntArray  # padded with -1
    logit_rows_R: IntArray  # indices into T
    parents_T: IntArray | None = None
    taps: tuple[int, ...] = ()  # k: hidden state after layer k (0 = embeddings), for all T
    exit_layer: int | None = None  # stop after this many layers, then norm and head
    begun: Begun | None = None  # for all T: the pass starts above the layer (`Continues`)
    draws: RowDraws | None = None  # a model that can may draw the rows' tokens in the same pass


@dataclass(slots=True)
class StepOutput:
    logits_RV: torch.Tensor  # float32, on the model's device; valid until the next forward
    taps: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [T, H]
    draws: list[int] | None = None  # what `StepBatch.draws` asked for, if the model did it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The facts about a model that other parts of the engine need."""

    name: str
    vocab_size: int  # width of the logits
    num_tokens: int  # ids below this mean something; the rest is padding and never emitted
    num_layers: int
    hidden_size: int
    max_positions: int
    kv_bytes_per_token: int
    num_parameters: int
    eos_ids: tuple[int, ...] = ()
    # The weights with which a draft model beside it is fastest; None: the engine's own dtype.
    draft_dtype: str | None = None
    # Why `max_positions` is less than the model is configured for; "" if it is not.
    shortened: str = ""


class OwnsKV(Protocol):
    """The owner of a paged KV store; `allocate` is called once, before the first pass."""

    def allocate(self, num_blocks: int, block_size: int) -> None: ...


class Model(OwnsKV, Protocol):
    """A causal language model. `forward` writes the K/V of every token of the batch and reads what
    earlier passes wrote; it must not touch any other slot.
    """

    spec: ModelSpec

    def forward(self, batch: StepBatch) -> StepOutput: ...

    def copy_slots(self, source: IntArray, target: IntArray) -> None:
        """Copies the K/V of physical slots; all sources are read before any target is written."""
        ...


@dataclass(frozen=True, slots=True)
class Needs:
    """What a proposer asks of the engine beyond the tokens."""

    taps: tuple[int, ...] = ()
    # Whether it also drafts in the pass over the prompt, like proposers with deterministic drafts.
    # Model drafters skip this step, so that the first token is not delayed.
    early: bool = False
    every_step: bool = True  # False: `observe` is skipped for steps without drafts
    stop_rules: bool = False  # it follows `SequenceView.stop_rule`
    # The states of several steps without drafts may come with the last one, as `Drafted.states_nF`.
    late_states: bool = False


@dataclass(slots=True)
class Observation:
    """The outcome of one sequence's step, which its proposer gets after the commit."""

    proposal: Proposal
    verdict: Verdict | None  # None: a prefill chunk, nothing was drawn
    # layer -> [n, H]: hidden states of the tokens this step committed to the KV, in order
    taps: dict[int, torch.Tensor] = field(default_factory=dict)
    start: int = 0  # index in the text of the first of these; a cached prefix is skipped


class Proposer(Protocol):
    """Drafts. May be arbitrarily wrong: the verifier makes the output right."""

    name: str
    draws: frozenset[Draw]  # what it can draw from; the engine checks the pairing
    trees: bool  # whether it may return a tree
    needs: Needs

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        """At most `budgets[i] > 0` nodes for `views[i]`; an empty proposal is always fine."""
        ...

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        """Called after every step of a sequence that names this proposer, drafts or not, unless
        its `needs` say otherwise."""
        ...

    def release(self, sequence_id: int) -> None:
        """Forget a sequence: finished, cancelled or preempted. Unknown ids are fine."""
        ...


@runtime_checkable
class HasModel(Protocol):
    """A proposer with a model of its own, whose cost and memory others can ask for."""

    @property
    def model(self) -> Model | None:
        """The model that drafts; None if torch modules draft."""
        ...


@runtime_checkable
class ReplacesWeights(Protocol):
    """A proposer whose trained weights can be exchanged between two steps."""

    def replace_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Takes other weights of the same names and shapes; its state of sequences stays."""
        ...


@runtime_checkable
class Recommends(Protocol):
    """A proposer whose checkpoint may say how many tokens a step it is for."""

    @property
    def recommended(self) -> int | None:
        """What those who trained it recommend; None: they say nothing."""
        ...


class ProposerDefaults:
    """The members of a proposer that a registered class may leave out.

    Its drafts are chains that are a function of the context. `build` calls the class with the
    user's options as keywords.
    """

    draws = frozenset({Draw.DETERMINISTIC})
    trees = False
    needs = Needs()

    @classmethod
    def build(cls, context: ProposerContext) -> Any:
        options = {}
        for name, parameter in signature(cls).parameters.items():
            named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if named and name in context.options:
                options[name] = context.options[name]
        return cls(**options)

    def release(self, sequence_id: int) -> None:
        """There is nothing to forget."""


class LoadModel(Protocol):
    """Loads a model onto the engine's device, with the engine's dtype or `dtype`.

    Does not check its vocabulary.
    """

    def __call__(self, name: str, *, dtype: str | None = None) -> Model: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerContext:
    """What a proposer class may build itself from: `Class.build(context) -> Proposer`."""

    target: Model
    model: str = ""  # folder or name of the target
    target_kv: KVCache  # slots from `view.num_computed` on may be overwritten while drafting
    tokenizer: Tokenizer  # the target's
    drafter: str | None  # folder or name of the draft model or head the user chose
    # The proposer that drafts with it, or with a layer of the target's own; None: there is none.
    drafter_proposer: str | None = None
    load_drafter: LoadModel  # also checks that it shares the target's vocabulary
    load_model: LoadModel
    make_kv: Callable[[OwnsKV], KVCache]  # allocates the KV store and its bookkeeping
    proposer: Callable[[str], Proposer]  # another one of this engine: built once, shared
    options: Mapping[str, object] = field(default_factory=dict)


class Distributions(Protocol):
    """The target's distribution at every row of the step, after all request processing.

    V is the number of *true* tokens: padding of the embedding never reaches a distribution.

    Rows are grouped by sequence: `starts[i]` is the row of sequence i's root and the row of its
    node j is `starts[i] + 1 + j`. Row r predicts the token *after* the node it belongs to.
    """

    starts: list[int]

    def draw(self) -> list[int]:
        """The target's own draw at every row, with TARGET noise (greedy rows: the argmax)."""
        ...

    def probs(self, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop as normalised float32 probabilities, [stop - start, V]."""
        ...


class Verifier(Protocol):
    """An acceptance rule. Stateless.

    Ratio rules use nodes after the last one they accept, and the next step drafts those positions
    again: SAMPLED draws must be keyed by step (the committed length) and node, never by position
    alone, or they return with a known bias. Which nodes exist must not depend on their tokens.
    """

    name: str
    draws: frozenset[Draw]  # the draft distributions it is exact for
    trees: bool
    needs_draws_alone: bool  # looks at `Distributions.draw()` only

    def verify(
        self, views: Seq[SequenceView], proposals: Seq[Proposal], distributions: Distributions
    ) -> list[Verdict]: ...


class ControlledView(SequenceView, Protocol):
    """What a policy sees of a sequence as well."""

    proposer: str | None  # None: no proposer, or one that is switched off
    adaptive: bool  # its K is the policy's choice, not the request's own
