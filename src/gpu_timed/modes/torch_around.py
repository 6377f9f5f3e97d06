"""What stands around a call and sees each operation of torch as it is asked for: a replay has none to show.

A mode of torch's that counts, logs, fakes or records operations, a transform of ``torch.func``, a forward derivative, a
trace. To what is recorded a replay would be a constant, of derivatives it knows nothing, and a count of it is none.

Private, versions seen 2.6 to 2.13: ``torch._C._len_torch_dispatch_stack``, ``_get_dispatch_stack_at``,
``_len_torch_function_stack``, ``_get_function_stack_at``, ``_get_tracing_state``,
``torch._C._functorch.peek_interpreter_stack``; ``torch.autograd.forward_ad._current_level``;
``TorchDispatchMode.is_infra_mode``; ``torch.utils._device.DeviceContext``, which is a mode in this sense and changes
nothing but where tensors are made.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from gpu_timed.modes.launcher import INSIDE, ForNow
from gpu_timed.modes.torch_watching import Watch

_functorch: Final[Any] = getattr(torch._C, "_functorch", None)  # noqa: SLF001 - see the docstring

_TRACERS: Final = frozenset({"FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode"})


def _none(*_: Any) -> Any:
    return None


def _no_mode() -> int:
    return 0


count_modes: Final[Any] = getattr(torch._C, "_len_torch_dispatch_stack", _no_mode)  # noqa: SLF001
_at: Final[Any] = getattr(torch._C, "_get_dispatch_stack_at", _none)  # noqa: SLF001
count_functions: Final[Any] = getattr(torch._C, "_len_torch_function_stack", _no_mode)  # noqa: SLF001
"""How many modes there are that see operations, and how many that see functions of torch: mostly none, it says."""
_function_at: Final[Any] = getattr(torch._C, "_get_function_stack_at", _none)  # noqa: SLF001
_traced: Final[Any] = getattr(torch._C, "_get_tracing_state", _none)  # noqa: SLF001
_transformed: Final[Any] = getattr(_functorch, "peek_interpreter_stack", _none)


def around() -> str:
    """Return what sees the operations of a call made here and now, or nothing.

    On a thread of autograd's it sees also what watches the call that asked for the derivatives.
    """
    modes = [_at(index) for index in range(count_modes())]
    if any(isinstance(mode, Watch) for mode in modes):
        return INSIDE
    for mode in modes + modes_of_functions():
        if not isinstance(mode, DeviceContext):
            return ForNow(f"a replay shows no operations to {type(mode).__name__}, which is around the call")
    if _transformed() is not None:
        return ForNow("inside a transform of torch.func")
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return ForNow("a replay has no forward derivatives")
    return ForNow("inside a trace of torch.jit") if _traced() is not None else ""


def around_compiled() -> str:
    """Return what torch compiles no call in, made here and now, and would give the function up for; or nothing."""
    for mode in map(_at, range(count_modes())):
        infra = getattr(mode, "is_infra_mode", bool)()  # as those are that the compiler may be under
        if not infra or type(mode).__name__ in _TRACERS:
            return ForNow(f"torch compiles nothing with {type(mode).__name__} around the call")
    if _transformed() is not None:
        return ForNow("inside a transform of torch.func")
    return ForNow("inside a trace of torch.jit") if _traced() is not None else ""


def devices() -> tuple[Any, ...]:
    """Return the devices that tensors are made on where none is named, the innermost last: part of a signature."""
    return tuple(getattr(mode, "device", None) for mode in modes_of_functions())


def modes_of_functions() -> list[Any]:
    """Return the modes that see functions of torch, not operations, the innermost last."""
    return [_function_at(index) for index in range(count_functions())]


def are_alike(one: list[Any], other: list[Any]) -> bool:
    """Return whether as many modes that see functions do the same: each ``with torch.device(…)`` is a new one."""
    return all(map(_is_alike, one, other))


def _is_alike(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) is DeviceContext and one.device == other.device)
