"""Models: from a folder or a name to something that implements `contracts.Model`."""

from outrider.model.bundled import bundled_path
from outrider.model.load import load_model

__all__ = ["bundled_path", "load_model"]
