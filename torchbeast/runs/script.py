"""Logging, signals and exit status around the main function of a script."""

import logging
import multiprocessing
from collections.abc import Callable

from torchbeast.base import errors
from torchbeast.procs import processes, standard_streams

log = logging.getLogger(__name__)


def configure_logging() -> None:
    logging.basicConfig(
        level=logging.INFO, format="[%(levelname)s %(asctime)s %(name)s] %(message)s"
    )
    logging.getLogger("torchbeast").setLevel(logging.INFO)  # whoever was first


def print_warnings_only() -> None:
    """For --suppress_logs: out.log still gets all lines."""
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.WARNING)


def run(work: Callable[[], int]) -> int:
    """The main function of a script. Returns the exit status.

    Configures logging. An exception in `work` is logged and gives the exit status.
    """
    standard_streams.keep_open()
    configure_logging()
    levels = [(x, x.level) for x in logging.getLogger().handlers]
    if not processes.in_main_thread():
        log.warning(
            "This is not the main thread, and only there Python handles signals: "
            "Ctrl-C and SIGTERM neither stop the run nor save it."
        )
    with processes.raise_on_stop_signals():
        try:
            if getattr(multiprocessing.current_process(), "_inheriting", False):
                raise errors.UserError(
                    "a child process imports your script, which calls main() again: "
                    "put the call under `if __name__ == '__main__':`"
                )
            return work()
        except (Exception, KeyboardInterrupt) as error:
            return errors.report(error)
        finally:
            for handler, level in levels:  # print_warnings_only may have changed it
                handler.setLevel(level)
