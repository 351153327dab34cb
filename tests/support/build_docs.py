"""Build the documentation's site and check it: `python -m tests.support.build_docs`, which `make docs` runs.

Zensical checks links between Markdown pages. What is checked here is the HTML that it makes: that nothing in it is
loaded from elsewhere, so that it works without a network, and that every file and every heading that it names is there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "docs"
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
WARNINGS = ("warning", "griffe", "error")
LOADING_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect", "dns-prefetch"}


class Page(HTMLParser):
    """What a page loads, what it links to, and which places in it can be linked to."""

    def __init__(self, html: str):
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.places.add(found["id"])
        if (source := found.get(LOADING.get(tag, ""))) is not None:
            self.loads.append(source)
        if tag == "link" and LOADING_LINKS & set(found.get("rel", "").split()):
            self.loads.append(found.get("href", ""))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])


def faults(site: Path) -> Iterator[str]:
    """One line for each thing that a page loads from elsewhere, and each link within the site that leads nowhere."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        foreign = [url for url in page.loads if urlsplit(url).netloc]
        yield from (f"{name} loads {url}, which is elsewhere" for url in foreign)
        for url in page.links + page.loads:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            base = site if parts.path.startswith("/") else path.parent  # 404.html is shown under any path
            target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            if not target.exists():
                yield f"{name} names {url}, which is not there"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].places | {"__top"}:
                yield f"{name} names {url}, a place that is not there"


def main() -> int:
    shutil.rmtree(SITE, ignore_errors=True)
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--clean"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(built.stdout, end="")
    if built.returncode or any(word in built.stdout.lower() for word in WARNINGS):
        print("the site was built with warnings" if not built.returncode else "the site was not built", file=sys.stderr)
        return 1
    found = list(faults(SITE))
    print(*found, sep="\n" if found else "")
    if not found:
        print(f"{SITE / 'index.html'}: nothing is loaded from elsewhere, and all links lead somewhere")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
