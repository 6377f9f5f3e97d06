"""Reads which program ``gpu-timed run`` is to run."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from gpu_timed.errors import ConfigurationError

_PYTHON: Final = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?")


@dataclass(frozen=True, slots=True)
class Program:
    """What is to be run."""

    kind: Literal["script", "module", "code"]
    what: str
    """Path, name of the module, or the code itself."""
    arguments: tuple[str, ...]


def parse(command: Sequence[str]) -> Program:
    """Read what stands after ``--``: ``python app.py …``, ``python -m pkg …``, ``app.py …``, ``uvicorn app:app``.

    Raises:
        ConfigurationError: It is no Python program, or one for another interpreter.
    """
    words = list(command)
    if words and _PYTHON.fullmatch(Path(words[0]).name):
        _refuse_other_interpreter(words.pop(0))
        return _after_python(words)
    if not words or words[0].startswith("-"):
        return _after_python(words)
    first, *rest = words
    is_command = os.sep not in first and not Path(first).suffix  # as a shell reads it, whatever folders are here
    found = (is_command and shutil.which(first)) or first
    if not Path(found).exists():
        raise ConfigurationError(
            f"there is no file and no command {first!r}. Write -- python {first} if it is a script."
        )
    if not (Path(found).is_dir() or Path(found).suffix in (".py", ".pyw", ".pyc", ".pyz", ".zip")):
        _refuse_other_interpreter(_interpreter_of(found))
    return Program("script", found, tuple(rest))


def _after_python(words: list[str]) -> Program:
    for flag, kind in (("-m", "module"), ("-c", "code")):
        if words and words[0].startswith(flag):
            joined = [words[0][2:], *words[1:]] if len(words[0]) > len(flag) else words[1:]
            if not joined:
                raise ConfigurationError(f"{flag} needs something after it, as with python itself.")
            return Program("module" if kind == "module" else "code", joined[0], tuple(joined[1:]))
    if not words or words[0] == "-":
        raise ConfigurationError(
            "there is nothing to run: write gpu-timed run -- python app.py, or -- -m package.module."
        )
    if words[0].startswith("-"):
        raise ConfigurationError(
            f"{words[0]} is a flag of the interpreter, which runs already. Give it to that: "
            f"python {words[0]} -m gpu_timed run … -- python {' '.join(words[1:])}"
        )
    return Program("script", words[0], tuple(words[1:]))


def _refuse_other_interpreter(word: str) -> None:
    """Raise unless *word* means the interpreter that runs: ``python`` does, whatever the PATH says."""
    version = re.search(r"\d+(\.\d+)?", Path(word).name)
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if version is not None and version[0] not in (running, str(sys.version_info.major)):
        raise _other_interpreter(word)
    if os.sep in word:
        ours = Path(sys.executable)
        theirs = Path(os.path.abspath(word))  # noqa: PTH100 - resolved, an environment's python is that of the system
        if theirs.parent != ours.parent or theirs.resolve() != ours.resolve():
            raise _other_interpreter(word)


def _other_interpreter(word: str) -> ConfigurationError:
    return ConfigurationError(
        f"{word} is another interpreter than the one that runs gpu-timed, {sys.executable}. With gpu-timed installed "
        f"there, write: {word} -m gpu_timed run …"
    )


def _interpreter_of(path: str) -> str:
    """Return which python the first line of a command names."""
    with Path(path).open("rb") as file:
        begun = file.read(1024).decode("utf-8", "replace")
    lines = begun.splitlines() if begun.startswith("#!") else []
    # Installers write the second form where the path is too long for the first.
    for line in lines[:2]:
        for word in re.split(r"[\s'\"]+", line.removeprefix("#!")):
            if _PYTHON.fullmatch(Path(word).name):
                return "python" if "/env" in line else word
    raise ConfigurationError(
        f"{path} is not a Python program. gpu-timed runs a program in its own process, and cannot reach into others: "
        "name the Python program that it starts, or let that call gpu_timed.targets.apply_targets()."
    )
