"""A real Prometheus that scrapes a registry, both on 127.0.0.1, until its test ends."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import start_http_server

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client import CollectorRegistry

DASHBOARD = Path(__file__).resolve().parents[2] / "dashboards" / "kvtrie.json"
# Ends a server whose test was killed.
LIMIT = 240
# A rate needs two samples.
SCRAPES = 3
# A proxy of the environment is not for this machine.
_HERE = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """Prometheus's own interface for queries."""

    def __init__(self, address: str) -> None:
        self._address = address

    def is_ready(self) -> bool:
        try:
            _HERE.open(f"{self._address}/-/ready", timeout=10).close()
        except OSError:
            return False
        return True

    def get(self, path: str, **arguments: str) -> Any:
        url = f"{self._address}{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with _HERE.open(url, timeout=10) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from error

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """The series of an instant query, with their values."""
        answer = self.get("/api/v1/query", query=expr)
        assert answer["status"] == "success", answer
        return [(one["metric"], float(one["value"][1])) for one in answer["data"]["result"]]

    def wait(self) -> None:
        """Until it has scraped a few times from now on."""
        began = time.time()
        for _ in range(600):
            time.sleep(0.1)
            # Samples, not steps: `up` is 1 after a scrape that worked.
            seconds = max(1, int(time.time() - began))
            found = self.query(f"sum_over_time(up[{seconds}s])")
            if found and found[0][1] >= SCRAPES:
                return
        pytest.fail("Prometheus has not scraped")

    def unanswered(self, asked: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Queries without a series, of titles and queries, after as many scrapes as are needed."""
        left = list(asked)
        for _ in range(60):
            left = [(title, expr) for title, expr in left if not self.query(expr)]
            if not left:
                break
            # A busy machine may miss a scrape.
            time.sleep(1)
        return left


@contextmanager
def scraping(registry: CollectorRegistry, folder: Path) -> Iterator[Server]:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed (Debian's package has that name)")
    exporter, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / "prometheus.yml"
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
                "scrape_configs": [
                    {
                        "job_name": "kvtrie",
                        "static_configs": [{"targets": [f"127.0.0.1:{exporter.server_port}"]}],
                    }
                ],
            }
        ),
        encoding="utf-8",
    )
    log = folder / "prometheus.log"
    command = ["timeout", "--signal=KILL", str(LIMIT), binary, f"--config.file={config}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    server = Server(f"http://127.0.0.1:{port}")
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text(encoding="utf-8")
            if server.is_ready():
                break
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(timeout=30)
        exporter.shutdown()
        exporter.server_close()
        thread.join()


def queries(rows: set[str]) -> list[tuple[str, str]]:
    """Title and query of each target of the dashboard's rows with these titles."""
    found: list[tuple[str, str]] = []
    row = ""
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        elif row in rows:
            found += [(panel["title"], target["expr"]) for target in panel["targets"]]
    return found
