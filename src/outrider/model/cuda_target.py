"""A target on the GPU kernels, which runs EAGLE-3 heads as well."""

from __future__ import annotations

from outrider.model.borrowed import Borrowed
from outrider.model.cuda_decoder import CudaDecoder
from outrider.model.cuda_eagle3 import CudaEagle3
from outrider.model.heads import Eagle3Head, FastHead, Head


class CudaTarget(CudaDecoder):
    """See `heads.RunsHeads`."""

    def head_weights(self, head: Head) -> tuple[str, ...]:
        return ("int8",) if isinstance(head, Eagle3Head) and head.is_plain else ()

    def make_head(self, head: Head, borrowed: Borrowed, weights: str) -> FastHead:
        assert isinstance(head, Eagle3Head)
        return CudaEagle3(head, borrowed, self, rounded=weights == "int8")
