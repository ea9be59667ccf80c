"""The page for Prometheus: the latest steps and the number of alarms."""

import threading
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from windlass.errors import UserError
from windlass.observe import steps
from windlass.observe.reader import as_dict
from windlass.runfile.objectives import PAIR_FIGURES

# Fields of the whole job: all ranks have the first rank's value.
OF_THE_JOB: Final = ("step", "epoch", "loss", "grad_norm", "learning_rate", "job_tokens", *PAIR_FIGURES)
ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
HELP: Final = "# HELP "  # begins the lines of a metric


def format_prometheus(run: str, latest: Mapping[int, Mapping[str, Any]], alarms: Mapping[str, int]) -> str:
    """Format `windlass_FIELD{run,rank}` for every numeric field of the step files, and `windlass_alarms_total`."""
    unit_fields = {name for record in latest.values() for name in steps.unit_fields(steps.read_unit(record))}
    script_fields = {name: ["", "as the script's meter counts"] for name in sorted(unit_fields - steps.FIELDS.keys())}
    pair_fields = {name: ["", "mean over the pairs of the step"] for name in PAIR_FIGURES}
    latest = {rank: {**record, **as_dict(record.get("preference"))} for rank, record in latest.items()}
    run_label = f'run="{run.translate(ESCAPES)}"'
    lines = []
    for field, (unit, meaning) in (steps.FIELDS | pair_fields | script_fields).items():
        name = field.replace("/", "_")
        by_rank = {rank: record[field] for rank, record in latest.items() if type(record.get(field)) in (int, float)}
        if not by_rank:
            continue
        lines.append(f"{HELP}windlass_{name} {meaning} ({unit})" if unit else f"{HELP}windlass_{name} {meaning}")
        lines.append(f"# TYPE windlass_{name} gauge")
        if field in OF_THE_JOB:
            lines.append(f"windlass_{name}{{{run_label}}} {float(next(iter(by_rank.values())))!r}")
        else:
            for rank, value in by_rank.items():
                lines.append(f'windlass_{name}{{{run_label},rank="{rank}"}} {float(value)!r}')
    lines.append(f"{HELP}windlass_alarms_total alarms of the watch since this run was started or resumed")
    lines.append("# TYPE windlass_alarms_total counter")
    lines += [f'windlass_alarms_total{{{run_label},kind="{kind}"}} {count}' for kind, count in sorted(alarms.items())]
    return "".join(f"{line}\n" for line in lines)


def merge_pages(pages: Iterable[str]) -> str:
    """Return one page with the lines of several runs: a metric's lines have to be together, below one description."""
    metrics: dict[str, list[str]] = {}
    for page in pages:
        for metric in f"\n{page}".split(f"\n{HELP}")[1:]:
            about, kind, *values = metric.splitlines()
            metrics.setdefault(f"{HELP}{about}\n{kind}", []).extend(values)
    return "".join("\n".join([about, *values, ""]) for about, values in metrics.items())


def serve_metrics(address: str, port: int, text: Callable[[], str]) -> Callable[[], None]:
    """Serve a run's metrics, on one page with those of other runs in this process: trials that train together. Returns
    a function that ends it."""
    server = SERVERS.get((address, port))
    if server is None:
        try:
            server = SERVERS[address, port] = MetricsServer((address, port), MetricsHandler)
        except OSError as error:
            problem = f"can't listen on {address}:{port}: {error.strerror}"
            raise UserError(problem, "watch.prometheus_port", "choose a free port", "cannot-listen") from None
        server.texts = []
        threading.Thread(target=server.serve_forever, name="windlass prometheus", daemon=True).start()
    server.texts.append(text)

    def close() -> None:
        server.texts.remove(text)
        if not server.texts:
            del SERVERS[address, port]
            server.shutdown()
            server.server_close()

    return close


class MetricsServer(ThreadingHTTPServer):
    texts: list[Callable[[], str]]


class MetricsHandler(BaseHTTPRequestHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        status = 404
        body = b"see /metrics\n"
        if self.path.split("?")[0] == "/metrics":
            status = 200
            body = merge_pages([text() for text in [*self.server.texts]]).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing for scrapes."""


SERVERS: Final[dict[tuple[str, int], MetricsServer]] = {}
