"""Ctrl-C while the main thread waits in C++, where Python's handlers do not run."""

import os
import signal
import threading
from collections.abc import Callable

_is_active = False


def stop_at_ctrl_c(stop: Callable[[], None]) -> Callable[[], None]:
    """Ctrl-C calls stop() in a thread from here on, until the result is called.

    Python's own handler then raises KeyboardInterrupt, once the main thread is back.
    Nothing changes outside the main thread, or if the program handles Ctrl-C itself.
    """
    global _is_active
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) != signal.default_int_handler:
        return lambda: None
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _is_active = True

    def wait() -> None:
        while 0 not in (numbers := os.read(reader, 64)):
            if signal.SIGINT in numbers:
                stop()

    thread = threading.Thread(target=wait, daemon=True)

    def end() -> None:
        global _is_active
        _is_active = False
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        if thread.ident is not None:
            os.write(writer, b"\0")
            thread.join()
        os.close(reader)
        os.close(writer)

    if before != -1:  # the program watches signals itself
        end()
        return lambda: None
    thread.start()
    return end


def _forget() -> None:
    if _is_active:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)  # a child's signals are its own
