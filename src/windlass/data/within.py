"""Run something that may never end, such as a chat template of somebody else's."""

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def run_within(seconds: float, work: Callable[[], Any]) -> Any:
    """Run this in a thread that is ended, with TimeoutError, after so many seconds."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # also the SystemExit that ends it
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        return future.result(seconds)
    except TimeoutError:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        raise
