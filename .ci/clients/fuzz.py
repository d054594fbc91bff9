"""Requests that are wrong, or nearly, drawn by a seed: for every route that takes JSON valid ones that were changed,
and wrong routes, methods, headers, queries, encodings and framing."""

import copy
import json

TEXT = [{"role": "user", "content": "What colour is the sky?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"], "additionalProperties": False}
HYPERPARAMETERS = {"n_epochs": 1, "batch_size": "auto", "learning_rate_multiplier": 1.5}
# Each is valid, but that nothing of the names exists which they give for files.
VALID = {
    "/v1/chat/completions": {
        "model": "demo", "messages": TEXT, "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "n": 1, "seed": 1,
        "stop": ["x"], "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}, "presence_penalty": 0.1,
        "stream": False, "tools": [TOOL], "tool_choice": "auto", "user": "u", "ignore_eos": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    },
    "/v1/completions": {
        "model": "demo", "prompt": ["The sky", "The sea"], "max_tokens": 2, "echo": True, "logprobs": 1, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "stop": "x", "guided_regex": "[a-z]+",
    },
    "/v1/responses": {
        "model": "demo", "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        "max_output_tokens": 2, "text": {"format": {"type": "text"}}, "metadata": {"a": "b"}, "store": False,
    },
    "/v1/responses/input_tokens": {"model": "demo", "input": "a", "instructions": "b", "tools": []},
    "/v1/messages": {
        "model": "demo", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 2,
        "system": "Be brief.", "stop_sequences": ["x"], "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    },
    "/v1/messages/count_tokens": {"model": "demo", "messages": TEXT},
    "/v1/embeddings": {"model": "demo", "input": ["a", "b"], "encoding_format": "float", "dimensions": 4},
    "/v1/fine_tuning/jobs": {
        "model": "demo", "training_file": "file-abc", "validation_file": "file-abc", "suffix": "s", "seed": 1,
        "method": {"type": "supervised", "supervised": {"hyperparameters": HYPERPARAMETERS}}, "metadata": {"a": "b"},
    },
    "/v1/fine_tuning/jobs/ftjob-abc/cancel": {},
    "/v1/fine_tuning/jobs/ftjob-abc/pause": {},
    "/v1/fine_tuning/jobs/ftjob-abc/resume": {},
    "/v1/files/file-abc/check": {},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/nothing", "load_inplace": True},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/tokenize": {"model": "demo", "prompt": "a", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"model": "demo", "tokens": [1, 2, 3]},
}
GETS = [
    "/v1/models", "/v1/models/demo", "/v1/files", "/v1/files/file-abc", "/v1/files/file-abc/content", "/v1/fine_tuning/jobs",
    "/v1/fine_tuning/jobs/ftjob-abc", "/v1/fine_tuning/jobs/ftjob-abc/events", "/v1/fine_tuning/jobs/ftjob-abc/adapter",
    "/v1/fine_tuning/jobs/ftjob-abc/checkpoints", "/tokenizer_info", "/health", "/version",
]
VALUES = [
    None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, -1e308, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, "", "a", "auto",
    "\x00", "é\u2028\U0001f600", "a" * 5000, "../../etc/passwd", "ft:demo:x::y", [], [[]], [None], [0] * 300, ["a", 1], {},
    {"": None}, {"type": "object"}, {"type": "image_url", "image_url": {"url": "data:,"}}, {"$ref": "#"},
    "(a+)+$", "<|im_end|>", "a\r\nb: c", {"a": {"a": {"a": {"a": []}}}}, [[1, 2], [3.5]], [1e9, -5],
]
KEYS = ["", "model", "stream", "n", "best_of", "suffix", "guided_grammar", "audio", "__proto__", "a" * 300, "\x00", "modalities"]
PATHS = [
    "/", "/v1", "/v1/", "/v1/nothing", "/v1//models", "/v1/models/", "/v1/models/%2e%2e%2f%2e%2e", "/v1/files/..%2f..%2fetc",
    "/v1/files/%00", "/v1/files/%ff%fe", "/../../etc/passwd", "/v1/chat/completions/x", "/v1/fine_tuning/jobs/x/y", "*",
    "/" + "a" * 9000, "/v1/models?" + "a=b&" * 2000, "/v1/audio/speech", "/V1/MODELS", "/v1/models#x", "http://x/v1/models",
]
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW", "post"]
KINDS = [
    "application/json", "text/plain", "", "application/json; charset=utf-16", "multipart/form-data",
    "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "a/b" * 500, "\xff",
]
QUERIES = [
    "limit=0", "limit=-1", "limit=99999999999999999999", "limit=a", "after=nothing", "after=%00", "order=up", "frog=1",
    "limit=1&limit=2", "metadata[a]=b", "metadata[a]", "purpose=x", "&&&", "%zz=1", "after=" + "a" * 3000,
]
# What no server can read; it may answer in its own words or close the connection.
FRAMING = [
    b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00",
    b"GET / HTTP/1.1\r\nhost x\r\n\r\n", b"GET / HTTP/1.1\r\n host: x\r\n\r\n", b"GET /\x00 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999999999999999\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n{}",
    b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(200)) + b"\r\n",
    b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
]


class Fuzzer:
    def __init__(self, chance):
        self.chance = chance

    def request(self):
        """The bytes of a request, its method, and whether it is HTTP."""
        kinds = (self.changed, self.garbled, self.typed, self.lost, self.asked, self.uploaded, self.framed)
        (kind,) = self.chance.choices(kinds, weights=(55, 15, 6, 8, 6, 5, 5))
        return kind()

    def changed(self):
        path, body = self.chance.choice(list(VALID.items()))
        body = copy.deepcopy(body)
        # With all of its fields it would mostly be refused for the same one.
        for key in list(body):
            if len(body) > 3 and self.chance.random() < 0.4:
                del body[key]
        for _ in range(self.chance.choice((1, 1, 1, 2, 4))):
            body = self.change(body)
        return self.post(path, json.dumps(body, ensure_ascii=self.chance.random() < 0.5).encode("utf-8", "surrogatepass"))

    def change(self, value, depth=0):
        if isinstance(value, (dict, list)) and value and (depth == 0 or self.chance.random() < 0.7):
            place = self.chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
            what = self.chance.random()
            if what < 0.1:
                del value[place]
            elif what < 0.2 and isinstance(value, dict):
                value[self.chance.choice(KEYS)] = self.value()
            elif what < 0.25 and isinstance(value, list):
                value += value * self.chance.choice((1, 20))
            else:
                value[place] = self.change(value[place], depth + 1)
            return value
        return self.value()

    def value(self):
        return copy.deepcopy(self.chance.choice(VALUES))

    def garbled(self):
        path, body = self.chance.choice(list(VALID.items()))
        text = bytearray(json.dumps(body).encode())
        for _ in range(self.chance.choice((1, 1, 3, 10))):
            place = self.chance.randrange(len(text) + 1)
            what = self.chance.choice((
                b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b'"', b"{", b"}", b"[", b",", b":", b"\\", b"\\ud800", b"NaN", b"-",
                b"1e999", b"[" * 2000, b'{"a":' * 2000, b"9" * 2000, b"\xef\xbb\xbf", b"/*", b"\n" * 50,
            ))
            if self.chance.random() < 0.2:
                del text[place:]
            text[place:place] = what
        return self.post(path, bytes(text))

    def typed(self):
        path, body = self.chance.choice(list(VALID.items()))
        return self.post(path, self.chance.choice((json.dumps(body).encode(), b"", b"a=b", b"--x\r\n")), self.chance.choice(KINDS))

    def lost(self):
        path = self.chance.choice(PATHS + GETS + list(VALID))
        method = self.chance.choice(METHODS)
        return self.plain(method, path)

    def asked(self):
        return self.plain("GET", self.chance.choice(GETS) + "?" + self.chance.choice(QUERIES))

    def uploaded(self):
        parts = [
            b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n' + self.chance.choice((b"fine-tune", b"", b"\xff", b"vision")) + b"\r\n",
            b'--x\r\ncontent-disposition: form-data; name="file"; filename="' + self.chance.choice((b"a.jsonl", b"", b"../../a", b"\xff\x00")) + b'"\r\n\r\n{}\r\n',
            b'--x\r\ncontent-disposition: form-data; name="frog"\r\n\r\n1\r\n',
            b"--x\r\n\r\n\r\n", b"--x\r\ncontent-disposition: form-data\r\n\r\n\r\n", b"--x\r\nA" + b"a" * 5000 + b"\r\n\r\n", b"--x", b"\xff" * 100,
        ]
        count = self.chance.randrange(5)
        body = b"".join(self.chance.choice(parts) for _ in range(count)) + self.chance.choice((b"--x--\r\n", b"", b"--x--\r\n"))
        return self.post("/v1/files", body, self.chance.choice(("multipart/form-data; boundary=x", "multipart/form-data; boundary=y", "multipart/form-data")))

    def framed(self):
        return self.chance.choice(FRAMING), "GET", False

    def plain(self, method, path):
        path = path.encode("latin-1")
        return method.encode() + b" " + path + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", method, True

    def post(self, path, body, kind="application/json"):
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        return head.encode("latin-1") + body, "POST", True
