"""A Python interpreter for tests with the training libraries already imported: processes start in 0.1 s instead of 7.

`warm.python()` returns the path of an interpreter to use instead of `sys.executable`, with `-m`, `-c` or a script. It
is a small client: a server, started once per run of pytest, forks itself for every start, and the fork runs the program
with the client's arguments, environment, folder, files and network namespace. In it `sys.executable` is the same
client, so what a program starts (ranks, for example) is warm too. The client passes signals on and ends when the fork
ends; if it is killed, so is the fork.

Two things differ from an ordinary process, so tests of them use `sys.executable`: the fork's parent is the server
(PR_SET_PDEATHSIG, getppid), and variables that libraries read at import were read before. If HF_*, TRANSFORMERS_* or
PYTHON* variables differ from pytest's (other than those that windlass sets for its own processes), or with interpreter
options, a cold interpreter is started.
"""

import atexit
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHARED = "WARM_PYTHON"
SET_LATER = ("HF_HUB_OFFLINE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "PYTHONPATH")  # by `run`
CLIENT = r"""#!{python} -IS
import os, signal, socket, sys
PREFIXES = ("HF_", "TRANSFORMERS_", "PYTHON")
imported = {{name: os.environ[name] for name in os.environ if name.startswith(PREFIXES) and name not in {set_later}}}
arguments = sys.argv[2:] if sys.argv[1:2] == ["-u"] else sys.argv[1:]  # torchrun asks for unbuffered output
folders = {{*os.environ.get("PYTHONPATH", "").split(os.pathsep)}} - {{""}}
folders -= {{os.getcwd()}} if arguments[:1] in (["-c"], ["-m"]) else set()  # comes first there anyway
option = not arguments or arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")
if option or imported != {environ} or not folders <= {folders}:
    os.execv({python!r}, [{python!r}, *arguments])
import json
connection = socket.socket(socket.AF_UNIX)
connection.connect({socket!r})
blocked = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)
signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
request = {{"arguments": arguments, "environ": dict(os.environ), "cwd": os.getcwd(), "umask": os.umask(0)}}
request = json.dumps(request).encode()
network = os.open("/proc/self/ns/net", os.O_RDONLY)
socket.send_fds(connection, [len(request).to_bytes(8, "big")], [0, 1, 2, network])
connection.sendall(request)
pid = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
for one in blocked:
    signal.signal(one, lambda number, frame: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
for stream in (0, 1, 2):  # whoever reads the output waits for the program's end, not for this one's
    os.close(stream)
status = connection.recv(8, socket.MSG_WAITALL)
code = os.waitstatus_to_exitcode(int.from_bytes(status, "big")) if status else -signal.SIGKILL
if code < 0:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def python() -> str:
    """Return the interpreter's path, once it is ready."""
    client = os.environ.get(SHARED) or start()
    until = time.monotonic() + 280
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(Path(client).with_name("socket")))
            except OSError:
                assert time.monotonic() < until, "the warm interpreter did not start"
                time.sleep(0.05)
            else:
                return client


def start() -> str:
    """Start the server, which ends with this process. With `pytest -n`, conftest.py starts one for all workers."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    client, address = folder / "python", folder / "socket"
    environ = {name: value for name, value in os.environ.items() if name.startswith(("HF_", "TRANSFORMERS_", "PYTHON"))}
    environ = {name: value for name, value in environ.items() if name not in SET_LATER}
    folders = {*sys.path, str(Path(__file__).parent)}
    fields = {"environ": environ, "socket": str(address), "set_later": SET_LATER, "folders": folders}
    client.write_text(CLIENT.format(python=sys.executable, **fields))
    client.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, __file__, str(client), str(address)],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,
    )
    atexit.register(server.wait)
    atexit.register(server.kill)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(client)


def serve(client: str, address: str) -> None:
    """Fork for every connection, report the process id to the client, and later how the fork ended."""
    import contextlib
    import ctypes
    import selectors
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive pytest
    import_libraries()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    clients: dict[int, socket.socket] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is listening:
                connection, _ = listening.accept()
                try:
                    header, files, _, _ = socket.recv_fds(connection, 8, 4)
                    request = connection.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL)
                except OSError:  # the client was killed
                    connection.close()
                    continue
                if len(files) < 4:
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    selector.close()
                    for one in (listening, connection, *clients.values()):
                        one.close()
                    os.close(woken)
                    os.close(wake)
                    run(client, request, files)
                for file in files:
                    os.close(file)
                clients[pid] = connection
                selector.register(connection, selectors.EVENT_READ, pid)
                with contextlib.suppress(OSError):
                    connection.sendall(pid.to_bytes(8, "big"))
            elif key.fileobj == woken:
                os.read(woken, 4096)
            elif clients.get(key.data) is key.fileobj:  # readable: the client was killed
                selector.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)
        while clients:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            connection = clients.pop(pid)
            if connection in selector.get_map():
                selector.unregister(connection)
            with contextlib.suppress(OSError):  # nobody waits for it any more
                connection.sendall(status.to_bytes(8, "big"))
            connection.close()


def import_libraries() -> None:
    """Import what ranks and tests of the engine import, and nothing that starts a thread."""
    import gc

    import datasets  # noqa: F401
    import peft  # noqa: F401
    import pytest  # noqa: F401
    from transformers import conversion_mapping
    from transformers.models.mistral4 import modeling_mistral4  # noqa: F401
    from trl import SFTTrainer  # noqa: F401

    import windlass.cli
    import windlass.train.run  # noqa: F401
    from windlass.observe.report import page
    from windlass.runfile.values import Section

    # Otherwise each process that reports or plans compiles these: most of what it takes.
    page._environment().get_template("page.html.j2")
    conversion_mapping.get_checkpoint_conversion_mapping("mistral4")
    sections = [Section]
    for section in sections:
        section.model_rebuild()
        sections += section.__subclasses__()
    gc.freeze()  # forks don't look through all of this for garbage


def run(client: str, request: bytes, files: list[int]) -> None:
    """Become the program. Never returns."""
    import ctypes
    import json
    import runpy
    import threading
    import traceback
    import types

    import numpy as np
    from datasets import config, disable_progress_bars
    from huggingface_hub import constants

    code: int | str | None = 1
    try:
        os.setsid()
        if ctypes.CDLL(None).setns(files[3], 0x40000000):  # CLONE_NEWNET
            raise OSError("setns failed")
        for stream, file in enumerate(files[:3]):
            os.dup2(file, stream)
        for file in files:
            os.close(file)
        asked = json.loads(request)
        os.environ.clear()
        os.environ.update(asked["environ"])
        constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE") == "1"
        if "HF_DATASETS_DISABLE_PROGRESS_BARS" in os.environ:
            disable_progress_bars()
        folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path += [folder for folder in folders if folder and folder not in sys.path]
        time.tzset()
        os.chdir(asked["cwd"])
        os.umask(asked["umask"])
        np.random.seed()
        sys.executable = client
        sys.modules["__main__"] = types.ModuleType("__main__")
        first, *rest = asked["arguments"]
        if first == "-m":
            sys.argv, sys.path[0] = rest, asked["cwd"]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv, sys.path[0] = ["-c", *rest[1:]], asked["cwd"]
            exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
        else:
            sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
            runpy.run_path(first, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    try:
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    serve(*sys.argv[1:])
