"""A server under load, over the demo's model: streams for 512 clients at once, of whom some read slowly, leave in the
middle or send half a request, and 10 000 wrong requests meanwhile. Nothing may panic, stay behind or grow, and every
error is an object as OpenAI's clients know it. And it outlives having no descriptors left."""

import asyncio
import collections
import json
import os
import random
import re
import socket
import struct
import sys
import time
import urllib.parse

from fuzz import Fuzzer
from server import Server

SEED = 20
STREAMS, SLOW, LEAVING, HALF = 512, 32, 96, 64
WRONG, WORKERS = 10_000, 32
TOKENS = 120
# Connections to a server that has so many descriptors; the system's queue has room for the rest.
CROWD, DESCRIPTORS = 150, 64
# Seconds that one answer may take.
PATIENCE = 120
ROUNDS = 2
# Megabytes that the process may have at any time, and by which it may grow in the last round.
MOST_MEMORY, GROWTH = 600, 100


def post(path, body):
    body = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chat(index, **more):
    content = f"Tell me about number {index}."
    return {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, **more}


async def answer(reader, method):
    """The status, the headers and the body of an answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split()[1])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    if method == "HEAD":
        return status, headers, b""
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readline()
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return status, headers, body


class Load:
    def __init__(self, server):
        self.server = server
        self.place = urllib.parse.urlsplit(server.url).hostname, urllib.parse.urlsplit(server.url).port
        self.counts = collections.Counter()
        self.most_open = 0
        self.faults = []

    async def ask(self, request, method="POST"):
        reader, writer = await asyncio.open_connection(*self.place)
        try:
            writer.write(request)
            return await asyncio.wait_for(answer(reader, method), PATIENCE)
        finally:
            writer.close()

    async def metrics(self):
        status, _, body = await self.ask(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert status == 200
        lines = re.findall(r"^([\w:]+)(?:\{[^}]*\})? ([\d.e+-]+)$", body.decode(), re.M)
        return {name: float(value) for name, value in lines}

    async def watch(self):
        while True:
            self.most_open = max(self.most_open, (await self.metrics())["http_requests_open"])
            await asyncio.sleep(0.1)

    async def stream(self, index, all_there):
        """Slow readers' system buffers are small, so that the server feels them."""
        slow, leaves = index < SLOW, SLOW <= index < SLOW + LEAVING
        raw = socket.socket()
        if slow:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, self.place)
        reader, writer = await asyncio.open_connection(sock=raw, limit=4096 if slow else 65536)
        await all_there.wait()
        writer.write(post("/v1/chat/completions", chat(index, stream=True, ignore_eos=True, seed=index)))
        text = b""
        while not text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = await asyncio.wait_for(reader.read(256 if slow else 65536), PATIENCE)
            assert part, f"the stream {index} ended: {text[-300:]}"
            text += part
            if leaves and len(text) > 400 * (index - SLOW):
                if index % 2:
                    # Without a word: the other side gets a reset.
                    raw = writer.get_extra_info("socket")
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.close()
                self.counts["left"] += 1
                return
            if slow:
                await asyncio.sleep(0.01)
        writer.close()
        assert text.startswith(b"HTTP/1.1 200") and text.count(b"data: {") > TOKENS // 8 and b'"length"' in text, text[:300]
        self.counts["slowly read" if slow else "read"] += 1

    async def half(self, index, done):
        """Sends a part of a request, and leaves or stays."""
        reader, writer = await asyncio.open_connection(*self.place)
        request = post("/v1/chat/completions", chat(index))
        writer.write(request[: len(request) * index // HALF])
        await writer.drain()
        if index % 2:
            await done.wait()
        writer.close()

    async def wrong(self, fuzzer, left):
        """Sends wrong requests one after the other, on one connection as long as it stays."""
        writer = None
        while left:
            left.pop()
            request, method, is_http = fuzzer.request()
            if writer is None:
                reader, writer = await asyncio.open_connection(*self.place)
            try:
                writer.write(request)
                if not is_http and writer.can_write_eof():
                    writer.write_eof()
                found = await asyncio.wait_for(answer(reader, method), PATIENCE)
            except (asyncio.IncompleteReadError, OSError) as error:
                if is_http or isinstance(error, TimeoutError):
                    self.faults.append(f"no answer to {request[:1000]}: {error!r}")
                self.counts["closed"] += 1
                found = None
            if found:
                self.check(request, found, is_http)
            if not is_http or not found or found[1].get("connection") == "close":
                writer.close()
                writer = None
        if writer:
            writer.close()

    def check(self, request, found, is_http):
        status, _, body = found
        self.counts[status] += 1
        if status >= 500:
            self.faults.append(f"{status} {body[:300]} to {request[:1000]}")
        if status >= 400 and is_http and body and not self.is_error(request, body):
            self.faults.append(f"{status} {body[:300]} to {request[:300]}, which is no error as clients know it")

    def is_error(self, request, body):
        try:
            found = json.loads(body)
            error = found["error"]
        except (ValueError, TypeError, LookupError):
            return False
        # Anthropic's clients know another one.
        if b" /v1/messages" in request.split(b"\r\n")[0] and found.get("type") == "error":
            return bool(error["type"] and error["message"])
        return set(error) == {"message", "type", "param", "code"} and bool(error["type"] and error["message"])

    async def settled(self):
        """What is under way once everybody has gone; this request itself is."""
        end = time.monotonic() + 60
        while True:
            found = await self.metrics()
            busy = {
                name: found[name]
                for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
                if found[name]
            }
            if found["http_requests_open"] == 1 and not busy:
                return
            assert time.monotonic() < end, f"left behind: {busy}, {found['http_requests_open']} requests"
            await asyncio.sleep(0.2)

    def memory(self):
        status = open(f"/proc/{self.server.process.pid}/status").read()
        return {key: int(re.search(rf"{key}:\s+(\d+)", status)[1]) // 1024 for key in ("VmRSS", "VmHWM")}

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.server.process.pid}/fd"))

    async def normal(self):
        status, _, body = await self.ask(post("/v1/chat/completions", chat(1, max_tokens=8)))
        assert status == 200 and json.loads(body)["choices"][0]["message"]["content"], body

    async def run(self):
        """Twice the same, so that what stays behind shows beside what is only needed once, as the cache."""
        fuzzer = Fuzzer(random.Random(SEED))
        await asyncio.gather(*(self.normal() for _ in range(8)))
        memory, descriptors = [self.memory()], self.descriptors()
        began = time.monotonic()
        for _ in range(ROUNDS):
            await self.round(fuzzer, list(range(WRONG // ROUNDS)))
            end = time.monotonic() + 10
            while self.descriptors() > descriptors + 4:
                assert time.monotonic() < end, f"{self.descriptors()} descriptors are open, {descriptors} were"
                await asyncio.sleep(0.1)
            memory.append(self.memory())
        print(
            f"{time.monotonic() - began:.0f} s, at most {self.most_open:.0f} requests at once, at most "
            f"{memory[-1]['VmHWM']} MB; MB before and after each round: {[each['VmRSS'] for each in memory]}; "
            + ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items(), key=str))
        )
        assert not self.faults, f"{len(self.faults)} wrong answers:\n" + "\n".join(self.faults[:20])
        assert self.most_open >= STREAMS, f"at most {self.most_open} requests were open at once"
        growth = memory[-1]["VmRSS"] - memory[-2]["VmRSS"]
        assert memory[-1]["VmHWM"] < MOST_MEMORY and growth < GROWTH, memory

    async def round(self, fuzzer, left):
        watching = asyncio.create_task(self.watch())
        all_there, done = asyncio.Event(), asyncio.Event()
        halves = [asyncio.create_task(self.half(index, done)) for index in range(HALF)]
        streams = [asyncio.create_task(self.stream(index, all_there)) for index in range(STREAMS)]
        await asyncio.sleep(1)
        all_there.set()
        await asyncio.gather(*streams, *(self.wrong(fuzzer, left) for _ in range(WORKERS)))
        done.set()
        await asyncio.gather(*halves)
        watching.cancel()
        await self.settled()
        await self.normal()

    async def crowd(self, count):
        """More connections than it has descriptors for: it answers who is in, and others once these have gone."""
        there = [await asyncio.open_connection(*self.place) for _ in range(count)]
        await asyncio.sleep(1)
        for _, writer in there:
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await asyncio.sleep(1)
        for _, writer in there:
            writer.close()
        await self.normal()
        await self.settled()


def main():
    # The cache has room for all that is written at once, and can't hide what stays behind.
    with Server("--max-sequences", "512", "--cache-tokens", "70000") as server:
        asyncio.run(Load(server).run())
        assert server.stop() == 0
        assert not any("panic" in line for line in server.said), server.said
    with Server("--cache-tokens", "4096", open_files=(DESCRIPTORS, DESCRIPTORS)) as server:
        asyncio.run(Load(server).crowd(CROWD))
        assert server.stop() == 0
        assert not any("panic" in line for line in server.said), server.said
    print(f"{CROWD} connections for {DESCRIPTORS} descriptors: it lives")


if __name__ == "__main__":
    sys.exit(main())
