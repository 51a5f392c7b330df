"""Finds why a layer computes something else than the reference's, by intervention: the reference's
layer is changed in one respect after the other, and the change that makes it compute what was
observed is the cause."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from slime_like.certify.layered import Call, States, parts_of, run_layer

EPSILONS = tuple(10.0**e for e in range(-12, 1))
BASES = (1e2, 5e2, 1e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 2e6, 5e6, 8e6, 1e7)
FACTORS = (0.03, 0.06, 0.12, 0.25, 0.5, 0.7, 0.9, 1.1, 1.4, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0)
REFINEMENTS = 40  # steps of the golden section
ACTIVATIONS = {
    "silu": torch.nn.SiLU(),
    "gelu": torch.nn.GELU(),
    "gelu with tanh": torch.nn.GELU(approximate="tanh"),
    "relu": torch.nn.ReLU(),
    "sigmoid": torch.nn.Sigmoid(),
}
# numbers of modules that have hypotheses of their own, or an effect in training only
KNOWN_NUMBERS = ("variance_epsilon", "eps", "scaling", "softmax_scale", "attention_dropout", "p")
KNOWN_SWITCHES = ("training", "norm_topk_prob", "inplace")
OPEN = 60.0  # a logit of which the sigmoid is 1
LOWER = (torch.bfloat16, torch.float16, torch.float32)


PreHook = Callable[[torch.nn.Module, tuple[Any, ...]], Any]
Hook = Callable[[torch.nn.Module, tuple[Any, ...], Any], Any]


@dataclass(frozen=True, slots=True)
class Rotary:
    """Another rotary embedding, in terms of the reference's angles per position."""

    base: float | None = None  # of plain frequencies base ** (-2 i / d)
    factor: float = 1.0  # on all angles
    interleaved: bool = False
    share: float = 1.0  # of the pairs that are turned, the first ones
    scale: float = 1.0  # on cosines and sines
    jump: tuple[int, int] | None = None  # from this position on, positions are so many more


@dataclass(frozen=True, slots=True)
class Change:
    """One respect in which the reference's layer is changed."""

    cause: str
    text: str
    attributes: tuple[tuple[Any, str, Any], ...] = ()  # of modules
    tensors: tuple[tuple[Tensor, Tensor], ...] = ()  # and what is written into them
    rotary: Rotary | None = None
    window: int | None = None  # keys that a query sees, itself included; 0: all before it
    before: tuple[tuple[torch.nn.Module, PreHook], ...] = ()  # hooks of modules
    after: tuple[tuple[torch.nn.Module, Hook], ...] = ()


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a layer differs."""

    cause: str
    evidence: str


@contextmanager
def changed(change: Change) -> Iterator[None]:
    """Apply what is changed in modules, and undo it."""
    before = [(module, name, getattr(module, name)) for module, name, _ in change.attributes]
    saved = [(tensor, tensor.clone()) for tensor, _ in change.tensors]
    hooks = [module.register_forward_pre_hook(hook) for module, hook in change.before]
    hooks += [module.register_forward_hook(hook) for module, hook in change.after]
    try:
        for module, name, value in change.attributes:
            setattr(module, name, value)
        for tensor, value in change.tensors:
            tensor.copy_(value)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, name, value in before:
            setattr(module, name, value)
        for tensor, value in saved:
            tensor.copy_(value)


def zero(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """Hook: the module gives nothing."""
    if isinstance(output, tuple):
        return (torch.zeros_like(output[0]), *output[1:])
    return torch.zeros_like(output)


def skip(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Hook: the module does nothing."""
    return inputs[0]


def opened(module: torch.nn.Module, inputs: tuple[Tensor, ...], logit: Tensor) -> Tensor:
    """Hook: the gate is 1."""
    return torch.full_like(logit, OPEN)


def centred(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    """Hook: the module gets its input without its mean."""
    return (inputs[0] - inputs[0].mean(dim=-1, keepdim=True),)


def taken_columns(
    order: Tensor, module: torch.nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[Tensor]:
    """Hook: the module gets the columns of its input in another order."""
    return (inputs[0][..., order],)


def given_columns(
    order: Tensor, module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    """Hook: the module gives its columns in another order."""
    return output[..., order]


def with_bias(
    module: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Hook of a router with logits, weights and choices: the bias that is for the choice alone is
    in the weights, which add up to what they did."""
    logits, weights, chosen = output
    scores = (logits.sigmoid() + module.e_score_correction_bias).gather(1, chosen)
    sums = weights.sum(dim=1, keepdim=True)
    if getattr(module, "norm_topk_prob", True):
        return logits, scores / scores.sum(dim=1, keepdim=True) * sums, chosen
    plain = logits.sigmoid().gather(1, chosen).sum(dim=1, keepdim=True)
    return logits, scores * sums / plain, chosen


def changed_call(call: Call, change: Change) -> Call:
    """The call with other rotary embeddings or another mask."""
    keywords = dict(call.keywords)
    if change.rotary is not None:
        keywords["position_embeddings"] = rotated(keywords["position_embeddings"], change.rotary)
    if change.window is not None:
        length = call.hidden.size(1)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | ((distance >= change.window) if change.window else False)
        mask = call.hidden.new_zeros(1, 1, length, length)
        mask = mask.masked_fill(hidden.to(mask.device), torch.finfo(mask.dtype).min)
        keywords["attention_mask"] = mask
    return replace(call, keywords=keywords)


def angles(embeddings: object) -> Tensor | None:
    """Angles per position [d / 2] of rotary embeddings (cosines, sines) of halves, [1, L, d] each;
    None if these are something else."""
    if not isinstance(embeddings, tuple) or len(embeddings) != 2:
        return None
    cosines, sines = embeddings
    if cosines.dim() != 3 or cosines.size(1) < 2:
        return None
    half = cosines.size(-1) // 2
    if not torch.equal(cosines[..., :half], cosines[..., half:]):
        return None
    return torch.atan2(sines[0, 1, :half], cosines[0, 1, :half])


def base_of(frequencies: Tensor) -> float | None:
    """The base of which these are the plain frequencies; None if they are scaled."""
    size = frequencies.numel()
    if size < 2:
        return None
    base = float(frequencies[1]) ** -size
    plain = base ** (-torch.arange(size, dtype=frequencies.dtype) / size)
    return base if torch.allclose(frequencies.cpu(), plain, rtol=1e-4, atol=0.0) else None


def rotated(embeddings: tuple[Tensor, Tensor], change: Rotary) -> tuple[Tensor, Tensor]:
    cosines, sines = embeddings
    frequencies = angles(embeddings)
    assert frequencies is not None
    amplitude = torch.hypot(cosines[0, 0, 0], sines[0, 0, 0]) * change.scale
    if change.base is not None:
        steps = torch.arange(frequencies.numel(), dtype=frequencies.dtype)
        frequencies = change.base ** (-steps / frequencies.numel())
    if change.share < 1:
        frequencies = frequencies.clone()
        frequencies[round(change.share * frequencies.numel()) :] = 0
    positions = torch.arange(cosines.size(1))
    if change.jump is not None:
        first, more = change.jump
        positions = positions + more * (positions >= first)
    turned = positions[:, None] * (frequencies.cpu() * change.factor)
    both = torch.cat([turned, turned], dim=-1)
    if change.interleaved:
        both = turned.repeat_interleave(2, dim=-1)
    both = both.to(cosines)[None]
    return amplitude * both.cos(), amplitude * both.sin()


# a module's path in the layer, the module, and the name of its attribute that is a number
Number = tuple[str, torch.nn.Module, str]


def epsilon_change(norms: Sequence[Number], value: float) -> Change:
    """All of these norms have this epsilon."""
    path, module, name = norms[0]
    who = path if len(norms) == 1 else "all norms"
    text = f"the epsilon of {who} is {value:.3g}, the reference's {getattr(module, name):.3g}"
    attributes = tuple((module, name, value) for _, module, name in norms)
    return Change("norm epsilon", text, attributes=attributes)


def scale_change(found: Number, factor: float) -> Change:
    path, module, name = found
    old = getattr(module, name)
    text = f"the softmax scale of {path} is {factor * old:.6g}, the reference's {old:.6g}"
    return Change("softmax scale", text, attributes=((module, name, factor * old),))


def number_change(found: Number, factor: float) -> Change:
    path, module, name = found
    old = getattr(module, name)
    text = f"{name} of {path or 'the layer'} is {factor * old:.6g}, the reference's {old:.6g}"
    return Change("setting", text, attributes=((module, name, factor * old),))


def amplitude_change(scale: float) -> Change:
    text = f"cosines and sines of rope are {scale:.6g} times the reference's"
    return Change("rope scaling", text, rotary=Rotary(scale=scale))


def base_change(own: float | None, base: float) -> Change:
    has = "has scaled frequencies" if own is None else f"has {own:.6g}"
    text = f"the rope base is {base:.6g}, the reference {has}"
    return Change("rope base", text, rotary=Rotary(base=base))


def factor_change(factor: float) -> Change:
    text = f"all rope angles are {factor:.6g} times the reference's"
    return Change("rope scaling", text, rotary=Rotary(factor=factor))


class SearchTime:
    """The time that searches for causes may take, all of them together, from the first one on.

    seconds: math.inf for no limit.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._deadline: float | None = None

    def check(self) -> None:
        """Raise TimeoutError at the end of the time."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self.seconds
        if time.monotonic() >= self._deadline:
            raise TimeoutError

    @property
    def text(self) -> str:
        return f"{self.seconds / 60:g} minutes (--certify-search-minutes)"


class LayerCauses:
    """Looks for the cause of one layer's difference.

    Args:
        layer: The reference's, in float64.
        calls: Its calls.
        site: "layers.3".
        observed: The states of the layer that differ.
        limits: The largest difference by site that is rounding.
        differing: The first part that differs, or "" for the layer as a whole.
        gap: Difference of two sites by token, [N].
        search_time: For this search and others; a pass in progress is finished.

    Raises:
        TimeoutError: At the end of the time: a hundred passes may be needed.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        calls: Sequence[Call],
        site: str,
        observed: States,
        limits: Mapping[str, float],
        differing: str,
        gap: Callable[[Tensor, Tensor], Tensor],
        search_time: SearchTime | None = None,
    ) -> None:
        self._time = search_time or SearchTime(math.inf)
        self._layer = layer
        self._calls = calls
        self._site = site
        self._observed = observed
        self._limits = limits
        self._part = differing
        self._target = f"{site}.{differing}" if differing else site
        self._gap = gap
        self._expected = self._pass(layer, calls)
        apart = gap(observed[self._target], self._expected[self._target])
        self._unexplained = float(apart.mean())

    @torch.no_grad()
    def states(self, change: Change) -> dict[str, Tensor]:
        with changed(change):
            calls = [changed_call(call, change) for call in self._calls]
            return self._pass(self._layer, calls)

    def _pass(self, layer: torch.nn.Module, calls: Sequence[Call]) -> dict[str, Tensor]:
        self._time.check()
        return run_layer(layer, calls, self._site)

    def explains(self, change: Change) -> tuple[bool, bool]:
        """Whether the changed layer computes what was observed at the first part that differs, and
        whether at all sites: what follows may have a fault of its own."""
        states = self.states(change)
        right = {
            site: self._is_near(site, self._gap(self._observed[site], states[site]))
            for site in states
            if site in self._observed and site in self._limits
        }
        return right[self._target], all(right.values())

    def _is_near(self, site: str, gap: Tensor) -> bool:
        """Whether this difference is rounding, and where something has to be explained, less than
        half of what it was: the rounding of bfloat16 may be as large as a fault."""
        explains = site != self._target or float(gap.mean()) < self._unexplained / 2
        return explains and float(gap.quantile(0.9)) <= 3 * self._limits[site]

    def _error(self, change: Change) -> float:
        found = self.states(change)[self._target]
        return float((found - self._observed[self._target].to(found)).norm())

    def find(self) -> Cause | None:
        """The change that explains the difference, in the order of what is likely."""
        partly: Cause | None = None
        for change in self._candidates():
            here, everywhere = self.explains(change)
            if everywhere:
                return Cause(change.cause, change.text)
            if here and partly is None:
                partly = Cause(change.cause, change.text)
        return partly or self._constant_factor() or self._lower_precision()

    def _candidates(self) -> Iterator[Change]:
        before_attention = self._part in ("norm", "attention", "")
        yield from self._epsilons()
        if self._part in ("norm", "mlp_norm"):
            yield from self._offsets()
        if before_attention:
            yield from self._windows()
            yield from self._sinks()
            yield from self._softmax_scales()
            yield from self._rotaries()
            yield from self._groups_of_heads()
        if self._part in ("router", "mlp", ""):
            yield from self._routers()
        yield from self._activations()
        yield from self._left_out()
        yield from self._switches()
        yield from self._numbers()

    def _left_out(self) -> Iterator[Change]:
        """Modules that have no effect."""
        left_out = "part left out"
        for path, module in self._layer.named_modules():
            name = path.rpartition(".")[2]
            text = f"{path} is left out"
            if name.endswith("norm") or name.startswith("norm_"):
                yield Change(left_out, text, after=((module, skip),))
            elif name.startswith("shared_expert") and name.endswith("gate"):
                text = f"{text}: the shared expert counts whole"
                yield Change(left_out, text, after=((module, opened),))
            elif name.startswith("shared_expert"):
                yield Change(left_out, text, after=((module, zero),))
        parts = parts_of(self._layer)
        for part in ("memory", "attention", "mlp"):
            if part in parts:
                yield Change(left_out, f"the {part} is left out", after=((parts[part], zero),))
        text = "the layer is left out: it gives what it gets"
        yield Change(left_out, text, after=((self._layer, skip),))

    def _groups_of_heads(self) -> Iterator[Change]:
        """Query head i has the keys and values of head i modulo their number, not of its group's:
        as if the heads of queries were in another order between their projection and the output's.
        """
        for path, module in self._layer.named_modules():
            groups = getattr(module, "num_key_value_groups", 1)
            size = getattr(module, "head_dim", None)
            output = getattr(module, "o_proj", None)
            queries = getattr(module, "q_proj", None)
            if groups == 1 or size is None or queries is None or output is None:
                continue
            heads = output.in_features // size
            order = torch.arange(heads).view(-1, heads // groups).t().flatten()
            columns = columns_of(order, queries.out_features // heads)
            back = columns_of(order, size).argsort()
            yield Change(
                "heads in another order",
                f"query head i of {path} reads keys and values i modulo {heads // groups}, the "
                f"reference's i // {groups}",
                before=((output, partial(taken_columns, back)),),
                after=((queries, partial(given_columns, columns)),),
            )

    def _switches(self) -> Iterator[Change]:
        """Settings of the layer's modules that are on or off."""
        for path, module, name in self._settings(bool):
            if name not in KNOWN_SWITCHES and not name.startswith(("_", "is_")):
                old = getattr(module, name)
                text = f"{name} of {path or 'the layer'} is {not old}, the reference's {old}"
                yield Change("setting", text, attributes=((module, name, not old),))

    def _numbers(self) -> Iterator[Change]:
        """Settings of the layer's modules that are numbers, such as a cap, a multiplier or the
        slope of an activation, of those that have an effect on the part."""
        for found in self._settings(float):
            value = getattr(found[1], found[2])
            if found[2] in KNOWN_NUMBERS or not 0 < value < math.inf:
                continue
            doubled = self.states(number_change(found, 2.0))[self._target]
            halved = self.states(number_change(found, 0.5))[self._target]
            expected = self._expected[self._target]
            if not (torch.equal(doubled, expected) and torch.equal(halved, expected)):
                yield self._fit(partial(number_change, found), FACTORS)

    def _settings(self, kind: type) -> list[Number]:
        return [
            (path, module, name)
            for path, module in self._layer.named_modules()
            for name, value in vars(module).items()
            if type(value) is kind
        ]

    def _fit(self, make: Callable[[float], Change], grid: Sequence[float]) -> Change:
        return fitted(make, grid, self._error)

    def _attributes(self, *names: str) -> list[Number]:
        """Modules of the layer with one of these attributes that is a number, with their names."""
        found = []
        for path, module in self._layer.named_modules():
            for name in names:
                if isinstance(getattr(module, name, None), int | float):
                    found.append((path, module, name))
        return found

    def _epsilons(self) -> Iterator[Change]:
        norms = self._attributes("variance_epsilon", "eps")
        inside = {"norm": "norm", "mlp_norm": "mlp_norm"}.get(self._part)
        parts = parts_of(self._layer)
        groups = [norms, *([norm] for norm in norms)]
        if inside is not None:
            groups = [norms, *([norm] for norm in norms if norm[1] is parts[inside])]
        for group in groups:
            if not group:
                continue
            yield self._fit(partial(epsilon_change, group), EPSILONS)

    def _offsets(self) -> Iterator[Change]:
        norm = parts_of(self._layer)[self._part]
        weight: Any = norm.weight
        for offset, text in ((1.0, "1 more"), (-1.0, "1 less")):
            yield Change(
                "norm around zero or one",
                f"the weight of the norm counts as {text} than the reference's",
                tensors=((weight.data, weight.data + offset),),
            )
        text = "the norm subtracts the mean, as a LayerNorm does"
        yield Change("kind of norm", text, before=((norm, centred),))

    def _windows(self) -> Iterator[Change]:
        if not isinstance(self._calls[0].keywords.get("attention_mask"), Tensor):
            return
        mask = self._calls[0].keywords["attention_mask"][0, 0]
        seen = int((mask[-1] >= 0).sum()) if mask.dtype != torch.bool else int(mask[-1].sum())
        has = "the window" if seen < mask.size(-1) else "no window"
        first = self.first_position()
        if seen < mask.size(-1):
            yield Change("attention window", f"no window, the reference has {seen} keys", window=0)
        for width in sorted({max(1, first + step) for step in (-1, 0, 1)}):
            text = f"a window of {width} keys, the reference has {has}"
            if seen < mask.size(-1):
                text = f"a window of {width} keys, the reference's has {seen}"
            yield Change("attention window", text, window=width)

    def first_position(self) -> int:
        """The first position of a sequence at which the part differs."""
        gaps = self._gap(self._observed[self._target], self._expected[self._target])
        lengths = [call.hidden.size(1) for call in self._calls]
        limit = self._limits[self._target]
        first = [
            int((part > limit).nonzero()[0])
            for part in gaps.split(lengths)
            if bool((part > limit).any())
        ]
        return min(first, default=0)

    def _sinks(self) -> Iterator[Change]:
        for path, module in self._layer.named_modules():
            sinks = getattr(module, "sinks", None)
            if isinstance(sinks, Tensor):
                for value, text in ((-1e30, "no sink"), (0.0, "a sink of logit 0")):
                    filled = torch.full_like(sinks.data, value)
                    text = f"{text} in {path}, where the reference has {float(sinks.mean()):.3g}"
                    yield Change("attention sink", text, tensors=((sinks.data, filled),))

    def _softmax_scales(self) -> Iterator[Change]:
        for found in self._attributes("scaling", "softmax_scale"):
            yield self._fit(partial(scale_change, found), FACTORS)

    def _rotaries(self) -> Iterator[Change]:
        frequencies = angles(self._calls[0].keywords.get("position_embeddings"))
        if frequencies is None:
            return
        own = base_of(frequencies)
        if own is None:
            for base in self._bases():
                text = f"rope is not scaled: it has the plain frequencies of base {base:.6g}"
                yield Change("rope scaling", text, rotary=Rotary(base=base))
        yield self._fit(partial(base_change, own), BASES)
        yield self._fit(factor_change, FACTORS)
        yield self._fit(amplitude_change, FACTORS)
        first = self.first_position()
        for more, size in ((1, "1 larger"), (-1, "1 smaller")):
            text = f"from position {first} on, rope's positions are {size} than the reference's"
            yield Change("positions", text, rotary=Rotary(jump=(first, more)))
        none = "there is no rope, which the reference has"
        yield Change("rope", none, rotary=Rotary(factor=0.0))
        for share in (0.25, 0.5, 0.75):
            text = f"rope turns the first {share:.0%} of the reference's dimensions"
            yield Change("rope share", text, rotary=Rotary(share=share))
        pairs = "rope turns neighbouring pairs, the reference halves"
        yield Change("rope layout", pairs, rotary=Rotary(interleaved=True))

    def _bases(self) -> list[float]:
        """The bases in the model's configuration: one, or one for each kind of layer."""
        for module in self._layer.modules():
            ropes = getattr(getattr(module, "config", None), "rope_parameters", None)
            if isinstance(ropes, Mapping):
                found = [r for r in (ropes, *ropes.values()) if isinstance(r, Mapping)]
                return [float(r["rope_theta"]) for r in found if "rope_theta" in r]
        return []

    def _routers(self) -> Iterator[Change]:
        for path, module, name in self._attributes("norm_topk_prob"):
            old = bool(getattr(module, name))
            text = f"{name} of {path} is {not old}, the reference's {old}"
            yield Change("router normalisation", text, attributes=((module, name, not old),))
        for path, module, name in self._attributes("top_k"):
            chosen = int(getattr(module, name))
            for value in (chosen - 1, chosen + 1):
                if value > 0:
                    text = f"{value} experts are chosen in {path}, the reference's {chosen}"
                    yield Change("router top-k", text, attributes=((module, name, value),))
        for path, module in self._layer.named_modules():
            bias = getattr(module, "e_score_correction_bias", None)
            if isinstance(bias, Tensor):
                text = f"the expert bias of {path} is not used"
                change = ((bias.data, torch.zeros_like(bias.data)),)
                yield Change("dropped buffer", text, tensors=change)
                text = f"the expert bias of {path} is in the weights, not in the choice alone"
                yield Change("router bias", text, after=((module, with_bias),))

        for path, module, name in self._settings(int):
            if name == "topk_group":
                chosen = getattr(module, name)
                groups = getattr(module, "num_group", getattr(module, "n_group", chosen))
                for value in range(1, groups + 1):
                    text = f"{value} groups of experts are open in {path}, the reference's {chosen}"
                    if value != chosen:
                        yield Change("router groups", text, attributes=((module, name, value),))

    def _activations(self) -> Iterator[Change]:
        modules = [m for m in self._layer.modules() if hasattr(m, "act_fn")]
        named = [found for found in self._settings(str) if getattr(found[1], found[2]) in ACT2FN]
        for name, function in ACTIVATIONS.items():
            attributes = tuple((module, "act_fn", function) for module in modules)
            if attributes:
                text = f"the activation is {name}"
                yield Change("activation function", text, attributes=attributes)
        for path, module, attribute in named:
            old = getattr(module, attribute)
            for name in ("silu", "gelu", "relu", "sigmoid"):
                text = f"the activation of {path} is {name}, the reference's {old}"
                if name != old:
                    changes = ((module, attribute, name),)
                    yield Change("activation function", text, attributes=changes)

    def _constant_factor(self) -> Cause | None:
        """The first differing part is a multiple of the reference's."""
        found = self._observed[self._target].double()
        expected = self._expected[self._target].double()
        factor = float((found * expected).sum() / expected.square().sum().clamp(min=1e-60))
        gap = self._gap(found, factor * expected)
        if abs(factor) < 1e-12 or not self._is_near(self._target, gap):
            return None
        return Cause("wrong scale", f"the output is {factor:.6g} times the reference's")

    def _is_noise(self) -> bool:
        """Whether the difference has no direction of its own, as rounding has none."""
        expected = self._expected[self._target].double()
        apart = self._observed[self._target].double() - expected
        along = (apart * expected).sum() / (apart.norm() * expected.norm()).clamp(min=1e-60)
        return abs(float(along)) < 0.5

    def _lower_precision(self) -> Cause | None:
        """The difference is as large as what the layer's own rounding in a lower precision is."""
        gaps = self._gap(self._observed[self._target], self._expected[self._target])
        size = float(gaps.median())
        for dtype in LOWER:
            lower = copy.deepcopy(self._layer).to(dtype)
            calls = [cast_call(call, dtype) for call in self._calls]
            with torch.no_grad():
                states = self._pass(lower, calls)
            rounding = float(self._gap(states[self._target], self._expected[self._target]).median())
            if rounding <= self._limits[self._target]:  # it may be 0
                continue
            if 1 / 4 < size / rounding < 2 and self._is_noise():
                kind = "router dtype" if self._part == "router" else "dtype"
                name = str(dtype).removeprefix("torch.")
                return Cause(
                    kind,
                    f"the difference is {size:.3g}, and the rounding of this part in {name} "
                    f"{rounding:.3g}",
                )
        return None


def fitted(
    make: Callable[[float], Change], grid: Sequence[float], error: Callable[[Change], float]
) -> Change:
    """The change of one positive number that comes nearest: the best of a grid, then a golden
    section of the logarithm between its neighbours."""
    errors = [error(make(value)) for value in grid]
    best = errors.index(min(errors))
    low = math.log(grid[max(0, best - 1)])
    high = math.log(grid[min(len(grid) - 1, best + 1)])
    ratio = (math.sqrt(5) - 1) / 2
    left = high - ratio * (high - low)
    right = low + ratio * (high - low)
    at_left = error(make(math.exp(left)))
    at_right = error(make(math.exp(right)))
    for _ in range(REFINEMENTS):
        if at_left < at_right:
            high = right
            right = left
            at_right = at_left
            left = high - ratio * (high - low)
            at_left = error(make(math.exp(left)))
        else:
            low = left
            left = right
            at_left = at_right
            right = low + ratio * (high - low)
            at_right = error(make(math.exp(right)))
    value = math.exp((low + high) / 2)
    return make(min((value, grid[best]), key=lambda v: error(make(v))))


def columns_of(heads: Tensor, size: int) -> Tensor:
    """The columns of heads of this size, in the order of the heads."""
    return (heads[:, None] * size + torch.arange(size)).flatten()


def cast_call(call: Call, dtype: torch.dtype) -> Call:
    """The call with all floating-point tensors in this dtype."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        return tuple(cast(part) for part in value) if isinstance(value, tuple) else value

    keywords = {name: cast(value) for name, value in call.keywords.items()}
    return Call(cast(call.hidden), cast(call.rest), keywords)


def router_cause(observed: Tensor, expected: Tensor, limit: float) -> Cause | None:
    """Why the weights of experts [N, E] differ, by the numbers themselves.

    Args:
        limit: Of the relative difference of a row.
    """
    found = observed.double()
    right = expected.double()
    counts = ((found != 0).sum(dim=1).float().mean(), (right != 0).sum(dim=1).float().mean())
    if abs(float(counts[0] - counts[1])) > 0.05:
        text = f"{float(counts[0]):.3g} experts have a weight, the reference's {float(counts[1]):g}"
        return Cause("router top-k", text)
    same = ((found != 0) == (right != 0)).all(dim=1)
    sums = found.sum(dim=1), right.sum(dim=1)
    if float(same.double().mean()) > 0.5:
        a, b = found[same], right[same]
        if _near(a, b, 3 * limit):
            return None
        if _near(a.sort(dim=1).values, b.sort(dim=1).values, 3 * limit):
            text = "the chosen experts have each other's weights"
            return Cause("router order", text)
        for title, x, y in (
            ("not normalised", a / a.sum(1, True), b),
            ("normalised", a, b / b.sum(1, True)),
        ):
            ratio = (x / x.sum(1, True), y / y.sum(1, True))
            if _near(*ratio, 3 * limit):
                shares = (sums[0] / sums[1])[same]
                spread = float(shares.std()) if shares.numel() > 1 else 0.0
                if spread <= 10 * limit:
                    text = f"the weights are {float(shares.mean()):.6g} times the reference's"
                    return Cause("wrong scale", text)
                means = [float(s[same].mean()) for s in sums]
                text = f"they add up to {means[0]:.4g}, the reference's to {means[1]:.4g}"
                return Cause("router normalisation", f"the weights are {title}: {text}")
        if torch.equal(a.argsort(dim=1)[:, -1], b.argsort(dim=1)[:, -1]):
            size = float(((a - b).norm(dim=1) / b.norm(dim=1)).median())
            if size > 0.02:  # more than the rounding of any dtype
                text = "the same experts have other weights, in the same order"
                return Cause("router score function", f"{text}: another function of the scores")
    return None


def _near(a: Tensor, b: Tensor, limit: float) -> bool:
    gap = (a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-30)
    return float(gap.quantile(0.9)) <= limit
