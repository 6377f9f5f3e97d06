"""Collectors that are down, silent, slow, that tear connections down or refuse: calls go on, and nothing is claimed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
from receiver import Receiver, grpc_receiver, http_receiver, nobody

from gpu_timed import configure, current, flush, gpu_timed, shutdown

STATES = {
    "silent": "silent",
    "slow": ("slow", 3.0),
    "resetting": "reset",
    "refusing": ("status", (400, {})),
    "unauthorised": ("status", (401, {})),
    "overloaded": ("status", (503, {"Retry-After": "2"})),
}
DEAD = ["down", *STATES]


@contextlib.contextmanager
def collector(state: str) -> Iterator[tuple[str, Receiver]]:
    """Run a collector in *state*; give its address, and what came."""
    if state == "down":
        with nobody() as address:
            yield address, Receiver()
    elif state.startswith("grpc "):
        answer = {"grpc silent": "silent", "grpc refusing": ("status", ("UNAUTHENTICATED", None)), "grpc ok": "ok"}
        with grpc_receiver(answer[state]) as receiver:
            yield f"http://{receiver.endpoint}", receiver
    else:
        with http_receiver(STATES[state]) as receiver:
            yield receiver.endpoint, receiver


BURST = """
    set_up()
    work = gpu_timed(name="work", sync="deferred")(lambda: 7)
    def resident():
        "Bytes of memory that the process holds."
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    def calls(number):
        for _ in range(number):
            assert work() == 7
    calls(10_000)  # every queue is full once
    current.tracer().resolver.flush(60)
    before, began = resident(), time.monotonic()
    calls(50_000)
    took = time.monotonic() - began
    current.tracer().resolver.flush(60)
    grown = resident() - before
    began = time.monotonic()
    result = flush(1)
    flushed = time.monotonic() - began
    answer(
        took=took, grown=grown, flushed=flushed, complete=result.complete, counts=dict(result.counts),
        pending=result.pending, threads=threading.active_count(), ended=time.time(),
    )
"""


@pytest.mark.parametrize("state", ["down", "silent", "refusing"])
def test_calls_go_on_and_memory_is_bounded(state, door, program):
    """50,000 calls under a dead collector take bounded time and memory; flush and exit are bounded and honest."""
    with collector(state) as (address, receiver):
        ended = program(
            BURST,
            DOOR=door,
            OTEL_EXPORTER_OTLP_ENDPOINT=address,
            OTEL_EXPORTER_OTLP_TIMEOUT="1" if door == "own" else "10",
            GPU_TIMED_EXIT_TIMEOUT_S="1",
            GPU_TIMED_MAX_QUEUE="2000",
            GPU_TIMED_MAX_PENDING="2000",
        )
        left_s = time.time() - ended.answer["ended"]
    told = ended.answer
    assert told["took"] < 40, "50,000 calls"
    assert told["grown"] < 40e6, "bytes that 50,000 spans left behind; all of them are 250 MB"
    assert told["flushed"] < 6
    assert told["threads"] < 10
    assert receiver.spans == []
    counts = told["counts"]
    made = counts["handed_over"] + counts.get("dropped_queue_full", 0)
    assert made == 60_000
    if door == "configure":
        # the receiver took nothing, and the flush says so; what is still queued is not counted as anything yet
        assert told["complete"] is False
        assert "exported" not in counts
        assert counts["batched"] == counts["handed_over"]
        out = counts.get("export_failed", 0) + counts.get("dropped_in_batch", 0)
        assert out <= counts["batched"]
        assert left_s < 1 + 5, "the end of the process"
    else:
        assert left_s < 20, "the SDK's own exit handler, with a second for each of four batches"


@pytest.mark.parametrize("state", [*DEAD, "grpc silent", "grpc refusing"])
def test_a_flush_is_bounded_and_true_to_the_facts(state, program):
    """Whatever the collector does, a flush ends in time, and is true only if it has taken everything by then."""
    protocol = "grpc" if state.startswith("grpc ") else "http/protobuf"
    with collector(state) as (address, receiver):
        ended = program(
            """
            set_up()
            work = gpu_timed(name="work")(lambda: 7)
            for _ in range(10):
                assert work() == 7
            began = time.monotonic()
            result = flush(0.5)
            took = time.monotonic() - began
            began = time.monotonic()
            for _ in range(300):
                assert work() == 7
            calls = time.monotonic() - began
            again = flush(0.5)
            answer(
                took=took, calls=calls, complete=result.complete, again=again.complete, counts=dict(again.counts),
                ended=time.time(),
            )
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=address,
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
            GPU_TIMED_EXIT_TIMEOUT_S="1",
        )
        left_s = time.time() - ended.answer["ended"]
    told = ended.answer
    assert told["took"] < 4
    assert told["calls"] < 10, "300 calls"
    assert (told["complete"], told["again"]) == (False, False)
    assert left_s < 1 + 5, "the end of the process"
    counts = told["counts"]
    assert counts["handed_over"] == counts["batched"] == 310
    assert "exported" not in counts
    assert sum(counts.get(kind, 0) for kind in ("export_failed", "dropped_in_batch")) <= 310
    if state != "slow":
        assert receiver.spans == []


def test_the_counts_add_up_once_a_refusing_collector_has_answered(program):
    """Handed over is exported, failed and dropped together, flush after flush, as answers change."""
    answers = [("status", (400, {})), "ok", ("status", (401, {})), "ok", "ok"]
    with http_receiver(answers=answers) as receiver:
        ended = program(
            """
            set_up()
            work = gpu_timed(name="work")(lambda: 7)
            for _ in range(5):
                for _ in range(30):
                    work()
                result = flush(20)
                answer(complete=result.complete, counts=dict(result.counts))
            for _ in range(5_000):  # more than the exporter's queue holds
                work()
            result = flush(20)
            answer(complete=result.complete, counts=dict(result.counts))
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            OTEL_BSP_MAX_QUEUE_SIZE="600",
        )
    assert [told["complete"] for told in ended.answers[:5]] == [False, True, False, True, True]
    for told in ended.answers:
        counts = told["counts"]
        out = sum(counts.get(kind, 0) for kind in ("exported", "export_failed", "dropped_in_batch"))
        assert counts["handed_over"] == counts["batched"] == out, counts
    last = ended.answers[-1]
    assert last["counts"]["exported"] == len(receiver.spans)
    assert last["complete"] is ("dropped_in_batch" not in last["counts"])
    assert receiver.once()


def test_under_the_applications_provider_losses_are_counted_up_to_the_hand_over(program):
    """What the application's own exporter fails to send is the application's to see: everything was handed over."""
    with collector("refusing") as (address, receiver):
        ended = program(
            """
            set_up()
            work = gpu_timed(name="work")(lambda: 7)
            for _ in range(10):
                work()
            result = flush(20)
            answer(complete=result.complete, provider=result.provider, counts=dict(result.counts))
            """,
            DOOR="own",
            OTEL_EXPORTER_OTLP_ENDPOINT=address,
        )
    assert ended.answer == {"complete": True, "provider": "flushed", "counts": {"handed_over": 10}}
    assert len(receiver.turned_away) == 10


@pytest.mark.parametrize("state", ["down", "silent"])
def test_flushes_under_a_dead_collector_leave_one_thread_behind(state, monkeypatch):
    """A program that flushes again and again meanwhile does not gather threads: one is left behind, not one each."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    with collector(state) as (address, _):
        configure(exporter="otlp", endpoint=address)
        work = gpu_timed(lambda: 7)
        for _ in range(10):
            work()
            assert not flush(0.06)
        left = [thread for thread in threading.enumerate() if thread.name == "gpu_timed-flush"]
        assert len(left) <= 1
        shutdown(0.1)
        for thread in left:
            thread.join(20)


def test_a_collector_that_comes_up_gets_what_was_waiting(program):
    """Spans made while the collector was overloaded arrive once it takes them, and the next flush is true."""
    with http_receiver(always=("status", (503, {"Retry-After": "1"}))) as receiver:

        def come_up() -> None:
            time.sleep(2.5)
            receiver.always = "ok"

        thread = threading.Thread(target=come_up)
        thread.start()
        ended = program(
            """
            set_up()
            work = gpu_timed(name="work")(lambda: 7)
            for _ in range(10):
                work()
            first = flush(0.3)
            second = flush(20)
            answer(first=first.complete, second=second.complete, counts=dict(second.counts))
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
        )
        thread.join()
    assert (ended.answer["first"], ended.answer["second"]) == (False, True)
    assert ended.answer["counts"] == {"batched": 10, "handed_over": 10, "exported": 10}
    assert len(receiver.spans) == 10
    assert receiver.once()


@pytest.mark.parametrize("state", ["down", "silent", "resetting", "grpc silent"])
def test_the_end_of_the_process_is_bounded(state, program):
    """A program ends by ``GPU_TIMED_EXIT_TIMEOUT_S`` with spans queued, whatever its collector does."""
    with collector(state) as (address, _):
        ended = program(
            """
            set_up()
            work = gpu_timed(name="work")(lambda: 7)
            for _ in range(3_000):
                work()
            answer(ended=time.time())
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=address,
            OTEL_EXPORTER_OTLP_PROTOCOL="grpc" if state.startswith("grpc ") else "http/protobuf",
            GPU_TIMED_EXIT_TIMEOUT_S="0.5",
        )
        left_s = time.time() - ended.answer["ended"]
    assert left_s < 0.5 + 5
    assert "Traceback" not in ended.err


def test_a_provider_that_is_gone_is_not_claimed_to_be_there(monkeypatch):
    """After ``shutdown()`` under a dead collector calls go on, and a flush is false."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with collector("down") as (address, _):
        configure(exporter="otlp", endpoint=address)
        work = gpu_timed(lambda: 7)
        work()
        assert not shutdown(0.2)
        assert work() == 7
        assert not flush(0.2)
    assert current.ledger().snapshot()["handed_over"] == 2
