"""Print the certificates that pip trusts while an image is built: its own, the base image's, and those of EXTRA_CA.

    python3 trust.py FOLDER > ca.pem

FOLDER contains the files of EXTRA_CA; this script and README.md are ignored. pip's --cert replaces what pip trusts
otherwise, so the output is all of them in one. Leaves with one line if a file is not a certificate in PEM.
"""

import ssl
import sys
from pathlib import Path

from pip._vendor import certifi

SYSTEM = ("/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/certs/ca-certificates.crt")  # Red Hat's, Debian's
OTHERS = ("README.md", "trust.py")


def main(folder: Path) -> None:
    extra = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in OTHERS]
    for path in extra:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
        except ssl.SSLError:
            sys.exit(f"EXTRA_CA: {path.name} is not a certificate in PEM; convert it: openssl x509 -inform der")
        if b"PRIVATE KEY" in path.read_bytes():
            sys.exit(f"EXTRA_CA: {path.name} contains a private key, which would stay in a layer; remove it")
    trusted = {path.resolve() for path in map(Path, (certifi.where(), *SYSTEM)) if path.is_file()}
    for path in (*sorted(trusted), *extra):
        sys.stdout.buffer.write(path.read_bytes() + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
