"""Which functions a call can come to, as far as names tell, and where on the host they read.

Looked into is what a function names: its closure, globals, modules' attributes, and of the classes of the objects that
it reaches the functions and attributes with a name that any of these functions uses. Not seen is what has no name in
the code: ``getattr`` with a name made at run time, ``vars()``. Of torch, NumPy and the standard library, and of the
other libraries in ``_CLOSED``, it is seen whether another function stands where one stood, and no more.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, Final

from gpu_timed.modes.host_places import CELL, CODE, LENGTH, Absent

_MOST_FUNCTIONS: Final = 4_096
_MOST_NAME: Final = 64
_OURS: Final = "_gpu_timed_"
_CLOSED: Final = frozenset(
    {
        *(
            "torch",
            "gpu_timed",
            "numpy",
            "triton",
            "numba",
            "llvmlite",
            "cupy",
            "jax",
            "jaxlib",
            "cuda",
            "opentelemetry",
        ),
        *("wrapt", "_wrappers", "pandas", "scipy", "matplotlib", "tqdm", "wandb", "pynvml", "psutil", "builtins"),
        *sys.stdlib_module_names,
    }
)
"""Libraries whose own objects and functions are not looked into: large, and no place for the settings of a model."""
_INSIDE: Final = ("func", "__func__", "fget", "__wrapped__", "args", "keywords")
_HOLDERS: Final = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def is_closed(module: Any) -> bool:
    """Return whether what belongs to the module of this name is not looked into."""
    return isinstance(module, str) and module.partition(".")[0] in _CLOSED and module != "__main__"


class Reach:
    """Follows functions, classes and modules.

    Args:
        place: Takes (name, holder, key) of what a function reads.
        follow: Takes (name, value) of what stands inside another, for good.
    """

    def __init__(self, place: Callable[[str, Any, Any], None], follow: Callable[[str, Any], None]) -> None:
        self._place = place
        self._follow = follow
        self._seen: set[int] = set()
        self._functions: list[Any] = []
        #: How many functions were looked into.
        self._count = 0
        #: What the code of all of them names.
        self.names: set[str] = set()
        #: Namespaces in which any name may be read: of classes, and of modules that objects hold.
        self._open: dict[int, tuple[str, Any, set[str]]] = {}
        self._modules: set[tuple[int, int]] = set()
        #: Of each namespace that functions read in: the names they may ask it for, and for which that is known.
        self._spaces: dict[int, tuple[str, dict[str, Any], set[str], set[str]]] = {}
        self.keep: list[Any] = []
        #: Whether there is more of it than is looked at.
        self.too_much = False

    def look(self, function: Any) -> None:
        """Take a function, or what stands around one, as one that may be called."""
        if id(function) not in self._seen and not isinstance(function, _HOLDERS):
            self._seen.add(id(function))
            self.keep.append(function)
            self._functions.append(function)

    def open(self, name: str, space: Any) -> None:
        """Take a class or module as one of which any name may be read."""
        if id(space) in self._open or is_closed(
            getattr(space, "__module__" if isinstance(space, type) else "__name__", "")
        ):
            return
        self._open[id(space)] = name, space, set()
        if isinstance(space, type):
            self._place(name, space.__dict__, LENGTH)

    def classes(self, kind: type) -> None:
        """Take the class of an object, and those that it inherits from."""
        if id(kind) not in self._seen:
            self._seen.add(id(kind))
            for base in kind.__mro__:
                self.open(base.__name__, base)
                if id(base) not in self._open and isinstance(vars(base).get("forward"), types.FunctionType):
                    self._place(base.__name__, vars(base), "forward")  # which some put another in the place of

    def finish(self) -> None:
        """Follow all of it to its end. More may be found meanwhile."""
        known = -1, -1
        while self._functions or known != (len(self.names), len(self._open)):
            if self._count > _MOST_FUNCTIONS:
                self.too_much = True
                return
            while self._functions:
                self._into(self._functions.pop())
            known = len(self.names), len(self._open)
            for name, space, done in list(self._open.values()):
                inside = vars(space)
                found = {each for each in self.names & inside.keys() if not each.startswith("__")}
                if isinstance(space, type):  # operators have no name in the code
                    found |= {key for key in inside if isinstance(inside[key], types.FunctionType) and key[:2] == "__"}
                    found |= {"forward"} & inside.keys()
                for key in found - done:
                    done.add(key)
                    self._place(name, inside, key)
        for name, inside, asked, done in self._spaces.values():
            if missing := frozenset(asked - done - inside.keys()):
                self._place(name, inside, Absent(missing))
            done.update(asked)

    def _into(self, function: Any) -> None:
        if isinstance(function, types.FunctionType):
            closed = is_closed(function.__globals__.get("__name__"))
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
                if name.startswith(_OURS):  # a decorated function: what is inside follows
                    continue
                if not closed:
                    self._place(name, cell, CELL)
                elif _is_function(cell):  # a context as a decorator, say
                    self.look(cell.cell_contents)
            if not closed:
                self._count += 1
                self._place(function.__name__, function, CODE)
                names = _names_in(function.__code__)
                self.names |= names
                self._globals(function.__globals__, names)
                for index in range(len(function.__defaults__ or ())):
                    self._place("a default", function.__defaults__, index)
                for name in function.__kwdefaults__ or ():
                    self._place("a default", function.__kwdefaults__, name)
                for name in names & function.__dict__.keys():
                    self._place(function.__name__, function.__dict__, name)
        elif not is_closed(type(function).__module__):
            return  # what it holds is looked at as with any object, and none of its properties is asked
        for name in _INSIDE:
            try:
                held = object.__getattribute__(function, name)
            except (AttributeError, TypeError):
                continue
            self._follow(name, held)

    def _asks(self, name: str, space: dict[str, Any], names: set[str]) -> None:
        self._spaces.setdefault(id(space), (name, space, set(), set()))[2].update(names)

    def _globals(self, space: dict[str, Any], names: set[str]) -> None:
        self._asks("", space, names)
        for name in names:
            if name in space:
                self._place("", space, name)
            module = space.get(name, sys.modules.get(name))  # or imported in the function
            if isinstance(module, types.ModuleType):
                self._module(name, module, names)

    def _module(self, name: str, module: types.ModuleType, names: set[str]) -> None:
        key = id(module), id(names)
        if key in self._modules:
            return
        self._modules.add(key)
        self.keep.append(names)  # so that its identity stays its own
        closed = is_closed(module.__name__)
        if not closed:
            self._asks(name, vars(module), names)
        for each in names & vars(module).keys():
            value = vars(module)[each]
            if not closed or isinstance(value, types.FunctionType | types.BuiltinFunctionType):
                self._place(name, vars(module), each)
            if isinstance(value, types.ModuleType):
                self._module(f"{name}.{each}", value, names)


def _is_function(cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, types.FunctionType | types.MethodType)
    except ValueError:  # not filled yet
        return False


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names that code uses, that inside it included, and what may be one for ``getattr``."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_in(constant)
        elif isinstance(constant, str) and len(constant) < _MOST_NAME and constant.isidentifier():
            found.add(constant)
    return found
