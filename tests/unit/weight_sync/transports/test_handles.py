"""The probe of --update-weight-transport cuda_ipc, with a process that opens the bytes of a CPU
tensor as it would open a handle."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

from slime_like.weight_sync.transports import handles
from slime_like.weight_sync.transports.handles import why_no_handles, without_broken_handles

CPU = torch.device("cpu")


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_another_process_opens_what_an_update_sends() -> None:
    assert why_no_handles(sys.executable, CPU) == ""


def test_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = script(
        tmp_path / "fails", "echo 'RuntimeError: CUDA error: invalid handle' >&2; exit 1"
    )
    assert why_no_handles(fails, CPU) == "RuntimeError: CUDA error: invalid handle"
    wrong = script(tmp_path / "wrong", "echo 7.0")
    assert why_no_handles(wrong, CPU) == "it reads 7.0 there"
    assert "No such file" in why_no_handles(str(tmp_path / "none"), CPU)
    monkeypatch.setattr(handles, "LIMIT_S", 0.2)
    assert why_no_handles(script(tmp_path / "slow", "exec sleep 60"), CPU) == (
        "no answer within 0.2 s"
    )

    def no_handle(*words: object) -> None:
        raise RuntimeError("cuda does not support handles here\nmore")

    monkeypatch.setattr(handles, "tensor_update", no_handle)
    assert why_no_handles(sys.executable, CPU) == "cuda does not support handles here"


def test_one_warning_and_another_transport(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fails = script(tmp_path / "fails", "echo broken >&2; exit 1")
    with caplog.at_level(logging.WARNING):
        assert without_broken_handles("cuda_ipc", fails, CPU) == "tensor"
        assert [record.message for record in caplog.records] == [
            "--update-weight-transport cuda_ipc: another process cannot open memory of cpu "
            "(broken); weights go to the servers as bytes (tensor), which is slow"
        ]
        for transport in ("broadcast", "disk", "tensor"):
            assert without_broken_handles(transport, fails, CPU) == transport
        assert without_broken_handles("cuda_ipc", sys.executable, CPU) == "cuda_ipc"
    assert len(caplog.records) == 1
