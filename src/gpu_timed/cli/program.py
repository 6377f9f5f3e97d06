"""Runs a Python program in this very process, as the interpreter itself would have run it.

What the program sees of itself (``__main__``, ``sys.argv``, ``sys.path[0]``) is what it would see without us, and its
exit code, exceptions and tracebacks are its own. The interpreter is told nothing anew: flags cannot be honoured.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from gpu_timed.cli.command import Program

_HOOK: Final = "__gpu_timed_offer__"

Rewrite = Callable[[ast.Module], ast.Module]


def run(program: Program, names: frozenset[str], offer: Callable[[str, Any], Any], absent: Callable[..., None]) -> None:
    """Run *program* to its end.

    Args:
        program: What to run.
        names: Top-level functions and classes of it whose definitions go through *offer*.
        offer: Given the name and what was defined under it, returns what to use instead.
        absent: Told of the names that nothing in the program defines, and of all that are defined.

    Raises:
        SystemExit: The program ended with it, or with an exception, whose traceback has been printed.
    """
    try:
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        if "__annotations__" in vars(sys.modules["__main__"]):  # which interpreters up to 3.13 give every program
            main.__dict__.update(__annotations__={})

        def rewrite(tree: ast.Module) -> ast.Module:
            defined = _mark(tree, names)
            absent(names - set(defined), defined)
            main.__dict__[_HOOK] = lambda name: functools.partial(offer, name)
            return tree

        code = _load(program, main, rewrite if names else None)
        if code is None:
            absent(names, ())
            code = _code_of(main)
        sys.modules["__main__"] = main
        exec(code, main.__dict__)  # noqa: S102 - what this is for
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the program's own, told as the interpreter would tell it
        _tell(error)


def _load(program: Program, main: types.ModuleType, rewrite: Rewrite | None) -> Any:
    """Set *main* and ``sys`` up for *program*, and return its code."""
    held = main.__dict__
    argv = [program.what, *program.arguments]
    if program.kind == "code":
        _enter_path("")
        sys.argv[:] = ["-c", *program.arguments]
        held.update(__doc__=None, __loader__=importlib.machinery.BuiltinImporter, __spec__=None, __package__=None)
        return _compile(program.what, "<string>", rewrite)
    if program.kind == "module":
        _enter_path(str(Path.cwd()))
        sys.argv[:] = ["-m", *program.arguments]
        return _from_spec(_find(program.what), main, rewrite, argv)
    sys.argv[:] = argv
    path = os.path.join(os.getcwd(), program.what)  # noqa: PTH109, PTH118 - as the interpreter does: not normalised
    importer = pkgutil.get_importer(path)
    if importer is not None and Path(path).exists():  # a folder or an archive
        _enter_path(path)
        spec = importer.find_spec("__main__") if hasattr(importer, "find_spec") else None
        if spec is None:
            _stop(f"can't find '__main__' module in {path!r}", 1)
        return _from_spec(spec, main, rewrite, None)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        _stop(f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}", 2)
    _enter_path(str(Path(path).resolve().parent))
    held.update(__doc__=None, __file__=path, __cached__=None, __package__=None, __spec__=None)
    if source.startswith(importlib.util.MAGIC_NUMBER):
        held["__loader__"] = importlib.machinery.SourcelessFileLoader("__main__", path)
        return pkgutil.read_code(io.BytesIO(source))
    held["__loader__"] = importlib.machinery.SourceFileLoader("__main__", path)
    return _compile(source, path, rewrite)


def _find(name: str) -> importlib.machinery.ModuleSpec:
    """Find the module *name* as ``python -m`` does: of a package, its ``__main__``."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package above it imports something that is not there
        _stop(f"Error while finding module specification for {name!r} ({type(error).__name__}: {error})", 1)
    except (ValueError, TypeError, AttributeError) as error:
        _stop(f"Error while finding module specification for {name!r} ({type(error).__name__}: {error})", 1)
    if spec is None:
        _stop(f"No module named {name}", 1)
    if spec.submodule_search_locations is not None:
        if name.endswith(".__main__"):
            _stop("Cannot use package as __main__ module", 1)
        inner = importlib.util.find_spec(f"{name}.__main__")
        if inner is None:
            _stop(f"No module named {name}.__main__; {name!r} is a package and cannot be directly executed", 1)
        return inner
    return spec


def _from_spec(
    spec: importlib.machinery.ModuleSpec, main: types.ModuleType, rewrite: Rewrite | None, argv: list[str] | None
) -> Any:
    loader: Any = spec.loader
    if argv is not None:
        sys.argv[:] = [spec.origin or argv[0], *argv[1:]]
    main.__dict__.update(
        __doc__=None,
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    if rewrite is None:
        return loader.get_code(spec.name)
    source = loader.get_source(spec.name)
    return None if source is None else _compile(source, spec.origin or spec.name, rewrite)


def _code_of(main: types.ModuleType) -> Any:
    spec: Any = main.__spec__
    return spec.loader.get_code(spec.name)


def _compile(source: str | bytes, path: str, rewrite: Rewrite | None) -> Any:
    if rewrite is None:
        return compile(source, path, "exec", dont_inherit=True)
    tree = ast.parse(source, path)
    return compile(rewrite(tree), path, "exec", dont_inherit=True)


def _mark(tree: ast.Module, names: frozenset[str]) -> dict[str, None]:
    """Put the decorator ``@__gpu_timed_offer__(name)`` above each top-level definition of *names*.

    Above all other decorators, and on the line where the definition begins: no line number moves. Returns the names
    of all top-level definitions, those in an ``if`` or a ``try`` too.
    """
    defined: dict[str, None] = {}
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined[node.name] = None
                if node.name in names:
                    place = node.decorator_list[0] if node.decorator_list else node
                    node.decorator_list.insert(0, _decorator(node.name, place))
            elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
                waiting.append(node)
    return defined


def _decorator(name: str, place: ast.expr | ast.stmt) -> ast.expr:
    hook = ast.Name(_HOOK, ast.Load())
    return ast.fix_missing_locations(ast.copy_location(ast.Call(hook, [ast.Constant(name)], []), place))


def _enter_path(folder: str) -> None:
    """Put *folder* where the interpreter puts the program's: in the place of our own, unless it puts none."""
    if sys.flags.safe_path:
        return
    main: Any = sys.modules["__main__"]
    ours = {"", str(Path.cwd()), str(Path(getattr(main, "__file__", None) or sys.argv[0]).resolve().parent)}
    if sys.path and sys.path[0] in ours:
        sys.path[0] = folder
    else:
        sys.path.insert(0, folder)


def _stop(message: str, code: int) -> NoReturn:
    """End as the interpreter does when it cannot begin."""
    sys.stderr.write(f"{sys.executable}: {message}\n")
    raise SystemExit(code)


def _tell(error: BaseException) -> NoReturn:
    """Print the traceback of *error* without our frames, and end as the interpreter does."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "") == __name__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.excepthook(type(error), error, trace)
    if isinstance(error, KeyboardInterrupt):  # the interpreter ends by the signal: let it, silently
        sys.excepthook = lambda *_: None
        raise error
    raise SystemExit(1)
