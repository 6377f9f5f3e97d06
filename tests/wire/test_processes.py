"""Processes that fork, are forked, and end in every way: each span is delivered once, and nothing hangs."""

from __future__ import annotations

import importlib.util
import signal
from collections import Counter

import pytest
from receiver import Receiver, grpc_receiver, http_receiver


def by_process(receiver: Receiver) -> dict[int, Counter[str]]:
    """Return how many spans of each name came from each process, as the attribute ``pid`` of the spans says."""
    found: dict[int, Counter[str]] = {}
    for span in receiver.spans:
        found.setdefault(span.attributes["pid"], Counter())[span.name] += 1
    return found


PREFORK = """
    work = gpu_timed(name="work", attributes=lambda *_: {"pid": os.getpid()})(lambda: 7)
    if os.environ["WHERE"] == "parent":
        set_up()
    def worker():
        if os.environ["WHERE"] == "child":
            set_up()
        assert [work() for _ in range(25)] == [7] * 25
        ENDING
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            worker()
        children.append(pid)
    codes = [wait_for(pid) for pid in children]
    assert "torch" not in sys.modules and threading.active_count() <= 3
    answer(codes=codes, children=children, parent=os.getpid())
"""


@pytest.mark.parametrize("where", ["parent", "child"])
@pytest.mark.parametrize("ending", ["sys.exit(0)", "os._exit(0 if flush(20) else 1)"])
def test_workers_of_a_server_that_forks_deliver(ending, where, door, program):
    """A parent decorates and never calls; workers forked from it call, export and end: every span arrives once."""
    with http_receiver() as receiver:
        ended = program(
            PREFORK.replace("ENDING", ending), DOOR=door, WHERE=where, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint
        )
    answer = ended.answer
    assert answer["codes"] == [0] * 4
    assert by_process(receiver) == {pid: {"work": 25} for pid in answer["children"]}
    assert receiver.once()
    if door == "configure":
        assert all(span.resource["process.pid"] == span.attributes["pid"] for span in receiver.spans)
        assert len({span.resource["service.instance.id"] for span in receiver.spans}) == 4
    assert ended.err == ""


def test_workers_of_a_server_that_forks_deliver_over_grpc(program):
    """A parent that has configured gRPC and exported nothing can fork: its workers deliver, and end in any way."""
    with grpc_receiver() as receiver:
        ended = program(
            PREFORK.replace("ENDING", "sys.exit(0)"),
            WHERE="parent",
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://{receiver.endpoint}",
            OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
        )
    assert ended.answer["codes"] == [0] * 4
    assert by_process(receiver) == {pid: {"work": 25} for pid in ended.answer["children"]}


def test_a_child_of_a_process_that_has_used_grpc_says_so_and_goes_on(program):
    """Behind a fork of a process that has exported by gRPC a child's calls go on, and its spans are counted as lost."""
    with grpc_receiver() as receiver:
        ended = program(
            """
            set_up()
            work = gpu_timed(name="work", attributes=lambda *_: {"pid": os.getpid()})(lambda: 7)
            work()
            assert flush(10)
            def child():
                assert work() == 7
                result = flush(10)
                assert not result
                assert result.counts["grpc_after_fork"] == result.counts["export_failed"] == 1, result
            codes = [wait_for(fork(child)) for _ in range(3)]
            pid = os.fork()
            if pid == 0:
                work()
                sys.exit(0)
            codes.append(wait_for(pid))
            work()
            answer(codes=codes, complete=flush(10).complete, parent=os.getpid())
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://{receiver.endpoint}",
            OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
        )
    answer = ended.answer
    assert (answer["codes"], answer["complete"]) == ([0] * 4, True)
    assert by_process(receiver) == {answer["parent"]: {"work": 2}}
    assert ended.err.count("use protocol='http/protobuf'") == 4, "once in each child"


def test_children_do_not_send_on_their_parents_connection(program):
    """Children of a process that has exported open connections of their own; what all of them send at once arrives."""
    with http_receiver() as receiver:
        ended = program(
            """
            set_up()
            work = gpu_timed(name="work", attributes=lambda *_: {"pid": os.getpid(), "filler": "x" * 4_000})(lambda: 7)
            work()
            assert flush(10)
            def child():
                for _ in range(10):
                    for _ in range(50):
                        work()
                    assert flush(20), flush(1)
            children = [fork(child) for _ in range(4)]
            child()
            answer(codes=[wait_for(pid) for pid in children], children=children, parent=os.getpid())
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
        )
    answer = ended.answer
    assert answer["codes"] == [0] * 4, ended.err
    expected = {pid: {"work": 500} for pid in answer["children"]}
    assert by_process(receiver) == {**expected, answer["parent"]: {"work": 501}}
    assert receiver.once()
    assert receiver.connections == 5
    assert ended.err == ""


def test_what_is_pending_at_a_fork_is_exported_by_the_parent_alone(door, program):
    """Spans that wait for the device, or for the next export, as the process forks come from the parent, once."""
    with http_receiver() as receiver:
        ended = program(
            """
            set_up()
            device = fake_device()
            def mine(*_):
                return {"pid": os.getpid()}
            waiting = gpu_timed(name="waiting", sync="deferred", attributes=mine)(lambda: device.launch(300_000_000))
            queued = gpu_timed(name="queued", attributes=mine)(lambda: 7)
            for _ in range(10):
                queued()
            for _ in range(10):
                waiting()
            def child():
                for _ in range(5):
                    queued()
                assert flush(20), flush(1)
            codes = [wait_for(fork(child)) for _ in range(3)]
            answer(codes=codes, parent=os.getpid(), complete=flush(20).complete)
            """,
            DOOR=door,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            OTEL_BSP_SCHEDULE_DELAY="60000",
            GPU_TIMED_DEVICE_SPANS="0",
        )
    answer = ended.answer
    assert (answer["codes"], answer["complete"]) == ([0] * 3, True)
    found = by_process(receiver)
    assert found.pop(answer["parent"]) == {"waiting": 10, "queued": 10}
    assert [dict(names) for names in found.values()] == [{"queued": 5}] * 3
    assert receiver.once()


# -- multiprocessing --------------------------------------------------------------------------------------

WORKERS = """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    @gpu_timed(name="work", attributes=lambda *_: {"pid": os.getpid()})
    def work():
        return 7

    def child():
        # Started anew (spawn, fork server) a worker has to set up; forked it has its parent's provider.
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            set_up()
        for _ in range(25):
            work()
        return os.getpid()

    if __name__ == "__main__":
        if os.environ["WHERE"] == "parent":
            set_up()
        if os.environ["USED"] == "1":
            work()
        context = multiprocessing.get_context(os.environ["METHOD"])
        workers = [context.Process(target=child) for _ in range(3)]
        for worker in workers:
            worker.start()
        pids = [worker.pid for worker in workers]
        for worker in workers:
            worker.join(20)
        codes = [worker.exitcode for worker in workers]
        with ProcessPoolExecutor(2, mp_context=context) as pool:
            pooled = [pool.submit(child).result(20) for _ in range(2)]
        answer(codes=codes, pids=pids, pooled=pooled, parent=os.getpid())
"""


def run_workers(program, tmp_path, **variables: str):
    """Run WORKERS as a file, which the workers of ``spawn`` can import."""
    import textwrap

    from conftest import PRELUDE

    path = tmp_path / "workers.py"
    path.write_text(PRELUDE + textwrap.dedent(WORKERS), encoding="utf-8")
    return program(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')", prelude=False, **variables)


@pytest.mark.parametrize(
    "how",
    [
        ("fork", "parent", "0"),
        ("fork", "parent", "1"),
        ("fork", "child", "0"),
        ("fork", "child", "1"),
        ("spawn", "parent", "1"),
        ("forkserver", "parent", "1"),
    ],
)
def test_a_worker_of_multiprocessing_delivers_as_it_ends(how, door, program, tmp_path):
    """A worker that just returns, however it was started and whatever its parent did, has delivered every span."""
    method, where, used = how
    with http_receiver() as receiver:
        ended = run_workers(
            program,
            tmp_path,
            METHOD=method,
            WHERE=where,
            USED=used,
            DOOR=door,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            OTEL_BSP_SCHEDULE_DELAY="60000",
        )
    answer = ended.answer
    assert answer["codes"] == [0] * 3, ended.err
    expected = dict.fromkeys(answer["pids"], 25)
    for pid in answer["pooled"]:
        expected[pid] = expected.get(pid, 0) + 25
    if used == "1" and where == "parent":
        expected[answer["parent"]] = 1
    assert {pid: names["work"] for pid, names in by_process(receiver).items()} == expected
    assert receiver.once()
    assert "Traceback" not in ended.err


def test_a_short_lived_child_loses_nothing_uncounted(program):
    """Of a burst in a forked worker under a slow receiver, what arrived and what the worker counted is what it made."""
    with http_receiver(always=("slow", 0.2)) as receiver:
        ended = program(
            """
            import multiprocessing
            configure(exporter="otlp", device_spans=False)
            work = gpu_timed(name="work", sync="deferred")(lambda: None)
            def child():
                for _ in range(10_000):
                    work()
                counts = flush(40).counts
                answer(counts=dict(counts))
            worker = multiprocessing.get_context("fork").Process(target=child)
            worker.start()
            worker.join(50)
            assert worker.exitcode == 0
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
        )
    counts = ended.answer["counts"]
    assert counts["exported"] == len(receiver.spans)
    assert counts["exported"] + counts.get("dropped_in_batch", 0) + counts.get("dropped_queue_full", 0) == 10_000
    assert receiver.once()


def test_the_end_of_a_worker_is_bounded(program):
    """With a collector that never answers a forked worker ends by ``GPU_TIMED_EXIT_TIMEOUT_S``."""
    with http_receiver(always="silent") as receiver:
        ended = program(
            """
            import multiprocessing
            set_up()
            def child():
                gpu_timed(name="work")(lambda: None)()
            worker = multiprocessing.get_context("fork").Process(target=child)
            before = time.monotonic()
            worker.start()
            worker.join(30)
            answer(code=worker.exitcode, took=time.monotonic() - before)
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            GPU_TIMED_EXIT_TIMEOUT_S="0.5",
        )
    assert ended.answer["code"] == 0
    assert ended.answer["took"] < 8
    assert receiver.requests == 1


def test_calls_in_other_finalizers_of_a_worker_are_delivered_too(program):
    """What a worker calls after gpu_timed has delivered, in a finalizer of the application's, is delivered as well."""
    with http_receiver() as receiver:
        program(
            """
            import multiprocessing.util
            set_up()
            work = gpu_timed(name="work")(lambda: None)
            def child():
                multiprocessing.util.Finalize(None, work, exitpriority=5)
                work()
            worker = multiprocessing.get_context("fork").Process(target=child)
            worker.start()
            worker.join(30)
            assert worker.exitcode == 0
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
        )
    assert Counter(span.name for span in receiver.spans) == {"work": 2}


# -- the end of the process -------------------------------------------------------------------------------


def test_calls_in_functions_of_atexit_are_delivered(door, program):
    """A decorated call in an ``atexit`` function registered after the first call is delivered: ours runs later."""
    with http_receiver() as receiver:
        ended = program(
            """
            work = gpu_timed(name="work")(lambda: None)
            set_up()
            work()
            atexit.register(work)
            """,
            DOOR=door,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
        )
    assert Counter(span.name for span in receiver.spans) == {"work": 2}
    assert ended.err == ""


SIGNALLED = """
    set_up()
    work = gpu_timed(name="work")(lambda: None)
    device = fake_device()
    HANDLER
    for _ in range(5):
        work()
    current.tracer().resolver.flush(5)
    print("ready", flush=True)
    os.kill(os.getpid(), signal.SIGNAL)
    time.sleep(20)
"""
LONG = {"OTEL_BSP_SCHEDULE_DELAY": "60000", "GPU_TIMED_DEVICE_SPANS": "0"}


def test_sigterm_without_a_handler_loses_what_is_queued(program):
    """SIGTERM by Python's own doing ends the process on the spot: nothing of ours holds it up, and spans are lost."""
    with http_receiver() as receiver:
        ended = program(
            SIGNALLED.replace("HANDLER", "").replace("SIGNAL", "SIGTERM"),
            code=-signal.SIGTERM,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            **LONG,
        )
    assert "ready" in ended.out
    assert receiver.spans == []
    assert ended.took_s < 15


def test_sigterm_with_a_handler_that_exits_delivers(door, program):
    """With a handler that calls ``sys.exit()``, as servers have it, what is queued is delivered."""
    with http_receiver() as receiver:
        ended = program(
            SIGNALLED.replace("HANDLER", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))").replace(
                "SIGNAL", "SIGTERM"
            ),
            DOOR=door,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            **LONG,
        )
    assert Counter(span.name for span in receiver.spans) == {"work": 5}
    assert ended.took_s < 15


def test_an_interrupt_delivers(door, program):
    """Ctrl-C raises KeyboardInterrupt, which ends the process as an exception does: what is queued is delivered."""
    with http_receiver() as receiver:
        ended = program(
            SIGNALLED.replace("HANDLER", "signal.signal(signal.SIGINT, signal.default_int_handler)").replace(
                "SIGNAL", "SIGINT"
            ),
            code=None,
            DOOR=door,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            **LONG,
        )
    assert ended.code == -signal.SIGINT
    assert "KeyboardInterrupt" in ended.err
    assert Counter(span.name for span in receiver.spans) == {"work": 5}
    assert ended.took_s < 15


def test_an_interrupt_inside_a_call_reaches_the_caller_and_is_delivered(program):
    """Ctrl-C inside a decorated call comes out of it unchanged, and the span says what happened."""
    with http_receiver() as receiver:
        program(
            """
            set_up()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            @gpu_timed(name="work")
            def work():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(20)
            try:
                work()
            except KeyboardInterrupt:
                sys.exit(0)
            sys.exit(3)
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
        )
    assert receiver.one("work").attributes["error.type"] == "KeyboardInterrupt"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="without torch there is nothing to set up")
def test_no_device_is_set_up_in_a_parent_that_forks(program):
    """Importing, configuring, decorating and calling without a device leaves torch unloaded, or CUDA uninitialised."""
    with http_receiver() as receiver:
        ended = program(
            """
            set_up()
            work = gpu_timed(name="work")(lambda: None)
            work()
            with gpu_span("block"):
                pass
            assert flush(10)
            before = "torch" in sys.modules
            import torch
            work()
            assert flush(10)
            answer(before=before, initialised=torch.cuda.is_initialized())
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
        )
    assert ended.answer == {"before": False, "initialised": False}
