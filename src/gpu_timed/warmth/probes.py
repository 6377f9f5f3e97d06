"""All probes of this version, and what became of each: waiting for its runtime, attached, or missing its hook."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final

from gpu_timed.imports import ImportWatch
from gpu_timed.ports import Lasting
from gpu_timed.record import NOT_SET, Measured, Tier
from gpu_timed.warmth import (
    cuda_modules,
    cudagraph_trees,
    cupy_compiler,
    first_imports,
    jax_compiler,
    numba_compiler,
    torch_autograd,
    torch_caches,
    torch_compile,
    torch_cuda,
    torch_inputs,
    torch_tuning,
    triton_compiler,
)
from gpu_timed.warmth.probe import Detach, Probe, Tell
from gpu_timed.warmth.ring import Ring

PROBES: Final = (
    *torch_compile.PROBES,
    *torch_caches.PROBES,
    *torch_tuning.PROBES,
    *torch_cuda.PROBES,
    *cudagraph_trees.PROBES,
    *triton_compiler.PROBES,
    *numba_compiler.PROBES,
    *cupy_compiler.PROBES,
    *jax_compiler.PROBES,
)
NOT_NEEDED: Final = frozenset(probe.name for probe in PROBES if not probe.needed)
"""Names of the probes without which a call may be called warm all the same."""


class Probes:
    """The probes of one process, all of which tell one ring.

    Args:
        ring: What they tell.
        imports: Says when a runtime has been imported.
        fault: Told of a probe that could not be attached, or failed.
        module_loads: Attaches what tells of CUDA modules being loaded; None where nobody asked for that.
    """

    def __init__(
        self,
        ring: Ring,
        imports: ImportWatch,
        fault: Callable[[str, BaseException], None],
        module_loads: cuda_modules.Source | None = None,
    ) -> None:
        self._ring = ring
        self._fault = fault
        self._detach: list[Detach] = []
        #: By probe: ``waiting``, ``attached``, or why it could not be.
        self.state: dict[str, str] = {probe.name: "waiting" for probe in PROBES}
        self.state[cuda_modules.NAME] = cuda_modules.OFF
        #: What tells of CUDA modules, where somebody asked for it.
        self.modules: cuda_modules.CudaModules | None = None
        ring.blind_to.update(_in_use(probe) for probe in PROBES if probe.needed)
        for probe in PROBES:
            imports.when_imported(probe.module, self._attacher(probe))
        first_imports.watch(imports, ring)
        if module_loads is not None:
            tell, name = self._teller(cuda_modules.NAME), cuda_modules.NAME
            self.modules = cuda_modules.CudaModules(
                module_loads, tell, functools.partial(self.state.__setitem__, name), fault
            )
            self.modules.watch(imports)
        imports.when_imported("torch.autograd.graph", lambda module: torch_autograd.attach(module, ring))
        imports.when_imported("torch", lambda module: torch_inputs.attach(module, ring))

    def told(self) -> dict[str, str]:
        """Return the state of each, those said to have no hook whose runtime is at work without the module of it."""
        told = dict(self.state)
        for probe in PROBES:
            if told[probe.name] == "waiting" and probe.needed and _in_use(probe) in sys.modules:
                told[probe.name] = f"no hook in this version: it has no {probe.module}"
        return told

    def without_modules(self) -> contextlib.AbstractContextManager[None]:
        """Leave CUPTI to others for the length of a block."""
        return contextlib.nullcontext() if self.modules is None else self.modules.paused()

    def restart(self) -> None:
        """Begin anew in a forked child."""
        if self.modules is not None:
            self.modules.restart()

    def close(self) -> None:
        """Take every hook out again."""
        for detach in (*self._detach, *([] if self.modules is None else [self.modules.close])):
            try:
                detach()
            except Exception as error:  # noqa: BLE001 - a runtime that was changed by others
                self._fault("probe_detach", error)
        self._detach.clear()

    def _teller(self, name: str) -> Tell:
        def tell(
            what: str,
            tier: Tier,
            duration_ns: Measured = NOT_SET,
            detail: str = "",
            *,
            lasting: Lasting | None = None,
            undone: Sequence[Lasting] = (),
        ) -> None:
            try:
                self._ring.emit(name, what, tier, duration_ns, detail, lasting=lasting, undone=undone)
            except Exception as error:  # noqa: BLE001 - never into a compiler
                self._fault(f"probe_{name}", error)

        return tell

    def _attacher(self, probe: Probe) -> Callable[[ModuleType], None]:
        tell = self._teller(probe.name)

        def attach(module: ModuleType) -> None:
            try:
                self._detach.append(probe.attach(module, tell))
            except (AttributeError, TypeError) as error:
                self.state[probe.name] = f"no hook in this version: {error}"
            else:
                self.state[probe.name] = "attached"
                if probe.needed:
                    self._ring.blind_to.discard(_in_use(probe))

        return attach


def _in_use(probe: Probe) -> str:
    return probe.in_use or probe.module
