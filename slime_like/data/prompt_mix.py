"""Prompts of several sources in exact proportions, with curricula by rollout and by pass rate.

Each draw adds to every open source its share and takes the source that is owed most, the first of
equals, which then owes one prompt (smooth weighted round-robin). Shares are integers over their sum
W, so nothing is rounded. No source is ever a whole prompt ahead of its share: the sum of what is
owed before a draw is 1, so the largest is positive and above -1 after it. After W draws what is
owed is an integer above -1 for each, and 0 in sum, therefore 0: the proportions are exact.
Whenever the open sources or their weights change, the count begins anew.

Which prompt comes next depends only on the sources, the seed, the number of prompts drawn and the
rewards observed so far, all of which a checkpoint holds. Weights follow the rollout that a prompt
is drawn for: the number of prompts drawn, over --rollout-batch-size.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from arguments.prompt_mix import MixSource
from arguments.schema.data import DataConfig
from slime_like.data.prompts import PromptSource, PromptStream
from slime_like.errors import RunError
from slime_like.types import PROMPT_SOURCE, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class MixedRows(PromptSource):
    """One source of a mix: rows may rest, and epochs may end.

    Args:
        settings: Of the source.
        config: The run's data settings.
        options: As of `PromptSource`.
    """

    def __init__(
        self,
        settings: MixSource,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        **options: Any,
    ) -> None:
        order = (zlib.crc32(settings.name.encode()),)  # not every source in the same order
        data = settings.data_config(config)
        super().__init__(data, tokenizer, order=order, metadata=settings.metadata, **options)
        self.settings = settings
        self._rests: dict[int, int] = {}  # the last epoch in which a row rests
        self._passes: list[float] = []  # of the latest groups

    def has_next(self) -> bool:
        """Whether a row is left. An epoch in which all rows would rest has them all."""
        while True:
            while self._offset < len(self) and self._rests_now(int(self._order[self._offset])):
                self._offset += 1
            if self._offset < len(self):
                return True
            most = self.settings.max_epochs
            if most is not None and self.epoch + 1 >= most:  # a resumed run may have lowered it
                return False
            self.epoch += 1
            self._offset = 0
            self._order = self._epoch_order()
            if all(self._rests.get(row, -1) >= self.epoch for row in range(len(self))):
                self._rests = {}

    def _rests_now(self, row: int) -> bool:
        return self._rests.get(row, -1) >= self.epoch

    def take(self) -> tuple[int, int]:
        """The next row, as an index of the prompts of an epoch, and its epoch; after `has_next`."""
        row = int(self._order[self._offset])
        self._offset += 1
        return row, self.epoch

    def prompts_at(self, rows: Sequence[int]) -> list[Prompt]:
        """The prompts of rows from `take`, with any group ids."""
        return self.prompts_of([int(self._kept[row]) for row in rows], 0)

    def see(self, row: int, epoch: int, rewards: Sequence[float | None]) -> None:
        """The rewards of a row that was taken; those that are missing or not finite do not
        count."""
        finite = [x for x in rewards if x is not None and math.isfinite(x)]
        if not finite:
            return
        settings = self.settings
        rate = sum(x >= settings.pass_reward for x in finite) / len(finite)
        self._passes = [*self._passes, rate][-settings.pass_window :]
        if settings.pass_rate is None:
            return
        low, high = settings.pass_rate
        if not low <= rate <= high:
            self._rests[row] = epoch + settings.rest_epochs

    @property
    def pass_rate(self) -> float | None:
        """Mean pass rate of the latest groups; None before there are enough."""
        if len(self._passes) < self.settings.pass_window:
            return None
        return sum(self._passes) / len(self._passes)

    def metrics(self) -> dict[str, float]:
        """Epochs so far, and how many rows rest in this one."""
        resting = sum(last >= self.epoch for last in self._rests.values())
        return {"epoch": self.epoch + self._offset / len(self), "resting_rows": float(resting)}

    def state_dict(self) -> dict[str, object]:
        """See `PromptStream`."""
        rests = [[row, last] for row, last in self._rests.items() if last >= self.epoch]
        return {**super().state_dict(), "rests": rests, "passes": list(self._passes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `PromptStream`."""
        super().load_state_dict(state)
        self._rests = {int(row): int(last) for row, last in state["rests"]}
        self._passes = [float(rate) for rate in state["passes"]][-self.settings.pass_window :]


class PromptMix(PromptStream):
    """Prompts of several sources.

    Args:
        name: The file of the mix.
        sources: Its sources.
        batch: Prompts of a rollout, --rollout-batch-size.

    Raises:
        RunError: `next_prompts`: no source has a prompt left.
    """

    def __init__(self, name: str, sources: Sequence[MixedRows], *, batch: int) -> None:
        self.name = name
        self.sources = {source.settings.name: source for source in sources}
        self._batch = batch
        self._drawn = 0
        self._opened = {name for name, each in self.sources.items() if not each.settings.after}
        self._shares: dict[str, int] = {}  # of the open sources, since the count began
        self._owed: dict[str, int] = {}  # prompts that each is owed, times the sum of the shares
        self.num_left_out = sum(source.num_left_out for source in sources)
        self.notes = [note for source in sources for note in source.notes]

    def __len__(self) -> int:
        return sum(map(len, self.sources.values()))

    def check_enough(self, needed: int) -> None:
        """Raise ValueError if the caps on epochs leave too few prompts for the rollouts in which
        every source with a weight has one. needed: prompts of the run."""
        sources = self.sources.values()
        steps = sorted({step for source in sources for step in source.settings.weight})
        ends = [*(step * self._batch for step in steps[1:]), needed]
        drawn = 0
        drawn_from = dict[str, int]()  # capped source -> its prompts
        for step, end in zip(steps, ends, strict=True):
            first = step * self._batch
            weighted = [source for source in sources if source.settings.weight_at(step) > 0]
            caps = {s.settings.name: s.settings.max_epochs for s in weighted}
            if first < needed and None not in caps.values():
                drawn += min(end, needed) - first
                drawn_from |= {name: len(self.sources[name]) * (n or 0) for name, n in caps.items()}
        most = sum(drawn_from.values())
        if most < drawn:
            raise ValueError(
                f"--prompt-data {self.name}: {drawn} of the run's {needed} prompts (--num-rollout "
                f"times --rollout-batch-size) are of rollouts in which every source with a weight "
                f"has max_epochs, and {', '.join(drawn_from)} have {most}. Raise max_epochs, or "
                "leave it out for one source"
            )

    def next_prompts(self, n: int) -> list[Prompt]:
        """See `PromptStream`."""
        picks = [self._pick() for _ in range(n)]
        made: dict[str, list[Prompt]] = {}
        for name, source in self.sources.items():
            made[name] = source.prompts_at([row for each, row, _ in picks if each == name])
        first = self._drawn - n
        prompts = []
        for place, (name, row, epoch) in enumerate(picks):
            origin = {"name": name, "row": row, "epoch": epoch}
            prompts.append(_with_origin(made[name].pop(0), first + place, origin))
        return prompts

    def _pick(self) -> tuple[str, int, int]:
        """The source of the next prompt, its row and its epoch."""
        self._open_sources()
        shares = self._shares_now()
        if shares != self._shares:
            self._shares = shares
            self._owed = dict.fromkeys(shares, 0)
        for name, share in shares.items():
            self._owed[name] += share
        chosen = max(shares, key=self._owed.__getitem__)  # the first of equals
        self._owed[chosen] -= sum(shares.values())
        self._drawn += 1
        return chosen, *self.sources[chosen].take()

    def _open_sources(self) -> None:
        """Open the sources that were waiting for others to pass."""
        for name, source in self.sources.items():
            waited = source.settings.after.items()
            if name not in self._opened and all(self._has_passed(*each) for each in waited):
                self._opened.add(name)

    def _has_passed(self, name: str, rate: float) -> bool:
        """Whether a source has reached a pass rate, or has left the mix."""
        source = self.sources[name]
        if source.pass_rate is not None and source.pass_rate >= rate:
            return True
        return source.settings.has_left(self._drawn // self._batch) or not source.has_next()

    def _shares_now(self) -> dict[str, int]:
        """Integers in the ratio of the weights of the sources that can be drawn from."""
        rollout = self._drawn // self._batch
        weights = {
            name: Fraction(str(source.settings.weight_at(rollout)))
            for name, source in self.sources.items()
            if name in self._opened and source.settings.weight_at(rollout) and source.has_next()
        }
        if not weights:
            raise RunError(self._ended(rollout))
        scale = math.lcm(*(weight.denominator for weight in weights.values()))
        shares = {name: int(weight * scale) for name, weight in weights.items()}
        divisor = math.gcd(*shares.values())
        return {name: share // divisor for name, share in shares.items()}

    def _ended(self, rollout: int) -> str:
        reasons = []
        for name, source in self.sources.items():
            if not source.has_next():
                reasons.append(f"{name} has reached max_epochs {source.settings.max_epochs}")
            elif name in self._opened:
                reasons.append(f"{name} has the weight 0")
            else:
                reasons.append(f"{name} waits for the pass rates of 'after'")
        return (
            f"--prompt-data {self.name}: after {self._drawn} prompts, in rollout {rollout + 1}, no "
            f"source has a prompt left: {'; '.join(reasons)}. Raise max_epochs, give another "
            "source a weight, or lower --num-rollout"
        )

    def observe(self, prompt: Prompt, rewards: Sequence[float | None]) -> None:
        """See `PromptStream`."""
        origin = prompt.metadata[PROMPT_SOURCE]
        self.sources[origin["name"]].see(origin["row"], origin["epoch"], rewards)

    def metrics(self) -> dict[str, float]:
        """See `PromptStream`."""
        return {
            f"rollout/{name}/{metric}": value
            for name, source in self.sources.items()
            for metric, value in source.metrics().items()
        }

    def state_dict(self) -> dict[str, object]:
        """See `PromptStream`."""
        return {
            "drawn": self._drawn,
            "opened": sorted(self._opened),
            "shares": dict(self._shares),
            "owed": dict(self._owed),
            "sources": {name: source.state_dict() for name, source in self.sources.items()},
            "source": {"path": self.name, "order": f"a mix of {', '.join(self.sources)}"},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `PromptStream`."""
        saved = state.get("sources")
        if saved is None or saved.keys() != self.sources.keys():
            before = "one data file" if saved is None else ", ".join(saved)
            raise ValueError(
                f"--prompt-data {self.name}: has the sources {', '.join(self.sources)}, and the "
                f"saved run drew from {before}, so its position cannot be resumed. Use the same "
                "sources, or start a new run"
            )
        for name, source in self.sources.items():
            source.load_state_dict(saved[name])
        self._drawn = int(state["drawn"])
        self._opened |= set(state["opened"])
        self._shares = {name: int(share) for name, share in state["shares"].items()}
        self._owed = {name: int(owed) for name, owed in state["owed"].items()}


def _with_origin(prompt: Prompt, group_id: int, origin: Mapping[str, object]) -> Prompt:
    """The prompt, and in a pair the other answer's, with its number and where it comes from."""
    rejected = prompt.rejected and _with_origin(prompt.rejected, group_id, origin)
    metadata = {**prompt.metadata, PROMPT_SOURCE: dict(origin)}
    return dataclasses.replace(prompt, group_id=group_id, metadata=metadata, rejected=rejected)
