"""What can be said about a server, and the limits that no request may exceed."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass

from outrider.errors import ConfigError

# Each of these was once missing in a real server, and cost it memory or minutes.
MAX_N = 16
MAX_PROMPTS = 64
MAX_MESSAGES = 1024
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_DRAFT_TOKENS = 128
MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Durations are seconds. Refuses what would be open to strangers or cannot work."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # empty: everybody who can connect
    model_name: str = "model"  # what clients call it
    proposers: tuple[str, ...] = ("ngram", "suffix", "prediction")  # besides the default one
    chat_template: str | None = None  # None: the model's own
    max_queue: int = 256  # sequences waiting for a place in the batch
    queue_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0  # 0: on SIGTERM, drop what is running
    stall_timeout_s: float = 120.0  # a step that takes longer fails /health
    body_timeout_s: float = 20.0
    send_timeout_s: float = 60.0  # a client that reads nothing for so long is dropped
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 32 << 10
    log_prompts: bool = False  # otherwise no text of a request is ever in a log
    otlp_endpoint: str | None = None  # where traces go, OTLP over HTTP
    pad: bool | None = None  # frame sizes in buckets; None: where not only this machine listens
    paced: float | None = None  # tokens per second and stream, at a constant rate

    def __post_init__(self) -> None:
        for name in ("queue_timeout_s", "stall_timeout_s", "body_timeout_s", "send_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a positive number, not {getattr(self, name)}")
        if not 0 <= self.drain_timeout_s < math.inf:
            raise ConfigError(f"drain_timeout_s must be 0 or more, not {self.drain_timeout_s}")
        if self.paced is not None and not 0 < self.paced <= 10_000:
            raise ConfigError(f"paced must be in (0, 10000] tokens per second, not {self.paced}")
        if self.max_queue < 1:
            raise ConfigError(f"max_queue must be at least 1, not {self.max_queue}")
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port must be in 0..65535, not {self.port}")
        if any(not key or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key must be printable ASCII and not empty")
        if not self.is_local and not self.api_keys:
            raise ConfigError(
                f"{self.host} is open to other machines: set an API key "
                "(--api-key-file FILE or OUTRIDER_API_KEY), or bind 127.0.0.1"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def pads(self) -> bool:
        return not self.is_local if self.pad is None else self.pad
