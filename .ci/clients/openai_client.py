"""The official `openai` client, as it is, against a server over the demo's model: texts, files, a fine-tuning job with
all that belongs to it, and a chat with what it made. Every answer is held against the published schemas."""

import base64
import csv
import io
import json
import math
import struct
import sys
import time
import urllib.request

import openai

from published import Published
from server import DEMO, Server

TRAIN = DEMO / "instructions/train.jsonl"
VALID = DEMO / "instructions/valid.jsonl"
QUESTION = [{"role": "user", "content": "What colour is the sky?"}]


# What the tests must have seen an answer of.
OPERATIONS = """
POST /chat/completions, POST /completions, POST /embeddings, POST /responses, POST /responses/input_tokens,
POST /v1/messages, POST /v1/messages/count_tokens, GET /models, GET /models/{model}, DELETE /models/{model}, POST /files, GET /files,
GET /files/{file_id}, GET /files/{file_id}/content, DELETE /files/{file_id}, POST /fine_tuning/jobs,
GET /fine_tuning/jobs, GET /fine_tuning/jobs/{fine_tuning_job_id}, GET /fine_tuning/jobs/{fine_tuning_job_id}/events,
GET /fine_tuning/jobs/{fine_tuning_job_id}/checkpoints, POST /fine_tuning/jobs/{fine_tuning_job_id}/cancel,
POST /fine_tuning/jobs/{fine_tuning_job_id}/pause, POST /fine_tuning/jobs/{fine_tuning_job_id}/resume
"""


def client_of(server, key="none", strict=True, published=None):
    return openai.OpenAI(
        base_url=server.url + "/v1",
        api_key=key,
        _strict_response_validation=strict,
        max_retries=0,
        http_client=published and published.client(),
    )


def refused(kind, call, *words, param=None):
    try:
        call()
    except kind as error:
        assert set(error.body) == {"message", "type", "param", "code"}, error.body
        for word in words:
            assert word in error.body["message"], (word, error.body)
        assert param is None or error.body["param"] == param, error.body
        return error
    raise AssertionError(f"expected {kind.__name__} ({words})")


def chat(client):
    answer = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=8, seed=1)
    assert answer.object == "chat.completion" and answer.model == "demo"
    (choice,) = answer.choices
    assert choice.finish_reason in ("stop", "length") and choice.message.role == "assistant"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    again = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=8, seed=1)
    assert again.choices[0].message.content == choice.message.content, "the same seed"

    stream = client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=8, seed=1, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content, (text, choice.message.content)
    assert chunks[-1].choices == [] and chunks[-1].usage == answer.usage or chunks[-1].usage.total_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == choice.finish_reason

    many = client.chat.completions.create(
        model="demo", messages=QUESTION, n=3, temperature=1.5, max_tokens=6, logprobs=True, top_logprobs=4
    )
    assert [c.index for c in many.choices] == [0, 1, 2]
    for choice in many.choices:
        for token in choice.logprobs.content:
            assert token.logprob <= 0 and len(token.top_logprobs) == 4
            values = [top.logprob for top in token.top_logprobs]
            assert values == sorted(values, reverse=True)

    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": ["small", "large"]}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    for seed in range(5):
        answer = client.chat.completions.create(
            model="demo", messages=QUESTION, response_format=form, temperature=1, seed=seed, max_tokens=200
        )
        thing = json.loads(answer.choices[0].message.content)
        assert set(thing) == {"name", "size"} and thing["size"] in ("small", "large"), thing

    # The demo's context has no room for a longer one.
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": [{}]}}}
    asked = {"tools": [tool], "tool_choice": "required", "max_tokens": 60}
    answer = client.chat.completions.create(model="demo", messages=QUESTION, seed=1, **asked)
    calls = answer.choices[0].message.tool_calls
    assert calls[0].function.name == "f" and calls[0].function.arguments == "{}", calls
    chunks = client.chat.completions.create(model="demo", messages=QUESTION, seed=1, stream=True, **asked)
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(part.function.arguments or "" for part in parts if part.index == 0) == calls[0].function.arguments

    refused(openai.NotFoundError, lambda: client.chat.completions.create(model="x", messages=QUESTION), "x")
    for param, value in [("temperature", 3), ("top_p", 0), ("n", 0), ("max_tokens", 0), ("stop", [1])]:
        refused(
            openai.BadRequestError,
            lambda: client.chat.completions.create(model="demo", messages=QUESTION, extra_body={param: value}),
            param,
        )
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    refused(openai.BadRequestError, lambda: client.chat.completions.create(model="demo", messages=image), "image")
    refused(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model="demo", messages=QUESTION, extra_body={"frog": 1}),
        "frog",
    )


def completions(client):
    """With `echo` the first token has no log-probability, which OpenAI's API says by a null that the client's types lack."""
    answer = client.completions.create(
        model="demo", prompt="The sky is", max_tokens=3, echo=True, logprobs=2, temperature=0
    )
    (choice,) = answer.choices
    assert choice.text.startswith("The sky is")
    probabilities = choice.logprobs
    assert probabilities.token_logprobs[0] is None and len(probabilities.tokens) == len(probabilities.top_logprobs)
    assert all(value <= 0 for value in probabilities.token_logprobs[1:])
    assert probabilities.text_offset[0] == 0
    # Tokens in, as lm-evaluation-harness sends them: the same figures, in a batch.
    tokens = post(client, "/tokenize", {"prompt": "The sky is", "add_special_tokens": False})["tokens"]
    batch = client.completions.create(
        model="demo", prompt=[tokens, tokens[:2]], max_tokens=1, echo=True, logprobs=1, temperature=0, seed=7
    )
    of_first = batch.choices[0].logprobs.token_logprobs[1 : len(tokens)]
    assert all(
        math.isclose(a, b, abs_tol=1e-4) for a, b in zip(of_first, probabilities.token_logprobs[1 : len(tokens)])
    )
    for value, top in zip(of_first, batch.choices[0].logprobs.top_logprobs[1:]):
        assert max(top.values()) >= value - 1e-6
    streamed = client.completions.create(model="demo", prompt="The sky is", max_tokens=3, temperature=0, stream=True)
    text = "".join(chunk.choices[0].text for chunk in streamed if chunk.choices)
    assert "The sky is" + text == choice.text, (text, choice.text)
    refused(openai.BadRequestError, lambda: client.completions.create(model="demo", prompt="a", suffix="b"), "suffix")


def post(client, path, body):
    base = str(client.base_url).removesuffix("/v1/")
    request = urllib.request.Request(base + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def others(client, lax):
    """The client's types know embeddings as lists alone, and it asks for base64 by itself."""
    models = [model.id for model in client.models.list()]
    assert models[0] == "demo", models
    assert client.models.retrieve("demo").id == "demo"
    refused(openai.NotFoundError, lambda: client.models.retrieve("nothing"), "nothing")
    floats = client.embeddings.create(model="demo", input=["The sky", "The sea"], encoding_format="float")
    packed = lax.embeddings.create(model="demo", input=["The sky", "The sea"])
    for a, b in zip(floats.data, packed.data):
        assert len(a.embedding) == len(b.embedding) and abs(sum(x * x for x in a.embedding) - 1) < 1e-4
        assert all(abs(x - y) < 1e-6 for x, y in zip(a.embedding, b.embedding))
    raw = lax.embeddings.with_raw_response.create(model="demo", input="The sky", encoding_format="base64")
    coded = json.loads(raw.text)["data"][0]["embedding"]
    assert len(struct.unpack(f"<{len(base64.b64decode(coded)) // 4}f", base64.b64decode(coded)))


def responses(client):
    answer = client.responses.create(model="demo", input="What colour is the sky?", max_output_tokens=8)
    assert answer.status in ("completed", "incomplete") and answer.output[0].type == "message", answer
    assert answer._request_id.startswith("req_"), answer
    count = client.responses.input_tokens.count(model="demo", input="What colour is the sky?")
    assert count.input_tokens == answer.usage.input_tokens, (count, answer.usage)
    events = list(client.responses.create(model="demo", input=QUESTION, max_output_tokens=8, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text, events[-1]
    refused(
        openai.BadRequestError,
        lambda: client.responses.create(model="demo", input="a", previous_response_id="resp_1"),
        "previous_response_id",
    )


def messages(server, http):
    """Anthropic's API, whose client is another package."""
    body = {"model": "demo", "max_tokens": 8, "messages": QUESTION}
    ask = lambda path, body: http.post(f"{server.url}/v1/messages{path}", json=body)
    answer = ask("", body)
    assert answer.status_code == 200 and answer.json()["content"][0]["type"] == "text", answer.text
    events = ask("", body | {"stream": True})
    assert "message_stop" in events.text, events.text
    tool = {"name": "f", "input_schema": {"enum": [{}]}}
    asked = {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 60}
    called = ask("", body | asked).json()
    assert called["content"][-1]["type"] == "tool_use", called
    assert "input_json_delta" in ask("", body | asked | {"stream": True}).text
    assert ask("/count_tokens", {"model": "demo", "messages": QUESTION}).json()["input_tokens"] > 0
    for wrong in ({"max_tokens": 0}, {"frog": 1}, {"model": "x"}):
        error = ask("", body | wrong)
        assert error.status_code in (400, 404) and error.json()["type"] == "error", error.text


def files(client):
    file = client.files.create(file=TRAIN.open("rb"), purpose="fine-tune")
    assert client.files.wait_for_processing(file.id).status == "processed"
    assert file.bytes == TRAIN.stat().st_size and file.filename == TRAIN.name
    assert client.files.content(file.id).read() == TRAIN.read_bytes()
    assert [f.id for f in client.files.list(limit=1)] == [file.id]
    gone = client.files.create(file=("x.jsonl", b"{}\n"), purpose="fine-tune")
    assert len(list(client.files.list(limit=1, purpose="fine-tune"))) == 2
    assert client.files.delete(gone.id).deleted
    refused(openai.NotFoundError, lambda: client.files.retrieve(gone.id), gone.id)
    refused(openai.NotFoundError, lambda: client.files.retrieve("../../etc/passwd"))
    refused(openai.BadRequestError, lambda: client.files.create(file=("x", b"x"), purpose="vision"), "purpose")
    return file


def wait(client, job, *statuses, seconds=300):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = client.fine_tuning.jobs.retrieve(job.id)
        if found.status in statuses:
            return found
        assert found.status != "failed", found.error
        time.sleep(0.1)
    raise AssertionError(f"{job.id} is {found.status}, not {statuses}")


def job(client, file):
    valid = client.files.create(file=VALID.open("rb"), purpose="fine-tune")
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1, "batch_size": 16}}}
    made = client.fine_tuning.jobs.create(
        model="demo",
        training_file=file.id,
        validation_file=valid.id,
        suffix="colours",
        seed=3,
        metadata={"who": "a test"},
        method=method,
    )
    assert made.status in ("validating_files", "queued") and made.object == "fine_tuning.job"
    running = wait(client, made, "running", "succeeded")
    done = wait(client, running, "succeeded")
    assert done.fine_tuned_model.startswith("ft:demo:") and "colours" in done.fine_tuned_model
    assert done.trained_tokens > 0 and done.finished_at >= done.created_at and done.metadata == {"who": "a test"}
    assert done.hyperparameters.n_epochs == 1

    events = list(client.fine_tuning.jobs.list_events(made.id, limit=7))
    losses = [e.data["train_loss"] for e in events if e.type == "metrics" and e.data["train_loss"] is not None]
    assert len(losses) > 9 and sum(losses[:5]) < sum(losses[-5:]), ("newest first, and falling", losses)
    assert len({event.id for event in events}) == len(events)
    assert "completed" in events[0].message, events[0]
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(made.id, limit=2))
    assert checkpoints and all(c.fine_tuning_job_id == made.id for c in checkpoints)
    table = list(csv.DictReader(io.StringIO(client.files.content(done.result_files[0]).text)))
    assert table and "train_loss" in table[0], table[:1]
    assert made.id in [j.id for j in client.fine_tuning.jobs.list(limit=1)]
    refused(openai.BadRequestError, lambda: client.fine_tuning.jobs.cancel(made.id), "succeeded")

    names = [model.id for model in client.models.list()]
    assert done.fine_tuned_model in names and checkpoints[0].fine_tuned_model_checkpoint in names
    for name in (done.fine_tuned_model, checkpoints[0].fine_tuned_model_checkpoint):
        answer = client.chat.completions.create(model=name, messages=QUESTION, max_tokens=20, temperature=0)
        assert answer.model == name and answer.choices[0].message.content
    stream = client.chat.completions.create(
        model=done.fine_tuned_model, messages=QUESTION, max_tokens=20, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    return done


def pause_and_cancel(client, file):
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 20, "batch_size": 4}}}
    create = lambda: client.fine_tuning.jobs.create(model="demo", training_file=file.id, method=method, seed=1)
    first, second = create(), create()
    wait(client, first, "running")
    client.fine_tuning.jobs.pause(first.id)
    # The client's types have no word for it: to them it waits.
    wait(client, first, "queued")
    wait(client, second, "running")
    client.fine_tuning.jobs.cancel(second.id)
    assert wait(client, second, "cancelled").fine_tuned_model is None
    client.fine_tuning.jobs.resume(first.id)
    wait(client, first, "running")
    client.fine_tuning.jobs.cancel(first.id)
    wait(client, first, "cancelled")


def bad_files(client):
    bad = client.files.create(file=("bad.jsonl", b'{"messages": []}\nnot json\n'), purpose="fine-tune")
    made = client.fine_tuning.jobs.create(model="demo", training_file=bad.id)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = client.fine_tuning.jobs.retrieve(made.id)
        if found.status == "failed":
            assert "line 1" in found.error.message or ":1" in found.error.message, found.error
            assert found.error.param == "training_file", found.error
            break
        time.sleep(0.1)
    else:
        raise AssertionError(found)
    refused(
        openai.BadRequestError,
        lambda: client.fine_tuning.jobs.create(model="demo", training_file="file-nothing"),
        "training_file",
    )
    reinforcement = {"type": "reinforcement", "reinforcement": {"grader": {}}}
    refused(
        openai.BadRequestError,
        lambda: client.fine_tuning.jobs.create(
            model="demo", training_file=bad.id, extra_body={"method": reinforcement}
        ),
        "reinforcement",
    )


def removed(client, name):
    """A fine-tuned model that is deleted can't be asked any more."""
    assert client.models.delete(name).deleted
    refused(openai.NotFoundError, lambda: client.chat.completions.create(model=name, messages=QUESTION), name)


def unknown(server, http):
    for method, path in [("GET", "/v1/nothing"), ("PUT", "/v1/models"), ("GET", "/v1/chat/completions")]:
        assert http.request(method, server.url + path).status_code in (404, 405), (method, path)


def keys(published):
    key = "a key of at least sixteen letters"
    with Server("--api-key", key) as server:
        refused(openai.AuthenticationError, lambda: client_of(server, published=published).models.list())
        assert [model.id for model in client_of(server, key).models.list()] == ["demo"]


def main():
    published = Published()
    with Server() as server:
        client, http = client_of(server, published=published), published.client()
        chat(client)
        lax = client_of(server, strict=False, published=published)
        completions(lax)
        others(client, lax)
        responses(client)
        messages(server, http)
        unknown(server, http)
        file = files(client)
        done = job(client, file)
        pause_and_cancel(client, file)
        bad_files(client)
        removed(client, done.fine_tuned_model)
        client.close(), lax.close(), http.close()
        assert server.stop() == 0
    keys(published)
    published.check(*(" ".join(operation.split()) for operation in OPERATIONS.split(",")))
    print(f"openai {openai.__version__}: everything passed")


if __name__ == "__main__":
    sys.exit(main())
