"""Answers from a real HTTP server that streams, fails, limits, breaks off and lies."""

import json
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dflashdist.cli import main
from dflashdist.config import InputError
from dflashdist.data.conversations import parse_prompt, parse_row
from dflashdist.data.sources import Sources
from dflashdist.regenerate import run as module
from dflashdist.regenerate.journal import Journal
from dflashdist.regenerate.run import (
    difference,
    failed_path,
    format_counts,
    refuse_ignored,
    regenerate,
)
from dflashdist.regenerate.server import ServerAnswerer

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


class ChatServer(ThreadingHTTPServer):
    """Answers "re: QUESTION". `troubles`: by question, what its next tries meet first.

    `bodies` are the requests and `seen` their last questions, in the order of arrival.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.troubles: dict[str, list] = {}
        self.extras: dict[str, dict] = {}  # what a question's answer has beside its text
        self.always: str | None = None
        self.bodies: list[dict] = []
        self.seen: list[str] = []
        self.times: list[float] = []
        self.keys: set[str] = set()
        self.gate = threading.Event()  # "wait" answers only when it is open
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *arguments) -> None:
        pass  # of clients that were killed

    def take(self, body: dict, key: str) -> tuple[str, str | None]:
        """The question of a request, and the trouble that is due."""
        question = [m["content"] for m in body["messages"] if m["role"] in ("user", "tool")][-1]
        with self.lock:
            self.bodies.append(body)
            self.seen.append(question)
            self.times.append(time.monotonic())
            self.keys.add(key)
            due = self.troubles.get(question)
            return question, due.pop(0) if due else self.always


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ChatServer

    def log_message(self, *arguments) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        question, trouble = self.server.take(body, self.headers["authorization"])
        finish = "stop"
        if isinstance(trouble, int):
            return self.fail(trouble, {"retry-after": "0.3"} if trouble == 429 else {})
        if trouble == "hang up":
            return self.drop()
        if trouble == "wait":
            self.server.gate.wait(30)
        if trouble in ("length", "content_filter", "abort"):
            finish = trouble
        message = {"role": "assistant", "content": f"re: {question}"}
        message |= self.server.extras.get(question, {})
        try:
            if body["stream"]:
                self.stream(message, finish, trouble)
            else:
                self.whole(message, finish, trouble)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def fail(self, status: int, headers: dict) -> None:
        self.reply(status, json.dumps({"error": {"message": "so sorry"}}), headers)

    def drop(self) -> None:
        self.close_connection = True
        self.connection.shutdown(2)

    def reply(self, status: int, text: str, headers: dict, kind: str = "application/json") -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in ({"content-type": kind, "content-length": len(data)} | headers).items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def whole(self, message: dict, finish: str, trouble) -> None:
        choice = {"index": 0, "message": message, "finish_reason": finish}
        text = json.dumps({"id": "1", "object": "chat.completion", "choices": [choice]})
        if trouble == "drop":
            self.reply(200, text[:40], {"content-length": len(text)})
            return self.drop()
        if trouble == "garbage":
            text = text[: len(text) // 2]
        if trouble == "page":
            return self.reply(200, "<html>Welcome</html>", {}, "text/html")
        if trouble == "error amid":
            text = json.dumps({"error": {"message": "engine died"}})
        self.reply(200, text, {})

    def stream(self, message: dict, finish: str, trouble) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        half = len(message["content"] or "") // 2
        deltas = [{"role": "assistant", "content": ""}]
        for name in ("reasoning_content", "reasoning"):
            deltas += [{name: piece} for piece in message.get(name, "")]
        if message["content"]:
            deltas += [
                {"content": message["content"][:half]},
                {"content": message["content"][half:]},
            ]
        for index, call in enumerate(message.get("tool_calls", [])):
            arguments = call["function"]["arguments"]
            start = call | {"index": index, "function": call["function"] | {"arguments": ""}}
            deltas.append({"tool_calls": [start]})
            for piece in (arguments[:3], arguments[3:]):
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        for number, delta in enumerate(deltas):
            if number == 1 and trouble == "drop":
                return self.drop()
            if number == 1 and trouble == "garbage":
                self.event('{"choices": [{"delta"')
            if number == 1 and trouble == "page":
                self.event("[1, 2]")
            if number == 1 and trouble == "error amid":
                self.event(json.dumps({"error": {"message": "engine died"}}))
            self.event(json.dumps({"choices": [{"index": 0, "delta": delta}]}))
        if trouble != "no end":
            last = {"index": 0, "delta": {}, "finish_reason": finish}
            self.event(json.dumps({"choices": [last]}))
            self.event(json.dumps({"choices": [], "usage": {"total_tokens": 3}}))
            self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, data: str) -> None:
        line = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()


@pytest.fixture
def server(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = ChatServer()
    yield running
    running.gate.set()
    running.shutdown()
    running.server_close()


@pytest.fixture
def out(tmp_path):
    (tmp_path / "made").mkdir()
    return tmp_path / "made" / "answers.jsonl"


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def write(path, conversations):
    """A source file of message lists or whole rows."""
    rows = [row if isinstance(row, dict) else {"messages": row} for row in conversations]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(number):
    return [[user(f"q{i}")] for i in range(number)]


def ask(server, source, out, *, concurrency=4, limit=None, **settings):
    """Regenerate with short pauses."""
    settings = {"first_pause": 0.01, "tries": 3} | settings
    answerer = ServerAnswerer(server.url, "m", **settings)
    counts = regenerate([source], out, answerer, concurrency=concurrency, limit=limit)
    outcomes = ("succeeded", "failed", "skipped", "already", "unfinished")
    assert counts["input"] == sum(counts[name] for name in outcomes)
    return counts


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def talks(path):
    """Messages by the first one's text."""
    return {row["messages"][0]["content"]: row["messages"] for row in rows_of(path)}


def numbers(counts):
    return [counts[name] for name in ("input", "succeeded", "failed", "skipped", "already")]


@pytest.mark.parametrize("stream", [True, False])
def test_turns_are_replayed_with_the_targets_own_answers(server, tmp_path, out, stream):
    talk = [
        {"role": "system", "content": "Be brief."}, assistant("Hello!"), user("a"),
        assistant("theirs"), assistant("more"), user("b"), user("c"), assistant("theirs"),
        user("d"),
    ]  # fmt: skip
    source = write(tmp_path / "in.jsonl", [talk])
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    counts = ask(
        server, str(source), out, stream=stream, extra=extra, temperature=0.5, max_tokens=77
    )
    assert numbers(counts) == [1, 1, 0, 0, 0]
    [row] = rows_of(out)
    system, said = (
        talk[0],
        [user("a"), assistant("re: a"), user("b"), user("c"), assistant("re: c")],
    )
    assert row["messages"] == [system, *said, user("d"), assistant("re: d")]
    assert row["source"] == f"{source}:1" and row["model"] == "m" and len(row["key"]) == 32
    assert [body["messages"] for body in server.bodies] == [
        [system, user("a")], [system, *said[:4]], [system, *said, user("d")]
    ]  # fmt: skip
    body = server.bodies[0]
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0.5, 77, stream)
    assert body["chat_template_kwargs"] == extra["chat_template_kwargs"]
    assert "tools" not in body and server.keys == {"Bearer none"}


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_is_kept_and_goes_back(server, tmp_path, out, stream):
    server.extras["a"] = {"reasoning_content": " Because.\n", "reasoning": " Because.\n"}
    server.extras["b"] = {"content": "<think>\nHm.\n</think>\n\nYes."}
    source = write(tmp_path / "in.jsonl", [[user("a"), assistant("x"), user("b")]])
    ask(server, source, out, stream=stream)
    [row] = rows_of(out)
    assert row["messages"][1] == assistant("re: a", reasoning_content=" Because.")
    assert row["messages"][3] == assistant("<think>\nHm.\n</think>\n\nYes.")
    assert server.bodies[1]["messages"][1]["reasoning_content"] == " Because."
    assert server.bodies[1]["messages"][1]["reasoning"] == " Because."
    read = parse_row("x", json.dumps(row))
    assert read.messages[1] == assistant("re: a", reasoning=" Because.")
    as_came = {"written": "<think>\nHm.\n</think>\n\nYes."}
    assert read.messages[3] == assistant("Yes.", reasoning="Hm.", **as_came)


@pytest.mark.parametrize("stream", [True, False])
def test_tool_results_follow_the_calls_that_the_target_makes(server, tmp_path, out, stream):
    def call(name, identity, text):
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": text}}

    theirs = [call("look", "old1", '{"at": "sky"}'), call("look", "old2", "{}")]
    rest = [
        {"role": "tool", "content": "blue", "tool_call_id": "old1"},
        {"role": "tool", "content": "calm", "tool_call_id": "old2"},
        assistant("It is blue."), user("thanks"), assistant("Welcome."),
    ]  # fmt: skip
    source = write(
        tmp_path / "in.jsonl",
        [
            {"messages": [user(text), assistant(None, tool_calls=theirs), *rest], "tools": TOOLS}
            for text in ("same", "other", "none")
        ],
    )
    own = [call("look", "new1", '{"at": "sea"}'), call("look", "new2", "")]
    server.extras["same"] = {"content": None, "tool_calls": own}
    server.extras["other"] = {
        "content": None,
        "tool_calls": [call("look", "new1", "{}"), call("listen", "new2", "{}")],
    }
    counts = ask(server, source, out, stream=stream)
    assert numbers(counts) == [3, 3, 0, 0, 0]
    said = talks(out)
    assert [m["role"] for m in said["same"]] == [
        "user", "assistant", "tool", "tool", "assistant", "user", "assistant"
    ]  # fmt: skip
    assert [m["tool_call_id"] for m in said["same"][2:4]] == ["new1", "new2"]
    assert said["same"][4] == assistant("re: calm") and said["same"][6] == assistant("re: thanks")
    assert json.loads(said["same"][1]["tool_calls"][0]["function"]["arguments"]) == {"at": "sea"}
    assert [m["role"] for m in said["other"]] == ["user", "assistant"]
    assert said["none"] == [user("none"), assistant("re: none")]
    assert all(row["tools"] == TOOLS for row in rows_of(out))
    assert all(body["tools"] == TOOLS for body in server.bodies)
    for row in rows_of(out):  # what `prepare` reads is what was said
        read = parse_row("x", json.dumps(row))
        assert len(read.messages) == len(row["messages"])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "trouble", [500, 503, 429, 408, "hang up", "drop", "garbage", "page", "error amid", "abort"]
)
def test_troubles_are_tried_again(server, tmp_path, out, stream, trouble):
    server.troubles["q1"] = [trouble]
    counts = ask(server, write(tmp_path / "in.jsonl", questions(3)), out, stream=stream)
    assert numbers(counts) == [3, 3, 0, 0, 0]
    assert Counter(server.seen) == {"q0": 1, "q1": 2, "q2": 1}
    assert talks(out)["q1"] == [user("q1"), assistant("re: q1")]


def test_an_answer_without_its_end_is_none(server, tmp_path, out):
    server.troubles["q0"] = ["no end"]
    ask(server, write(tmp_path / "in.jsonl", questions(1)), out)
    assert server.seen == ["q0", "q0"]


def test_the_asked_pause_is_kept_by_all(server, tmp_path, out):
    server.troubles["q0"] = [429]
    ask(server, write(tmp_path / "in.jsonl", questions(8)), out, concurrency=1)
    assert server.seen[:3] == ["q0", "q0", "q1"]
    assert server.times[1] - server.times[0] >= 0.3


def test_a_failure_is_asked_again_from_its_first_missing_answer(server, tmp_path, out):
    talk = [user("a"), assistant("x"), user("b"), assistant("x"), user("c")]
    source = write(tmp_path / "in.jsonl", [talk, [user("z")]])
    server.troubles["b"] = [500, 500, 500]
    assert numbers(ask(server, source, out)) == [2, 1, 1, 0, 0]
    [failure] = rows_of(failed_path(out))
    assert failure["reason"] == "server error 500" and failure["source"] == f"{source}:1"
    assert "so sorry" in failure["detail"]
    assert failure["asked"] == [user("a"), assistant("re: a"), user("b")]
    server.seen.clear()
    assert numbers(ask(server, source, out)) == [2, 1, 0, 0, 1]
    assert server.seen == ["b", "c"]
    assert [m["content"] for m in talks(out)["a"][1::2]] == ["re: a", "re: b", "re: c"]
    assert not failed_path(out).exists()


def test_an_unusable_answer_ends_its_conversation_and_is_not_paid_twice(server, tmp_path, out):
    source = write(
        tmp_path / "in.jsonl",
        [[user("a"), assistant("x"), user("b"), assistant("x"), user("c")], [user("d")]],
    )
    server.troubles = {"b": ["length"], "d": ["length"]}
    counts = ask(server, source, out)
    assert numbers(counts) == [2, 1, 1, 0, 0]
    reason = "answer cut off at max_tokens"
    assert counts["reasons"]["shortened"]["counts"] == {reason: 1}
    assert counts["reasons"]["failed"] == {
        "counts": {reason: 1}, "examples": {reason: [f"{source}:2"]}
    }  # fmt: skip
    assert talks(out) == {"a": [user("a"), assistant("re: a")]}
    server.seen.clear()
    assert numbers(ask(server, source, out)) == [2, 0, 1, 0, 1]
    assert server.seen == []
    assert numbers(ask(server, source, out, max_tokens=4096)) == [2, 2, 0, 0, 0]
    assert sorted(server.seen) == ["b", "c", "d"] and not failed_path(out).exists()


def test_a_later_answer_that_was_cut_off_is_asked_again_with_more_tokens(server, tmp_path, out):
    talk = [user("a"), assistant("x"), user("b"), assistant("x"), user("c")]
    source = write(tmp_path / "in.jsonl", [talk, [user("d")], [user("e"), user("f")]])
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "ü"}'}}
    server.extras["a"] = {"reasoning_content": "Hm.", "tool_calls": [call]}
    talk.insert(1, assistant(None, tool_calls=[call]))
    talk.insert(2, {"role": "tool", "content": "blue"})
    write(source, [talk, [user("d")], [user("e"), user("f")]])
    server.troubles["b"] = ["length"]
    assert numbers(ask(server, source, out)) == [3, 3, 0, 0, 0]
    first = talks(out)["a"]
    assert len(first) == 4 and [row.get("cut_off") for row in rows_of(out)].count(True) == 1
    assert numbers(ask(server, source, out)) == [3, 0, 0, 0, 3]  # not with as many tokens
    server.seen.clear()
    server.troubles["b"] = ["length", 500, 500, 500]
    assert numbers(ask(server, source, out, max_tokens=4096)) == [3, 1, 0, 0, 2]
    assert server.seen == ["b"]  # from where it was cut off, once
    assert numbers(ask(server, source, out, max_tokens=8192)) == [3, 0, 1, 0, 2]
    assert [row["reason"] for row in rows_of(failed_path(out))] == ["server error 500"]
    assert prepared_from(out) == [["re: a", "re: blue"], ["re: d"], ["re: f"]]
    server.seen.clear()
    assert numbers(ask(server, source, out, max_tokens=8192)) == [3, 1, 0, 0, 2]
    assert server.seen == ["b", "c"] and not failed_path(out).exists()
    rows = [row["messages"] for row in rows_of(out) if row["messages"][0] == user("a")]
    assert rows[0] == rows[1] == first and rows[2][:4] == first  # the file only grew
    # What is trained on holds each conversation once, and whole.
    assert prepared_from(out) == [["re: a", "re: blue", "re: b", "re: c"], ["re: d"], ["re: f"]]
    assert numbers(ask(server, source, out, max_tokens=9000)) == [3, 0, 0, 0, 3]


def prepared_from(path):
    """The answers of each row that `prepare` reads, sorted: they were asked for at once."""
    sources = Sources([path])
    count = sources.max_rows
    rows = [parse_row(origin, payload) for origin, payload in sources.rows()]
    assert len(rows) == count
    return sorted([m["content"] for m in row.messages if m["role"] == "assistant"] for row in rows)


def test_rows_of_other_models_and_settings_replace_none(server, tmp_path, out):
    """Files put end to end, of the same conversations: only the same model's own later row, made
    alike but for its length, is the same answer gone on with."""
    source = write(tmp_path / "in.jsonl", [[user("a"), assistant("x"), user("b")]])
    server.troubles["b"] = ["length"] * 3
    for number, settings in enumerate(({}, {"temperature": 0.5})):
        ask(server, source, tmp_path / f"made/{number}.jsonl", **settings)
    other = ServerAnswerer(server.url, "other", max_tokens=4096)
    regenerate([source], tmp_path / "made/2.jsonl", other, concurrency=1)
    texts = [(tmp_path / f"made/{number}.jsonl").read_text() for number in range(3)]
    assert all('"cut_off": true' in text for text in texts)
    out.write_text("".join(texts))
    assert prepared_from(out) == [["re: a"]] * 3
    ask(server, source, tmp_path / "made/0.jsonl", max_tokens=4096)
    out.write_text("".join([*texts[1:], (tmp_path / "made/0.jsonl").read_text()]))
    assert prepared_from(out) == [["re: a"]] * 2 + [["re: a", "re: b"]]


@pytest.mark.parametrize(
    ("extras", "reason"),
    [
        ({"content": " \n"}, "empty answer"),
        ({"content": "", "reasoning_content": "Hm."}, "empty answer"),
        ({"content": "half \ud83d"}, "half a surrogate pair in the text"),
        (
            {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "tool call malformed",
        ),
    ],
)
def test_answers_that_cannot_be_trained_on(server, tmp_path, out, extras, reason):
    server.extras["q0"] = extras
    counts = ask(server, write(tmp_path / "in.jsonl", questions(1)), out, stream=False)
    assert counts["reasons"]["failed"]["counts"] == {reason: 1}
    assert server.seen == ["q0"]


def test_rows_that_ask_nothing_are_skipped_and_counted(server, tmp_path, out):
    source = tmp_path / "in.jsonl"
    write(source, [[user("a")], {"text": "plain"}, [assistant("only")], [user("b")]])
    with source.open("a") as file:
        file.write("not json\n")
    counts = ask(server, source, out)
    assert numbers(counts) == [5, 2, 0, 3, 0]
    assert counts["reasons"]["skipped"]["counts"] == {
        "no messages": 1, "no question": 1, "not JSON": 1
    }  # fmt: skip
    told = format_counts(counts)
    assert told.startswith("5 conversations = 2 succeeded + 0 failed + 3 skipped + 0 already there")
    assert f"skipped: no question: 1 ({source}:3)" in told


def test_copies_are_asked_as_often_as_they_stand_there(server, tmp_path, out):
    source = write(tmp_path / "in.jsonl", questions(2) * 3)
    assert numbers(ask(server, source, out, limit=4)) == [4, 4, 0, 0, 0]
    assert Counter(server.seen) == {"q0": 2, "q1": 2}
    assert numbers(ask(server, source, out)) == [6, 2, 0, 0, 4]
    assert Counter(server.seen) == {"q0": 3, "q1": 3}
    assert len({row["key"] for row in rows_of(out)}) == 6
    assert numbers(ask(server, source, out)) == [6, 0, 0, 0, 6]


CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background has it ignored
from dflashdist.regenerate.run import format_counts, regenerate
from dflashdist.regenerate.server import ServerAnswerer
url, source, out = sys.argv[1:]
try:
    regenerate([source], out, ServerAnswerer(url, "m", first_pause=0.01), concurrency=4)
except KeyboardInterrupt:
    sys.exit(130)
"""


# As a shell starts what it runs in the background, whoever runs this suite.
IN_BACKGROUND = ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable]


def start(*arguments):
    return subprocess.Popen(
        [*IN_BACKGROUND, *map(str, arguments)], stderr=subprocess.PIPE, text=True
    )


def start_and_stop(server, source, out, how, answers):
    """Run in a process of its own, end it by a signal once it has written some answers."""
    child = start("-c", CHILD, server.url, source, out)
    while not (out.exists() and out.read_bytes().count(b"\n") >= answers):
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.005)
    while len(server.seen) - answers < 4:  # all four workers are waiting for an answer
        time.sleep(0.005)
    child.send_signal(how)
    said = child.communicate()[1]
    return child.returncode, said


@pytest.mark.dist
def test_killed_and_started_again_asks_only_what_was_in_flight(server, tmp_path, out):
    source = write(tmp_path / "in.jsonl", [[user(f"a{i}"), assistant("x")] for i in range(40)])
    server.troubles = {f"a{i}": ["wait"] for i in range(20, 40)}
    code, _ = start_and_stop(server, source, out, signal.SIGKILL, 20)
    assert code == -signal.SIGKILL
    finished = set(talks(out))
    assert len(finished) == 20
    with out.open("ab") as file:
        file.write(b'{"key": "00')  # as a kill amid a write leaves it
    first = Counter(server.seen)
    server.troubles.clear()
    counts = ask(server, source, out)
    assert numbers(counts) == [40, 20, 0, 0, 20]
    asked = Counter(server.seen)
    assert all(asked[question] == 1 for question in finished)
    again = {question for question, times in asked.items() if times > 1}
    assert again == set(first) - finished and len(again) == 4 and max(asked.values()) == 2
    assert sorted(talks(out)) == sorted(f"a{i}" for i in range(40))


@pytest.mark.dist
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_keeps_even_the_first_answers_in_flight(server, tmp_path, out, how):
    source = write(
        tmp_path / "in.jsonl",
        [[user(f"a{i}")] for i in range(10)]
        + [[user(f"b{i}"), assistant("x"), user(f"c{i}")] for i in range(10)],
    )
    server.troubles = {f"c{i}": ["wait"] for i in range(10)}
    child = start("-c", CHILD, server.url, source, out)
    while sum(question.startswith("c") for question in server.seen) < 4:
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.005)
    child.send_signal(how)
    said = child.communicate()[1]
    assert child.returncode == 130
    assert "10 succeeded + 0 failed + 0 skipped + 0 already there + 4 unfinished" in said
    assert "the same command goes on from here" in said
    assert {row["reason"] for row in rows_of(failed_path(out))} == {"interrupted"}
    server.troubles.clear()
    assert numbers(ask(server, source, out)) == [20, 10, 0, 0, 10]
    asked = Counter(server.seen)
    assert all(asked[f"b{i}"] == 1 for i in range(10))
    assert sum(asked.values()) == 30 + 4  # the four that nobody had answered yet


@pytest.mark.dist
def test_in_the_background_ctrl_c_is_somebody_elses(server, tmp_path, out):
    """SIGINT that was ignored at the start stays so."""
    server.always = "wait"
    child = start(
        "-m", "dflashdist", "regenerate", write(tmp_path / "in.jsonl", questions(1)), "--out", out,
        "--base-url", server.url, "--model", "m",
    )  # fmt: skip
    while not server.seen:
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.005)
    child.send_signal(signal.SIGINT)
    server.gate.set()
    assert "interrupted" not in child.communicate()[1]
    assert child.returncode == 0 and set(talks(out)) == {"q0"}


@pytest.mark.parametrize(("status", "fix"), [(401, "OPENAI_API_KEY"), (404, "/v1")])
def test_a_wrong_key_or_model_ends_the_run_at_once(server, tmp_path, out, status, fix):
    server.always = status
    with pytest.raises(InputError, match=f"{status} .*so sorry.*{fix}"):
        ask(server, write(tmp_path / "in.jsonl", questions(50)), out)
    assert len(server.seen) <= 4


def test_a_proxy_without_its_server_is_waited_for(server, tmp_path, out):
    server.troubles["q3"] = [404, 401]
    source = write(tmp_path / "in.jsonl", questions(4))
    assert numbers(ask(server, source, out, concurrency=1)) == [4, 4, 0, 0, 0]


@pytest.mark.parametrize("gone", [502, "hang up"])
def test_a_server_that_is_gone_is_waited_for_and_ends_the_run(server, tmp_path, out, capsys, gone):
    source = write(tmp_path / "in.jsonl", questions(100))
    assert numbers(ask(server, source, out, limit=10)) == [10, 10, 0, 0, 0]
    server.always = gone
    told = rf"^{server.url}: no answer for \d of 0 s, \d+ tries, .*; start the server.*--wait"
    with pytest.raises(InputError, match=told):
        ask(server, source, out, wait=0.4)
    assert len(set(server.seen)) == 14  # those in flight, tried as long as the wait is
    assert server.times[-1] - server.times[10] >= 0.3 and len(server.seen) > 10 + 3 * 4
    assert "10 already there + 4 unfinished" in capsys.readouterr().err
    server.always = None
    assert numbers(ask(server, source, out)) == [100, 90, 0, 0, 10]
    assert not failed_path(out).exists()


def test_the_wait_is_shown_and_ends_with_the_first_answer(
    server, tmp_path, out, capsys, monkeypatch
):
    monkeypatch.setattr(module, "WAITING_LINE_SECONDS", 0.02)
    server.always = 503
    threading.Timer(0.5, lambda: setattr(server, "always", None)).start()
    source = write(tmp_path / "in.jsonl", questions(8))
    assert numbers(ask(server, source, out, tries=1, wait=60)) == [8, 8, 0, 0, 0]
    lines = [line for line in capsys.readouterr().err.splitlines() if "no answer for" in line]
    assert lines
    for line in lines:
        assert line.startswith(f"regenerate: {server.url}: no answer for ")
        assert " of 60 s, " in line and " tries, server error 503: " in line and "0/8" in line


def test_a_request_that_ends_the_server_each_time_is_given_up(server, tmp_path, out):
    """Others are answered in between, so that its tries count."""
    server.troubles["q0"] = ["hang up"] * 60
    source = write(tmp_path / "in.jsonl", questions(60))
    counts = ask(server, source, out, concurrency=2, wait=60)
    assert numbers(counts) == [60, 59, 1, 0, 0]
    assert Counter(server.seen)["q0"] <= 10


def test_a_refused_prompt_is_no_reason_to_stop(server, tmp_path, out):
    server.troubles = {f"q{i}": [400] for i in range(1, 30)}
    source = write(tmp_path / "in.jsonl", questions(32))
    counts = ask(server, source, out, concurrency=2)
    assert counts["reasons"]["failed"]["counts"] == {"server refuses the request": 29}
    assert numbers(ask(server, source, out)) == [32, 29, 0, 0, 3]  # it costs nothing: asked again


def test_a_server_that_refuses_everything_ends_the_run(server, tmp_path, out):
    server.always = 400
    with pytest.raises(InputError, match=r"refuses every request: 400 .*so sorry"):
        ask(server, write(tmp_path / "in.jsonl", questions(100)), out)
    assert len(server.seen) < 30


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_too_slow_is_not_tried_over_and_over(server, tmp_path, out, stream):
    server.always = "wait"
    source = write(tmp_path / "in.jsonl", questions(1))
    counts = ask(server, source, out, stream=stream, timeout=0.1, tries=50, concurrency=1)
    assert counts["reasons"]["failed"]["counts"] == {"no answer in time": 1}
    assert len(server.seen) <= (8 if stream else 2)


def test_nobody_at_the_address(server, tmp_path, out):
    source = write(tmp_path / "in.jsonl", questions(1))
    nobody = ServerAnswerer("http://127.0.0.1:1/v1", "m", tries=2, first_pause=0.01, wait=0.2)
    began = time.monotonic()
    with pytest.raises(InputError, match=r"^http://127.0.0.1:1/v1: no answer .* connection failed"):
        regenerate([source], out, nobody, concurrency=1)
    assert time.monotonic() - began >= 0.2
    import httpx2

    let_through = httpx2.RemoteProtocolError("closed")  # some releases of `openai` do
    assert str(nobody._judge(let_through)) == "connection failed"
    with pytest.raises(KeyError):  # a fault of our own is nothing to try again
        nobody._judge(KeyError("x"))


def test_failures_are_said_and_no_success(server, tmp_path, out, capsys):
    """Exit code 1 and a last line; what there is of answers stays."""
    source = write(tmp_path / "in.jsonl", questions(3))
    command = ["regenerate", str(source), "--out", str(out), "--base-url", server.url, "--model"]
    server.troubles["q1"] = [400]
    with pytest.raises(SystemExit) as ended:
        main([*command, "m"])
    told = capsys.readouterr()
    assert ended.value.code == 1 and set(talks(out)) == {"q0", "q2"}
    last = told.err.splitlines()[-1]
    assert last.startswith("dflashdist regenerate: 1 of 3 conversations have no usable answer")
    assert str(failed_path(out)) in last
    assert main([*command, "m"]) == 0
    server.always = 503
    assert (
        main([*command[:3], str(tmp_path / "made/2.jsonl"), *command[4:], "m", "--wait", "0"]) == 2
    )
    assert "dflashdist regenerate: http://" in capsys.readouterr().err.splitlines()[-1]


def test_no_quota_ends_the_run(server, tmp_path, out):
    answerer = ServerAnswerer(server.url, "m")
    import httpx2
    import openai

    request = httpx2.Request("POST", server.url)
    body = {"code": "insufficient_quota"}
    error = openai.RateLimitError("x", response=httpx2.Response(429, request=request), body=body)
    with pytest.raises(InputError, match="no quota"):
        answerer._judge(error)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--base-url", "localhost:8000"], "http://HOST:PORT/v1"),
        (["--concurrency", "0"], "concurrency=0"),
        (["--concurrency", "2000"], "at most 1000"),
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--wait", "-1"], "wait=-1.0"),
        (["--limit", "0"], "limit=0"),
    ],
)
def test_settings_that_cannot_be(tmp_path, out, capsys, change, told):
    source = write(tmp_path / "in.jsonl", questions(1))
    command = ["regenerate", str(source), "--out", str(out), "--model", "m"]
    assert main([*command, "--base-url", "http://127.0.0.1:1/v1", *change]) == 2
    assert told in capsys.readouterr().err


def test_out_is_none_of_the_sources(server, tmp_path):
    source = write(tmp_path / "in.jsonl", questions(1))
    for sources, out in (
        (source, source),
        (tmp_path, tmp_path / "out.jsonl"),
        (f"{tmp_path}/*.jsonl", tmp_path / "out.jsonl"),
    ):
        with pytest.raises(InputError, match="would be read as part of"):
            ask(server, str(sources), out)
    assert rows_of(source) == [{"messages": [user("q0")]}]
    with pytest.raises(InputError, match=r"ends in \.jsonl"):
        ask(server, source, tmp_path / "out.json")
    with pytest.raises(InputError, match="no such folder"):
        ask(server, source, tmp_path / "nowhere" / "out.jsonl")


def test_two_models_never_share_a_file(server, tmp_path, out):
    source = write(tmp_path / "in.jsonl", questions(1))
    ask(server, source, out)
    other = ServerAnswerer(server.url, "other")
    with pytest.raises(InputError, match='1: holds answers of "m", this run asks "other"'):
        regenerate([source], out, other, concurrency=1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"temperature": 0.7}, "temperature: 0.0 there, 0.7 now"),
        ({"max_tokens": 99}, r"max_tokens: 2048 there, 99 now \(it may only grow\)"),
        ({"extra": {}}, "extra.kwargs.think: false there, no such setting now"),
        ({"extra": {"kwargs": {"think": True}}}, "extra.kwargs.think: false there, true now"),
        (
            {"extra": {"kwargs": {"think": False}, "top_p": 0.9}},
            "extra.top_p: no such setting there, 0.9 now",
        ),
    ],
)
def test_two_settings_never_share_a_file(server, tmp_path, out, change, told):
    settings: dict = {"extra": {"kwargs": {"think": False}}}
    source = write(tmp_path / "in.jsonl", questions(3))
    assert numbers(ask(server, source, out, limit=2, **settings)) == [2, 2, 0, 0, 0]
    before = out.read_bytes()
    with pytest.raises(InputError, match=rf"answers\.jsonl:1: made with other settings \({told}\)"):
        ask(server, source, out, **(settings | change))
    assert sorted(server.seen) == ["q0", "q1"] and out.read_bytes() == before
    # How it is asked does not matter, and longer answers may come to those that were finished.
    counts = ask(server, source, out, stream=False, concurrency=1, max_tokens=9000, **settings)
    assert numbers(counts) == [3, 1, 0, 0, 2]
    assert [row["settings"]["max_tokens"] for row in rows_of(out)] == [2048, 2048, 9000]
    with pytest.raises(InputError, match=r"answers\.jsonl:3: .*max_tokens: 9000 there, 2048 now"):
        ask(server, source, out, **settings)


def test_answers_of_other_settings_are_not_gone_on_with(server, tmp_path, out):
    source = write(tmp_path / "in.jsonl", [[user("a"), assistant("x"), user("b")]])
    server.troubles["b"] = [500] * 6
    ask(server, source, out)
    ask(server, source, out, max_tokens=4096)
    assert Counter(server.seen) == {"a": 1, "b": 6}  # nothing stands in OUT: all settings will do
    assert numbers(ask(server, source, out, temperature=0.7)) == [1, 1, 0, 0, 0]
    assert Counter(server.seen) == {"a": 2, "b": 7}


def test_a_setting_that_is_null_is_none():
    assert difference({"extra": {"top_k": None}}, {"extra": {}}) is None
    assert difference({"temperature": 0}, {"temperature": 0.0}) is None


def test_options_that_are_ignored_are_refused():
    refuse_ignored("--local", {"--model": None, "--extra": None})
    with pytest.raises(InputError, match=r"^--model, --no-stream: nothing that --local uses"):
        refuse_ignored("--local", {"--model": "m", "--extra": None, "--no-stream": False})


def test_progress_is_told_in_lines_without_a_terminal(server, tmp_path, out, capsys, monkeypatch):
    monkeypatch.setattr(module, "LINE_SECONDS", 0.01)
    ask(server, write(tmp_path / "in.jsonl", questions(60)), out, concurrency=1)
    lines = [line for line in capsys.readouterr().err.splitlines() if "regenerate: " in line]
    assert lines and "/60 [" in lines[-1] and "0 failed" in lines[-1]


KEYS = [bytes([i]) * 16 for i in range(4)]
SETTINGS = {"max_tokens": 8, "extra": {"stop": '"}, "source', "t": 0.1}}


def test_journal_reads_back_what_was_whole(tmp_path):
    path = tmp_path / "j.jsonl"
    journal = Journal(path, 'a "model"', SETTINGS)
    for i, key in enumerate([*KEYS, KEYS[1]]):
        journal.append(key, {"i": i, "text": "ü\u2028"})
    journal.close()
    whole = path.read_bytes()
    for cut in range(len(whole)):  # torn at any byte
        path.write_bytes(whole[:cut])
        journal = Journal(path, 'a "model"', SETTINGS)
        lines = whole[:cut].count(b"\n") + (whole[cut : cut + 1] == b"\n")
        assert set(journal.offsets) == set(KEYS[:lines])
        assert path.read_bytes() == b"".join(whole.splitlines(True)[:lines])
        journal.append(KEYS[3], {"i": 9, "text": ""})
        assert journal.row(KEYS[3])["i"] == 9
        journal.close()
    path.write_bytes(whole)
    journal = Journal(path, 'a "model"', SETTINGS)
    assert [(key, row["i"]) for key, row in journal.rows()] == [
        (KEYS[0], 0), (KEYS[2], 2), (KEYS[3], 3), (KEYS[1], 4)
    ]  # fmt: skip
    journal.keep([KEYS[1], KEYS[2]])
    assert [row["i"] for row in rows_of_journal(path)] == [2, 4]
    Journal(path, 'a "model"', SETTINGS).keep([])
    assert not path.exists()


def rows_of_journal(path):
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


@pytest.mark.parametrize(
    "content",
    [
        '{"messages": []}\n', '[\n', '[{"key": 1}]', '{"key": "zz", "model": "m"}\n', "text",
        '{"key": "' + "0" * 32 + '", "model": "m", "a\n',
        '{"key": "' + "0" * 32 + '", "model": "m", "messages": []}\n',
        '{"key": "' + "0" * 32 + '", "model": "m", "settings": 3, "messages": []}\n',
    ],
)  # fmt: skip
def test_journal_leaves_foreign_files_alone(tmp_path, content):
    path = tmp_path / "j.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="1: not a row that `dflashdist regenerate` wrote"):
        Journal(path, "m", {})
    assert path.read_text() == content


def test_journal_is_one_processes_at_a_time(tmp_path):
    journal = Journal(tmp_path / "j.jsonl", "m", {})
    with pytest.raises(InputError, match="another process"):
        Journal(tmp_path / "j.jsonl", "m", {})
    journal.close()
    Journal(tmp_path / "j.jsonl", "m", {}).close()


def test_journal_takes_back_a_row_that_does_not_fit(tmp_path):
    path = tmp_path / "j.jsonl"
    journal = Journal(path, "m", {})
    journal.append(KEYS[0], {"a": 1})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, hard))
    try:
        with pytest.raises(InputError, match="cannot be written: File too large"):
            journal.append(KEYS[1], {"a": "x" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and KEYS[1] not in journal
    journal.append(KEYS[1], {"a": 2})
    assert len(rows_of(path)) == 2
    journal.close()


def test_keys_are_of_the_conversation_not_of_its_place(server, tmp_path, out):
    """A file that is moved or gets other rows in front is not paid for again."""
    ask(server, write(tmp_path / "in.jsonl", questions(3)), out)
    moved = write(tmp_path / "moved.jsonl", [[user("new")], *questions(3)])
    assert numbers(ask(server, moved, out)) == [4, 1, 0, 0, 3]
    prompt = parse_prompt("elsewhere", json.dumps({"messages": [user("q0")]}))
    assert prompt.key == parse_prompt("here", {"messages": [user("q0")]}).key
