"""A server of the built program over the demo's model, for the tests of clients."""

import os
import pathlib
import re
import signal
import resource
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEMO = ROOT / "crates/cli/demo"
PROGRAM = os.environ.get("METAL_CANDLE", str(ROOT / "target/release/metal-candle"))


class Server:
    """Runs until the end of its `with` block; its data folder goes with it unless one is given."""

    def __init__(self, *flags, data=None, model=DEMO / "base", open_files=None):
        self.own = None if data else tempfile.TemporaryDirectory()
        self.data = pathlib.Path(data or self.own.name) / "data"
        self.open_files = open_files
        self.flags = ["--model", str(model), "--data", str(self.data), "--port", "0"]
        self.flags += ["--dtype", "f32", "--served-model-name", "demo", *flags]

    def start(self):
        environment = {k: v for k, v in os.environ.items() if k != "METAL_CANDLE_API_KEY"}
        command = [PROGRAM, "serve", *self.flags]
        bound = self.open_files and (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, self.open_files))
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=bound
        )
        self.said = []
        for line in self.process.stderr:
            self.said.append(line)
            found = re.search(r"https?://[\d.:\[\]]+", line)
            if found:
                self.url = found.group(0)
                break
        else:
            raise RuntimeError("the server did not start:\n" + "".join(self.said))
        # What it says later must not fill the pipe.
        threading.Thread(target=self.listen, daemon=True).start()
        return self

    def listen(self):
        for line in self.process.stderr:
            self.said.append(line)
            sys.stderr.write(line)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.stop()
        if self.own:
            self.own.cleanup()
