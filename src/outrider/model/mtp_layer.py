"""The MTP layer of a target: one more decoder layer of the target's kind, which drafts.

Row i reads the target's last state of token i, after its norm, and the embedding of token i + 1,
both normalised and projected to one input. It guesses token i + 2; the next row reads its output.
The decoder layer, the last norm and the output head are a model of one layer that begins with these
inputs. So every family runs here as it runs as a target, quantised files included.

Shapes: T tokens of a pass, R rows with logits, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.contracts import Begun, Model, StepBatch
from outrider.errors import ModelError
from outrider.model.borrowed import Borrowed, borrow
from outrider.model.checkpoints import open_checkpoint
from outrider.model.dialects.mtp import Names, Spliced, find_mtp
from outrider.model.families import UnsupportedByDecoder, read_decoder_config
from outrider.model.families.description import DecoderConfig, one_layer
from outrider.model.native_model import NativeModel
from outrider.model.tensors import Source
from outrider.model.torch_decoder import TorchDecoder
from outrider.model.weights import read_config, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What makes inputs of embeddings and hidden states, and the norm after the layer."""

    embedding_norm_H: Tensor
    hidden_norm_H: Tensor
    projection: Tensor  # [H, 2 * H]
    final_norm_H: Tensor | None
    eps: float
    hidden_first: bool
    feeds_normed: bool

    def inputs(self, embeds_TH: Tensor, states_TH: Tensor) -> Tensor:
        """[T, H]: what the layer reads."""
        embeds_TH = self._normed(embeds_TH, self.embedding_norm_H)
        states_TH = self._normed(states_TH.to(embeds_TH), self.hidden_norm_H)
        both = (states_TH, embeds_TH) if self.hidden_first else (embeds_TH, states_TH)
        return F.linear(torch.cat(both, dim=-1), self.projection)

    def fed_back(self, output_RH: Tensor) -> Tensor:
        """What the next row reads instead of the target's state."""
        if self.feeds_normed and self.final_norm_H is not None:
            return self._normed(output_RH, self.final_norm_H)
        return output_RH

    def _normed(self, x: Tensor, weight_H: Tensor) -> Tensor:
        return F.rms_norm(x, weight_H.shape, weight_H, self.eps)


class MtpLayer:
    """Drafts row by row: `use`, then `run`. The caller draws the tokens."""

    def __init__(
        self, body: Model, ends: Ends, borrowed: Borrowed, num_draft_tokens: int | None = None
    ) -> None:
        """`body` decodes one layer; `num_draft_tokens` is what its checkpoint recommends."""
        self.num_draft_tokens = num_draft_tokens
        self.body = body
        self.borrowed = borrowed
        self._ends = ends
        self._states_TH = torch.empty(0)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self.body.allocate(num_blocks, block_size)

    def use(self, states_TH: Tensor) -> None:
        """The next pass reads these states, one for each token of its batch."""
        self._states_TH = states_TH

    @torch.no_grad()
    def run(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """States to feed back and logits, [R, H] and [R, V], of the rows that the batch asks for.

        The logits are valid until the next pass.
        """
        embeds_TH = self.borrowed.embed(batch.tokens_T.tolist())
        batch.begun = Begun(0, self._ends.inputs(embeds_TH, self._states_TH))
        batch.taps = (1,)
        output = self.body.forward(batch)
        output_RH = output.taps[1][torch.from_numpy(batch.logit_rows_R).to(embeds_TH.device)]
        if self._ends.final_norm_H is None:  # the body's norm is the target's
            return output_RH, self.borrowed.logits(output_RH).float()
        return self._ends.fed_back(output_RH), output.logits_RV


def holds_mtp(folder: Path) -> bool:
    """Whether a target that our decoder runs holds an MTP layer; False for what cannot be read."""
    try:
        config = read_decoder_config(read_config(folder))
        return find_mtp(open_checkpoint(folder).names(), config.family) is not None
    except ModelError:
        return False


def load_mtp(target: Model, folder: Path, apart: Path | None, weights: str) -> MtpLayer:
    """The MTP layer of a target, which is loaded from `folder`; `apart`: from a folder of its own.

    `weights`: the dtype for the native engine, which runs it where it runs the target. Raises
    ModelError, one line, for a folder without such a layer and for one that does not fit.
    """
    try:
        config = read_decoder_config(read_config(folder))
    except UnsupportedByDecoder as error:
        raise ModelError(f"an MTP layer needs a target of our own decoder: {error}") from None
    whole = open_checkpoint(folder)
    own = whole if apart is None else open_checkpoint(apart)
    names = find_mtp(own.names(), config.family)
    if names is None:
        raise ModelError(f"{apart or folder} holds no MTP layer")
    one = one_layer(config, sparse=_has_experts(own, names, config))
    source = Spliced(whole, own, names, one)
    device = getattr(target, "device", torch.device("cpu"))
    dtype = getattr(target, "dtype", None) if device.type != "cpu" else torch.float32
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
    body = _body(target, source, one, weights, dtype)
    ends = _ends(own, names, one, device, dtype)
    return MtpLayer(body, ends, borrow(folder, device, dtype), _recommended(apart))


def _recommended(apart: Path | None) -> int | None:
    """What the config of a layer in a folder of its own says. A target's says how many layers it
    has, each of which can draft any number of tokens."""
    config = read_json(apart / "config.json") if apart is not None else {}
    if "speculators_config" in config:
        from outrider.model.dialects.speculators import num_draft_tokens

        return num_draft_tokens(config)
    steps = config.get("num_speculative_steps")
    return steps if isinstance(steps, int) else None


def _has_experts(own: Source, names: Names, config: DecoderConfig) -> bool:
    router = f"{names.layer}{config.layout.experts.router}"
    return any(f"{router}.{kind}" in own for kind in ("weight", "qweight", "weight_packed"))


def _body(
    target: Model, source: Spliced, config: DecoderConfig, weights: str, dtype: torch.dtype
) -> Model:
    one = target.spec.kv_bytes_per_token // target.spec.num_layers
    spec = replace(target.spec, name="mtp", num_layers=1, kv_bytes_per_token=one)
    if isinstance(target, NativeModel):
        from outrider.model.native_decoder import NativeDecoder

        return NativeDecoder.read(source, config, spec, dtype=weights)
    return TorchDecoder.read(
        source,
        config,
        name=spec.name,
        num_tokens=spec.num_tokens,
        eos_ids=spec.eos_ids,
        device=getattr(target, "device", torch.device("cpu")),
        dtype=dtype,
    )


def _ends(
    own: Source, names: Names, config: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> Ends:
    size = config.hidden_size

    def read(name: str, *shape: int) -> Tensor:
        weight = own.tensor(f"{name}.weight", shape)
        if not bool(torch.isfinite(weight).all()):
            raise ModelError(f"{name} has values that are no numbers: the file is damaged")
        return weight.to(device, dtype).contiguous()

    def norm(name: str) -> Tensor:
        return read(name, size) + config.norm_shift

    return Ends(
        embedding_norm_H=norm(names.embedding_norm),
        hidden_norm_H=norm(names.hidden_norm),
        projection=read(names.projection, size, 2 * size),
        final_norm_H=norm(names.final_norm) if names.final_norm else None,
        eps=config.norm_eps,
        hidden_first=names.hidden_first,
        feeds_normed=names.feeds_normed,
    )
