import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from roost.rollout.episode import Task
from roost.rollout.rewards.judge import Judge, Reading, filled
from roost.rollout.rewards.reward import Answer, RewardFailed
from tests.limits import HANG_S

ANSWER = Answer(Task("2+2", {"question": "What is 2+2?", "answer": "4"}), "It is {reference}. Score: 10")


class Bench:
    """An endpoint that says what the test wants, in order; the last again and again."""

    def __init__(self, *replies):
        self.replies, self.asked, self.keys = list(replies), [], []
        self.in_flight = self.most_in_flight = 0
        self.changed = threading.Condition()

    def next_reply(self):
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


def handler(bench):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with bench.changed:
                bench.asked.append((self.path, body))
                bench.keys.append(self.headers["Authorization"])
                bench.in_flight += 1
                bench.most_in_flight = max(bench.most_in_flight, bench.in_flight)
                reply = bench.next_reply()
            status, content = reply() if callable(reply) else reply
            with bench.changed:
                bench.in_flight -= 1
            sent = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_):
            pass

    return Handler


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """A judge that left before its answer came is no news."""


def says(text, finish="stop"):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


@pytest.fixture
def judged():
    """Score an answer by a judge with these keys, whose endpoint says what the bench has."""
    servers = []

    def score(bench, times=1, **keys):
        server = Server(("127.0.0.1", 0), handler(bench))
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

        async def run():
            judge = Judge("judge-1", f"http://127.0.0.1:{server.server_port}/v1", **keys)
            try:
                scores = await asyncio.gather(*(judge.score(ANSWER) for _ in range(times)))
            finally:
                bench.counts = judge.counts
                await judge.close()
            return scores if times > 1 else scores[0]

        return asyncio.run(run())

    yield score
    for server in servers:
        server.shutdown()
        server.server_close()


def test_what_is_asked(judged, monkeypatch):
    monkeypatch.setenv("BENCH_KEY", "secret")
    bench = Bench(says("Fine.\nScore: 8"))
    keys = {"question": "question", "reference": "answer", "api_key_env": "BENCH_KEY", "sampling": {"seed": 3}}
    assert judged(bench, **keys) == pytest.approx(0.8)
    ((path, body),) = bench.asked
    assert (path, body["model"], body["temperature"], body["seed"]) == ("/v1/chat/completions", "judge-1", 0.0, 3)
    (message,) = body["messages"]
    assert "What is 2+2?" in message["content"]
    assert "<reference>\n4\n</reference>" in message["content"]
    assert "<answer>\nIt is {reference}. Score: 10\n</answer>" in message["content"]
    assert "a number from 0 (" in message["content"]
    assert bench.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("reply", "keys", "expected"),
    [
        pytest.param("Score: 7/10", {}, 0.7, id="of ten"),
        pytest.param("**Score:** 7", {}, 0.7, id="markdown"),
        pytest.param("Score: 1? No.\nSCORE = 2.5", {}, 0.25, id="the last counts"),
        pytest.param("Score: 4", {"lowest": 2, "highest": 6}, 0.5, id="a range"),
        pytest.param("Score: -3", {"lowest": -5, "highest": 5, "scale": False}, -3.0, id="as it is"),
        pytest.param("[[6]]", {"pattern": r"\[\[(\d+)\]\]"}, 0.6, id="a pattern"),
        pytest.param('I think {x}\n```json\n{"score": 6, "why": {}}\n```', {"json_key": "score"}, 0.6, id="json"),
        pytest.param('{"score": "6"}', {"json_key": "score"}, 0.6, id="json with text"),
    ],
)
def test_numbers(judged, reply, keys, expected):
    assert judged(Bench(says(reply)), **keys) == pytest.approx(expected)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(says("It is good."), id="no number"),
        pytest.param(says("Score: 11"), id="out of range"),
        pytest.param(says("Score: 1", finish="length"), id="cut off"),
        pytest.param(says(None), id="nothing said"),
        pytest.param(says(""), id="an empty reply"),
        pytest.param((500, {"error": {"message": "out of memory"}}), id="a server error"),
        pytest.param((200, b"<html>"), id="no JSON"),
        pytest.param((200, {"choices": []}), id="no choices"),
        pytest.param((200, ["choices"]), id="a list"),
    ],
)
def test_another_try(judged, first):
    bench = Bench(first, says("Score: 5"))
    assert judged(bench) == 0.5
    assert len(bench.asked) == 2


def test_a_judge_that_forgot_the_number_is_reminded(judged):
    bench = Bench(says("It is good."), says("Score: 5"))
    judged(bench)
    first, again = (body["messages"] for _, body in bench.asked)
    assert [message["role"] for message in again] == ["user", "assistant", "user"]
    assert again[:2] == [*first, {"role": "assistant", "content": "It is good."}]
    assert "a number from 0 to 10" in again[2]["content"]
    assert bench.counts == {"malformed": 1, "failed": 0}


@pytest.mark.parametrize(
    ("reply", "asked", "message"),
    [
        pytest.param(says("good"), 2, "no number in 2 tries; its reply has no number: 'good'", id="never a number"),
        pytest.param((500, {"message": "boom"}), 1, "does not answer: .*500, boom", id="never an answer"),
        pytest.param((400, {"message": "too long"}), 1, "refuses.*400, too long", id="refused"),
    ],
)
def test_failures(judged, reply, asked, message):
    bench = Bench(reply)
    with pytest.raises(RewardFailed, match=message):
        judged(bench, tries=2, patience_s=0)
    assert len(bench.asked) == asked
    assert bench.counts["failed"] == 1


def test_a_default_instead_of_a_failure(judged):
    bench = Bench(says("good"))
    assert judged(bench, tries=1, default=0.25) == 0.25
    assert bench.counts == {"malformed": 1, "failed": 1}


def test_a_judge_that_does_not_answer(judged):
    gone = threading.Event()

    def hang():
        gone.wait(HANG_S)
        return says("Score: 1")

    try:
        with pytest.raises(RewardFailed, match=r"no answer within 0\.2 s"):
            judged(Bench(hang), tries=1, limit_s=0.2, patience_s=0)
    finally:
        gone.set()


def test_a_busy_judge_is_waited_for(judged, monkeypatch):
    """Longer than the calls themselves try, and beyond the tries for a number."""
    monkeypatch.setattr("roost.rollout.rewards.judge.FIRST_WAIT_S", 0.01)
    bench = Bench(*[(500, {"message": "starting"})] * 5, says("Score: 5"))
    assert judged(bench, tries=1) == 0.5
    assert len(bench.asked) == 6 and bench.counts == {"malformed": 0, "failed": 0}


def test_so_many_at_a_time(judged):
    bench = Bench(lambda: (threading.Event().wait(0.02), says("Score: 5"))[1])
    assert judged(bench, times=9, concurrency=3) == [0.5] * 9
    assert bench.most_in_flight <= 3


def test_a_task_without_the_reference_is_a_failure_at_once(judged):
    bench = Bench(says("Score: 5"))
    with pytest.raises(RewardFailed, match="has no 'gold'"):
        judged(bench, reference="gold", default=1.0)
    assert bench.asked == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        pytest.param({"template": "{task}"}, "no {answer}", id="template"),
        pytest.param({"lowest": 5, "highest": 5}, "range", id="range"),
        pytest.param({"pattern": r"\d+"}, "no group", id="no group"),
        pytest.param({"pattern": "("}, "cannot be read", id="no pattern"),
        pytest.param({"tries": 0}, "tries is 0", id="tries"),
        pytest.param({"patience_s": -1}, "patience_s is -1", id="patience"),
        pytest.param({"api_key_env": "ROOST_NO_SUCH_KEY"}, "ROOST_NO_SUCH_KEY has no key", id="key"),
    ],
)
def test_wrong_keys(keys, message):
    with pytest.raises(ValueError, match=message):
        Judge("judge-1", "http://127.0.0.1:9/v1", **keys)


@pytest.mark.parametrize(
    "reported",
    [
        "score",
        "Score: ",
        "Score: nan",
        "Score: 1e400",
        "Score: 99999999999999999999",
        "Score: -1",
        "Scores: 5",
        "score" * 99,
    ],
)
def test_what_is_no_number_in_range(reported):
    assert Reading(0, 10).number(reported) is None


@pytest.mark.parametrize(
    "reported",
    [
        '{"s": true}',
        '{"s": null}',
        '{"s": NaN}',
        '{"s": 1e999}',
        '{"s": [1]}',
        '{"t": 1}',
        "{" * 5_000,
        '{"s":' * 5_000,
        "1",
    ],
    ids=lambda reported: reported[:12],
)
def test_what_is_no_number_in_json(reported):
    assert Reading(0, 10, json_key="s").number(reported) is None


def test_templates_are_filled_once():
    texts = {"task": "{answer}", "answer": r"\1 {task} {{}} %s", "reference": "", "lowest": "0", "highest": "1"}
    assert (
        filled("{task}|{answer}|{other}|{{answer}}", texts) == r"{answer}|\1 {task} {{}} %s|{other}|{\1 {task} {{}} %s}"
    )
