"""A user's prompt source (--data-source-path), created as in slime: ``Class(args)`` on rank 0. See
`sources.DataSource` for its methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from arguments.run_config import RunConfig
from slime_like.compat.slime.samples import slime_args
from slime_like.distributed.collectives import from_rank_zero, on_rank_zero
from slime_like.import_utils import exit_called

METHODS = ("get_samples", "add_samples", "save", "load", "__len__")
Result = TypeVar("Result")


class SlimeUserSource:
    """See `rollout.hooks.UserSource`. All methods are collectives."""

    def __init__(self, make: Callable[..., Any], name: str, config: RunConfig) -> None:
        """
        Args:
            make: The user's class.
            name: The flag and its value, for messages.
            config: The run's.
        """
        self.notes: list[str] = []
        self._name = name
        self._rollout_id: int | None = None  # of the latest save
        self.data_source: Any = on_rank_zero(lambda: self._create(make, config))

    def _create(self, make: Callable[..., object], config: RunConfig) -> object:
        source = self._call("__init__", lambda: make(slime_args(config)))
        for name in METHODS:
            if not callable(getattr(source, name, None)):
                raise ValueError(
                    f"{self._name}: {type(source).__name__} has no {name}; a data source needs "
                    f"{', '.join(METHODS)}"
                )
        return source

    def __len__(self) -> int:
        """Number of prompts per epoch."""
        return from_rank_zero(lambda: self._call("__len__", lambda: len(self.data_source)))

    def save(self, rollout_id: int) -> None:
        """Save before writing a checkpoint. rollout_id: of its last rollout."""
        from_rank_zero(lambda: self._call("save", lambda: self.data_source.save(rollout_id)))
        self._rollout_id = rollout_id

    def state_dict(self) -> dict[str, object]:
        """The state in a checkpoint: which save it belongs to."""
        return {"data_source": self._name, "rollout_id": self._rollout_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the source to that save."""
        rollout_id = int(state["rollout_id"])
        from_rank_zero(lambda: self._call("load", lambda: self.data_source.load(rollout_id)))
        self._rollout_id = rollout_id

    def _call(self, method: str, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except SystemExit as error:
            raise ValueError(f"{self._name}: {method}: {exit_called(error)}") from error
        except Exception as error:
            raise ValueError(
                f"{self._name}: {method} raised {type(error).__name__}: {error}"
            ) from error
