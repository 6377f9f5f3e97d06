"""What a call does, as torch's dispatcher sees it: what it changes, what it reads, and what no CUDA Graph can hold.

Seen are operations of torch. What kernels of Triton, Numba or CuPy change is not, nor what code inside
``torch.compile`` does: that has to be declared.

Private, versions seen 2.6 to 2.13: ``torch.utils._python_dispatch.TorchDispatchMode`` with its ``_should_skip_dynamo``,
``is_infra_mode`` and ``ignore_compile_internals``; ``OpOverload._schema``, its ``is_mutable`` and
``alias_info.is_write``; ``OpOverload.tags`` and ``namespace``; ``UntypedStorage._cdata`` and that of generators;
``torch._C._len_torch_dispatch_stack``, ``_get_dispatch_stack_at`` and ``_pop_torch_dispatch_stack``;
``torch._ops.HigherOrderOperator`` with ``_higher_order_ops`` and ``python_key_table``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_timed.modes.torch_memory import is_made_of_others
from gpu_timed.modes.torch_ranks import has_ranks

_READS: Final = frozenset(
    {
        *("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"),
        *("aten::nonzero", "aten::masked_select", "aten::unique_consecutive", "aten::_unique2", "aten::unique_dim"),
        *("aten::repeat_interleave", "aten::bincount", "aten::nonzero_numpy"),
        *("aten::linalg_eig", "aten::linalg_eigvals", "aten::_linalg_eigvals"),
    }
)
"""Operations whose result, or its size, the host has to wait for.

There are more, in which it waits out of the dispatcher's sight: a capture of such fails.
"""
_BY_NO_SOLVER: Final = frozenset({"aten::linalg_vector_norm", "aten::linalg_cross"})
"""Of linear algebra what many compute that decompose no matrix: they are to make no handle of cuSOLVER's."""
_INDICES: Final = frozenset({torch.int32, torch.int64})
_ASSERTS: Final = frozenset(
    {
        *("aten::_assert_async", "aten::_functional_assert_async", "aten::binary_cross_entropy"),
        *("aten::masked_scatter", "aten::masked_scatter_"),
    }
)
"""Operations that stop the device for what is in a tensor that is no index."""
_COPIES: Final = frozenset({"aten::_to_copy", "aten::copy_", "aten::clone", "aten::cat", "aten::stack"})
_OF_TORCH: Final = frozenset({"aten", "prims", "prim"})
_BETWEEN_RANKS: Final = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"}
)
EXCHANGES: Final = "it exchanges data with other ranks"
_RANDOM_STATE: Final = frozenset({"philox_seed", "philox_offset", "rng_state", "unused"})
"""Names of what attention keeps for its backward pass: on the host, but where it is captured; and read by nothing else.
"""
_IN_PLACE: Final = "c10d"
"""Operations that change what they are given, of which their schemas say nothing."""
_ONLY_READ: Final = ("backward", "no_training", "no_update", "functional")
"""What names of batch norms have in them that do not change their statistics, and have no argument that says so."""
_DYNAMO: Final = "torch._dynamo"
_all_come_here: Final = hasattr(TorchDispatchMode, "supports_higher_order_operators")
_NO_WORK: Final = "torch._subclasses."
"""Where the classes of tensors are that only say what a result would look like: nothing is done for them anywhere."""


class Waits(Exception):  # noqa: N818 - what it would do
    """An operation would have the host wait for the device, in the midst of a capture."""


class _Mode(TorchDispatchMode):  # type: ignore[misc] # torch is not read by mypy
    """A mode that compiled code and operations that run functions take as one that they need not know."""

    #: Else flex_attention, torch.cond or scan raise, in the user's call, that they do not know this mode.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return _DYNAMO in sys.modules  # else it would be imported for that

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Say that compiled code may be compiled and run as ever."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Say the same, to a newer torch."""
        return True


class WithoutReads(_Mode):
    """Keeps a capture from being broken by a function that was to leave out what makes the host wait.

    Raises:
        Waits: At its end, too: what was raised in the midst of it may have been caught.
    """

    def __init__(self) -> None:
        super().__init__()
        self._broken = ""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        super().__exit__(kind, error, trace)
        if kind is None and self._broken:
            raise Waits(self._broken)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run *func*.

        Raises:
            Waits: The host would wait for what it gives.
        """
        if types and any(map(is_made_of_others, types)):
            return NotImplemented  # as below: what its class does with the parts comes here
        name = getattr(getattr(func, "_schema", None), "name", "")
        if name in _READS:
            self._broken = self._broken or _waits(name)
            raise Waits(self._broken)
        return func(*args, **(kwargs or {}))


class Watch(_Mode):
    """Watches the operations of one call on this thread.

    Args:
        holds: Whether a tensor lives where a graph can work on it.
        most_bytes: How much of what it changes is set aside, as it was before; None for nothing.
        where: Tells the stream that is current.
        relaxed: A context in which an allocation cannot break another thread's capture.
    """

    def __init__(
        self,
        holds: Callable[[Any], bool],
        most_bytes: int | None = None,
        where: Callable[[], int] | None = None,
        relaxed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        self._holds = holds
        self._relaxed = relaxed
        self._where = where
        self._stream = where() if where is not None else 0
        #: Whether it works on more than one stream, and whether it may draw random numbers.
        self.streams = self.draws = False
        #: Whether it decomposes matrices, by cuSOLVER, say.
        self.solves = False
        #: Whether the device may stop, for the whole process, if it is run on other tensors than the function has now:
        #: an index is beyond what was a smaller table (embeddings, gathers). Of operations that are not torch's, too.
        self.may_stop = False
        #: That it exchanges data with other ranks, or may: who runs it once more than they do hangs, or gets another's
        #: data. Empty if it does not.
        self.talks = ""
        self.most_bytes = self._left = most_bytes or 0
        self._saves = most_bytes is not None
        #: Content of what it changes, before: by storage.
        self.before: dict[int, Any] = {}
        #: Whether there was more of it than may be set aside.
        self.too_much = False
        #: Why no graph can hold the call, with the line of the user's code; empty if nothing is known.
        self.blocked = ""
        #: What made the host wait for the device, which no graph can hold; a library may leave it out in a capture.
        self.waits = ""
        #: Tensors that were there before the call and that it works on, and those of them that it changes: by address
        #: and extent of their storage.
        self.outside: dict[int, Any] = {}
        self.changed: dict[int, Any] = {}
        self.devices: set[Any] = set()
        #: Storages made in the call. Not held, or none of its memory could be used again before it ends.
        self._born: set[int] = set()

    def forget(self) -> None:
        """Let go of all tensors, and look at no more operations: the call raised.

        An interrupt in the midst of entering or leaving it may have left it where it was, for the rest of the thread.
        """
        self.before, self.outside, self.changed = {}, {}, {}
        with suppress(Exception):  # not in this version: the user's exception is to come out
            count = torch._C._len_torch_dispatch_stack()  # noqa: SLF001
            if count and torch._C._get_dispatch_stack_at(count - 1) is self:  # noqa: SLF001
                torch._C._pop_torch_dispatch_stack(None)  # noqa: SLF001

    def __enter__(self) -> Any:
        """Begin to watch this thread."""
        if not _all_come_here:
            with suppress(Exception):  # not in this version
                make_known(type(self))
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at *func*, and run it."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            self.blocked = self.blocked or f"{func.name()} runs functions that cannot be seen into, {_line()}"
            return func(*args, **kwargs)
        if types and any(map(is_made_of_others, types)):
            if any(kind.__module__.startswith(_NO_WORK) for kind in types):
                return func(*args, **kwargs)
            return NotImplemented  # its class takes it apart, and what it does with the parts comes here
        try:
            self._before(func, args, kwargs)
        except Exception as error:  # noqa: BLE001 - the operation is the user's: it goes on
            self.blocked = self.blocked or f"{func} cannot be looked at ({type(error).__name__})"
        result = func(*args, **kwargs)
        try:
            self._after(func, result)
        except Exception as error:  # noqa: BLE001
            self.blocked = self.blocked or f"what {func} gives cannot be looked at ({type(error).__name__})"
        return result

    def _before(self, func: Any, args: Any, kwargs: Any) -> None:
        schema = func._schema  # noqa: SLF001 - versions in the module's docstring
        if self._where is not None and not self.streams:
            self.streams = self._where() != self._stream
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = self.draws or not _without_dropout(schema, args, kwargs)
            if not self.blocked and _has_generator(schema, args, kwargs):
                self.blocked = f"{schema.name} draws from a generator= of its own, which no graph knows of, {_line()}"
        taken = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if func.namespace not in _OF_TORCH and self.talks != EXCHANGES and has_ranks():
            told = func.namespace in _BETWEEN_RANKS  # else what it does inside is not seen: vLLM's all_reduce, say
            self.talks = EXCHANGES if told else f"{schema.name} may exchange data with other ranks"
        self.may_stop = self.may_stop or _may_stop(func, taken)
        self.solves = self.solves or ("linalg" in schema.name and schema.name not in _BY_NO_SOLVER)
        for one in taken:
            key = one.untyped_storage()._cdata  # noqa: SLF001 - the storage itself, whatever its address
            if key not in self._born:
                self.outside.setdefault(key, one)
        if func.namespace == _IN_PLACE:
            for one in taken:
                self.will_change(one)
        elif schema.is_mutable:
            self._note_changes(schema, args, kwargs)
        elif "_norm" in schema.name:
            for one in _statistics(schema, args, kwargs):
                self.will_change(one)
        if not self.blocked:
            aside = self._aside(schema.arguments, args)
            self._look(schema.name, [one for one in taken if id(one) not in aside])

    def _after(self, func: Any, result: Any) -> None:
        name = func._schema.name  # noqa: SLF001
        aside = self._aside(func._schema.returns, result if isinstance(result, tuple | list) else ())  # noqa: SLF001
        for one in pytree.tree_leaves(result):
            if isinstance(one, torch.Tensor):
                key = one.untyped_storage()._cdata  # noqa: SLF001
                if key not in self.outside:
                    self._born.add(key)
                if id(one) in aside:
                    continue
                if not self.blocked and not self._holds(one):
                    self.blocked = f"{name} makes a tensor on {one.device}, {_line()}"
                self.devices.add(one.device)

    def _note_changes(self, schema: Any, args: Any, kwargs: Any) -> None:
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for one in pytree.tree_leaves(value):
                if isinstance(one, torch.Tensor):
                    self.will_change(one)

    def will_change(self, tensor: Any) -> None:
        """Take note that *tensor*, if it was there before the call, is about to be changed."""
        key = tensor.untyped_storage()._cdata  # noqa: SLF001
        if key in self._born or key in self.changed:
            return
        self.changed[key] = tensor
        if self._saves:
            size = tensor.untyped_storage().nbytes()
            self._left -= size
            if self._left < 0:
                self.too_much = True
            else:
                with self._relaxed():
                    self.before[key] = content_of(tensor)

    def has_read(self, tensor: Any) -> bool:
        """Return whether the call worked on *tensor*, which was there before it."""
        if is_made_of_others(type(tensor)):
            parts = object.__getattribute__(tensor, "__dict__").values()
            return any(self.has_read(one) for one in parts if isinstance(one, torch.Tensor))
        return key_of(tensor) in self.outside

    def _aside(self, named: Any, values: Any) -> set[int]:
        """Return which of *values* are what attention keeps for its backward pass, and are on the host."""
        return {
            id(value)
            for one, value in zip(named, values, strict=False)
            if one.name in _RANDOM_STATE and isinstance(value, torch.Tensor) and not self._holds(value)
        }

    def _look(self, name: str, taken: list[Any]) -> None:
        if name in _READS:
            self.waits = self.waits or _waits(name)
        for one in taken:
            self.devices.add(one.device)
            if not self._holds(one):
                self.blocked = f"{name} works on a tensor on {one.device}, {_line()}"


def _waits(name: str) -> str:
    return f"{name} makes the host wait for the device, {_line()}"


def make_known(kind: type[Watch]) -> None:
    """Have operations that run functions come to modes of this *kind*, in a torch in which each asks whether it may."""
    for operation in list(getattr(torch._ops, "_higher_order_ops", {}).values()):  # noqa: SLF001
        if kind not in operation.python_key_table:
            operation.py_impl(kind)(functools.partial(_come, operation))


def _come(operation: Any, mode: Watch, *arguments: Any, **named: Any) -> Any:
    return mode.__torch_dispatch__(operation, (), arguments, named)


def _statistics(schema: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the running means and variances that a batch norm changes, which its schema does not say."""
    given = {
        one.name: args[place] if place < len(args) else kwargs.get(one.name)
        for place, one in enumerate(schema.arguments)
    }
    trains = given.get("training", given.get("use_input_stats", True))
    if not trains or any(said in schema.name for said in _ONLY_READ):
        return []
    return [one for one in (given.get("running_mean"), given.get("running_var")) if isinstance(one, torch.Tensor)]


def _may_stop(func: Any, taken: list[Any]) -> bool:
    """Return whether *func* may check on the device what is in *taken*, which ends the process's use of it if it fails.

    Which of torch's operations do is not said by any of their properties. Those that work element by element do not.
    """
    schema = func._schema  # noqa: SLF001
    if func.namespace not in _OF_TORCH or schema.name in _ASSERTS:
        return True
    if torch.Tag.pointwise in func.tags or schema.name in _COPIES or not any(one.dtype in _INDICES for one in taken):
        return False
    return schema.is_mutable or not any(given.alias_info for given in schema.returns)  # it is no view


def _has_generator(schema: Any, args: Any, kwargs: Any) -> bool:
    """Return whether it is given a generator of random numbers that is not that of the device."""
    for index, argument in enumerate(schema.arguments):
        if argument.name == "generator":
            given = args[index] if index < len(args) else kwargs.get("generator")
            known = (torch.default_generator, *torch.cuda.default_generators)
            return given is not None and given._cdata not in {one._cdata for one in known}  # noqa: SLF001
    return False


def _without_dropout(schema: Any, args: Any, kwargs: Any) -> bool:
    """Return whether this is attention that has been told to leave out nothing: it draws no random number then."""
    for index, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return not given
    return False


def _line() -> str:
    """Return where in the user's code this happens."""
    frame = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        of_torch = name == "torch" or frame.f_code.co_filename.startswith("<eval_with_key>")  # which torch.fx has made
        if not of_torch and not name.startswith(("torch.", "gpu_timed.")):
            return f"at {frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "in torch"


def memory_of(tensor: Any) -> Any:
    """Return all of the memory behind *tensor* as a flat tensor of its dtype that is no part of any autograd graph."""
    with torch.no_grad():
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def content_of(tensor: Any) -> Any:
    """Return a copy of all of the memory behind *tensor*."""
    with torch.no_grad():
        return memory_of(tensor).clone()


def key_of(tensor: Any) -> int:
    """Return what tells the storage of *tensor* from others as long as it lives."""
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return key
