"""What a call takes and gives, taken apart: the signature that one graph is for, and the tensors in it.

A signature is: of each tensor its shape, strides, dtype, device, and whether it requires grad; of modules and other
objects their identity; of everything plain its value; how they are nested; and grad mode, inference mode, autocast,
and the device that tensors are made on.

Private, versions seen 2.6 to 2.13: ``torch._C._dynamo.guards.TensorGuards``, which compares types, shapes, strides,
dtypes, devices and dispatch keys of tensors with others' in one call; ``torch._C._set_grad_enabled``.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch.autograd import forward_ad

from gpu_timed.modes.host_places import has_attributes
from gpu_timed.modes.torch_around import are_alike, count_functions, count_modes, devices, modes_of_functions
from gpu_timed.modes.torch_around import around as around  # noqa: PLC0414
from gpu_timed.modes.torch_memory import Shares as Shares  # noqa: PLC0414 - asked for here, with all else of values
from gpu_timed.modes.torch_memory import is_made_of_others as is_made_of_others  # noqa: PLC0414
from gpu_timed.modes.torch_memory import memory_behind as memory_behind  # noqa: PLC0414
from gpu_timed.modes.torch_memory import overlaps as overlaps  # noqa: PLC0414
from gpu_timed.modes.torch_memory import standing_in as standing_in  # noqa: PLC0414
from gpu_timed.modes.torch_writes import writes as writes  # noqa: PLC0414

_PLAIN: Final = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, slice)
_TENSORS: Final = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_TOLERANCE: Final[dict[Any, float]] = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""Relative and absolute: some ten times what ``torch.testing.assert_close`` allows, since kernels that add up in any
order differ from run to run. Everything else must be equal. Of float16 half of what :mod:`gpu_timed.measure` allows:
there compiled code is compared, which rounds at other places; a graph runs the very kernels of the eager run."""


# What every call asks: each lookup in the module of torch, which is large, takes as long as the answer.
_is_grad_enabled: Final = torch.is_grad_enabled
_is_inference: Final = torch.is_inference_mode_enabled
_is_autocast: Final = torch.is_autocast_enabled
_set_grad: Any = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)  # noqa: SLF001 - see the docstring
_MOST_KEPT: Final = 256
"""Characters of a text that is kept as part of a signature: a prompt, or an image, is not."""
_FEW: Final = 2
"""Copies that cost less one by one than ``torch._foreach_copy_`` does for all."""


class Taken(NamedTuple):
    """The arguments of one call."""

    key: Hashable
    """Equal for calls that one graph can serve."""
    tensors: list[Any]
    leaves: list[Any]
    """All of them, tensors included, in order."""
    spec: Any
    """How they are nested; where they are not, how many have no names, and the names of the others."""
    refused: str
    """Why no graph can serve it."""

    @property
    def others(self) -> list[Any]:
        """All arguments that are no tensors."""
        return [leaf for leaf in self.leaves if not isinstance(leaf, torch.Tensor)]


def take(arguments: tuple[Any, ...], named: Mapping[str, Any], holds: Callable[[Any], bool], *, static: bool) -> Taken:
    """Take the arguments of a call apart. *holds* as in :class:`~gpu_timed.modes.torch_watching.Watch`."""
    leaves = [*arguments, *named.values()] if named else list(arguments)
    spec: Any
    if all(map(_is_leaf, map(type, leaves))):  # a tenth of the time that the tree of it takes
        spec = len(arguments), tuple(named)
    else:
        leaves, spec = pytree.tree_flatten((arguments, dict(named)))
    tensors: list[Any] = []
    key: list[Any] = [_hashable(spec), torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    if torch.is_autocast_enabled("cuda"):
        key.append(torch.get_autocast_dtype("cuda"))
    if made_on := devices():
        key.append(made_on)
    refused = ""
    for leaf in leaves:
        kind = type(leaf)
        if kind in _TENSORS or isinstance(leaf, torch.Tensor):
            if kind not in _TENSORS or leaf.layout is not torch.strided:
                refused = f"an argument is a {kind.__name__} of layout {leaf.layout}"
            elif not holds(leaf):
                refused = f"an argument is a tensor on {leaf.device}"
            tensors.append(leaf)
            key += (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
            if static:
                key.append(leaf.data_ptr())
        elif isinstance(leaf, _PLAIN) and not has_attributes(leaf):
            told_by_text = leaf.__hash__ is None or isinstance(leaf, float | complex)  # 0.0 == -0.0
            told: Any = repr(leaf) if told_by_text else leaf
            if isinstance(leaf, str | bytes) and len(leaf) > _MOST_KEPT:
                told = _digest(leaf)
            key.append((kind, told))
        else:
            key.append((kind, id(leaf)))
    return Taken(tuple(key), tensors, leaves, spec, refused)


def _hashable(spec: Any) -> Any:
    """Return what tells *spec*, of how arguments are nested: itself, where this version of torch can hash it."""
    try:
        hash(spec)
    except TypeError:  # 2.6: names of a dict are a list in it
        if isinstance(spec, list):
            return tuple(map(_hashable, spec))
        if not isinstance(spec, pytree.TreeSpec):
            return type(spec), repr(spec)
        return spec.type, _hashable(spec.context), tuple(map(_hashable, spec.children_specs))
    return spec


def _digest(text: str | bytes) -> bytes:
    """Return what tells a long *text*, of which each call may have another, from all others."""
    told = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return hashlib.blake2b(told, digest_size=16).digest()


class Alike:
    """Tells the calls that have the signature of one that was taken apart.

    That takes half a microsecond: a tenth of what :func:`take` needs. Of a call that has the signature it may say that
    it has not; never the other way round.

    Args:
        check: Compares tensors with those of that call.
        taken: Its arguments, none of which has parts.
        count: How many of them have no names.
        names: The names of the others.
    """

    __slots__ = (
        "_check",
        "_count",
        "_functions",
        "_grad",
        "_inference",
        "_modes",
        "_names",
        "_objects",
        "_places",
        "_plain",
        "_require",
    )

    def __init__(self, check: Callable[..., bool], taken: Taken, count: int, names: tuple[str, ...]) -> None:
        self._check = check
        self._count, self._names = count, names
        self._modes = modes_of_functions()
        self._functions = len(self._modes)
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._require = [] if self._grad else [tensor.requires_grad for tensor in taken.tensors]
        #: Where the tensors are, if there is anything beside them; and the rest, known by identity.
        self._places: list[int] = []
        self._plain: list[tuple[int, Any]] = []
        self._objects: list[tuple[int, weakref.ref[Any]]] = []
        if len(taken.tensors) < len(taken.leaves):
            for place, leaf in enumerate(taken.leaves):
                if isinstance(leaf, torch.Tensor):
                    self._places.append(place)
                elif isinstance(leaf, _PLAIN):
                    self._plain.append((place, leaf))
                else:
                    self._objects.append((place, weakref.ref(leaf)))

    def tensors(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Return the tensors of a call that has the signature, in order; else None."""
        if len(arguments) != self._count:
            return None
        found: Any = arguments
        if named:
            if tuple(named) != self._names:
                return None
            found = (*arguments, *named.values())
        elif self._names:
            return None
        if self._places:
            for place, value in self._plain:
                if found[place] is not value:
                    return None
            for place, ref in self._objects:
                if found[place] is None or found[place] is not ref():
                    return None
            found = [found[place] for place in self._places]
        if (
            not self._check(*found)
            or _is_grad_enabled() is not self._grad
            or _is_inference() is not self._inference
            or _is_autocast()
            or count_modes()
            or getattr(forward_ad, "_current_level", -1) >= 0  # transforms and traces the check tells from this
            or count_functions() != self._functions
            or (self._modes and not are_alike(self._modes, modes_of_functions()))
            or (not self._grad and [tensor.requires_grad for tensor in found] != self._require)
        ):
            return None
        return found


def alike(taken: Taken, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Alike | None:
    """Return what tells calls like that of *taken*, made here and now; None where that would take as long."""
    given = (*arguments, *named.values())
    if len(given) != len(taken.leaves) or not all(map(operator.is_, given, taken.leaves)) or not taken.tensors:
        return None  # some have parts
    if _is_autocast("cuda"):
        return None
    try:
        guards: Any = torch._C._dynamo.guards  # noqa: SLF001 - see the docstring
        check = guards.TensorGuards(*taken.tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        made = Alike(check, taken, len(arguments), tuple(named))
        return made if check(*taken.tensors) else None  # not of tensors that are the same one
    except (AttributeError, TypeError, SystemError):  # not in this version; or what cannot be held weakly
        return None


@functools.lru_cache(maxsize=1024)
def _is_leaf(kind: type) -> bool:
    """Return whether values of *kind* have no parts that are arguments of their own."""
    return kind in _TENSORS or issubclass(kind, (*_PLAIN[:-2], torch.nn.Module))


def rebuilt(taken: Taken, tensors: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of *taken*, with *tensors* in place of its own."""
    following = iter(tensors)
    leaves = [next(following) if isinstance(leaf, torch.Tensor) else leaf for leaf in taken.leaves]
    if type(taken.spec) is tuple:
        count, names = taken.spec
        return tuple(leaves[:count]), dict(zip(names, leaves[count:], strict=True))
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, taken.spec)
    return found


def apart(result: Any) -> tuple[list[Any], Any]:
    """Return the leaves of what a call gave, and how they are nested."""
    found: tuple[list[Any], Any] = pytree.tree_flatten(result)
    return found


def together(spec: Any, like: Any) -> Callable[[list[Any]], Any]:
    """Return what undoes :func:`apart` of what is nested as *like* is."""
    if isinstance(like, torch.Tensor):
        return _first
    if type(like) in {tuple, list} and all(map(is_tensor, like)):
        return type(like)
    make = _made_of(like)
    leaves, _ = apart(like)
    try:  # half of the time that the tree of it takes, where it is what that gives
        if make is not None:
            again, nested = apart(make(iter(leaves)))
            if nested == spec and len(again) == len(leaves) and all(map(operator.is_, again, leaves)):
                return lambda given: make(iter(given))
    except StopIteration:
        pass
    return functools.partial(_together, spec)


def _made_of(like: Any) -> Callable[[Iterator[Any]], Any] | None:
    """Return what takes the leaves of *like* one by one and nests them so; None where it holds other containers."""
    kind = type(like)
    if kind not in {tuple, list, dict, torch.Size}:
        return next if kind is torch.Tensor or isinstance(like, _PLAIN) else None
    parts = list(map(_made_of, like.values() if kind is dict else like))
    if None in parts:
        return None
    makers: list[Any] = parts
    flat = all(make is next for make in makers)
    if kind is dict:
        keys = list(like)
        if flat:
            return lambda rest: dict(zip(keys, rest, strict=False))  # the names first: it takes no leaf too many
        return lambda rest: dict(zip(keys, [make(rest) for make in makers], strict=True))
    if flat and kind is not torch.Size:  # which takes no iterator
        count = len(makers)
        return lambda rest: kind(itertools.islice(rest, count))
    return lambda rest: kind([make(rest) for make in makers])


def _first(leaves: list[Any]) -> Any:
    return leaves[0]


def _together(spec: Any, leaves: list[Any]) -> Any:
    return pytree.tree_unflatten(leaves, spec)


def is_tensor(value: Any) -> bool:
    """Return whether *value* is a tensor."""
    return isinstance(value, torch.Tensor)


def are_at(tensors: list[Any]) -> Callable[[list[int]], bool]:
    """Return what tells whether *tensors* are at given addresses: some 60 ns for each.

    Of torch's own there is ``_tensors_data_ptrs_at_indices_equal``, which converts three objects for each.
    """
    address_of = torch.Tensor.data_ptr
    return lambda addresses: list(map(address_of, tensors)) == addresses


def are_as_now(tensors: list[Any]) -> Callable[[], bool]:
    """Return what tells whether *tensors* have the shapes, strides and dtypes that they have now.

    And, where outputs may be to be differentiated, whether they still require grad, or still do not.

    Some 100 ns for each, where torch can compare them in one call; else, or where that says no, five times that: it
    looks at modes of torch, too.
    """
    if not tensors:
        return lambda: True
    size, stride = torch.Tensor.size, torch.Tensor.stride
    kind = operator.attrgetter(*(("dtype", "requires_grad") if _is_grad_enabled() else ("dtype",)))

    def look() -> list[Any]:
        return [*map(size, tensors), *map(stride, tensors), *map(kind, tensors)]

    was = look()
    try:
        guards: Any = torch._C._dynamo.guards  # noqa: SLF001 - see the docstring
        check = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        check(*tensors)
    except (AttributeError, TypeError, SystemError, RuntimeError):
        return lambda: look() == was
    return lambda: bool(check(*tensors)) or look() == was


def copy_into(targets: list[Any], sources: Sequence[Any]) -> None:
    """Queue copies of *sources* into *targets*."""
    graded = _is_grad_enabled()
    try:  # already: what a signal's handler raises may come after the next line
        if graded:
            _set_grad(False)
        if len(targets) <= _FEW:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        else:
            torch._foreach_copy_(targets, list(sources))  # one launch, where dtypes and strides allow
    finally:
        if graded:
            _set_grad(True)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two tensors of the same kind hold the same. Waits."""
    with torch.no_grad():
        return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - NaN is the same


def differ(expected: Any, found: Any) -> str:
    """Return how two outputs differ, by more than the tolerance of their dtype; nothing if they do not. Waits."""
    if not isinstance(expected, torch.Tensor):
        return ""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{tuple(found.shape)} of {found.dtype} in place of {tuple(expected.shape)} of {expected.dtype}"
    tolerance = _TOLERANCE.get(expected.dtype, 0.0)
    with torch.no_grad():
        if torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
            return ""
        most = (found.double() - expected.double()).abs().max().item() if not expected.is_complex() else "much"
    return f"a tensor of {expected.dtype} differs by up to {most}"
