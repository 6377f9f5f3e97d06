"""``gpu-timed doctor``: the findings of :func:`gpu_timed.diagnose`, for a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

from gpu_timed.findings import Diagnosis, Finding

_TITLES: Final = {
    "versions": "Versions",
    "devices": "Devices",
    "clock": "Clock",
    "vitals": "State of the machine",
    "export": "Export",
    "settings": "Settings",
    "process": "This process",
    "hooks": "Probes for cold calls",
    "caches": "Caches of compiled kernels",
    "targets": "Calls that cannot be timed",
}
_STYLES: Final = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}
_WIDTH: Final = max(map(len, _STYLES))


def show(console: Console, diagnosis: Diagnosis) -> None:
    """Print every section, then what to do, then the verdict. Plain lines where *console* is no terminal."""
    for section in diagnosis.sections:
        _print(console, Text(_TITLES.get(section.name, section.name), "bold"))
        for finding in section.findings:
            _print(console, _line(finding))
            if finding.fix:
                _print(console, Text(f"  {'':{_WIDTH}}  -> {finding.fix}", "dim" if finding.level == "ok" else ""))
        _print(console, Text())
    _print(console, Text("Verdict: ", "bold").append(diagnosis.verdict, _STYLES[diagnosis.level]))


def _line(finding: Finding) -> Text:
    return Text(f"  {finding.level:{_WIDTH}}  ", _STYLES[finding.level]).append(finding.text, "")


def _print(console: Console, text: Text) -> None:
    # A terminal that cannot show a character must not end in a traceback.
    encoding = getattr(console.file, "encoding", None) or "utf-8"
    plain = text.plain
    if plain.encode(encoding, "replace").decode(encoding) != plain:
        text = Text(plain.replace("µ", "u").replace("±", "+-").encode(encoding, "replace").decode(encoding))
    console.print(text, soft_wrap=True, highlight=False)
