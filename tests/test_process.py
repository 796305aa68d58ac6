"""Forks, threads of Python and of torch, and the GIL."""

from __future__ import annotations

import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import sample_calls
import torch
from compare import assert_same_bits
from sample_calls import CALLS, Call, DecodeProblem, LogitsProblem, PoolProblem, Scope
from subprocesses import run_script


def large(op: str, seed: int = 0) -> Call:
    """Work enough for several threads."""
    if op == "flash_mla_decode":
        extra = Scope("fp4", 16, 20, 200)
        problem = DecodeProblem(
            b=2, s_q=2, h_q=64, main=Scope("fp8", 64, 8, 256), extra=extra, sink="finite", seed=seed
        )
        return sample_calls.decode(problem)
    if op == "paged_mqa_logits":
        contexts = (700, 1000, 1, 1000)
        return sample_calls.logits(
            LogitsProblem(contexts, 32, page_kv=64, pages=20, width=16, max_context_len=1024, seed=seed)
        )
    return sample_calls.pool(PoolProblem(300, 8, 512, seed=seed))


OPERATORS = ("flash_mla_decode", "paged_mqa_logits", "softmax_pool")

FORK = """
import hashlib, os, signal, sys, torch, deepinfer_ops
from test_process import OPERATORS, large

def bits(calls):  # through numpy: after a fork torch's own threaded operators hang
    return [call.run().view(torch.int16).numpy().tobytes() for call in calls]

def hash_of(results):
    return hashlib.sha256(b"".join(results)).digest()

def in_child(check):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a hang is a signal, and the parent sees it
        try:
            check()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
"""


def test_a_forked_child_computes_the_parents_bits_after_use_in_the_parent():
    script = """
    torch.set_num_threads(4)
    calls = [large(op) for op in OPERATORS]
    want = bits(calls)
    def check():
        assert bits(calls) == want
        torch.set_num_threads(2)
        assert bits(calls) == want
        in_child(lambda: [bits(calls) == want or sys.exit(3)])
    in_child(check)
    assert bits(calls) == want  # the parent keeps its threads
    in_child(check)
    """
    run_script(FORK + textwrap.dedent(script))


def test_a_child_forked_before_the_first_call_computes_the_same_bits():
    script = """
    torch.set_num_threads(4)
    calls = [large(op) for op in OPERATORS]
    readable, writable = os.pipe()
    in_child(lambda: os.write(writable, hash_of(bits(calls))))
    assert os.read(readable, 64) == hash_of(bits(calls))
    """
    run_script(FORK + textwrap.dedent(script))


def test_a_child_forked_while_other_threads_compute_does_not_hang():
    script = """
    import threading
    torch.set_num_threads(2)
    calls = [large(op) for op in OPERATORS]
    want, stop = bits(calls), threading.Event()
    def work():
        while not stop.is_set():
            for call in calls:
                call.run()
    threads = [threading.Thread(target=work) for _ in range(3)]
    [thread.start() for thread in threads]
    try:
        for _ in range(5):
            in_child(lambda: bits(calls) == want or sys.exit(3))
    finally:
        stop.set()
        [thread.join() for thread in threads]
    """
    run_script(FORK + textwrap.dedent(script))


def test_workers_of_a_fork_pool_compute_the_parents_bits():
    script = """
    import multiprocessing
    torch.set_num_threads(4)
    calls = {op: large(op) for op in OPERATORS}
    want = [bits([call]) for call in calls.values()]
    def compute(op):
        return bits([calls[op]])
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(compute, OPERATORS).get(timeout=60) == want
    """
    run_script(FORK + textwrap.dedent(script))


@pytest.mark.parametrize("torch_threads", [1, 3])
def test_many_python_threads_on_different_inputs_give_the_serial_bits(threads, torch_threads):
    threads(torch_threads)
    calls = [large(op, seed) for seed in range(3) for op in OPERATORS] + [make() for make in CALLS.values()]
    want = [call.run() for call in calls]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            results = pool.map(Call.run, [*calls, *calls])
            for i, (result, wanted) in enumerate(zip(results, [*want, *want], strict=True)):
                assert_same_bits(result, wanted, f"call {i % len(calls)}")


def test_the_first_call_may_come_from_eight_threads_at_once_that_did_not_import():  # llama.cpp 26954
    script = """
    import threading
    from sample_calls import CALLS
    calls = [large(op) for op in OPERATORS] + [large("flash_mla_decode", seed) for seed in range(5)]
    barrier, results = threading.Barrier(len(calls)), {}
    def work(i):
        barrier.wait()
        results[i] = bits([calls[i]])
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [results[i] for i in range(len(calls))] == [bits([call]) for call in calls]
    """
    run_script(FORK + textwrap.dedent(script))


@pytest.mark.parametrize("op", OPERATORS)
def test_set_num_threads_between_calls_changes_no_bit(threads, op):  # vllm 49896
    call = large(op)
    threads(1)
    want = call.run()
    for count in (2, 7, 16, 1, 3) * 3:
        threads(count)
        assert_same_bits(call.run(), want, f"{count} threads")


def test_set_num_threads_in_one_thread_while_others_compute_changes_no_bit(threads):
    calls = [large(op) for op in OPERATORS]
    threads(2)
    want = [call.run() for call in calls]
    stop = threading.Event()

    def change():
        while not stop.is_set():
            for count in (1, 2, 5):
                torch.set_num_threads(count)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(5):
            for call, wanted in zip(calls, want, strict=True):
                assert_same_bits(call.run(), wanted)
    finally:
        stop.set()
        changer.join()


def times_seen_running(compute: Callable[[], object], tries: int) -> int:
    """In how many of the tries this thread runs Python while another one is inside ``compute``.

    With a switch interval of hours a thread gives up the GIL only where it releases it. The worker signals, then
    computes; this thread wakes before the worker is done only if ``compute`` lets go. Counted, never timed.
    """
    before, seen = sys.getswitchinterval(), 0
    sys.setswitchinterval(10_000.0)
    try:
        for _ in range(tries):
            started, done = threading.Lock(), []
            started.acquire()

            def work(started=started, done=done):
                started.release()
                compute()
                done.append(True)

            worker = threading.Thread(target=work)
            worker.start()
            with started:
                seen += not done
            worker.join()
    finally:
        sys.setswitchinterval(before)
    return seen


@pytest.mark.parametrize("op", OPERATORS)
def test_the_gil_is_released_while_an_operator_computes(op):
    assert times_seen_running(large(op).run, tries=50) > 0


def test_that_count_is_zero_for_a_function_that_keeps_the_gil():
    assert times_seen_running(lambda: sum(range(20_000)), tries=50) == 0
