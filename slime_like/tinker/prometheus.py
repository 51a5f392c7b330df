"""Metrics of the server in Prometheus's text format, at /metrics."""

from __future__ import annotations

import importlib.util

from slime_like.tinker.futures import Request
from slime_like.tinker.service import Service

PREFIX = "slime_like_tinker"
SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)  # histogram buckets


class ServerMetrics:
    """Prometheus metrics: request counters are updated when requests end, gauges are read from the
    service on each scrape."""

    def __init__(self, service: Service) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        self._requests = Counter(
            f"{PREFIX}_requests",
            "Finished requests. outcome: ok, user or server (who caused the failure).",
            ["op", "outcome"],
            registry=self.registry,
        )
        self._queued_s = Histogram(
            f"{PREFIX}_waiting_seconds",
            "Seconds from acceptance to execution of a request.",
            ["op"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._execution_s = Histogram(
            f"{PREFIX}_execution_seconds",
            "Execution time of a request, in seconds.",
            ["op"],
            buckets=SECONDS,
            registry=self.registry,
        )
        registry = service.registry
        dispatcher = service.dispatcher
        for name, description, count in (
            ("healthy", "1 while requests are executed.", lambda: service.problem() is None),
            ("waiting_requests", "Queued requests.", lambda: dispatcher.waiting),
            (
                "sessions",
                "Open sessions.",
                lambda: sum(not s.finished for s in registry.sessions.values()),
            ),
            ("models", "Models in training.", lambda: len(registry.live_models())),
            ("samplers", "Sampling sessions.", lambda: len(registry.samplers)),
            (
                "checkpoint_bytes",
                "Bytes of all checkpoints.",
                lambda: sum(c.size for c in registry.checkpoints.values()),
            ),
        ):
            Gauge(f"{PREFIX}_{name}", description, registry=self.registry).set_function(count)

    def done(self, request: Request) -> None:
        """Count a finished request."""
        self._requests.labels(request.op, request.category or "ok").inc()
        if request.started:
            self._queued_s.labels(request.op).observe(request.started - request.created)
            self._execution_s.labels(request.op).observe(request.finished - request.started)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return bytes(generate_latest(self.registry))


def make_metrics(service: Service) -> ServerMetrics | None:
    """None where prometheus_client is not installed."""
    if importlib.util.find_spec("prometheus_client") is None:
        return None
    metrics = ServerMetrics(service)
    service.dispatcher.on_done = metrics.done
    return metrics
