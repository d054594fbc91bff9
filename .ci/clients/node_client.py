"""Runs `node_client.cjs` against a server over the demo's model.

    node_client.py FOLDER

FOLDER has the node modules; `node` is found in the PATH.
"""

import os
import pathlib
import subprocess
import sys

from server import DEMO, Server

with Server() as server:
    script = pathlib.Path(__file__).with_suffix(".cjs")
    command = ["node", script, server.url, DEMO / "instructions/train.jsonl"]
    sys.exit(subprocess.run(command, env={**os.environ, "NODE_PATH": sys.argv[1]}).returncode)
