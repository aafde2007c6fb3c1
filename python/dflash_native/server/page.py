"""The status page: one file, and a policy that lets it load nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

_FILE = Path(__file__).parent / "page.html"


@cache
def page() -> str:
    """The page as it is sent."""
    return _FILE.read_text(encoding="utf-8")


def _hashes(tag: str) -> str:
    """The inline parts of this kind, as a Content-Security-Policy allows them."""
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page(), re.DOTALL)
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


PAGE_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
