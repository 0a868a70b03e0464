"""The first signal asks, the second ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from wmcli.interrupt import stop_requests

ENDING = [signal.SIGINT, signal.SIGTERM]
ASKING = [signal.SIGUSR1, signal.SIGUSR2]
SIGNALS = [*ENDING, *ASKING]

STUBBORN = """
import time
from wmcli.interrupt import stop_requests
with stop_requests() as stop:
    print("ready", flush=True)
    while not stop:
        time.sleep(0.01)
    print("asked", flush=True)
    while not stop.ending:
        time.sleep(0.01)
    print("ending", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_request_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with stop_requests() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
    assert [signal.getsignal(each) for each in SIGNALS] == before
    with stop_requests() as another:
        assert not another


def test_the_handlers_come_back_after_an_error() -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(ZeroDivisionError), stop_requests():
        raise ZeroDivisionError
    assert [signal.getsignal(each) for each in SIGNALS] == before


@pytest.mark.parametrize("second", ENDING)
@pytest.mark.parametrize("first", ENDING)
def test_the_second_signal_ends_the_process_at_once(first: signal.Signals, second: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            child.send_signal(first)
            assert child.stdout.readline() == "asked\n"
            began = time.monotonic()
            child.send_signal(second)
            assert child.wait(timeout=30) == -second
            assert time.monotonic() - began < 10
        finally:
            child.kill()


def test_a_scheduler_may_ask_as_often_as_it_likes() -> None:
    """It signals every process of a job, and the one that started this one passes it on; in any order."""
    for signals in ([*ASKING, *ASKING, signal.SIGTERM], [signal.SIGTERM, *ASKING]):
        with stop_requests() as stop:
            for number in signals:
                os.kill(os.getpid(), number)
                assert stop
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            child.send_signal(signal.SIGUSR2)
            assert child.stdout.readline() == "asked\n"
            child.send_signal(signal.SIGTERM)
            assert child.stdout.readline() == "ending\n"  # signals that wait together are handled by number
            child.send_signal(signal.SIGUSR1)
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(timeout=0.3)
            child.send_signal(signal.SIGINT)
            assert child.wait(timeout=30) == -signal.SIGINT
        finally:
            child.kill()


@pytest.mark.slow
def test_who_reaches_no_checkpoint_ends_without_one() -> None:
    """However long an update takes: within ten seconds, with the exit code that asks to be run again."""
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            child.send_signal(signal.SIGTERM)
            began = time.monotonic()
            _, said = child.communicate(timeout=30)
            assert child.returncode == 75 and time.monotonic() - began < 10
            assert "stopped without a new checkpoint; the same command resumes from the last one" in said
        finally:
            child.kill()


def test_blocks_inside_share_the_request_and_only_the_outermost_restores() -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with stop_requests() as outer:
        during = [signal.getsignal(each) for each in SIGNALS]
        with stop_requests() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
        assert inner and outer
        assert [signal.getsignal(each) for each in SIGNALS] == during
        with stop_requests() as next_stage:
            assert next_stage, "a later stage must not begin"
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_outside_the_main_thread_nothing_is_caught() -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    seen = []

    def work() -> None:
        with stop_requests() as stop:
            seen.append((bool(stop), [signal.getsignal(each) for each in SIGNALS] == before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, True)]
