"""Takes docs/report.png: the report of a made-up run of three GPUs, in headless Chromium.

python docs/report_picture.py
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "tests"))

from chromium import Chromium  # noqa: E402
from report_runs import write  # noqa: E402

from windlass.observe import report  # noqa: E402


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        page = report.make([write(Path("runs", "mistral-small-4"), count=1200)]).html
        browser = Chromium()
        try:
            browser.size(1160, 1150)
            browser.open(page)
            (DOCS / "report.png").write_bytes(browser.picture())
        finally:
            browser.close()


if __name__ == "__main__":
    main()
