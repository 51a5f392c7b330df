"""``data_source`` of slime's rollout functions: the run's prompts and waiting groups."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from slime_like.compat.slime.samples import SlimeArgs, SlimeSample, from_slime, to_slime_with_output
from slime_like.data.group_buffer import Choose, GroupBuffer, PendingGroup
from slime_like.samples.episodes import complete
from slime_like.types import Prompt, Sample


class DataSource:
    """The data source of one function call, usable from any thread.

    Args:
        choose: Selects the waiting groups that come first.
        flag: Flag of the function, for messages.
    """

    def __init__(
        self, buffer: GroupBuffer, choose: Choose, args: SlimeArgs, tokenizer: object, flag: str
    ) -> None:
        self._buffer = buffer
        self._choose = choose
        self._args = args
        self._tokenizer = tokenizer
        self._flag = flag
        self._prompts: dict[int, Prompt] = {}  # groups that were handed out and not returned
        self._lock = threading.Lock()

    def get_samples(self, num_samples: int) -> list[list[SlimeSample]]:
        """Get `num_samples` groups of --n-samples-per-prompt samples: first waiting groups, then
        new prompts."""
        if num_samples < 0:
            raise ValueError(f"{self._flag}: data_source.get_samples({num_samples})")
        with self._lock:
            groups, _ = self._buffer.take(num_samples, self._choose)
            self._prompts |= {group.group_id: group.prompt for group in groups}
        return [list(map(to_slime_with_output, complete(group.samples))) for group in groups]

    def add_samples(self, samples: Sequence[Sequence[SlimeSample]]) -> None:
        """Return groups of this call, in their current state, for the next rollout; checkpoints
        include them. Raises ValueError for other groups."""
        for group in samples:
            group_id = group[0].group_index if group else None
            with self._lock:
                prompt = None if group_id is None else self._prompts.pop(group_id, None)
                if prompt is None:
                    raise ValueError(
                        f"{self._flag}: data_source.add_samples: group {group_id} was not returned "
                        "by get_samples in this rollout, or was added already"
                    )
                self._buffer.requeue([PendingGroup(prompt, self._read_group(group, prompt))])

    def get_buffer_length(self) -> int:
        """Number of waiting groups."""
        return len(self._buffer.waiting)

    def __len__(self) -> int:
        """Number of prompts per epoch."""
        return len(self._buffer.source)

    def _read_group(self, group: Sequence[SlimeSample], prompt: Prompt) -> tuple[Sample, ...]:
        """The group's samples in order of their number; they are unfinished unless they are
        COMPLETED, TRUNCATED or FAILED."""
        empty = {s.sample_id: s for s in complete(self._buffer.empty_group(prompt).samples)}
        if sorted(s.index if s.index is not None else -1 for s in group) != sorted(empty):
            raise ValueError(
                f"{self._flag}: data_source.add_samples: group {prompt.group_id} has the samples "
                f"{[s.index for s in group]}, must be {sorted(empty)}"
            )
        read = []
        for sample in sorted(group, key=lambda s: s.index or 0):
            assert sample.index is not None
            before = ours = empty[sample.index]
            if sample.response_length:
                ours = from_slime(
                    sample,
                    before,
                    sample.engine_outputs,
                    self._args,
                    self._tokenizer,
                    flag=self._flag,
                    allow_unfinished=True,
                )
            read.append(ours)
        return tuple(read)
