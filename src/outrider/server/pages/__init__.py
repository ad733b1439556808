"""The pages for browsers: a chat at /, and the routes of the API at /docs.

They load nothing from elsewhere. Scripts read the API as any other client does.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from outrider import __version__
from outrider.server.service import Service

_FOLDER = Path(__file__).parent
_FILES = {
    "/docs": ("docs.html", "text/html"),
    "/page/docs.js": ("docs.js", "text/javascript"),
    "/page/chat.js": ("chat.js", "text/javascript"),
    "/page/page.css": ("page.css", "text/css"),
}
# Text of a model is data. If a browser took it for markup, these headers would still stop scripts.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def pages_router(service: Service) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/", response_model=None)
    async def home() -> Response:
        return home_page(facts(service))

    @router.get("/docs", response_model=None)
    @router.get("/page/{name}", response_model=None)
    async def file(name: str = "") -> Response:
        found = page_file(f"/page/{name}" if name else "/docs")
        return found or Response(status_code=404)

    return router


def page_file(path: str) -> Response | None:
    """A file of the pages; None if there is none at this path."""
    if path not in _FILES:
        return None
    name, kind = _FILES[path]
    return Response((_FOLDER / name).read_bytes(), media_type=kind, headers=HEADERS)


def home_page(rows: dict[str, str]) -> Response:
    """The chat, with facts on what runs here."""
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in rows.items()
    )
    text = (_FOLDER / "home.html").read_text(encoding="utf-8")
    text = text.replace("{version}", escape(__version__)).replace("{facts}", shown)
    return Response(text, media_type="text/html", headers=HEADERS)


def facts(service: Service) -> dict[str, str]:
    served, config = service.served, service.config
    spec, default = served.core.target.spec, served.core.default
    return {
        "Model": f"{config.model_name}, {spec.num_parameters / 1e6:.0f} million parameters",
        "Context": f"{served.max_model_len} tokens",
        "Drafts": "none" if default.proposer is None else default.proposer,
        "APIs": "OpenAI (/v1), Anthropic (/v1/messages), Ollama (/api), llama-server",
    }
