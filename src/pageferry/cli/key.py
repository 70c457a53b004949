"""`pageferry key`: a fresh API key, and what the tenants file has of it."""

import argparse
import secrets

from pageferry.core.tenants import key_digest

_PREFIX = "pf_"  # by which a key that lies about is known for one
_BYTES = 32


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print a fresh API key for a caller, and the line of its tenant in security.tenants_file."
    parser.epilog = "The key is kept nowhere. Another key's digest is what `printf %s KEY | sha256sum` prints."
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    key = _PREFIX + secrets.token_urlsafe(_BYTES)
    print(key)
    print(f'key_sha256 = ["{key_digest(key)}"]')
    return 0
