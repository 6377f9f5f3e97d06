"""What ``opentelemetry-instrument`` finds: timing what ``GPU_TIMED_TARGETS`` names, with no change to the code.

Needs ``pip install 'gpu-timed[instrumentation]'``. ``OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=gpu_timed`` switches it off.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gpu_timed.errors import ConfigurationError, missing_extra
from gpu_timed.ledger import logger
from gpu_timed.targets import AppliedTargets, apply_targets

try:
    from opentelemetry.instrumentation.instrumentor import (  # type: ignore[attr-defined] # an untyped module, 0.66b2
        BaseInstrumentor,
    )
except ImportError:
    raise missing_extra("gpu_timed.instrumentation", "opentelemetry-instrumentation", "instrumentation") from None

__all__ = ["GpuTimedInstrumentor"]


class GpuTimedInstrumentor(BaseInstrumentor):  # type: ignore[misc] # it is Any
    """OpenTelemetry's way to switch gpu_timed's targets on and off: ``GpuTimedInstrumentor().instrument()``.

    ``instrument(targets="pkg.mod:infer[sync=deferred]")``, or a list of them, times these; without *targets* it is
    those of ``GPU_TIMED_TARGETS``. Spans go to the global provider.
    """

    _applied: tuple[AppliedTargets, ...] = ()

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return nothing: whatever is named can be timed."""
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        """Apply the targets.

        Raises:
            ConfigurationError: A target given in the code cannot be read. One of ``GPU_TIMED_TARGETS`` is told in
                the log instead: raised, it would keep other instrumentations from being loaded.
        """
        if kwargs.get("tracer_provider") is not None:
            logger.warning("gpu_timed: tracer_provider= is not used: spans go to the global provider.")
        targets = kwargs.get("targets")
        try:
            self._applied = (apply_targets(targets),)
        except ConfigurationError as error:
            if targets is not None:
                raise
            logger.error("gpu_timed: %s No target is timed.", error)

    def _uninstrument(self, **kwargs: Any) -> None:
        """Put back what was there."""
        del kwargs
        for applied in self._applied:
            applied.undo()
        self._applied = ()
