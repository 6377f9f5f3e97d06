"""``gpu-timed compare``: finds what was named, has it compared, and shows what was found."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from rich.console import Console

from gpu_timed.arms import Comparison
from gpu_timed.cli.selftest import watched
from gpu_timed.comparison import compare
from gpu_timed.errors import ConfigurationError
from gpu_timed.option_names import on_the_command_line
from gpu_timed.target_names import Target, parse_targets
from gpu_timed.views import page, plots, table

STDOUT: Final = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be compared, found and looked at: nothing has been called yet."""

    what: Callable[..., Any] | Mapping[str, Callable[..., Any]]
    options: Mapping[str, Any]
    json: str | None
    html: Path | None

    def run(self, console: Console, errors: Console) -> Comparison:
        """Compare, show it on *console*, and write what was asked for; progress goes to *errors*.

        Raises:
            GpuTimedError: An option cannot be used.
        """
        with watched(errors) as progress, on_the_command_line():
            found = compare(self.what, **self.options, progress=progress)
        if self.json == STDOUT:
            console.file.write(found.to_json(indent=2) + "\n")
        else:
            table.show(console, found)
        if self.json not in (None, STDOUT):
            _write(Path(str(self.json)), found.to_json(indent=2) + "\n", errors)
        if self.html is not None:
            _write(self.html, page.html(found), errors)
        return found


def prepare(
    targets: Sequence[str],
    *,
    args_from: str | None,
    modes: str | None,
    baseline: str | None,
    reset: str | None,
    sweep: str | None,
    json: str | None,
    html: Path | None,
    errors: Console,
    **more: Any,
) -> Asked:
    """Read the options and import what they name, with the current directory first, as ``python -m`` has it.

    Raises:
        ConfigurationError: A name or an option cannot be used.
        MissingExtraError: A package that *html* needs is not installed.
    """
    if html is not None:
        plots.load()
    for option, path in (("--json", json), ("--html", html)):
        if path not in (None, STDOUT) and not Path(str(path)).absolute().parent.is_dir():
            raise ConfigurationError(f"{option} {path}: the directory is not there. Make it, or name another.")
    swept = _sweep(sweep)
    if swept is not None and args_from is None:
        (keyword,) = swept
        raise ConfigurationError(
            f"--sweep needs --args-from module:function, a function of {keyword} that returns the arguments as a tuple."
        )
    if modes is not None and len(targets) > 1:
        raise ConfigurationError("--modes is for one function: several are compared as they are. Leave it out.")
    found = {target.text: _found(target, "target", errors) for target in _parsed(targets)}
    if not found:
        raise ConfigurationError("nothing to compare: name a function, as in gpu-timed compare module:function.")
    options = {
        "modes": None if modes is None else tuple(_words(modes)),
        "baseline": baseline,
        "sweep": swept,
        "reset": None if reset is None else _one(reset, "--reset", errors),
        **more,
    }
    if args_from is not None:
        options["args"] = _maker(args_from, swept, errors)
    else:
        _check_need_none(found)
    what = found if len(found) > 1 else next(iter(found.values()))
    return Asked(what=what, options=options, json=json, html=html)


def _write(path: Path, text: str, errors: Console) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}.") from None
    errors.print(f"Wrote {path}.", markup=False, highlight=False, soft_wrap=True)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _sweep(text: str | None) -> dict[str, list[Any]] | None:
    """Read ``batch=1,8,32``: numbers and such as Python has them, else texts."""
    if text is None:
        return None
    keyword, equals, values = (part.strip() for part in text.partition("="))
    held = _words(values)
    if not equals or not keyword.isidentifier() or not held:
        raise ConfigurationError(f"--sweep {text!r} cannot be read: write a name and its values, as in batch=1,8,32.")
    return {keyword: [_value(word) for word in held]}


def _value(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def _parsed(targets: Sequence[str]) -> tuple[Target, ...]:
    parsed = parse_targets(",".join(targets))
    for target in parsed:
        if target.options:
            raise ConfigurationError(
                f"target {target.text!r} has options in brackets, which are gpu-timed run's: leave them out here."
            )
    return parsed


def _one(text: str, option: str, errors: Console) -> Callable[..., Any]:
    parsed = _parsed([text])
    if len(parsed) != 1:
        raise ConfigurationError(f"{option} {text!r}: name one function, as in module:function.")
    return _found(parsed[0], option, errors)


def _check_need_none(found: Mapping[str, Callable[..., Any]]) -> None:
    """Refuse what takes arguments where nothing makes them."""
    for text, function in found.items():
        try:
            inspect.signature(function).bind()
        except ValueError:  # it has no signature that can be known
            continue
        except TypeError as error:
            raise ConfigurationError(
                f"target {text!r} needs arguments ({error}): name what makes them, as in --args-from module:function, "
                "which returns them as a tuple."
            ) from None


def _maker(text: str, swept: Mapping[str, Any] | None, errors: Console) -> Callable[..., Any]:
    """Return what makes the arguments; what it raises is shown and told by its name."""
    make = _one(text, "--args-from", errors)
    (keyword,) = swept or (None,)
    try:
        inspect.signature(make).bind(**({} if keyword is None else {keyword: None}))
    except ValueError:  # it has no signature that can be known
        pass
    except TypeError as error:
        fix = "give them defaults, or name one by --sweep" if keyword is None else f"it is called with {keyword}="
        raise ConfigurationError(f"--args-from {text!r} cannot be called: {error} ({fix}).") from None

    @functools.wraps(make)
    def told(**value: Any) -> Any:
        try:
            return make(**value)
        except Exception as error:  # noqa: BLE001 - shown, and told by the name that was asked for
            _show_trace(error, errors)
            said = f"--args-from {text!r} raised {type(error).__name__}, as shown above."
            raise ConfigurationError(said) from None

    return told


def _show_trace(error: BaseException, errors: Console) -> None:
    told = "".join(traceback.format_exception(error.with_traceback(_of_the_module(error.__traceback__))))
    errors.print(told, markup=False, highlight=False, soft_wrap=True, end="")


def _found(target: Target, option: str, errors: Console) -> Callable[..., Any]:
    """Import the module of *target*, and return what it names."""
    holder: Any = _module(target, option, errors)
    for name in target.path:
        if not hasattr(holder, name):
            near = difflib.get_close_matches(name, dir(holder), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigurationError(f"{option} {target.text!r}: there is no {name!r} in it{hint}")
        holder = getattr(holder, name)
    if not callable(holder):
        raise ConfigurationError(f"{option} {target.text!r} is no function, but of type {type(holder).__name__}.")
    found: Callable[..., Any] = holder
    return found


def _module(target: Target, option: str, errors: Console) -> Any:
    here = str(Path.cwd())
    if not sys.flags.safe_path and here not in sys.path:
        sys.path.insert(0, here)
    if _absent(target.module):
        raise ConfigurationError(
            f"{option} {target.text!r}: no module {target.module!r} was found. Start this in the directory that holds "
            "it, install it, or set PYTHONPATH."
        )
    try:
        return importlib.import_module(target.module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - shown, and told by the name that was asked for
        _show_trace(error, errors)
        raise ConfigurationError(
            f"{option} {target.text!r}: importing {target.module!r} raised {type(error).__name__}, as shown above."
        ) from None


def _of_the_module(trace: TracebackType | None) -> TracebackType | None:
    """Return *trace* without the frames of importing."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith((__name__, "importlib")):
        trace = trace.tb_next
    return trace


def _absent(module: str) -> bool:
    """Return whether no such module is there; what is raised on the way to it is not told here."""
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError as error:
        return error.name is not None and f"{module}.".startswith(f"{error.name}.")
    except Exception:  # noqa: BLE001 - a package above it raises: importing it tells
        return False
