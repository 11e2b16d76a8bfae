"""Certificates of NATS servers, made by openssl."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Authority:
    """Who signs certificates."""

    certificate: Path
    key: Path

    @classmethod
    def make(cls, folder, name):
        """A new one."""
        made = cls(folder / f"{name}.pem", folder / f"{name}.key")
        _openssl(f"req -x509 {_NEW_KEY} -subj /CN={name} -keyout {made.key} -out {made.certificate} -days 2")
        return made

    def sign(self, name, days=2, valid_for="IP:127.0.0.1"):
        """A server's certificate, for 127.0.0.1 by default, and its key; with no days it has expired when it is
        made."""
        folder = self.certificate.parent
        key, request, signed, more = (folder / f"{name}.{end}" for end in ("key", "csr", "pem", "ext"))
        more.write_text(f"subjectAltName = {valid_for}\n")
        _openssl(f"req {_NEW_KEY} -subj /CN={name} -keyout {key} -out {request}")
        by = f"-CA {self.certificate} -CAkey {self.key} -CAcreateserial"
        _openssl(f"x509 -req -in {request} {by} -extfile {more} -days {days} -out {signed}")
        return signed, key


_NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"


def _openssl(arguments):
    subprocess.run(["openssl", *arguments.split()], check=True, capture_output=True)
