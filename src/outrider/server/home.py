"""The page at /: what runs here, and where to go."""

from __future__ import annotations

from html import escape

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from outrider import __version__
from outrider.server.service import Service

_STYLE = """:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:44rem;
margin:2rem auto;padding:0 1rem}dt{font-weight:600}dd{margin:0 0 .6rem}
code{font-family:ui-monospace,monospace;overflow-wrap:anywhere}"""
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}


def home_router(service: Service) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/", response_model=None)
    async def home() -> Response:
        return HTMLResponse(page(service), headers=_HEADERS)

    return router


def page(service: Service) -> str:
    served, config = service.served, service.config
    spec, default = served.core.target.spec, served.core.default
    curl = "curl -s HOST/v1/chat/completions -H 'Content-Type: application/json' -d '{...}'"
    facts = {
        "Model": f"{config.model_name}, {spec.num_parameters / 1e6:.0f} million parameters",
        "Context": f"{served.max_model_len} tokens",
        "Drafts": "none" if default.proposer is None else default.proposer,
        "APIs": "OpenAI (/v1), Anthropic (/v1/messages), Ollama (/api), llama-server",
        "Try": curl,
    }
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd><code>{escape(text)}</code></dd>"
        for name, text in facts.items()
    )
    links = "".join(
        f'<li><a href="{path}">{escape(text)}</a></li>'
        for path, text in (
            ("live", "Chat, and watch every step of the drafts"),
            ("docs", "The API, route by route"),
            ("v1/models", "The models"),
            ("metrics", "Figures for Prometheus"),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Outrider</title><style>{_STYLE}</style></head><body>"
        f"<h1>Outrider {escape(__version__)}</h1><dl>{rows}</dl><ul>{links}</ul></body></html>"
    )
