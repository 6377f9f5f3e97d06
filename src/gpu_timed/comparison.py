"""The door of a comparison: is it launch-bound, and which mode pays?"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, Literal, get_args

from gpu_timed import current
from gpu_timed.analysis.concluding import LONGEST_S
from gpu_timed.analysis.ratios import need_scipy
from gpu_timed.arms import Comparison, Point, Quantity
from gpu_timed.assembly import peak_book
from gpu_timed.callables.functions import is_timed, template_for
from gpu_timed.errors import ConfigurationError, unknown_value
from gpu_timed.measure.contest import PARTS, TIMED, Contest, Plan, Progress, Tools
from gpu_timed.measure.contestant import Contestant, Unsaid, name_of
from gpu_timed.measure.interleaving import describe
from gpu_timed.measure.stopwatch import Stopwatch
from gpu_timed.mode_values import EAGER, Mode, mode_of
from gpu_timed.option_names import called, given
from gpu_timed.work import COUNT, Work, check_work, one_work

Function = Callable[..., Any]
Outputs = Literal["compare", "ignore"]
MODES: Final = ("eager", "cuda_graph", "reduce-overhead")
_FLUSH_S: Final = 2.0
_SEVERAL: Final = 'compare({"old": f, "new": g})'
_one_at_a_time: Final = threading.Lock()


def compare(
    fn: Function | Mapping[str, Function],
    args: Sequence[Any] | Callable[..., Sequence[Any]] = (),
    kwargs: Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None = None,
    *,
    modes: Sequence[str | Mode] | None = None,
    baseline: str | None = None,
    reset: Callable[[], object] | None = None,
    budget_s: float = 20.0,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    work: Work | Callable[..., Work] | None = None,
    seed: int | None = None,
    outputs: Outputs = "compare",
    tolerance: float | None = None,
    by: Quantity = "wall",
    profile: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """Run a function in several modes, or several functions, and say which is faster, by how much, and why.

    ::

        result = compare(step, args=(x,))                       # eager, cuda_graph and reduce-overhead
        result = compare({"old": old, "new": new}, args=(x,))   # two functions, from equal inputs

    Every arm is called until it is warm; those first calls are measured apart. Then all take turns in short blocks, in
    an order drawn anew for each, until the interval of the ratio of their times is narrow enough, or *budget_s* is up.
    Last comes a profiled pass of a few calls, from which busy time and gaps are; launches are slower in the process
    ever after, so that a second comparison belongs into a new one (its notes say so), and several values into *sweep*.
    No span is made meanwhile, by this or any other thread of the process, and nothing is exported. Never call it in a
    service that serves.

    The function must do the same in every call: it is called with the same arguments again and again. One that changes
    its arguments or state is refused, unless *reset* puts them back.

    Args:
        fn: What is compared, in each of *modes*; or several functions by name, each as it is. A ``gpu_timed`` wrapper
            is taken off.
        args: Its arguments by position. May be a function that makes them, of the keyword of *sweep* where there is
            one.
        kwargs: Its arguments by name, likewise.
        modes: As :func:`gpu_timed.gpu_timed` takes them; only with a single function.
        baseline: Name of the arm that the others are held against: ``eager``, or the first of several functions.
        reset: Called before each call, outside of what is timed. Puts back what the function changes. A CUDA Graph of a
            function that changes host state is refused all the same, unless its mode says so: ``CudaGraph(reset=...)``.
        budget_s: Seconds for the blocks. First calls (compiling!) and the profiled pass take what they take.
        sweep: One keyword and its values, as in ``{"batch": [1, 8, 32]}``: one comparison for each, in ``points``. What
            they take of memory is held until the last one is done: kernels are recorded when all have been timed.
        work: What one call has to do, to tell memory-bound from compute-bound; or a function of the call's arguments.
        seed: By which blocks are shuffled, and sources of random numbers set before outputs are compared. They are put
            back. None draws one, which is in the result.
        outputs: ``compare`` gives no verdict about an arm whose outputs differ from the baseline's.
        tolerance: Part of a number, and of the usual size of its array, by which outputs may differ. None takes that of
            the type of number.
        by: The time that verdicts are about: the wall's (from the call until the device has done it), or the device's.
        profile: Whether to make the profiled pass.
        progress: Called with how much is done, of how much, and what is being done.

    Returns:
        Arms, samples, verdicts and what follows. An arm that cannot run says why; so does a comparison that cannot be
        made. Neither raises.

    Raises:
        ConfigurationError: An option cannot be used.
        MissingExtraError: SciPy is not installed.
    """
    need_scipy()
    _check(budget_s, outputs, by, tolerance=tolerance, seed=seed, reset=reset)
    _check_work(work)
    made = _arms(fn, modes, baseline)
    number = random.SystemRandom().getrandbits(31) if seed is None else seed

    def planned(**value: Any) -> Plan:
        positional, named = _arguments(args, kwargs, value)
        stated = work if work is None or isinstance(work, Work) else one_work(work(*positional, **named))
        return Plan(
            name=made.name,
            baseline=made.baseline,
            arguments=(positional, named),
            budget_ns=round(budget_s * 1e9),
            seed=number,
            reset=reset,
            outputs=outputs == "compare",
            tolerance=tolerance,
            by_device=by == "device",
            work=stated,
            profile=profile,
        )

    told = progress or _nobody
    if sweep is None:
        _check_makers(args, kwargs, [])
        return _contests(made, [planned], [told])[0]
    keyword, values = _sweep(sweep, args, kwargs)
    _check_makers(args, kwargs, [keyword])
    found = _contests(
        made,
        [functools.partial(planned, **{keyword: value}) for value in values],
        [_part_of(told, index, len(values), f"{keyword}={value}") for index, value in enumerate(values)],
    )
    return Comparison(
        name=made.name,
        arms=(),
        baseline=made.baseline,
        environment=found[0].environment,
        seed=number,
        seconds=sum(one.seconds for one in found),
        sweep=keyword,
        points=tuple(map(Point, values, found)),
    )


class _Arms:
    """What is to be compared: name and function of each arm, and its mode."""

    def __init__(self, name: str, baseline: str, held: list[tuple[str, Function, Mode | None]]) -> None:
        self.name = name
        self.baseline = baseline
        self.held = held


def _contests(made: _Arms, plans: Sequence[Callable[[], Plan]], told: Sequence[Progress]) -> list[Comparison]:
    """Run them one after the other, and only then record kernels, after which launches are slower.

    Where the arguments of a later one cannot be made (of a sweep that outgrows the memory), the others are kept.
    """
    tracer = current.tracer()
    contests: list[Contest | Comparison] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet(tracer))
        for planned, tell in zip(plans, told, strict=True):
            try:
                plan = planned()
            except Exception as error:
                if not contests:
                    raise
                why = f"its arguments could not be made ({describe(error)})"
                contests.append(Comparison(name=made.name, arms=(), baseline=made.baseline, refused=why))
                continue
            notes = Unsaid(current.modes)
            contestants = [Contestant(name, function, mode, notes) for name, function, mode in made.held]
            for each in contestants:
                stack.callback(each.close)
            tools = Tools(
                stopwatch=Stopwatch(tracer.locator, tracer.host),
                warmth=tracer.warmth,
                peaks=peak_book().of,
                ledger=current.ledger(),
                alone=current.without_module_loads,
            )
            contest = Contest(contestants, plan, tools, tell)
            contests.append(contest)
            contest.run()
        for held in contests:
            if isinstance(held, Contest):
                held.record_kernels()
        return [held if isinstance(held, Comparison) else held.result() for held in contests]


def _part_of(told: Progress, index: int, count: int, name: str) -> Progress:
    """Return what tells of one of *count* comparisons, as part of all: first all are timed, then kernels recorded."""

    def tell(done: int, _total: int, text: str) -> None:
        recording = done >= TIMED
        before = count * TIMED + index * (PARTS - TIMED) - TIMED if recording else index * TIMED
        told(before + done, count * PARTS, f"{name}: {text}")

    return tell


@contextlib.contextmanager
def _quiet(tracer: Any) -> Iterator[None]:
    """Make no spans for the length of the block, once those that were made have been read.

    One comparison at a time: two would disturb each other's times, and put back each other's silence.
    """
    with _one_at_a_time:
        tracer.resolver.flush(_FLUSH_S)
        before = tracer.settings
        silent = tracer.settings = before.with_values(disabled=True)
        try:
            yield
        finally:
            if tracer.settings is silent:  # else somebody has changed them meanwhile
                tracer.settings = before


def _arms(fn: Any, modes: Any, baseline: str | None) -> _Arms:
    if isinstance(fn, Mapping):
        if modes is not None:
            raise ConfigurationError("modes= is for one function: several are compared as they are. Leave it out.")
        if not fn or not all(isinstance(name, str) and name for name in fn):
            raise ConfigurationError(f"several functions are given by name: {_SEVERAL}.")
        held: list[tuple[str, Function, Mode | None]] = [(name, _bare(each), None) for name, each in fn.items()]
        return _Arms(" / ".join(fn), _known(baseline or held[0][0], held), held)
    function = _bare(fn)
    if isinstance(modes, str):
        named = [word.strip() for word in modes.split(",") if word.strip()]
        meant = tuple(named if len(named) > 1 else dict.fromkeys([EAGER.name, *(named or MODES[1:])]))
        meant = meant if len(meant) > 1 else MODES
        raise ConfigurationError(f"modes must be several, and not one text: modes={meant!r}.")
    asked = [mode_of(mode) for mode in (MODES if modes is None else modes)]
    if not asked:
        raise ConfigurationError(
            f"{given('modes')} is empty: name at least one, as in {given('modes', ('eager', 'cuda_graph'))}."
        )
    if baseline is None and EAGER not in asked:
        asked.insert(0, EAGER)
    held, names = [], set()
    shared = {mode.name for mode in asked if sum(mode.name == one.name for one in asked) > 1}
    for mode in asked:
        known = name = f"{mode.name}{_options(mode) if mode.name in shared else ''}"
        number = 2
        while name in names:
            name, number = f"{known} {number}", number + 1
        names.add(name)
        held.append((name, function, mode))
    return _Arms(name_of(function), _known(baseline or EAGER.name, held), held)


def _options(mode: Mode) -> str:
    """Return the options of *mode* that are not what they are without being given; nothing where all are."""
    given = [(one.name, getattr(mode, one.name)) for one in fields(mode) if one.name != "mode"]
    plain = {one.name: one.default for one in fields(mode)}
    told = [f"{name}={'…' if callable(value) else repr(value)}" for name, value in given if value != plain[name]]
    return f"({', '.join(told)})" if told else ""


def _known(baseline: str, held: Sequence[tuple[str, Any, Any]]) -> str:
    names = [name for name, _, _ in held]
    if baseline not in names:
        alike = next((name for name, _, mode in held if mode is not None and mode.name == baseline), None)
        if alike is not None:
            return alike
        raise unknown_value("baseline", baseline, names)
    return baseline


def _bare(function: Any) -> Function:
    """Return the function without our own wrapper: a span is none of its time."""
    if not callable(function):
        kind = type(function).__name__
        raise ConfigurationError(f"compare() takes a function, or several by name, not {kind}: {_SEVERAL}.")
    while is_timed(function):
        function = getattr(function, "__wrapped__")  # noqa: B009 - of a function, for type checkers
    if template_for(function) is not _PLAIN:
        raise ConfigurationError(
            "coroutines and generators cannot be compared: give a plain function that runs the part in question."
        )
    found: Function = function
    return found


_PLAIN: Final = template_for(_bare)


def _arguments(args: Any, kwargs: Any, value: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positional = args(**value) if callable(args) else args
    named = kwargs(**value) if callable(kwargs) else kwargs
    if not isinstance(positional, tuple | list):
        kind = type(positional).__name__
        if callable(args):
            raise ConfigurationError(f"what makes the arguments must return a tuple, not {kind}: return (x,) for one.")
        raise ConfigurationError(f"args must be a tuple, not {kind}: write args=(x,) for one.")
    if named is not None and not isinstance(named, Mapping):
        raise ConfigurationError(f"kwargs must be a mapping of names, not {type(named).__name__}.")
    return tuple(positional), dict(named or {})


def _check_makers(args: Any, kwargs: Any, keywords: Sequence[str]) -> None:
    """See before anything is measured whether what makes the arguments takes what it will be called with."""
    for name, make in (("args", args), ("kwargs", kwargs)):
        if callable(make) and (why_not := _unfit(make, dict.fromkeys(keywords))):
            how = f"{keywords[0]}=" if keywords else "no argument"
            raise ConfigurationError(f"the function given as {name}= is called with {how}, and cannot be: {why_not}.")


def _unfit(function: Any, named: Mapping[str, Any]) -> str:
    """Return why *function* cannot be called with *named* alone; nothing where it can, or nobody knows."""
    try:
        inspect.signature(function).bind(**named)
    except ValueError:  # it has no signature that can be known
        return ""
    except TypeError as error:
        return str(error)
    return ""


def _sweep(sweep: Any, args: Any, kwargs: Any) -> tuple[str, list[Any]]:
    if not isinstance(sweep, Mapping) or len(sweep) != 1:
        raise ConfigurationError("sweep must hold one keyword and its values, as in sweep={'batch': [1, 8, 32]}.")
    ((keyword, values),) = sweep.items()
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ConfigurationError(f"sweep of {keyword!r} must be a list of values, not {values!r}.")
    if not callable(args) and not callable(kwargs):
        raise ConfigurationError(
            f"with sweep=, args must be a function of {keyword!r} that makes them: args=lambda {keyword}: (...)."
        )
    return str(keyword), list(values)


def _check(budget_s: Any, outputs: Any, by: Any, *, tolerance: Any, seed: Any, reset: Any) -> None:
    if not isinstance(budget_s, int | float) or isinstance(budget_s, bool) or not 0 < budget_s <= LONGEST_S:
        raise ConfigurationError(
            f"{called('budget_s')} must be a number greater than 0 and at most {LONGEST_S:g}, not {budget_s!r}."
        )
    for what, value, known in (("way to treat outputs", outputs, get_args(Outputs)), ("time", by, get_args(Quantity))):
        if value not in known:
            raise unknown_value(what, value, known)
    if tolerance is not None and (
        not isinstance(tolerance, int | float) or isinstance(tolerance, bool) or not tolerance >= 0
    ):
        raise ConfigurationError(f"tolerance must be a number, 0 or more, not {tolerance!r}.")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 63):
        raise ConfigurationError(f"{called('seed')} must be a whole number, 0 or more, not {seed!r}.")
    if reset is not None and not callable(reset):
        raise ConfigurationError(f"{called('reset')} must be a function without arguments, not {type(reset).__name__}.")
    if reset is not None and (why_not := _unfit(reset, {})):
        raise ConfigurationError(f"{called('reset')} is called without arguments, and cannot be: {why_not}.")


def _check_work(work: Any) -> None:
    if work == COUNT:
        raise ConfigurationError("compare() counts no operations: give work=Work(flops=...).")
    if work is not None:
        check_work(work)


def _nobody(done: int, total: int, text: str) -> None:
    """Tell nobody."""
