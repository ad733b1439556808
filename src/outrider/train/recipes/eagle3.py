"""An EAGLE-3 head, trained on its own outputs, as in use.

Unroll step 0 reads the target's fused features at every position t; step j reads the head's own
output of step j - 1. A draft that starts at t attends to the true features up to t and then to its
own j positions, so the keys of step 0 are masked causally and those of later steps on the diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.model.head_layers import KeyValue, join
from outrider.model.heads import Eagle3Config, Eagle3Head
from outrider.model.rope import RopeConfig
from outrider.train.config import Eagle3RecipeConfig
from outrider.train.models import rope_theta
from outrider.train.recipes.heads import Depth, FrozenTarget, HeadRecipe


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high layers; vLLM's (2, L/2, L - 3) if the target is deep enough."""
    if num_layers >= 12:
        return (2, num_layers // 2, num_layers - 3)
    low, high = max(0, min(num_layers // 3, num_layers - 3)), num_layers - 1
    return (low, (low + high) // 2, high)


def frequent_ids(tokens: Tensor, vocab_size: int, size: int) -> Tensor:
    """The `size` most frequent ids of a text, ascending; ties go to the lower id."""
    counts_V = torch.bincount(tokens.flatten().long(), minlength=vocab_size)
    order = torch.sort(counts_V, descending=True, stable=True).indices
    return order[:size].sort().values


def new_head(target: FrozenTarget, config: Eagle3RecipeConfig, text: Tensor) -> Eagle3Head:
    shape = target.model.config
    size = min(config.draft_vocab_size or shape.vocab_size, shape.vocab_size)
    head = Eagle3Head(
        Eagle3Config(
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            draft_vocab_size=size,
            taps=config.taps or default_taps(shape.num_hidden_layers),
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=getattr(shape, "num_key_value_heads", shape.num_attention_heads),
            head_dim=shape.hidden_size // shape.num_attention_heads,
            intermediate_size=config.intermediate_size or shape.intermediate_size,
            max_position_embeddings=shape.max_position_embeddings,
            rope=RopeConfig(theta=rope_theta(shape)),
            rms_norm_eps=getattr(shape, "rms_norm_eps", 1e-6),
        )
    )
    ids_W = frequent_ids(text, shape.vocab_size, size)
    head.set_target_ids(ids_W)
    weight_VH = target.head.weight.detach()
    with torch.no_grad():
        assert head.lm_head is not None
        head.lm_head.weight.copy_(weight_VH[ids_W.to(weight_VH.device)])
    return head


class Eagle3Recipe(HeadRecipe):
    def __init__(
        self,
        target: FrozenTarget,
        config: Eagle3RecipeConfig,
        text: Tensor,
        head: Eagle3Head | None = None,
        *,
        answers_only: bool = False,
    ) -> None:
        """Trains `head` further, or a new one whose draft vocabulary is frequent in `text`.

        With `answers_only`, rows are those of `data.pack_answers`, and only drafts of answers
        count.
        """
        head = head or new_head(target, config, text)
        super().__init__(head.to(target.head.weight.device), target, config)
        self.head, self.num_unroll = head, config.num_unroll
        self.answers_only = answers_only
        self.temperature = 1.0  # of the head's distribution; the target's is the teacher's

    def depths(self, tokens_BL: Tensor, step: int, skip: int = 0) -> Iterator[Depth]:
        answers = None
        if self.answers_only:
            answers, tokens_BL = tokens_BL[:, :2], tokens_BL[:, 2:]
            if not tokens_BL.is_cuda:  # no pass over padding; graphs of a GPU want one shape
                tokens_BL = tokens_BL[:, : int(answers[:, 1].max())]
        num_starts = tokens_BL.shape[1] - 1 - self.num_unroll
        if num_starts <= skip:
            raise ConfigError(f"rows of {tokens_BL.shape[1]} are too short for the unroll")
        hidden = self.head.fuse(self.target.taps(tokens_BL, self.head.taps)[:, :num_starts])
        device = tokens_BL.device
        starts = torch.arange(num_starts, device=device)
        counted_BT = (starts >= skip).expand(len(tokens_BL), -1)
        if answers is not None:  # the first draft of start t is token t + 2
            first_B1, end_B1 = answers[:, :1], answers[:, 1:]
            counted_BT = (starts + 2 >= first_B1) & (starts + 2 + self.num_unroll <= end_B1)
        causal = starts[:, None] >= starts
        diagonal = starts[:, None] == starts
        compare = self._sides(tokens_BL)
        seen: list[KeyValue] = []
        for ahead in range(self.num_unroll):
            part = slice(1 + ahead, 1 + ahead + num_starts)
            mask = torch.cat([causal] + [diagonal] * ahead, dim=1)[None, None]
            past = join(seen) if seen else None
            hidden, q_BTW, own = self.head(
                self.target.embed(tokens_BL[:, part]), hidden, (starts + ahead)[None], past, mask
            )
            seen.append(own)
            yield compare(q_BTW / self.temperature, part, counted_BT)

    def _sides(self, tokens_BL: Tensor) -> Callable[[Tensor, slice, Tensor], Depth]:
        """Pairs the head's logits with the target's at the places of a slice, where counted."""
        ids_W = self.head.target_ids
        if not self.answers_only:
            p_BLV = self.target.next_logits(tokens_BL)
            return lambda q, part, counted: Depth(q[counted], p_BLV[:, part][counted], ids_W)
        # Over the draft vocabulary: a target with many ids would take most of the time.
        p_BLX, best_BL = self.target.narrowed(tokens_BL, ids_W)
        places_W = torch.arange(len(ids_W), device=ids_W.device)
        return lambda q, part, counted: Depth(
            q[counted], p_BLX[:, part][counted], places_W, best_N=best_BL[:, part][counted]
        )
