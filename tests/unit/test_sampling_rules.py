"""What is read off the usual samplers is what they answer when they are asked."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import sampling as sdk

from gpu_timed.context.sampling import RECORDED, SAMPLED, UNKNOWN, StaticRules

ONLY_RECORD = sdk.StaticSampler(sdk.Decision.RECORD_ONLY)
SAMPLERS = {
    "always on": sdk.ALWAYS_ON,
    "always off": sdk.ALWAYS_OFF,
    "record only": ONLY_RECORD,
    "parent, on": sdk.DEFAULT_ON,
    "parent, off": sdk.DEFAULT_OFF,
    "parent, upside down": sdk.ParentBased(
        sdk.ALWAYS_OFF,
        remote_parent_sampled=sdk.ALWAYS_OFF,
        remote_parent_not_sampled=ONLY_RECORD,
        local_parent_sampled=ONLY_RECORD,
        local_parent_not_sampled=sdk.ALWAYS_ON,
    ),
}


class Moody(sdk.StaticSampler):
    """A sampler of the user's, that only looks like one that never changes."""

    def should_sample(self, *args: Any, **kwargs: Any) -> sdk.SamplingResult:
        return sdk.SamplingResult(sdk.Decision.DROP)


def context_of(*, sampled: bool, remote: bool) -> Context:
    known = trace.SpanContext(7, 9, is_remote=remote, trace_flags=trace.TraceFlags(int(sampled)))
    return trace.set_span_in_context(trace.NonRecordingSpan(known), Context())


def asked(sampler: sdk.Sampler, context: Context | None) -> int:
    decision = sampler.should_sample(context, 7, "name", trace.SpanKind.INTERNAL, {}, ()).decision
    return RECORDED * decision.is_recording() | SAMPLED * decision.is_sampled()


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_answer_read_off_is_the_answer_given(name: str) -> None:
    sampler = SAMPLERS[name]
    rules = StaticRules(sampler)
    assert rules.root == asked(sampler, Context())
    for sampled in (False, True):
        assert rules.child[sampled] == asked(sampler, context_of(sampled=sampled, remote=False))
        assert rules.remote_child[sampled] == asked(sampler, context_of(sampled=sampled, remote=True))


@pytest.mark.parametrize(
    "sampler",
    [sdk.TraceIdRatioBased(0.5), Moody(sdk.Decision.RECORD_AND_SAMPLE), object()],
    ids=["ratio", "own", "odd"],
)
def test_any_other_sampler_is_asked(sampler: Any) -> None:
    rules = StaticRules(sampler)
    assert rules.root == UNKNOWN
    assert rules.child == rules.remote_child == (UNKNOWN, UNKNOWN)
    assert rules.asked_at_root is sampler


def test_delegates_of_the_users_are_asked() -> None:
    own = Moody(sdk.Decision.RECORD_AND_SAMPLE)
    rules = StaticRules(sdk.ParentBased(own, local_parent_sampled=own))
    assert rules.root == UNKNOWN
    assert rules.asked_at_root is own
    assert rules.child == (0, UNKNOWN)
    assert rules.remote_child == (0, RECORDED | SAMPLED)


def test_decisions_come_to_bits() -> None:
    rules = StaticRules(sdk.ALWAYS_ON)
    assert [rules.bits(one) for one in sdk.Decision] == [0, RECORDED, RECORDED | SAMPLED]
