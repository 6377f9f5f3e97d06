"""The host state that a function can reach: what it sees by its closure, its globals and its arguments.

A graph replays what the device did and nothing that the host did: a counter that goes up in every call stands still in
a replay. So a call that changes what is here is not captured; and whoever changes a value between two calls, or puts
another object or tensor in the place of one, has the graph captured anew.

Looked at are plain values, tensors (identity, address, shape, strides), the identity and class of every object in
between, and the lengths of what holds them: dicts, lists, tuples, sets, deques, attributes, slots, and small arrays of
the host. It is bounded: a call that reaches more is not captured.

Not seen are: state in objects of C, as iterators and generators (of random numbers, too), context variables, thread's
locals, files and the environment; arrays of the host of more than 64 KiB; attributes of tensors; what only a weak
reference leads to; other defaults put into a function, other bases into a class, attributes into its class, another
``__dict__`` into a module of torch; attributes of a function that had none by that name; and what
:mod:`gpu_timed.modes.host_reach` says. What comes of them in the first calls differs from a replay, which the
comparison with an eager run shows. What changes there later is not noticed.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from gpu_timed.modes.host_guards import Guards
from gpu_timed.modes.host_places import (
    ATTRIBUTES,
    CELL,
    CLASS,
    CONTENTS,
    GONE,
    ITSELF,
    LENGTH,
    ORDER,
    VALUES,
    Behind,
    Slot,
    Special,
    WasTensor,
    is_array,
    is_plain,
    members,
    same,
)
from gpu_timed.modes.host_places import get as _get
from gpu_timed.modes.host_reach import Reach, is_closed

_MOST: Final = 50_000
_MOST_PARTS: Final = 4_096
_INSIDE: Final = frozenset({"_modules", "_parameters", "_buffers"})
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks")
_HOOKS_OF_ALL: Final = ("_global_forward_hooks", "_global_forward_pre_hooks")
_GO_THROUGH: Final = frozenset(
    {
        *("parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules"),
        *("children", "named_children", "state_dict", *_INSIDE),
    }
)
"""Names in code that may come to all that is in a module, whatever it is called."""
_MODULE: Final = "torch.nn.modules.module"
_CONTAINERS: Final = "torch.nn.modules.container"
"""Where torch's modules come from that are or go through what others put in them. Its others ask by name, for what they
always had."""
_CAN_BE_ANOTHERS: Final = 1 << 9
"""The flag of classes whose objects can be given another class: those made by a ``class`` statement."""
_OPEN: Final = frozenset({"builtins", "torch", "collections", "types", "functools", "argparse", "enum", "__main__"})
"""Where objects come from that are looked into, of the modules whose functions are not."""
_CACHING: Final = frozenset({"torch._ops"})
"""Of those, whose objects are not: an operation of torch finds its kernels when it is first called, and keeps them."""
_NO_STATE: Final = frozenset(
    {
        *("_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks"),
        *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_non_persistent_buffers_set"),
        *("_is_full_backward_hook", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
        "_forward_pre_hooks_with_kwargs",
    }
)
"""What every module of torch has and none looks at when it is called forward: its hooks are counted where they are."""
_AROUND: Final = frozenset({types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items())})
"""What shows a dict that is elsewhere."""
_KERNELS: Final = frozenset({"triton", "numba", "cupy", "cuda", "pycuda", "warp", "tilelang", "nanobind"})
"""Libraries that launch kernels of their own, of which torch's dispatcher sees nothing; and what wraps such in C++."""
_ASK_FOR_CAPTURES: Final = frozenset({"is_current_stream_capturing"})
"""Of torch.cuda: transformers, say, looks into masks where this says no."""
_CALLED: Final = (types.FunctionType, staticmethod, classmethod, property)


class Snapshot:
    """What the host state was at a moment.

    Args:
        function: What is to be called.
        values: What it is to be called with.
        is_tensor: Whether something is a tensor.
        is_made_of_others: Whether tensors of a class have no memory of their own: those in their attributes are looked
            at.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        values: Iterable[Any],
        is_tensor: Callable[[Any], bool],
        is_made_of_others: Callable[[type], bool] = lambda _: False,
    ) -> None:
        self._is_tensor = is_tensor
        self._is_made_of_others = is_made_of_others
        #: What stands where: (name, holder, key, what). Of tensors a :class:`WasTensor`.
        self.held: list[tuple[str, Any, Any, Any]] = []
        #: Why not all that the function can reach is in here, or nothing.
        self.too_much = ""
        #: Whether it can come to what launches kernels that torch does not see: of other libraries, or in C.
        self.launches = False
        self._places: set[tuple[int, Any]] = set()
        self._seen: set[int] = set()
        #: Of those what is looked into, so that it does not change unseen.
        self._opened: set[int] = set()
        self._keep: list[Any] = []
        self._todo: list[tuple[str, Any]] = []
        #: Empty dicts of modules of torch's own, which matter to what goes through them.
        self._unasked: list[tuple[str, Any]] = []
        self._reach = reach = Reach(self._place, self._follow)
        if not isinstance(function, types.FunctionType | types.MethodType):
            self._todo.append((type(function).__name__, function))
            reach.look(function)
        else:
            self._follow("", function)
        given = [value for value in values if not is_plain(value)]
        self._tensors = [WasTensor.of(value) for value in given if is_tensor(value)]
        #: Which are to be known and not to be kept alive: a cache of a request is one of them.
        self._arguments = set(map(id, given))
        self._todo += [("an argument", value) for value in given]
        known = -1
        while self._todo or known != len(self.held):
            known = len(self.held)
            while self._todo and not self.too_much:
                self._walk(*self._todo.pop())
            if self.too_much:
                break
            reach.finish()
            if reach.too_much:
                self.too_much = "can come to more functions than are looked into for what they read"
                break
            if self._unasked and not _GO_THROUGH.isdisjoint(reach.names):
                self._todo += self._unasked
                self._unasked = []
        #: Whether code that it can come to asks for that: to leave out what a capture cannot hold, say.
        self.asks_whether_capturing = not _ASK_FOR_CAPTURES.isdisjoint(reach.names)
        self._keep += reach.keep
        del self._reach  # which holds this

    def changed(self) -> str:
        """Return what of it is not as it was; nothing if all of it is."""
        for name, holder, key, was in self.held:
            if not same(_get(holder, key), was):
                return f"{name}{_shown(key)}".removeprefix(".")
        return ""

    def rearranged(self) -> bool:
        """Return whether a tensor among the arguments has another shape, strides, dtype or memory than it had."""
        return not all(was.is_alike(was.tensor) for was in self._tensors)

    def knows(self, value: Any) -> bool:
        """Return whether *value* is an argument, or stands somewhere: it is that one as long as the guards hold."""
        return id(value) in self._opened

    def replaced(self, was_read: Callable[[Any], bool]) -> str:
        """Return where another tensor stands in the place of one that *was_read*, or more beside such; or nothing."""
        for name, holder, key, was in self.held:
            weak = isinstance(key, Behind)
            grows = (key.key if weak else key) is LENGTH
            if (type(was) is not WasTensor and not grows) or same(now := _get(holder, key), was):
                continue
            if grows:
                found = any(self._is_tensor(one) and was_read(one) for one in _inside_of(holder() if weak else holder))
            else:
                found = self._is_tensor(now) and _is_another(now, was) and was_read(was.tensor)
            if found:
                return f"{name}{'' if grows else _shown(key)}".removeprefix(".")
        return ""

    def guards(
        self,
        read: Iterable[Any] = (),
        are_at: Callable[[list[Any]], Callable[[list[int]], bool]] | None = None,
        are_as_now: Callable[[list[Any]], Callable[[], bool]] | None = None,
        writes: Callable[[list[Any]], Any] | None = None,
    ) -> Guards:
        """Return what is to be the same at a replay. The arguments as of :class:`Guards`."""
        return Guards([each[1:] for each in self.held], read, are_at, are_as_now, writes)

    @property
    def tensors(self) -> list[Any]:
        """The tensors that it knows, arguments themselves left out."""
        return [was.tensor for *_, was in self.held if type(was) is WasTensor]

    def _place(self, name: str, holder: Any, key: Any) -> None:
        """Take note of what stands at *key* of *holder*, and follow it."""
        where = id(holder), key
        if where in self._places:
            return
        value = _get(holder, key)
        if value is GONE and not isinstance(key, Slot) and key is not CELL:
            return
        self._places.add(where)
        self._keep.append(holder)  # so that its identity stays its own
        asked = key
        if id(holder) in self._arguments:
            holder, key = _weakly(holder, key)
        if value is GONE:
            self.held.append((name, holder, key, value))
            return
        if isinstance(asked, Special) and asked is not CELL and not isinstance(asked, Slot):
            self.held.append((name, holder, key, WasTensor.of(value) if asked is ITSELF else value))
            return
        if self._is_tensor(value):
            self.held.append((name, holder, key, WasTensor.of(value)))
            if self._is_made_of_others(type(value)):
                self._inner(f"{name}{_shown(asked)}".removeprefix("."), value)
            return
        if type(holder) is not tuple or not is_plain(value):
            self.held.append((name, holder, key, value))
        if not is_plain(value):
            self._follow(f"{name}{_shown(asked)}".removeprefix("."), value)

    def _inner(self, name: str, tensor: Any) -> None:
        """Take note of the tensors that *tensor* is made of: other weights come to it as others of them."""
        inside = object.__getattribute__(tensor, "__dict__")
        self._place(name, tensor, ATTRIBUTES)
        for key in [key for key, value in inside.items() if self._is_tensor(value)]:
            self._place(name, inside, key)

    def _follow(self, name: str, value: Any) -> None:
        if isinstance(value, types.MethodType):
            self._todo.append((name or "self", value.__self__))
            self._reach.look(value.__func__)
        elif isinstance(value, _CALLED):
            self._reach.look(value)
        elif isinstance(value, type):
            self._reach.classes(value)
        elif isinstance(value, types.ModuleType):
            self.launches = self.launches or _root(value.__name__) in _KERNELS
            self._reach.open(name, value)
        else:
            self._todo.append((name, value))

    def _walk(self, name: str, value: Any) -> None:
        if id(value) in self._seen or is_plain(value) or self._is_tensor(value):
            return
        if isinstance(value, (*_CALLED, type, types.ModuleType, types.MethodType)):
            self._follow(name, value)
            return
        if max(len(self.held), len(self._seen)) > _MOST:
            self.too_much = f"reaches more than {_MOST:,} values on the host, which cannot be watched"
            return
        self._seen.add(id(value))
        self._keep.append(value)
        kind = type(value)
        self.launches = self.launches or _launches(value)
        if issubclass(kind, (dict, list, tuple, set, frozenset, deque)):  # and not what only says that it is one
            self._parts(name, value)
        elif kind in _AROUND:
            self._todo += [(name, each) for each in gc.get_referents(value)]
        elif is_array(value):
            self._place(name, value, CONTENTS)
        self._reach.look(value)  # it may stand around a function
        if kind.__module__ in _CACHING or (_root(kind.__module__) not in _OPEN and is_closed(kind.__module__)):
            return
        self._opened.add(id(value))
        self._reach.classes(kind)
        self._attributes(name, value)

    def _parts(self, name: str, value: Any) -> None:
        count = LENGTH.get(value)
        if count > _MOST_PARTS:
            self.too_much = f"reaches {name} with more than {_MOST_PARTS:,} parts, which cannot be watched"
            return
        kind = type(value)
        if not issubclass(kind, (tuple, frozenset)):
            self._place(name, value, LENGTH)
        if issubclass(kind, (set, frozenset)):
            if issubclass(kind, set):
                self._place(name, value, CONTENTS)
            self._inside(name, members(value))
            return
        keys: Iterable[Any] = range(count)
        if issubclass(kind, dict):
            keys = members(value)
            told_by_more = self._inside(name, keys)
            if told_by_more or count > 1:
                self._place(name, value, ORDER)
            if told_by_more:
                self._place(name, value, VALUES)
                self._inside(name, dict.values(value))
                return
        for key in keys:
            self._place(name, value, key)

    def _inside(self, name: str, parts: Iterable[Any]) -> bool:
        """Follow what has no place of its own, as a key has none; returns whether any of it is not plain."""
        found = [each for each in parts if not is_plain(each)]
        for each in found:
            if self._is_tensor(each):
                self._place(name, each, ITSELF)
            else:
                self._follow(name, each)
        return bool(found)

    def _attributes(self, name: str, value: Any) -> None:
        try:
            inside = object.__getattribute__(value, "__dict__")
        except (AttributeError, TypeError):
            inside = None
        self._kind(name, value, inside)
        if type(inside) is dict:
            is_module = _is_module(inside)
            if is_module:
                self._hooks_of_all()
            asks_by_name = is_module and _asks_by_name(value, inside)
            self._place(name, inside, LENGTH)
            for key in list(inside):
                if asks_by_name and key in _INSIDE and not inside[key]:
                    self._unasked.append((name, inside[key]))
                elif not (is_module and key in _NO_STATE):
                    self._place(name, inside, key)
        for base in type(value).__mro__:
            if not is_closed(base.__module__):
                for slot, descriptor in list(vars(base).items()):
                    if isinstance(descriptor, types.MemberDescriptorType):
                        self._place(name, value, Slot.of(slot))

    def _hooks_of_all(self) -> None:
        space = vars(sys.modules[_MODULE]) if _MODULE in sys.modules else {}
        self._todo += [("the hooks of all modules", space[name]) for name in _HOOKS_OF_ALL if name in space]

    def _kind(self, name: str, value: Any, inside: Any) -> None:
        """Take note of its class, and of its attributes as a whole: that of modules is not put in another's place."""
        if not type(value).__flags__ & _CAN_BE_ANOTHERS:
            return
        self._place(name, value, CLASS)
        if type(inside) is dict and not _is_module(inside):
            self._place(name, value, ATTRIBUTES)


def _inside_of(holder: Any) -> list[Any]:
    return list(dict.values(holder)) if issubclass(type(holder), dict) else members(holder)


def _is_another(now: Any, was: WasTensor) -> bool:
    """Return whether a tensor is no view of the same memory, which is the same tensor to what reads it."""
    if now is was.tensor:
        return bool(now.data_ptr() != was.address)  # it was given other memory
    return not (was.address and was.is_alike(now))


def _weakly(holder: Any, key: Any) -> tuple[Any, Any]:
    """Return how to ask for *key* and not keep *holder* alive for it."""
    try:
        return weakref.ref(holder), Behind(key)
    except TypeError:
        return holder, key  # what cannot be known weakly is kept alive anyway


def _root(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


def _launches(value: Any) -> bool:
    """Return whether *value* may launch kernels by itself: of one of those libraries, or a function of another in C."""
    if isinstance(value, types.BuiltinFunctionType):
        module = value.__module__
        return isinstance(module, str) and not is_closed(module)
    return _root(type(value).__module__) in _KERNELS


def _is_module(inside: dict[str, Any]) -> bool:
    return "_modules" in inside and "_parameters" in inside


def _asks_by_name(module: Any, inside: dict[str, Any]) -> bool:
    """Return whether a module comes to nothing in it that it had not when it was made: one of torch's own."""
    where = type(module).__module__
    return is_closed(where) and where not in {_MODULE, _CONTAINERS} and not any(map(inside.get, _HOOKS))


def _shown(key: Any) -> str:
    if isinstance(key, Special):
        return key.shown
    if isinstance(key, str):
        return "" if key in _INSIDE else f".{key}"
    return f"[{key!r}]"
