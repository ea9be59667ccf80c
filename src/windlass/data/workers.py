"""Processes that parse, render and tokenize chunks of rows beside each other. The rows come back in their order."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from windlass.data.choose import choose_format
from windlass.data.documents import Documents, Found
from windlass.data.formats import render_rows
from windlass.data.reading import Chunk, SplitPart
from windlass.data.tokenize import tokenize_rows
from windlass.errors import RunError, UserError
from windlass.hardware import count_usable_cpus

if TYPE_CHECKING:
    from windlass.runfile import Data

# Input for which another process is worth its start, which takes as long as this much of tokenizing.
WORKER_BYTES = 4 << 20
AHEAD = 2  # chunks for each process that are in work or wait for those before them
Tokenized = tuple[Documents, Found]
Setup = tuple["Data", Sequence[str], Any, int]  # what makes a format, whose functions can't be sent, and max_length
COMMAND = "from windlass.data.workers import serve; serve()"


def count_workers(parts: Sequence[SplitPart], tokenizer: Any) -> int:
    """Return how many processes should tokenize these rows; 1: this one does."""
    if not tokenizer.is_fast or not type(tokenizer).__module__.startswith("transformers."):
        return 1  # of other code, which another process may not find
    size = sum(path.stat().st_size for part in parts for path in part.files)
    return max(1, min(count_usable_cpus(), size // WORKER_BYTES))


def tokenize_chunks(chunks: Iterable[Chunk], setup: Setup, count: int) -> Generator[Tokenized, None, None]:
    """Yield what becomes of each chunk, in their order, from at most `count` processes."""
    given = pickle.dumps(setup)
    workers: list[subprocess.Popen[bytes]] = []
    of_thread = threading.local()

    def tokenize(chunk: Chunk | UserError) -> Tokenized:
        if isinstance(chunk, UserError):
            raise chunk
        questions: list[Any] = [chunk]
        if not hasattr(of_thread, "worker"):
            of_thread.worker = start_worker()
            workers.append(of_thread.worker)
            questions = [given, chunk]
        return ask(of_thread.worker, questions)

    with ThreadPoolExecutor(count) as threads:
        pending: deque[Future[Tokenized]] = deque()
        try:
            for chunk in read_or_fail(chunks):
                pending.append(threads.submit(tokenize, chunk))
                if len(pending) > AHEAD * count:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for worker in workers:
                worker.kill()
            threads.shutdown(cancel_futures=True)
            for worker in workers:
                worker.kill()
                worker.communicate()


def read_or_fail(chunks: Iterable[Chunk]) -> Iterator[Chunk | UserError]:
    """Yield an error that ends the reading behind the chunks before it: theirs come first."""
    try:
        yield from chunks
    except UserError as error:
        yield error


def start_worker() -> subprocess.Popen[bytes]:
    """Start a process that ends when this one does: its input ends then."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
    # In a group of its own, Ctrl-C reaches this process alone, which ends the others.
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, process_group=0
    )


def ask(worker: subprocess.Popen[bytes], questions: Sequence[Any]) -> Tokenized:
    """Return a process's answer to the last question, or raise the error that it had."""
    assert worker.stdin
    assert worker.stdout
    try:
        for question in questions:
            pickle.dump(question, worker.stdin, pickle.HIGHEST_PROTOCOL)
        worker.stdin.flush()
        answer = pickle.load(worker.stdout)
    except (EOFError, OSError, pickle.UnpicklingError):
        status = worker.wait()
        how = f"exited with {status}"
        hint = "its last words are above"
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
            hint = "if memory ran out, give the job more of it, or fewer processors: each has a process"
        raise RunError(f"a process that tokenizes {how}", "data", hint, "lost-process") from None
    if isinstance(answer, Exception):
        raise answer
    return cast(Tokenized, answer)


def serve() -> None:
    """Answer on stdout what comes on stdin, until that ends: first the setup, then chunks."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    questions = sys.stdin.buffer
    given = pickle.load(questions)
    tokenize: Callable[[Chunk], Tokenized] | None = None
    with suppress(EOFError, BrokenPipeError):
        while True:
            chunk = pickle.load(questions)
            try:
                tokenize = tokenize or make_tokenizing(given)
                pickle.dump(tokenize(chunk), answers, pickle.HIGHEST_PROTOCOL)
            except BrokenPipeError:
                raise
            except Exception as error:
                error.add_note(traceback.format_exc())
                pickle.dump(error, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


def make_tokenizing(given: bytes) -> Callable[[Chunk], Tokenized]:
    data, columns, tokenizer, max_length = pickle.loads(given)
    kind = choose_format(data, columns, tokenizer)
    return lambda chunk: tokenize_rows(*render_rows(chunk.rows(), kind), kind, tokenizer, max_length)
