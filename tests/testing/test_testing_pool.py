"""The worker pool: results, errors, hangs, crashes, and that nothing outlives a failure."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from shardtensor.testing import (
    DistributedFailure,
    RemoteError,
    run_distributed,
    run_expecting_errors,
    shared_mesh,
)


def rank_and_sum(a, b=0):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), a + b, total.item()


def random_numbers():
    return torch.rand(3)


def process_id():
    return os.getpid()


def environment():
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], int(os.environ["RANK"])


def leave_state_behind():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def state():
    return torch.get_default_dtype(), torch.is_grad_enabled()


def fail_on(ranks):
    if dist.get_rank() in ranks:
        raise ValueError(f"no luck with {ranks}")
    return "fine"


class Stubborn(Exception):
    def __reduce__(self):
        raise TypeError("will not be pickled")


def raise_stubborn():
    raise Stubborn("unmoved")


def barrier_unless(rank):
    if dist.get_rank() != rank:
        dist.barrier()


def a_telling_name(rank):
    if dist.get_rank() == rank:
        time.sleep(100)


def die(rank, how):
    if dist.get_rank() == rank:
        print("last words")
        os._exit(3) if how == "exit" else os.abort()


def lonely_send():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
        raise ValueError("left a message behind")


def lonely_send_in_mesh():
    group = shared_mesh((1, 2), ("a", "b")).get_group("b")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=group, async_op=True)
        raise ValueError("left a message behind")


def mesh_twice():
    first = shared_mesh((2, 1), ("x", "y"))
    return first is shared_mesh((2, 1), ("x", "y")), first is shared_mesh(2), tuple(first.shape)


def unpicklable():
    return lambda: None


def say(text):
    print(text)


def test_results_come_back_in_the_order_of_ranks():
    assert run_distributed(rank_and_sum, 2, 1, b=2) == [(0, 3, 1.0), (1, 3, 1.0)]


def test_workers_are_reused_seeded_and_single_threaded():
    pids = run_distributed(process_id, 2)
    assert len(set(pids)) == 2 and os.getpid() not in pids
    assert run_distributed(process_id, 2) == pids
    first, second = run_distributed(random_numbers, 2)
    assert torch.equal(first, second)
    assert torch.equal(first, run_distributed(random_numbers, 2)[0])
    assert run_distributed(environment, 2) == [(1, "1", 0), (1, "1", 1)]


def test_a_call_does_not_inherit_global_state():
    run_distributed(leave_state_behind, 2)
    assert run_distributed(state, 2) == [(torch.float32, True)] * 2


def test_an_error_on_one_rank_is_reported_with_its_traceback():
    pids = run_distributed(process_id, 2)
    with pytest.raises(DistributedFailure) as caught:
        run_distributed(fail_on, 2, [1])
    text = str(caught.value)
    assert text.startswith("1 of 2 ranks failed in test_testing_pool.fail_on\n--- rank 1 raised\nTraceback")
    assert "ValueError: no luck with [1]" in text and "in fail_on" in text and "_worker.py" not in text
    assert text.endswith("--- rank 0 returned")
    assert isinstance(caught.value.errors[1], ValueError)
    assert run_distributed(process_id, 2) == pids, "a healthy pool need not be replaced"


def test_equal_tracebacks_are_shown_once():
    with pytest.raises(DistributedFailure, match="2 of 2 ranks failed") as caught:
        run_distributed(fail_on, 2, [0, 1])
    assert str(caught.value).count("ValueError: no luck") == 1
    assert "--- ranks 0, 1 raised" in str(caught.value)


def test_expected_errors_are_returned_per_rank():
    errors = run_expecting_errors(fail_on, 2, [0])
    assert isinstance(errors[0], ValueError) and str(errors[0]) == "no luck with [0]"
    assert "in fail_on" in errors[0].remote_traceback
    assert errors[1] is None


def test_an_error_that_cannot_be_pickled_keeps_its_type_name_and_text():
    for error in run_expecting_errors(raise_stubborn, 2):
        assert isinstance(error, RemoteError) and str(error) == "Stubborn: unmoved"


def test_a_hang_is_reported_with_stacks_and_the_next_call_works():
    pids = run_distributed(process_id, 2)
    start = time.monotonic()
    with pytest.raises(DistributedFailure) as caught:
        run_distributed(barrier_unless, 2, 1, timeout=2)
    assert time.monotonic() - start < 20
    text = str(caught.value)
    assert "--- rank 0 did not return within 2" in text and "in barrier_unless" in text and "in barrier" in text
    assert "in listen" not in text
    assert caught.value.hung == (0,)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert run_distributed(fail_on, 2, []) == ["fine", "fine"]


def test_a_hang_is_no_expected_error():
    with pytest.raises(DistributedFailure, match=r"(?s)rank 1 did not return within 1.*in a_telling_name"):
        run_expecting_errors(a_telling_name, 2, 1, timeout=1)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        pytest.param("exit", "exit code 3", marks=pytest.mark.slow, id="exit"),
        pytest.param("abort", f"killed by signal {signal.SIGABRT:d}", id="abort"),
    ],
)
def test_a_crash_is_reported_and_the_next_call_works(how, reason):
    with pytest.raises(DistributedFailure) as caught:
        run_distributed(die, 2, 1, how)
    assert f"--- rank 1 died ({reason})" in str(caught.value)
    assert "printed:\nlast words" in str(caught.value)
    if how == "abort":
        assert "in die" in str(caught.value)
    assert list(caught.value.dead) == [1]
    assert run_distributed(fail_on, 2, []) == ["fine", "fine"]


@pytest.mark.parametrize("fn", [pytest.param(lonely_send, marks=pytest.mark.slow), lonely_send_in_mesh])
def test_a_pool_whose_ranks_are_out_of_step_is_replaced(fn):
    pids = run_distributed(process_id, 2)
    assert isinstance(run_expecting_errors(fn, 2)[0], ValueError)
    assert run_distributed(process_id, 2) != pids
    assert [total for *_, total in run_distributed(rank_and_sum, 2, 0)] == [1.0, 1.0]


def test_meshes_are_shared():
    assert run_distributed(mesh_twice, 2) == [(True, False, (2, 1))] * 2


def test_output_is_shown_with_its_rank(capfd):
    run_distributed(say, 2, "hello")
    assert capfd.readouterr().out == "[rank 0] hello\n[rank 1] hello\n"


def test_what_cannot_be_sent_is_refused_clearly():
    with pytest.raises(ValueError, match="top level of a module"):
        run_distributed(lambda: None, 2)
    with pytest.raises(DistributedFailure, match="the result, a function, cannot be pickled"):
        run_distributed(unpicklable, 2)


def test_a_failure_can_be_pickled():
    original = DistributedFailure("text", {}, [1], {0: 3})
    copy = pickle.loads(pickle.dumps(original))
    assert (str(copy), copy.hung, copy.dead) == ("text", (1,), {0: 3})


def test_no_worker_outlives_its_parent(tmp_path):
    (tmp_path / "script_functions.py").write_text(
        textwrap.dedent("""
        import os, time
        def pid():
            return os.getpid()
        def stuck():
            time.sleep(100)
        """)
    )
    script = textwrap.dedent("""
        import os, threading, time
        import script_functions
        from shardtensor.testing import run_distributed
        print(*run_distributed(script_functions.pid, 2), flush=True)
        threading.Thread(target=run_distributed, args=(script_functions.stuck, 2), daemon=True).start()
        time.sleep(1)
        os.kill(os.getpid(), 9)
        """)
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    pids = [int(word) for word in result.stdout.split()]
    assert len(pids) == 2, result.stderr
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"orphans: {alive}"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:  # an orphan that has ended may stay a zombie where nothing reaps it
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return os.path.isdir("/proc/self") is False
