"""What stands in for a span that is not recorded."""

from __future__ import annotations

from typing import Any

from gpu_timed.context.recording import Admission, SilentSpan
from gpu_timed.mode_values import Ran
from gpu_timed.record import Record
from gpu_timed.site import Site
from gpu_timed.work import Work, one_work


class Unrecorded(SilentSpan):
    """Stands in for a span that is not recorded: same calls, no work, nothing exported."""

    token: Any = None
    saved_context: Any = None
    caller_context: Any = None
    ran: Ran | None = None

    def __init__(self, owner: Any, site: Site, admission: Admission | None = None) -> None:
        if admission is None:
            super().__init__()
        else:  # the hot path of an unsampled root: one call fewer
            self.admission = admission
        self.owner = owner
        self.site = site

    def set_work(self, work: Work) -> None:
        """Take no note of it. As :meth:`Span.set_work`."""
        one_work(work)

    @property
    def record(self) -> Record:
        """A record in which everything is Missing("not_sampled")."""
        record: Record = self.owner.record_of_unsampled(self.site)
        return record

    def wait(self, timeout_s: float | None = None) -> Record:  # noqa: ARG002 - the shape of Span.wait
        """Return a record in which everything is Missing("not_sampled")."""
        return self.record
