"""Ports for servers that listen half a minute after their port was chosen."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from slime_like.servers import processes
from slime_like.servers.processes import LOWEST_PORT, free_ports


def test_they_are_free_and_no_outgoing_connection_is_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outgoing = tmp_path / "ip_local_port_range"
    outgoing.write_text("20000\t60999\n")
    monkeypatch.setattr(processes, "OUTGOING_PORTS", outgoing)
    ports = free_ports(50)
    assert len(set(ports)) == 50 and all(LOWEST_PORT <= port < 20000 for port in ports)
    for port in ports:
        with socket.socket() as s:
            s.bind(("127.0.0.1", port))


def test_one_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_ports(1)[0]))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(processes, "LOWEST_PORT", port)
        monkeypatch.setattr(processes, "_first_outgoing_port", lambda: port + 1)
        with pytest.raises(
            OSError,
            match=f"127.0.0.1 has 0 free ports from {port} to {port}, 1 are needed",
        ):
            free_ports(1)


def test_where_outgoing_connections_have_nearly_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outgoing = tmp_path / "ip_local_port_range"
    outgoing.write_text("1024 65535")
    monkeypatch.setattr(processes, "OUTGOING_PORTS", outgoing)
    assert all(LOWEST_PORT <= port < 65536 for port in free_ports(3))
