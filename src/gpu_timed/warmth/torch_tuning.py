"""Inductor's tuning: configurations of its Triton kernels, and the choice of a kernel (``max-autotune``).

Private. ``CachingAutotuner.benchmark_all_configs`` and ``.coordinate_descent_tuning`` of
``torch._inductor.runtime.triton_heuristics`` (2.6 to 2.14): run at a kernel's first launch, and only where no
cache knows the best configuration; the second is called at each first launch and does nothing unless
``_should_coordesc_tune`` (2.11 on; an older ``inductor_meta["coordinate_descent_tuning"]``) says so.
``AlgorithmSelectorCache.make_benchmark_fn`` of ``torch._inductor.select_algorithm`` (2.6 to 2.14): makes what
benchmarks the choices for a matrix product or convolution, called only where no cache knows.

Both run in this process, on the thread that compiles or launches; with ``autotune_in_subproc`` it waits there.
TunableOp (``torch.cuda.tunable``) tunes on ROCm only, which no clock here reads.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any, Final

from gpu_timed.warmth.probe import Detach, Probe, Tell, replace

_SHORTEST_NS: Final = 100_000
"""A coordinate descent that took less launched no kernel: it was asked for, and had nothing to do."""


def _attach_heuristics(module: ModuleType, tell: Tell) -> Detach:
    def maker(what: str, shortest_ns: int) -> Any:
        def make(original: Any) -> Any:
            def step(self: Any, *args: Any, **kwargs: Any) -> Any:
                began = time.perf_counter_ns()
                try:
                    return original(self, *args, **kwargs)
                finally:
                    took = time.perf_counter_ns() - began
                    if took >= shortest_ns:
                        configs = len(getattr(self, "launchers", None) or ())
                        tell(f"{_kernel(self)} {what}", "built", took, f"{configs} configurations" if configs else "")

            return step

        return make

    tuner: Any = module.CachingAutotuner
    undo = [
        replace(tuner, "benchmark_all_configs", maker("tuned", 0)),
        replace(tuner, "coordinate_descent_tuning", maker("tuned by coordinate descent", _SHORTEST_NS)),
    ]

    def detach() -> None:
        for each in undo:
            each()

    return detach


def _kernel(tuner: Any) -> str:
    meta = getattr(tuner, "inductor_meta", None)
    named = meta.get("kernel_name") if isinstance(meta, dict) else None
    return str(named or getattr(getattr(tuner, "fn", None), "__name__", None) or "a kernel")


def _attach_choices(module: ModuleType, tell: Tell) -> Detach:
    def make(original: Any) -> Any:
        def make_benchmark_fn(*args: Any, **kwargs: Any) -> Any:
            benchmark = original(*args, **kwargs)

            def timed(choices: Any, *more: Any, **named: Any) -> Any:
                began = time.perf_counter_ns()
                try:
                    return benchmark(choices, *more, **named)
                finally:
                    names = [str(getattr(choice, "name", "")) for choice in tuple(choices)[:3]]
                    took = time.perf_counter_ns() - began
                    tell(f"{len(choices)} choices of a kernel benchmarked", "built", took, ", ".join(names))

            return timed

        return make_benchmark_fn

    cache: Any = module.AlgorithmSelectorCache
    return replace(cache, "make_benchmark_fn", make)


PROBES: Final = (
    Probe("inductor tuning", "torch._inductor.runtime.triton_heuristics", _attach_heuristics),
    # What it sees is part of a compile that torch_compile sees.
    Probe("inductor choices", "torch._inductor.select_algorithm", _attach_choices, needed=False),
)
