"""A bad argument is found before any data is read: the same table of bad calls, on memory that cannot be read."""

from __future__ import annotations

from subprocesses import run_script


def test_no_byte_is_read_before_the_whole_call_is_checked():
    script = """
    import deepinfer_ops
    from contract_cases import CASES, good
    from unreadable_memory import unreadable
    for case in CASES:
        broken = case.apply(good(case.op)).map_tensors(unreadable)
        try:
            broken.run()
        except RuntimeError as error:
            assert str(error) == case.text, f"{case}: {error}"
        else:
            raise AssertionError(f"{case} was accepted")
    print(len(CASES))
    """
    assert int(run_script(script)) > 200


def test_the_memory_of_that_test_is_really_unreadable():
    script = """
    import os, signal, deepinfer_ops
    from contract_cases import OPERATORS, good
    from unreadable_memory import unreadable
    for op in OPERATORS:
        call = good(op).map_tensors(unreadable)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            call.run()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV, (op, status)
    print("each call died of its first read")
    """
    assert "each call died" in run_script(script)
