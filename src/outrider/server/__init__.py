"""The OpenAI-compatible server: routes over one batching engine. Needs the extra `[server]`."""
