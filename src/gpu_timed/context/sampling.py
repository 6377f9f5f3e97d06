"""What a sampler is going to answer, where that is known without asking it.

Asking costs a microsecond on the calling thread. The usual samplers, always on or off, alone or by the parent's
decision, answer by three facts only; their answer is then read off here, and the sampler itself is asked later,
when the span is made, for what else goes into its result.

Private names used, with the versions seen: ``StaticSampler._decision`` and of ``ParentBased`` ``_root``,
``_local_parent_sampled`` and the like; sdk 1.30 to 1.45. Where one is missing, or the class is not exactly one of
these, the sampler is asked each time.
"""

from __future__ import annotations

from typing import Any, Final

UNKNOWN: Final = -1
RECORDED: Final = 1
SAMPLED: Final = 2
_DELEGATES: Final = ("_local_parent_not_sampled", "_local_parent_sampled")
_REMOTE: Final = ("_remote_parent_not_sampled", "_remote_parent_sampled")


class StaticRules:
    """The answers of *sampler* that never change. Each is UNKNOWN, or the sum of RECORDED and SAMPLED, or 0."""

    __slots__ = ("_both", "_drop", "asked_at_root", "child", "remote_child", "root", "sampler", "usual_generator")

    def __init__(self, sampler: Any) -> None:
        # Only where there is a sampler of the SDK's:
        from opentelemetry.sdk.trace import sampling as sdk  # noqa: PLC0415
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator  # noqa: PLC0415

        def answer(of: Any) -> int:
            decision = getattr(of, "_decision", None) if type(of) is sdk.StaticSampler else None
            return self.bits(decision) if isinstance(decision, sdk.Decision) else UNKNOWN

        self._drop, self._both = sdk.Decision.DROP, sdk.Decision.RECORD_AND_SAMPLE
        self.sampler = sampler
        #: The SDK's own class of generators, whose ids are random bits and nothing else.
        self.usual_generator = RandomIdGenerator
        #: Of a root, of a child by whether its parent is sampled, and of one whose parent is another process's.
        self.root = answer(sampler)
        #: Who is asked about a root whose answer is not known.
        self.asked_at_root = sampler
        self.child = self.remote_child = (self.root, self.root)
        if type(sampler) is sdk.ParentBased:
            self.asked_at_root = getattr(sampler, "_root", sampler)  # to it a root is passed on as it is
            self.root = answer(self.asked_at_root)
            unsampled, sampled = (answer(getattr(sampler, name, None)) for name in _DELEGATES)
            self.child = (unsampled, sampled)
            unsampled, sampled = (answer(getattr(sampler, name, None)) for name in _REMOTE)
            self.remote_child = (unsampled, sampled)

    def bits(self, decision: Any) -> int:
        """Return what the SDK's *decision* comes to, without its own methods: each takes a microsecond."""
        if decision is self._drop:
            return 0
        return RECORDED | SAMPLED if decision is self._both else RECORDED
