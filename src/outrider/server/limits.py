"""The limits that no request may exceed; the server's parameters are in `server_config.py`."""

from __future__ import annotations

# Without any one of these, a real server once lost memory or minutes.
MAX_PROMPTS = 64
MAX_BEST_OF = 16
MAX_MESSAGES = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_NAME_CHARS = 256
MAX_TOOLS = 1024
