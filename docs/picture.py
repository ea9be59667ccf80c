"""Draw the top of a run's report, in headless Chromium.

python docs/picture.py                                 docs/report.png, of the run that `make demo` left
python docs/picture.py real-run/run real-report.png    docs/real-report.png, of the one that `make real` left
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from chromium import Chromium  # noqa: E402

WIDTH, MOST_HEIGHT = 1000, 1500


def main(run: str = "demo-run/run", name: str = "report.png") -> None:
    report, picture = ROOT / run / "report.html", ROOT / "docs" / name
    if not report.is_file():
        raise SystemExit(f"there is no {report.relative_to(ROOT)}: run `make demo` or `make real` first")
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
    main(*sys.argv[1:])
