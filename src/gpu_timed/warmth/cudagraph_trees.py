"""CUDA Graph trees (``mode="reduce-overhead"``): the warm-up run and the recording, each off the replay path.

Private, the same names in torch 2.6 to 2.14: ``CUDAGraphTreeManager.run_eager`` and ``.record_function`` of
``torch._inductor.cudagraph_trees``. Neither seen in a call means a replay, or no graph.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any, Final

from gpu_timed.warmth.probe import Detach, Probe, Tell, replace


def _attach(module: ModuleType, tell: Tell) -> Detach:
    manager: Any = module.CUDAGraphTreeManager

    def maker(what: str) -> Any:
        def make(original: Any) -> Any:
            def step(self: Any, *args: Any, **kwargs: Any) -> Any:
                began = time.perf_counter_ns()
                try:
                    return original(self, *args, **kwargs)
                finally:
                    tell(what, "initialised", time.perf_counter_ns() - began)

            return step

        return make

    undo = [
        replace(manager, "run_eager", maker("warm-up run before recording")),
        replace(manager, "record_function", maker("recorded")),
    ]

    def detach() -> None:
        for each in undo:
            each()

    return detach


PROBES: Final = (Probe("cudagraph", "torch._inductor.cudagraph_trees", _attach),)
