"""The latest step of every rank as a page for Prometheus to scrape, in its text format."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from windlass.errors import UserError
from windlass.observe import steps

# Of the whole job: the first rank's value is everybody's.
OF_THE_JOB: Final = ("step", "epoch", "loss", "grad_norm", "learning_rate", "job_tokens")
ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def exposition(run: str, latest: Mapping[int, Mapping[str, Any]], alarms: Mapping[str, int]) -> str:
    """`windlass_FIELD{run,rank}` for every field of the step files that is a number, and `windlass_alarms_total`."""
    counted = {name for record in latest.values() for name in steps.counted(steps.unit(record))}
    own = {name: ["", "as the script's meter counts"] for name in sorted(counted - steps.FIELDS.keys())}
    named = f'run="{run.translate(ESCAPES)}"'
    lines = []
    for field, (unit, meaning) in (steps.FIELDS | own).items():
        found = {rank: record[field] for rank, record in latest.items() if type(record.get(field)) in (int, float)}
        if found:
            lines.append(f"# HELP windlass_{field} {meaning}{f' ({unit})' if unit else ''}")
            lines.append(f"# TYPE windlass_{field} gauge")
        if found and field in OF_THE_JOB:
            lines.append(f"windlass_{field}{{{named}}} {float(next(iter(found.values())))!r}")
        else:
            lines += [f'windlass_{field}{{{named},rank="{rank}"}} {float(value)!r}' for rank, value in found.items()]
    lines.append("# HELP windlass_alarms_total alarms of the watch since this run was started or resumed")
    lines.append("# TYPE windlass_alarms_total counter")
    lines += [f'windlass_alarms_total{{{named},kind="{kind}"}} {count}' for kind, count in sorted(alarms.items())]
    return "".join(f"{line}\n" for line in lines)


class Page:
    """Serves `/metrics` from a thread of its own."""

    def __init__(self, address: str, port: int, text: Callable[[], str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.split("?")[0] == "/metrics"
                body = text().encode() if found else b"see /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Scrapes are not logged."""

        try:
            self.server = ThreadingHTTPServer((address, port), Handler)
        except OSError as error:
            problem = f"can't listen on {address}:{port}: {error.strerror}"
            raise UserError(problem, "watch.prometheus_port", "choose a free port") from None
        self.thread = threading.Thread(target=self.server.serve_forever, name="windlass prometheus", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)
