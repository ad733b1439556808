"""One OpenTelemetry span per generating request, with vLLM's attribute names.

Needs the extra `[otel]`. With a `traceparent` header the span is a child of the caller's span.
Spans contain no text and no key.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from time import monotonic, time_ns
from typing import TYPE_CHECKING, Any

from outrider import __version__
from outrider.errors import ConfigError
from outrider.server.logs import request_id
from outrider.statistics import SpeculationStats

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from outrider.server.generation import Generation

# The trace context of the current request; the guard sets it.
traceparent: ContextVar[str] = ContextVar("traceparent", default="")


class Tracing:
    def __init__(self, endpoint: str, *, exporter: SpanExporter | None = None) -> None:
        """`endpoint` takes OTLP over HTTP, e.g. http://localhost:4318/v1/traces."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint)
        except ImportError:
            raise ConfigError("traces need another package: pip install 'outrider[otel]'") from None
        resource = Resource.create({"service.name": "outrider", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("outrider.server")
        self._context = TraceContextTextMapPropagator()

    def record(self, generation: Generation, *, model: str) -> None:
        """Records the span of a generation that has ended, complete or not."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        # The engine's times are monotonic; spans need the time of day.
        offset_ns = time_ns() - int(monotonic() * 1e9)
        span = self._tracer.start_span(
            "llm_request",
            context=self._context.extract({"traceparent": traceparent.get()}),
            kind=SpanKind.SERVER,
            start_time=offset_ns + int(generation.started_s * 1e9),
            attributes={
                "gen_ai.response.model": model,
                "gen_ai.request.id": request_id.get(),
                **attributes(generation),
            },
        )
        if generation.ending != "finished":
            span.set_status(Status(StatusCode.ERROR, generation.ending))
        span.end(offset_ns + int(monotonic() * 1e9))

    def close(self) -> None:
        """Sends the remaining spans. It blocks, so do not call it on the loop."""
        self._provider.shutdown()


def attributes(generation: Generation) -> Mapping[str, Any]:
    ask = generation.ask
    found: dict[str, Any] = {
        "gen_ai.request.n": ask.params.n,
        "gen_ai.request.max_tokens": ask.params.max_tokens,
        "gen_ai.request.temperature": ask.params.temperature,
        "gen_ai.request.top_p": ask.params.top_p,
        "gen_ai.usage.prompt_tokens": sum(map(len, ask.prompts)),
        "gen_ai.usage.completion_tokens": generation.num_completion_tokens,
        "outrider.proposer": ask.speculation.proposer or "none",
        "outrider.verifier": ask.speculation.verifier,
        "outrider.ending": generation.ending,
    }
    stats = SpeculationStats()
    results = [result for result in generation.results if result is not None]
    for result in results:
        stats.merge(result.stats)
    if stats.num_proposals:
        found["outrider.num_draft_tokens"] = stats.num_drafted
        found["outrider.num_accepted_tokens"] = stats.num_accepted
    if results:  # of the first prompt, where there are several
        times = results[0].times
        found["gen_ai.latency.e2e"] = monotonic() - generation.started_s
        if times.admitted_s is not None and times.first_token_s is not None:
            found["gen_ai.latency.time_in_queue"] = times.admitted_s - times.arrived_s
            found["gen_ai.latency.time_to_first_token"] = times.first_token_s - times.arrived_s
    return found
