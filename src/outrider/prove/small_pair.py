"""The user's own target and drafter, restricted to an alphabet of three tokens.

A distribution over a whole vocabulary has too many outcomes to test, and classes of outcomes would
hide errors inside a class. So the *models* become small: their distributions after a prompt of the
user, and after every continuation in the alphabet, are restricted to three tokens and renormalised,
as by a grammar. A rule's output on them can be enumerated exactly and tested with a known power,
and they disagree as the user's models do. Probabilities are rounded to thousandths to keep exact
arithmetic cheap; both sides use the rounded values.

The position is the end, the middle or the third quarter of a prompt: where drafter and target
disagree most. The temperature is 1, or 2, 4, 8 if the other two tokens have less than a tenth.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import torch

from outrider.contracts import Draw, Proposal
from outrider.engine.engine import Engine
from outrider.engine.request import Request, Speculation
from outrider.layout import Slice, pack
from outrider.prove.enumerate import Model, Tokens
from outrider.prove.reference import Distribution
from outrider.prove.toys import hashed
from outrider.sampling import SamplingParams, true_vocabulary

SIZE = 3
DEPTH = 4  # contexts of fewer tokens than this have a distribution
GRAIN = 1000
TEMPERATURES = (1.0, 2.0, 4.0, 8.0)
MOST_PROBABLE = 0.9


@dataclass(frozen=True, slots=True)
class SmallPair:
    """Exact distributions after every context; of a long one the last DEPTH - 1 tokens count."""

    target: Model
    draft: Model
    alphabet: tuple[int, ...]  # ids in the models' vocabulary
    prompt: list[int]
    temperature: float
    is_drafters: bool  # False: a made-up distribution, since the drafter has none

    @property
    def disagreement(self) -> float:
        """Total variation of the two distributions at the prompt."""
        pairs = zip(self.target(()), self.draft(()), strict=True)
        return float(sum(abs(p - q) for p, q in pairs) / 2)


def small_pair(engine: Engine, prompts: Seq[list[int]]) -> SmallPair:
    """Reads the distributions from the engine's models. The engine must be idle."""
    best: SmallPair | None = None
    for prompt in _places(prompts):
        p_V = target_logits(engine, prompt, [()])[0]
        drafted = draft_logits(engine, prompt, [()])
        q_V = p_V if drafted is None else drafted[0]
        alphabet = (p_V.softmax(-1) + q_V.softmax(-1)).topk(SIZE).indices.tolist()
        temperature = _temperature(p_V[alphabet])
        target, draft = (_exact(x[alphabet] / temperature) for x in (p_V, q_V))
        pair = SmallPair(
            lambda context, dist=target: dist,  # type: ignore[misc]
            lambda context, dist=draft: dist,  # type: ignore[misc]
            tuple(alphabet),
            prompt,
            temperature,
            drafted is not None,
        )
        if best is None or pair.disagreement > best.disagreement:
            best = pair
    assert best is not None, "no prompt was given"
    return _deepened(engine, best)


def _places(prompts: Seq[list[int]]) -> list[list[int]]:
    cuts = [prompt[: -(-len(prompt) * part // 4)] for prompt in prompts for part in (2, 3, 4)]
    return [list(cut) for cut in dict.fromkeys(map(tuple, cuts))]


def _deepened(engine: Engine, pair: SmallPair) -> SmallPair:
    """The same pair with a distribution after every context."""
    contexts = [c for n in range(DEPTH) for c in product(range(SIZE), repeat=n)]
    ids = [tuple(pair.alphabet[v] for v in context) for context in contexts]
    wanted = list(pair.alphabet)

    def dists(logits_CV: torch.Tensor) -> Model:
        rows = (logits_CV[:, wanted] / pair.temperature).unbind()
        table = {context: _exact(row) for context, row in zip(contexts, rows, strict=True)}
        return lambda context: table[context[1 - DEPTH :]]

    drafted = draft_logits(engine, pair.prompt, ids) if pair.is_drafters else None
    return SmallPair(
        dists(target_logits(engine, pair.prompt, ids)),
        hashed(1, SIZE) if drafted is None else dists(drafted),
        pair.alphabet,
        pair.prompt,
        pair.temperature,
        drafted is not None,
    )


def target_logits(engine: Engine, prompt: list[int], contexts: Seq[Tokens]) -> torch.Tensor:
    """[C, V] of the target after prompt + context, all in one pass over the tree of contexts.

    The prefixes of a context must precede it in `contexts`.
    """
    node_of: dict[Tokens, int] = {(): -1}
    tree = Proposal(parents=[])
    assert tree.parents is not None
    for context in contexts:
        if context:
            node_of[context] = len(tree)
            tree.parents.append(node_of[context[:-1]])
            tree.tokens.append(context[-1])
    if not tree.tokens:
        tree.parents = None
    [scratch] = engine.kv.scratch(1)
    engine.kv.reserve(scratch, len(prompt) + len(tree))
    try:
        batch = pack([Slice(prompt, 0, engine.kv.table(scratch), tree)])
        logits_RV = engine.target.forward(batch).logits_RV.float().cpu()
    finally:
        engine.kv.free(scratch)
    rows = [1 + node_of[context] for context in contexts]
    return true_vocabulary(logits_RV, engine.target.spec.num_tokens)[rows]


def draft_logits(engine: Engine, prompt: list[int], contexts: Seq[Tokens]) -> torch.Tensor | None:
    """[C, V] log q of the engine's own proposer; None if it does not sample from a q."""
    name = engine.default.proposer
    if name is None:
        return None
    proposer = engine.proposers[name]
    rule = "tree" if proposer.trees else "token"
    if not proposer.draws & {Draw.SAMPLED, Draw.WITHOUT_REPLACEMENT} or proposer.needs.taps:
        return None
    views = [
        engine.make_sequence(
            Request(
                id=f"small-pair-{index}",
                prompt=[*prompt, *context],
                params=SamplingParams(temperature=1.0, ignore_eos=True),
                speculation=Speculation(proposer=name, num_draft_tokens=1, verifier=rule),
                seed=index,
            ),
            0,
        )
        for index, context in enumerate(contexts)
    ]
    try:
        dists = [proposal.q for proposal in proposer.propose(views, [1] * len(views))]
    finally:
        for view in views:
            proposer.release(view.id)
    if any(dist is None or len(dist) == 0 for dist in dists):
        return None
    return torch.stack([dist[0].float().cpu() for dist in dists if dist is not None]).log()


def _temperature(logits_A: torch.Tensor) -> float:
    for temperature in TEMPERATURES:
        if float((logits_A / temperature).softmax(-1).max()) <= MOST_PROBABLE:
            break
    return temperature


def _exact(logits_A: torch.Tensor) -> Distribution:
    """softmax in thousandths, at least one for each token."""
    weights = [max(1, round(GRAIN * p)) for p in logits_A.double().softmax(-1).tolist()]
    return tuple(Fraction(weight, sum(weights)) for weight in weights)
