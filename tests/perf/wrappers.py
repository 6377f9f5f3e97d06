"""What the wrapper itself costs, for each kind of callable: what a call that is not recorded pays for being decorated.

    python tests/perf/wrappers.py [--json FILE]

Nanoseconds a call, medians over interleaved rounds: bare, in a closure by functools.wraps, by a wrapt.decorator that
only passes on, and decorated with gpu_timed: left out by ``every``, unsampled under an unsampled parent, and, for
comparison, recorded and deferred. A generator is exhausted, what awaits is driven by hand. Each number holds the cost
of the lambda or function that makes the call.
"""

from __future__ import annotations

import argparse
import functools
import gc
import inspect
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import wrapt
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from overhead import CALLS, ROUNDS, Nowhere

from gpu_timed import configure, flush, gpu_timed

FAR = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(0))
UNSAMPLED = trace.set_span_in_context(trace.NonRecordingSpan(FAR))


def nothing(*_: Any) -> None:
    """Do nothing, as a function or a method."""


def one() -> Iterator[int]:
    """Give one item."""
    yield 1


async def awaited() -> None:
    """Do nothing, as a coroutine."""


async def async_one() -> AsyncIterator[int]:
    """Give one item, asynchronously."""
    yield 1


def closure(target: Any) -> Any:
    """Wrap *target* in a closure of its kind, as one writes it with functools.wraps."""
    if inspect.isasyncgenfunction(target):

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            async for item in target(*args, **kwargs):
                yield item

    elif inspect.iscoroutinefunction(target):

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await target(*args, **kwargs)

    elif inspect.isgeneratorfunction(target):

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return (yield from target(*args, **kwargs))

    else:

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return target(*args, **kwargs)

    return functools.wraps(target)(wrapper)


@wrapt.decorator
def passing(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    """Only call what is wrapped."""
    return wrapped(*args, **kwargs)


def made(**members: Any) -> Any:
    """Return an object of a new class with *members*."""
    return type("Owner", (), members)()


def sent(target: Any) -> None:
    """Drive a coroutine that does not suspend."""
    try:
        target().send(None)
    except StopIteration:
        pass


def drained(target: Any) -> None:
    """Exhaust an async generator that awaits nothing."""

    async def drain() -> None:
        async for _ in target():
            pass

    sent(drain)


KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {  # how it is made, and how it is called
    "function": (lambda deco: deco(nothing), lambda f: f()),
    "method": (lambda deco: made(call=deco(nothing)), lambda owner: owner.call()),
    "staticmethod": (lambda deco: made(call=staticmethod(deco(nothing))), lambda owner: owner.call()),
    "classmethod": (lambda deco: made(call=classmethod(deco(nothing))), lambda owner: owner.call()),
    "partial": (lambda deco: deco(functools.partial(nothing, 1)), lambda f: f()),
    "callable object": (lambda deco: deco(made(__call__=nothing)), lambda f: f()),
    "bound method": (lambda deco: deco(made(call=nothing).call), lambda f: f()),
    "coroutine": (lambda deco: deco(awaited), sent),
    "generator of 1": (lambda deco: deco(one), lambda f: list(f())),
    "async generator of 1": (lambda deco: deco(async_one), drained),
}
DECORATORS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda target: target,
    "functools.wraps": closure,
    "wrapt": passing,
    "left out": gpu_timed(every=1_000_000),
    "unsampled": gpu_timed(sync="deferred"),
    "deferred": gpu_timed(sync="deferred"),
}


def sample(call: Callable[[Any], Any], target: Any, how: str) -> float:
    """Return nanoseconds a call, over one round."""
    token = otel_context.attach(UNSAMPLED if how == "unsampled" else otel_context.get_current())
    gc.collect()
    gc.disable()
    begin = time.perf_counter_ns()
    for _ in range(CALLS):
        call(target)
    each = (time.perf_counter_ns() - begin) / CALLS
    gc.enable()
    otel_context.detach(token)
    flush(30)
    return each


def measure() -> dict[str, dict[str, float]]:
    """Return the median nanoseconds a call by kind and decorator, over interleaved rounds."""
    arms = [(kind, how, KINDS[kind][0](deco)) for kind in KINDS for how, deco in DECORATORS.items()]
    for kind, _, target in arms:
        KINDS[kind][1](target)  # the one call in a million that is recorded, and what a first call sets up
    gc.collect()
    gc.freeze()  # else each collection walks all of torch
    taken: dict[tuple[str, str], list[float]] = {(kind, how): [] for kind, how, _ in arms}
    for round_ in range(ROUNDS + 2):
        for kind, how, target in arms:
            each = sample(KINDS[kind][1], target, how)
            if round_ >= 2:  # the first two fill pools and caches
                taken[kind, how].append(each)
        arms.append(arms.pop(0))
    return {kind: {how: statistics.median(taken[kind, how]) for how in DECORATORS} for kind in KINDS}


def main() -> None:
    """Print the table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    trace.set_tracer_provider(provider)
    configure(poll_ms=1000)
    card, version = "none", ""
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None:
        version, x = torch.__version__, torch.ones(1)
        KINDS["nn.Module"] = (lambda deco: deco(torch.nn.Identity()), lambda module: module(x))
        if torch.cuda.is_available():
            torch.ones(1, device="cuda")
            torch.cuda.synchronize()
            card = torch.cuda.get_device_name()
    native = getattr(sys.modules.get("wrapt._wrappers"), "FunctionWrapper", None) is not None
    environment = {"card": card, "torch": version, "python": sys.version.split()[0], "wrapt": wrapt.__version__}
    environment |= {"wrapt's C extension": "on" if native else "off", "date": time.strftime("%Y-%m-%d")}
    found = measure()
    print(environment)
    print(f"{'ns per call':22s}" + "".join(f"{how:>17s}" for how in DECORATORS))
    for kind, row in found.items():
        print(f"{kind:22s}" + "".join(f"{value:17,.0f}" for value in row.values()))
    if options.json:
        options.json.write_text(json.dumps({"environment": environment, "ns": found}, indent=1))


if __name__ == "__main__":
    main()
