"""The pretend GPU raises what CUDA raises, and counts what makes the host wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.parity.ranks import run_ranks


def run(name: str, folder: Path, environment: dict[str, str]) -> list[Any]:
    target = f"tests.pretend_gpu.device_worker:{name}"
    return run_ranks(target, 2, folder, {}, 100, environment=environment)


def test_what_cuda_forbids_is_an_error(tmp_path: Path, environment: dict[str, str]) -> None:
    expected = {
        "host and device": "Expected all tensors to be on the same device",
        "two devices": "Expected all tensors to be on the same device",
        "numpy": "can't convert cuda",
        "pinned device memory": "cannot pin",
        "host index of a kernel": "Expected all tensors to be on the same device",
        "device index of a host tensor": "indices should be either on cpu",
        "no such device": "invalid device ordinal",
        "host tensor in NCCL": "No backend type associated with device type cpu",
        "holes in NCCL": "Tensors must be contiguous",
        "random state of the device": "RNG state must be a torch.ByteTensor",
    }
    for found in run("errors", tmp_path, environment):
        assert found.keys() == expected.keys()
        assert [n for n, words in expected.items() if words not in found[n]] == [], found


def test_memory_and_copies(tmp_path: Path, environment: dict[str, str]) -> None:
    for found in run("late_copies", tmp_path, environment):
        assert found["fresh"] is True
        assert found["allocated"] is True
        assert found["early"] != [0.0, 1.0, 2.0, 3.0], "a copy that does not block arrives late"
        assert found["late"] == [0.0, 1.0, 2.0, 3.0]
        assert "pinned memory was written" in found["written"]


def test_waits_are_counted(tmp_path: Path, environment: dict[str, str]) -> None:
    for found in run("waits", tmp_path, environment):
        assert found == {
            "item": [["item", "item", True, 1]],
            "nonzero": [["nonzero", "sync op", True, 1]],
            "mask": [["mask", "sync op", True, 1], ["mask", "mask index", True, 1]],
            "fill": [],
            "to the host": [["to the host", "D2H", True, 1]],
            "to the device": [["to the device", "H2D", True, 1]],
            "pinned, without a wait": [["pinned, without a wait", "H2D async (pinned)", False, 1]],
            "not pinned": [["not pinned", "H2D async (pageable)", False, 1]],
            "arithmetic": [],
        }


def test_collectives(tmp_path: Path, environment: dict[str, str]) -> None:
    first, second = run("collectives", tmp_path, environment)
    assert (first["device"], second["device"]) == ("cuda:0", "cuda:1")
    assert (first.pop("share"), second.pop("share")) == ([3.0], [30.0])
    for found in (first, second):
        assert found["total"] == [3.0, 3.0] and found["host"] == 3.0
        assert found["gathered"] == [1.0, 1.0, 2.0, 2.0]
        assert found["parts"] == [[0.0], [1.0, 1.0, 1.0]]
