"""GPT-2's byte-pair encoding: tiktoken, with a rank file that can be had wherever Python packages can.

tiktoken downloads its ranks from a host of its own, which is often closed where package indexes are open.
The same file ships in the sdist of openai-whisper (MIT) as `whisper/assets/gpt2.tiktoken`: it is tiktoken's
`r50k_base`, byte for byte, and its ids are GPT-2's.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from data.errors import user_error
from data.pypi import cached, fetch_pypi_file

if TYPE_CHECKING:
    import tiktoken

# tiktoken_ext/openai_public.py, r50k_base().
RANKS_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
RANK_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"

RANKS_PACKAGE = "openai-whisper==20250625"
RANKS_MEMBER = "whisper/assets/gpt2.tiktoken"
# Hash of openai_whisper-20250625.tar.gz. pip prepares an sdist's metadata even when it only downloads it,
# so it runs code of the package: the pinned hash makes that exactly this code.
RANKS_PACKAGE_SHA256 = "37a91a3921809d9f44748ffc73c0a55c9f366c85a3ef5c2ae0cc09540432eb96"

VOCAB_SIZE = 50257
_CONNECT_S, _READ_S = 5, 30  # a silent firewall must not hang a first run


def _from_tiktoken() -> bytes | None:
    """The rank file from tiktoken's own cache (if TIKTOKEN_CACHE_DIR is set) or its download host, else
    None.
    """
    import requests  # a dependency of tiktoken

    kept = os.environ.get("TIKTOKEN_CACHE_DIR")
    if kept:
        path = Path(kept) / hashlib.sha1(RANKS_URL.encode()).hexdigest()
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == RANK_SHA256:
            return path.read_bytes()
    try:
        answer = requests.get(RANKS_URL, timeout=(_CONNECT_S, _READ_S))
    except requests.RequestException:
        return None
    # A proxy's error page has the wrong hash, so the status need not be looked at.
    return answer.content if hashlib.sha256(answer.content).hexdigest() == RANK_SHA256 else None


def _from_pypi() -> bytes:
    return fetch_pypi_file(RANKS_PACKAGE, RANKS_MEMBER, RANK_SHA256, RANKS_PACKAGE_SHA256)


def rank_file() -> bytes:
    """GPT-2's rank file (835,554 bytes), always with sha256 RANK_SHA256. Raises UserError if it cannot be
    had.
    """

    def make() -> bytes:
        content = _from_tiktoken()
        if content is not None:
            return content
        try:
            return _from_pypi()
        except ValueError as error:
            raise user_error(f"the GPT-2 rank file is neither at {RANKS_URL} nor in {RANKS_PACKAGE}: {error}") from None

    return cached("gpt2.tiktoken", RANK_SHA256, make)


@functools.cache
def gpt2_encoding() -> tiktoken.Encoding:
    """The GPT-2 encoding (50,257 ids, `<|endoftext|>` = 50256). 'Hello world' is [15496, 995]."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    lines = (line.split() for line in rank_file().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": VOCAB_SIZE - 1},
        explicit_n_vocab=VOCAB_SIZE,
    )


def well_formed(text: str) -> tuple[str, int]:
    """Text that UTF-8 can hold, and how many characters became U+FFFD.

    Surrogate pairs (as JSON's \\ud83d\\ude00 may leave them) become the character they stand for; lone
    surrogates become U+FFFD, as tiktoken does it in silence.
    """
    try:
        text.encode()
        return text, 0
    except UnicodeEncodeError:
        fixed = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return fixed, fixed.count("�") - text.count("�")
