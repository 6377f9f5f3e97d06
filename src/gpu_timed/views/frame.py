"""The samples of a comparison as a pandas data frame.

Names used: ``pandas.DataFrame``, ``pandas.array`` (public; pandas 2.2 to 3.1).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

from gpu_timed.arms import Comparison
from gpu_timed.errors import missing_extra
from gpu_timed.record import Missing

_COLUMNS: Final = ("arm", "mode", "block", "wall_ns", "launch_ns", "device_ns")


def to_pandas(found: Comparison) -> Any:
    """Return a data frame with a row for each warm call.

    Columns: ``arm``, ``mode`` (that ran), ``block``, ``wall_ns``, ``launch_ns``, ``device_ns``; of a sweep, its name
    with the value goes first. Times are nanoseconds, ``Int64``; what was not measured is ``<NA>``.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    if importlib.util.find_spec("pandas") is None:
        raise missing_extra("A data frame", "pandas", "pandas")
    pandas: Any = importlib.import_module("pandas")
    swept = f"{found.sweep}_" if found.sweep in _COLUMNS else found.sweep
    columns: dict[str, list[Any]] = {swept: []} if found.points else {}
    columns |= {name: [] for name in _COLUMNS}
    for value, one in [(point.value, point.comparison) for point in found.points] or [(None, found)]:
        for arm in one.arms:
            samples, count = arm.samples, len(arm.samples)
            if found.points:
                columns[swept] += [value] * count
            columns["arm"] += [arm.name] * count
            columns["mode"] += [None if isinstance(arm.ran, Missing) else arm.ran] * count
            columns["block"] += samples.block
            columns["wall_ns"] += samples.wall_ns
            columns["launch_ns"] += samples.launch_ns
            columns["device_ns"] += [None] * count if isinstance(samples.device_ns, Missing) else samples.device_ns
    whole = {name: pandas.array(held, dtype="Int64") for name, held in columns.items() if name.endswith("_ns")}
    return pandas.DataFrame({**columns, **whole})
