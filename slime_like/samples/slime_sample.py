"""slime's Sample, as user functions get it, also in the processes of rewards: imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from slime_like.images.encoded import EncodedImage
from slime_like.images.files import DEFAULT_LIMITS, decode, encode

if TYPE_CHECKING:
    from slime_like.engines.base import GenerateOutput
    from slime_like.function_args import FunctionArgs


@dataclass
class SlimeSample:
    """slime's Sample.

    Functions may add attributes; later functions, e.g. the reward, find those that hold plain
    values.
    """

    class Status(StrEnum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    # text, or the messages of a row without --apply-chat-template
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)  # prompt and response
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None  # one entry per response token; loss_mask None: all ones
    # of the requests that generated it, as numbers or text
    weight_versions: list[int | str] = field(default_factory=list)
    # one entry per response token; loss_mask None: all ones
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    rollout_id: int | None = None  # shared by the sequences of one episode
    # files of the images, in the order of their placeholders in `tokens`; see `multimodal_inputs`
    images: tuple[EncodedImage, ...] = ()
    # in order; internal, not to be modified
    engine_outputs: list[GenerateOutput] = field(default_factory=list, repr=False, compare=False)
    # of `multimodal_inputs`, once a function has used it; then `images` are those of the start
    _pictures: dict[str, list[Any]] | None = field(default=None, repr=False, compare=False)
    # the pictures that were decoded, with their files
    _decoded: list[tuple[Any, EncodedImage]] = field(
        default_factory=list, repr=False, compare=False
    )

    @property
    def multimodal_inputs(self) -> dict[str, list[Any]] | None:
        """slime's: ``{"images": [...]}`` with PIL's images, decoded when a function first asks;
        None without images. What a function adds to the list belongs to the sample."""
        if self._pictures is None and self.images:
            self._decoded = [(decode(image, DEFAULT_LIMITS), image) for image in self.images]
            self._pictures = {"images": [picture for picture, _ in self._decoded]}
        return self._pictures

    @multimodal_inputs.setter
    def multimodal_inputs(self, value: dict[str, list[Any]] | None) -> None:
        self._pictures = {"images": []} if value is None else value

    @property
    def image_files(self) -> tuple[EncodedImage, ...]:
        """The files of all images. Raises ImageProblem for what is no image."""
        if self._pictures is None:
            return self.images
        return tuple(map(self._file_of, self._pictures.get("images") or []))

    def _file_of(self, picture: Any) -> EncodedImage:
        """Its own file, or a new one for a picture that a function has made."""
        own = (image for decoded, image in self._decoded if decoded is picture)
        return next(own, None) or encode(picture)

    def get_reward_value(self, args: FunctionArgs) -> Any:
        """The reward to train on: that of --reward-key if the reward is a dict."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) else self.reward

    @property
    def effective_response_length(self) -> int:
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def added(self) -> dict[str, Any]:
        """The attributes that functions have added."""
        return {name: value for name, value in vars(self).items() if name not in _FIELDS}

    def update_from_meta_info(self, args: object, meta_info: Mapping[str, Any]) -> None:
        """Take weight version and status from the ``meta_info`` of a response of the engine."""
        if meta_info.get("weight_version"):
            self.weight_versions.append(meta_info["weight_version"])
        reason = (meta_info.get("finish_reason") or {}).get("type")
        self.status = _STATUS_OF_REASON.get(str(reason), self.status)

    def append_response_tokens(
        self,
        args: object,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Add tokens to the response: the model's own, or, with trainable=False, an observation.
        log_probs: zeros by default. meta_info: of the engine's response, see
        `update_from_meta_info`."""
        mask = [1] * self.response_length if self.loss_mask is None else self.loss_mask
        logged = self.rollout_log_probs or [0.0] * self.response_length
        self.tokens = [*self.tokens, *tokens]
        self.loss_mask = [*mask, *([int(trainable)] * len(tokens))]
        self.rollout_log_probs = [*logged, *(log_probs or [0.0] * len(tokens))]
        self.response_length += len(tokens)
        if meta_info is not None:
            self.update_from_meta_info(args, meta_info)

    def to_dict(self) -> dict[str, Any]:
        """All attributes; the status as text; images only where there are any."""
        values = {name: value for name, value in vars(self).items() if name not in _INTERNAL}
        if not self.images:
            del values["images"]
        return values | {"status": self.status.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SlimeSample:
        """The inverse of `to_dict`."""
        values = dict(data) | {"status": cls.Status(data.get("status", "pending"))}
        sample = cls(**{name: values.pop(name) for name in _FIELDS & values.keys()})
        vars(sample).update(values)
        return sample


_INTERNAL = ("engine_outputs", "_pictures", "_decoded")
_FIELDS = frozenset(field.name for field in fields(SlimeSample))
_STATUS_OF_REASON = {
    "stop": SlimeSample.Status.COMPLETED,
    "length": SlimeSample.Status.TRUNCATED,
    "abort": SlimeSample.Status.ABORTED,
}
