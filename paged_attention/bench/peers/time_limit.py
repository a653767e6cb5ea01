"""A limit on how long a piece of code may take, such as a compilation that might never end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Expired(BaseException):
    """Not an Exception, because what is interrupted must not catch it, as with Ctrl-C."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the block after `seconds`, as Ctrl-C would.

    There is no limit on Windows, which has no such signal, and in any thread but the main one.
    A call into compiled code is interrupted when it comes back, a wait for a process at once.

    Raises:  TimeoutError: the block took longer. ValueError: seconds <= 0
    """
    if not seconds > 0:
        raise ValueError(f"seconds={seconds!r} must be above 0")
    main = threading.current_thread() is threading.main_thread()
    if not (main and hasattr(signal, "setitimer")):
        yield
        return

    def expired(*_: object) -> None:
        raise _Expired

    before = signal.signal(signal.SIGALRM, expired)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again, should one be swallowed
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _Expired:
        raise TimeoutError(f"took longer than {seconds:g} s") from None
    finally:
        signal.signal(signal.SIGALRM, before)
