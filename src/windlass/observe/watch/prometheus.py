"""The latest step of every rank as a page for Prometheus to scrape, in its text format."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from windlass.errors import UserError
from windlass.observe import steps

TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Of the whole job: the first rank's value is everybody's.
OF_THE_JOB = ("step", "epoch", "loss", "grad_norm", "learning_rate", "job_tokens")


def exposition(run: str, latest: Mapping[int, Mapping[str, Any]], alarms: Mapping[str, int]) -> str:
    """`windlass_FIELD{run,rank}` for every field of the step files that is a number, and `windlass_alarms_total`."""
    return "".join(f"{line}\n" for line in _lines(run, latest, alarms))


def _lines(run: str, latest: Mapping[int, Mapping[str, Any]], alarms: Mapping[str, int]) -> Iterator[str]:
    counted = {name for record in latest.values() for name in steps.counted(steps.unit(record))}
    fields = steps.FIELDS | dict.fromkeys(sorted(counted - steps.FIELDS.keys()), ("", "as the script's meter counts"))
    for field, (unit, meaning) in fields.items():
        found = {rank: record[field] for rank, record in latest.items() if _number(record.get(field))}
        if field in OF_THE_JOB:
            found = dict(list(found.items())[:1])
        if found:
            yield f"# HELP windlass_{field} {meaning}{f' ({unit})' if unit else ''}".replace("\\", "\\\\")
            yield f"# TYPE windlass_{field} gauge"
            for rank, value in found.items():
                labels = {"run": run} if field in OF_THE_JOB else {"run": run, "rank": str(rank)}
                yield f"windlass_{field}{_labels(labels)} {float(value)!r}"
    yield "# HELP windlass_alarms_total alarms of the watch since this run was started or resumed"
    yield "# TYPE windlass_alarms_total counter"
    for kind, number in sorted(alarms.items()):
        yield f"windlass_alarms_total{_labels({'run': run, 'kind': kind})} {number}"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _labels(labels: Mapping[str, str]) -> str:
    escaped = {
        name: text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name, text in labels.items()
    }
    return "{" + ",".join(f'{name}="{text}"' for name, text in escaped.items()) + "}"


class Page:
    """Serves `/metrics` from a thread of its own."""

    def __init__(self, address: str, port: int, text: Any) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.split("?")[0] == "/metrics"
                body = text().encode() if found else b"see /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """A scrape is no news."""

        try:
            self.server = ThreadingHTTPServer((address, port), Handler)
        except OSError as error:
            raise UserError(
                f"{address}:{port} can't be served: {error.strerror}", "watch.prometheus_port", "name a free port"
            ) from None
        self.thread = threading.Thread(target=self.server.serve_forever, name="windlass prometheus", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)
