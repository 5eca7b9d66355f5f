"""A template that hangs inside one C call ends the process; nothing else notices the watchdog."""

import signal
import subprocess
import sys
import threading
import time

from sparsekv_cli.models.chat.watchdog import LAST_WORDS, watched

HANGING = "('a' * 1000000).rfind('a' * 250000 + 'b' + 'a' * 250000)"  # a minute, the GIL held


def run(program: str) -> subprocess.CompletedProcess[str]:
    program = f"from sparsekv_cli.models.chat.watchdog import watched\n{program}"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_hanging_call_ends_the_process_with_one_line():
    ended = run(f"print('before', flush=True)\nwith watched(0.2):\n    {HANGING}\nprint('behind')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "before\n", LAST_WORDS + "\n")


def test_a_template_is_watched():
    ended = run(
        "from sparsekv_cli.models.chat import limits, template\n"
        "limits.SLOW_SEARCHES = ()\n"
        "template.watched = lambda: watched(0.5)\n"
        f"template.render({'{{ ' + HANGING.replace('+', '~') + ' }}'!r}, [])"
    )
    assert (ended.returncode, ended.stderr) == (1, LAST_WORDS + "\n")


def test_a_block_that_ends_in_time_leaves_no_timer():
    with watched(0.05):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    time.sleep(0.1)


def test_a_timer_that_was_set_goes_on():
    rung: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with watched():
            time.sleep(0.05)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 0.16 and not rung
        time.sleep(0.3)
        assert rung == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def test_other_threads_are_not_watched():
    ran: list[float] = []

    def block() -> None:
        with watched(0.05):
            ran.append(signal.getitimer(signal.ITIMER_REAL)[0])
            time.sleep(0.1)

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert ran == [0.0]
