"""All probes of this version, and what became of each: waiting for its runtime, attached, or missing its hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final

from gpu_timed.imports import ImportWatch
from gpu_timed.ports import Lasting
from gpu_timed.record import NOT_SET, Measured, Tier
from gpu_timed.warmth import (
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
from gpu_timed.warmth.probe import Detach, Probe
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


class Probes:
    """The probes of one process, all of which tell one ring.

    Args:
        ring: What they tell.
        imports: Says when a runtime has been imported.
        fault: Told of a probe that could not be attached, or failed.
    """

    def __init__(self, ring: Ring, imports: ImportWatch, fault: Callable[[str, BaseException], None]) -> None:
        self._ring = ring
        self._fault = fault
        self._detach: list[Detach] = []
        #: By probe: ``waiting``, ``attached``, or why it could not be.
        self.state: dict[str, str] = {probe.name: "waiting" for probe in PROBES}
        ring.blind_to.update(_in_use(probe) for probe in PROBES if probe.needed)
        for probe in PROBES:
            imports.when_imported(probe.module, self._attacher(probe))
        first_imports.watch(imports, ring)
        imports.when_imported("torch.autograd.graph", lambda module: torch_autograd.attach(module, ring))
        imports.when_imported("torch", lambda module: torch_inputs.attach(module, ring))

    def close(self) -> None:
        """Take every hook out again."""
        for detach in self._detach:
            try:
                detach()
            except Exception as error:  # noqa: BLE001 - a runtime that was changed by others
                self._fault("probe_detach", error)
        self._detach.clear()

    def _attacher(self, probe: Probe) -> Callable[[ModuleType], None]:
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
                self._ring.emit(probe.name, what, tier, duration_ns, detail, lasting=lasting, undone=undone)
            except Exception as error:  # noqa: BLE001 - never into a compiler
                self._fault(f"probe_{probe.name}", error)

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
