"""Model families: config.json -> `DecoderConfig`, the description that all our decoders run.

One function per model type, in a file per group of relatives. A model that needs a part which
the description does not have is refused by `UnsupportedByDecoder`, instead of being computed
almost correctly.
"""

from outrider.model.families import (
    cohere,
    deepseek,
    experts,
    falcon,
    gemma,
    gemma_later,
    glm,
    gpt,
    granite,
    lfm,
    llama,
    llama4,
    mamba,
    mamba_first,
    minimax,
    olmo,
    phi,
    qwen_next,
    stablelm,
)
from outrider.model.families.description import DecoderConfig, Layout
from outrider.model.families.reader import (
    FAMILIES,
    Family,
    Reader,
    UnsupportedByDecoder,
    family,
    read_decoder_config,
    stored_dtype,
)

__all__ = [
    "FAMILIES",
    "DecoderConfig",
    "Family",
    "Layout",
    "Reader",
    "UnsupportedByDecoder",
    "cohere",
    "deepseek",
    "experts",
    "falcon",
    "family",
    "gemma",
    "gemma_later",
    "glm",
    "gpt",
    "granite",
    "lfm",
    "llama",
    "llama4",
    "mamba",
    "mamba_first",
    "minimax",
    "olmo",
    "phi",
    "qwen_next",
    "read_decoder_config",
    "stablelm",
    "stored_dtype",
]
