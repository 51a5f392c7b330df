"""The files of a conversion outlive a failure at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime_like.conversion.shards import write_shards
from slime_like.weights.export_plan import TensorPlan
from slime_like.weights.safetensors_writer import ShardPlan, plan_shards


def test_a_full_disk_at_the_end_loses_no_file(tmp_path: Path) -> None:
    plans = [TensorPlan(name, (4,), torch.float32) for name in "abc"]
    shards = plan_shards(plans, 16)
    written = []

    def stream(file: ShardPlan) -> Iterator[tuple[str, Tensor]]:
        written.append(file.file_name)
        yield from ((plan.name, torch.ones(4)) for plan in file.tensors)

    def convert(text: str, folder: Path = tmp_path / "out") -> int:
        def complete(partial: Path) -> None:
            (partial / "config.json").write_text(text)
            if not text:
                raise OSError(28, "No space left on device")

        settings = {"workers": 1, "advance": lambda size: None}
        return write_shards(folder, shards, "origin", stream, complete, **settings)  # type: ignore[arg-type]

    with pytest.raises(OSError, match="No space left"):
        convert("")
    assert (convert("{}"), len(written)) == (3, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", *(shard.file_name for shard in shards)}
    (tmp_path / "link").symlink_to(tmp_path / "out")
    assert convert("[]", tmp_path / "link") == 0 and (tmp_path / "link").is_symlink()
    assert (tmp_path / "out" / "config.json").read_text() == "[]"
