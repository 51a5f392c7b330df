"""HTTP server for the live page of a run, for this machine only."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from slime_like.report.page import json_in_html

HOST = "127.0.0.1"
OWN_NAMES = ("127.0.0.1", "localhost")


class ReportServer(ThreadingHTTPServer):
    """Server of the live page: `GET /TOKEN/` is the page, and `GET /TOKEN/runs.json` the data that
    it polls, with `?timeline` including the ranks' phases. Responses have an ETag; if the browser
    has the current one, the response is an empty 304.

    The token is random, since every user of a machine can reach its loopback ports. Requests with a
    foreign Host header are rejected, because a web page could reach a loopback port through DNS
    rebinding. close: `shutdown`.
    """

    daemon_threads = True

    def __init__(
        self,
        port: int,
        make_page: Callable[[], str],
        make_data: Callable[[bool], object],
        state: Callable[[], str],
    ) -> None:
        """
        Args:
            make_data: Called with whether to include the timeline.
            state: Fingerprint of the runs' files, which changes when they do.
        """
        super().__init__((HOST, port), _Handler)
        self.make_page = make_page
        self.make_data = make_data
        self.state = state
        self.root = f"/{secrets.token_urlsafe(16)}/"
        self.lock = threading.Lock()  # only one thread reads the run's files at a time

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}{self.root}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore browsers that disconnect before the response is complete."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 30.0  # seconds for a request, and for the browser to receive the response

    def do_GET(self) -> None:
        name = self.headers.get("Host", "").rsplit(":", 1)[0]
        if name not in OWN_NAMES:
            return self._respond(403, "text/plain", "only for clients on this machine\n")
        self._respond(*self._page())

    def _page(self) -> tuple[int, str, str, str]:
        """Status, content type, text and ETag. The lock is released before sending."""
        root = self.server.root
        tag = ""
        if not secrets.compare_digest(self.path[: len(root)].encode(), root.encode()):
            return 404, "text/plain", "use the address that slime-like report prints\n", tag
        page, _, query = self.path[len(root) :].partition("?")
        try:
            with self.server.lock:
                if page == "":
                    return 200, "text/html", self.server.make_page(), tag
                if page == "runs.json":
                    tag = f'"{self.server.state()}{query}"'
                    if self.headers.get("If-None-Match") == tag:
                        return 304, "application/json", "", tag
                    data = self.server.make_data(query == "timeline")
                    return 200, "application/json", json_in_html(data), tag
        except (ValueError, OSError) as error:  # a file that is being written
            return 503, "text/plain", f"{error}\n", ""
        return 404, "text/plain", "no such page\n", tag

    def _respond(self, status: int, kind: str, text: str, tag: str = "") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")  # the URL contains the token
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""
