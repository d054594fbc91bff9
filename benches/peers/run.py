#!/usr/bin/env python3
"""Times metal-candle beside plain Candle, MLX and PyTorch: `python3 benches/peers/run.py`.

This file needs nothing but Python itself. It makes a virtual environment with the pinned peers,
builds the Rust sides, and hands over to driver.py, whose options `--help` lists.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FEATURES = {
    "cpu": [],
    "metal": ["--features", "metal"],
    "cuda": ["--features", "cuda", "--config", "crates/kernels/cuda.toml"],
}


def environment(folder: Path, files: list[Path]) -> Path:
    """The Python of a virtual environment that has the packages pinned in these files."""
    stamp = folder / "requirements.sha256"
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    python = folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    if not python.exists():
        print(f"making a virtual environment in {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
    packages = [word for file in files for word in ("-r", str(file))]
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(command + packages, check=True)
    stamp.write_text(wanted)
    return python


def build(device: str) -> Path:
    """The program with the Rust sides, for this device."""
    command = ["cargo", "build", "--release", "--locked", "-p", "metal-candle-peers"]
    command += ["--message-format=json-render-diagnostics", *FEATURES[device]]
    built = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    return next(Path(path) for message in messages if (path := message.get("executable")))


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--venv", type=Path, default=ROOT / "target" / "peers" / "venv")
    options, rest = parser.parse_known_args()
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--device", choices=list(FEATURES), default="cpu")
    shared.add_argument("--sides", default="")
    asked = shared.parse_known_args(rest)[0]
    device = asked.device
    files = [HERE / "requirements.txt"]
    if "llama.cpp" in asked.sides.split(","):
        files.append(HERE / "requirements-llama.txt")
    python = environment(options.venv.absolute(), files)
    worker = build(device) if not {"-h", "--help"} & set(rest) else Path("metal-candle-peers")
    arguments = [str(python), str(HERE / "driver.py"), "--worker", str(worker), *rest]
    os.execv(arguments[0], arguments)


if __name__ == "__main__":
    main()
