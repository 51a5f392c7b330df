"""slime's data sources, which users may subclass: those of ``slime.rollout.data_source``. Import
them from `api.py`."""

from __future__ import annotations

import abc
import copy
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arguments.schema.data import DataConfig
from slime_like.compat.slime.samples import SlimeArgs, SlimeSample
from slime_like.data.prompts import PromptSource
from slime_like.data.tokenizer import load_tokenizer
from slime_like.engines.base import GenerateOutput
from slime_like.import_utils import load_function
from slime_like.rollout.recording import decode, encode
from slime_like.types import PROMPT_MESSAGES, Prompt

Group = list[SlimeSample]


class DataSource(abc.ABC):
    """Interface of the class of --data-source-path, which is created with ``Class(args)``."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """Get `num_samples` groups of --n-samples-per-prompt samples. ``index`` numbers all samples
        of the run, ``group_index`` all groups."""

    @abc.abstractmethod
    def add_samples(self, samples: list[Group]) -> None:
        """Take back groups that were not trained on, finished or not."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Save state for a checkpoint. rollout_id: of its last rollout, from 0."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Resume after this rollout, with the state of `save` for it."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of prompts per epoch."""


class RolloutDataSource(DataSource):
    """The rows of --prompt-data, in the same order as without --data-source-path; empty samples
    without --prompt-data. Its position is stored in a file in --save."""

    def __init__(self, args: SlimeArgs) -> None:
        self.args = args
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}
        self.dataset: PromptSource | None = None
        if args.prompt_data is not None:
            tokenizer = load_tokenizer(
                args.hf_checkpoint, vocab_size=None, trust_remote_code=args.trust_remote_code
            )
            names = [field.name for field in dataclasses.fields(DataConfig)]
            data = DataConfig(**{name: getattr(args, name) for name in names})
            self.dataset = PromptSource(data, tokenizer, raw_messages=True)

    def get_samples(self, num_samples: int) -> list[Group]:
        if self.dataset is None:
            return [self._group(SlimeSample()) for _ in range(num_samples)]
        return [self._group(_sample(prompt)) for prompt in self.dataset.next_prompts(num_samples)]

    def _group(self, sample: SlimeSample) -> Group:
        """Copies of a sample, with the next numbers."""
        group = [copy.deepcopy(sample) for _ in range(self.args.n_samples_per_prompt)]
        for copied in group:
            copied.group_index = self.sample_group_index
            copied.index = self.sample_index
            self.sample_index += 1
        self.sample_group_index += 1
        return group

    def add_samples(self, samples: list[Group]) -> None:
        """Raises RuntimeError, since there is no buffer."""
        raise RuntimeError(f"{type(self).__name__} is read-only: samples cannot be added")

    def save(self, rollout_id: int) -> None:
        """Atomically write `state_dict`."""
        path = _state_path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(self.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def load(self, rollout_id: int | None = None) -> None:
        """Load the state. Raises ValueError if the file is missing, or belongs to other data."""
        if self.args.load is None or rollout_id is None:
            return
        path = _state_path(self.args.load, rollout_id)
        if not path.is_file():
            raise ValueError(f"{path}: no such file; it stores the position in the prompts")
        self.load_state_dict(json.loads(path.read_text(encoding="utf-8")))

    def state_dict(self) -> dict[str, object]:
        """State as plain JSON."""
        return {
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": encode(self.metadata, "the data source's metadata"),
            "prompts": None if self.dataset is None else self.dataset.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sample_group_index = state["sample_group_index"]
        self.sample_index = state["sample_index"]
        self.metadata = decode(state["metadata"])
        if self.dataset is not None:
            self.dataset.load_state_dict(state["prompts"])

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Adds a buffer of returned groups, which come first, in the order of --buffer-filter-path.
    They are saved as well."""

    def __init__(self, args: SlimeArgs) -> None:
        super().__init__(args)
        self.buffer: list[Group] = []
        path = args.buffer_filter_path
        self.buffer_filter = pop_first
        if path is not None:
            self.buffer_filter = load_function(path, "--buffer-filter-path")

    def get_samples(self, num_samples: int) -> list[Group]:
        waiting: list[Group] = []
        if self.buffer and num_samples:
            waiting = self.buffer_filter(self.args, None, self.buffer, num_samples)
        return [*waiting, *super().get_samples(num_samples - len(waiting))]

    def add_samples(self, samples: list[Group]) -> None:
        """Add groups to the buffer. Raises ValueError for a group of the wrong size."""
        size = self.args.n_samples_per_prompt
        for group in samples:
            if len(group) != size:
                raise ValueError(
                    f"add_samples: a group of {len(group)} samples; --n-samples-per-prompt is "
                    f"{size}"
                )
            self.buffer.append(group)

    def get_buffer_length(self) -> int:
        """Number of waiting groups."""
        return len(self.buffer)

    def state_dict(self) -> dict[str, object]:
        rows = [list(map(_to_row, group)) for group in self.buffer]
        return {**super().state_dict(), "buffer": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.buffer = [list(map(_from_row, group)) for group in state["buffer"]]


def pop_first(args: SlimeArgs, rollout_id: int | None, buffer: list[Group], n: int) -> list[Group]:
    """Remove and return the groups that have waited longest."""
    taken = buffer[:n]
    del buffer[:n]
    return taken


def _state_path(folder: str, rollout_id: int) -> Path:
    return Path(folder) / "rollout" / f"global_dataset_state_dict_{rollout_id}.json"


def _sample(prompt: Prompt) -> SlimeSample:
    metadata = dict(prompt.metadata)
    messages = metadata.pop(PROMPT_MESSAGES, prompt.text)
    return SlimeSample(prompt=messages, label=prompt.label, metadata=metadata)


def _to_row(sample: SlimeSample) -> dict[str, object]:
    """Convert a sample to plain JSON; numbers are restored bit by bit."""
    row, outputs = sample.to_dict(), sample.engine_outputs
    row["written"] = [(output.tokens, output.weight_versions) for output in outputs]
    return encode(row, f"sample {sample.index}")


def _from_row(plain: Mapping[str, object]) -> SlimeSample:
    row = decode(plain)
    sample_id = -1 if row["index"] is None else row["index"]
    row["engine_outputs"] = [
        GenerateOutput(sample_id, tokens, (), "stop", versions)
        for tokens, versions in row.pop("written")
    ]
    return SlimeSample.from_dict(row)
