"""Trains SmolLM2's EAGLE-3 head on the text of `text.py`: `python family/smollm2/head.py`.

The project's recipe with two differences: only answers count, and the target's probabilities are
taken on the draft vocabulary once, for all depths.

Shapes: B rows, L positions, T starts, N compared positions, W draft vocabulary.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from target import load_target
from text import KINDS
from torch import Tensor

from outrider.model.head_layers import KeyValue, join
from outrider.model.heads import Eagle3Head, load_head
from outrider.train.config import Eagle3RecipeConfig, OptimConfig
from outrider.train.data import Shuffle
from outrider.train.recipes.eagle3 import Eagle3Recipe
from outrider.train.recipes.heads import FrozenTarget
from outrider.train.trainer import TrainConfig, train

LEAST_ANSWER = 24
HELD_OUT = 97  # every 97th row is never trained on


class Answers:
    """Rows of `text.py`, each with its prompt's length and its answer's end in front."""

    def __init__(self, rows: dict[str, Tensor], seed: int) -> None:
        parts = [rows["prompt"][:, None], rows["end"][:, None], rows["tokens"]]
        self.rows_BL = torch.cat(parts, dim=1).long()
        self._shuffle = Shuffle(len(self.rows_BL), seed)

    def rows(self, step: int, num_rows: int) -> Tensor:
        return self.rows_BL[[index for _, index in self._shuffle.pick(step, num_rows)]]


class AnswersOnly(Eagle3Recipe):
    def compared(self, packed_BL: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Per depth: the head's logits and the target's probabilities, [N, W] each."""
        prompt_B1, end_B1, tokens_BL = packed_BL[:, :1], packed_BL[:, 1:2], packed_BL[:, 2:]
        num_starts = tokens_BL.shape[1] - 1 - self.num_unroll
        states = self.target.states(tokens_BL)
        taps = torch.stack([states[tap] for tap in self.head.taps], dim=2)
        hidden = self.head.fuse(taps[:, :num_starts])
        p_BLW = self._known(states[-1])
        starts = torch.arange(num_starts, device=tokens_BL.device)
        causal, diagonal = starts[:, None] >= starts, starts[:, None] == starts
        # The first draft of start t is token t + 2.
        in_answer_BT = (starts + 2 >= prompt_B1) & (starts + 2 + self.num_unroll <= end_B1)
        seen: list[KeyValue] = []
        for ahead in range(self.num_unroll):
            part = slice(1 + ahead, 1 + ahead + num_starts)
            mask = torch.cat([causal] + [diagonal] * ahead, dim=1)[None, None]
            hidden, q_BTW, own = self.head(
                self.target.embed(tokens_BL[:, part]),
                hidden,
                (starts + ahead)[None],
                join(seen) if seen else None,
                mask,
            )
            seen.append(own)
            yield q_BTW[in_answer_BT], p_BLW[:, part][in_answer_BT]

    @torch.no_grad()
    def _known(self, last_BLH: Tensor) -> Tensor:
        ids_W = self.head.target_ids
        parts = [self.target.logits(part).float().softmax(-1) for part in last_BLH.split(8)]
        return torch.cat([part[..., ids_W] for part in parts])

    def loss(self, tokens_BL: Tensor, step: int, done: float) -> tuple[Tensor, dict[str, Tensor]]:
        share = torch.tensor(self.config.tvd_share * done, device=tokens_BL.device)
        weights = [self.config.decay**depth for depth in range(self.num_unroll)]
        loss = torch.zeros((), device=tokens_BL.device)
        alphas = []
        for weight, (q_NW, p_NW) in zip(weights, self.compared(tokens_BL), strict=True):
            value, alpha = distil_known(q_NW, p_NW, share)
            loss = loss + weight * value
            alphas.append(alpha)
        survival = torch.stack(alphas).cumprod(0)
        return loss / sum(weights), {"alpha": alphas[0], "length": 1 + survival.sum()}

    @torch.no_grad()
    def measure(self, rows_BL: Tensor, **_: Any) -> dict[str, Any]:
        alphas, same = [], []
        for part_BL in rows_BL.split(16):
            alpha_D, same_D = [], []
            for q_NW, p_NW in self.compared(part_BL):
                alpha_D.append(torch.minimum(p_NW, q_NW.float().softmax(-1)).sum(-1))
                # The target's best token is in the draft vocabulary for sure if it beats the rest.
                best_N, best_id_N = p_NW.max(-1)
                is_known_N = best_N >= 1 - p_NW.sum(-1)
                same_D.append(((q_NW.argmax(-1) == best_id_N) & is_known_N).float())
            alphas.append(torch.stack(alpha_D))
            same.append(torch.stack(same_D))
        alpha_DN, same_DN = torch.cat(alphas, dim=1), torch.cat(same, dim=1)
        return {
            "alpha_by_depth": alpha_DN.mean(1).tolist(),
            "agreement_by_depth": same_DN.mean(1).tolist(),
            "greedy_acceptance_length": 1 + same_DN.cumprod(0).sum(0).mean().item(),
            "positions": same_DN.shape[1],
        }


def distil_known(q_NW: Tensor, p_NW: Tensor, tvd_share: Tensor) -> tuple[Tensor, Tensor]:
    """`losses.distil` for probabilities on the draft vocabulary, averaged over the rows."""
    log_q_NW = q_NW.float().log_softmax(-1)
    goal_NW = p_NW / p_NW.sum(-1, keepdim=True).clamp_min(1e-9)
    kl_N = (goal_NW * (goal_NW.clamp_min(1e-20).log() - log_q_NW)).sum(-1)
    alpha_N = torch.minimum(p_NW, log_q_NW.exp()).sum(-1)
    return ((1 - tvd_share) * kl_N + tvd_share * (1 - alpha_N)).mean(), alpha_N.mean().detach()


def further(folder: Path, target: FrozenTarget, ids_W: Tensor) -> Eagle3Head:
    """The head of `folder` with another draft vocabulary, whose new rows start as the target's."""
    head = load_head(folder, num_layers=target.model.config.num_hidden_layers)
    assert isinstance(head, Eagle3Head)
    assert head.lm_head is not None
    old_W, weight_WH = head.target_ids, head.lm_head.weight.detach()
    own_VH = target.head.weight.detach().float().cpu()
    rows_VH = own_VH + (weight_WH - own_VH[old_W]).mean(0)
    rows_VH[old_W] = weight_WH
    head.set_target_ids(ids_W)
    with torch.no_grad():
        head.lm_head.weight.copy_(rows_VH[ids_W])
    return head.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="the model's GGUF file")
    parser.add_argument("--text", type=Path, required=True, help="what text.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--further", type=Path, help="a head to begin with")
    parser.add_argument("--minutes", type=float, default=17)
    parser.add_argument("--draft-vocab-size", type=int, default=6144)
    parser.add_argument("--intermediate-size", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--num-unroll", type=int, default=5)
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    rows = torch.load(given.text)
    good = rows["end"] - rows["prompt"] >= LEAST_ANSWER
    rows = {name: value[good] for name, value in rows.items()}
    held_out = torch.arange(int(good.sum())) % HELD_OUT == 0
    source = Answers({name: value[~held_out] for name, value in rows.items()}, seed=1)
    measured = Answers({name: value[held_out] for name, value in rows.items()}, seed=1)
    kind_M = rows["kind"][held_out]
    place_L = torch.arange(rows["tokens"].shape[1])
    is_answer = (place_L >= rows["prompt"][:, None]) & (place_L < rows["end"][:, None])
    written = rows["tokens"][is_answer & ~held_out[:, None]].long()
    target = FrozenTarget(load_target(given.target), compiled=on_gpu)
    counts_V = torch.bincount(written, minlength=target.model.config.vocab_size)
    ids_W = counts_V.sort(descending=True, stable=True).indices[: given.draft_vocab_size]
    ids_W = ids_W.sort().values
    recipe = AnswersOnly(
        target,
        Eagle3RecipeConfig(
            num_unroll=given.num_unroll,
            draft_vocab_size=given.draft_vocab_size,
            intermediate_size=given.intermediate_size,
            decay=0.9,
        ),
        written,
        further(given.further, target, ids_W) if given.further else None,
    )

    def measure() -> dict[str, Any]:
        """Over all held-out rows, and over each kind of them."""
        found = {}
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            for number, kind in enumerate(KINDS):
                rows_BL = measured.rows_BL[kind_M == number][:96]
                if len(rows_BL):
                    found[kind] = recipe.measure(rows_BL.to(device))
        return found

    before = measure()
    config = TrainConfig(
        minutes=given.minutes,
        rows_per_step=given.rows,
        optim=OptimConfig(warmup_steps=100),
        bf16=on_gpu,
        checkpoint_every_s=15,
        log_every=50,
        seed=1,
    )
    report = train(recipe, source, config, checkpoint=given.out / "checkpoint.pt")
    recipe.save(given.out / "head")
    record = {
        "num_steps": report.num_steps,
        "seconds": report.seconds,
        "rows": len(source.rows_BL),
        "answer_tokens": len(written),
        "coverage": float(counts_V[ids_W].sum() / counts_V.sum()),
        "results": {"before": before, "after": measure()},
        "curve": report.curve,
    }
    (given.out / "provenance.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
