"""Draw docs/report.png: the top of the report of the run that `make demo` left in demo-run, in headless Chromium."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from chromium import Chromium  # noqa: E402

WIDTH, MOST_HEIGHT = 1000, 1500


def main() -> None:
    report, picture = ROOT / "demo-run" / "run" / "report.html", ROOT / "docs" / "report.png"
    if not report.is_file():
        raise SystemExit(f"there is no {report.relative_to(ROOT)}: run `make demo` first")
    browser = Chromium()
    try:
        browser.size(WIDTH, MOST_HEIGHT)
        browser.open(report)
        drawn = browser.send("Page.captureScreenshot", format="png")
        picture.write_bytes(base64.b64decode(drawn["data"]))
    finally:
        browser.close()
    print(picture.relative_to(ROOT))


if __name__ == "__main__":
    main()
