"""Agents with tools: servers over real HTTP, code in a real sandbox."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from roost.config.findings import Findings, Where
from roost.rollout.agents.scenario import AgentScenario
from roost.rollout.check_target import ENVIRONMENT, check_target
from roost.rollout.data.scenario import PromptScenario
from roost.rollout.episode import NOT_GENERATED, Task, Transcript
from tests.rollout.agents.talk import QWEN_TOKENIZER, ids
from tests.rollout.script import completion, ran

AGENT = "roost.rollout.agents.tools.ToolAgent"
TOOLS = "roost.rollout.environments.tools"
TEXT = Task("who?", {"prompt_text": "Who? ", "messages": [{"role": "user", "content": "Who? "}], "is_rendered": False})
CHAT = Task("sum", {"prompt_text": "", "messages": [{"role": "user", "content": "2+2?"}], "is_rendered": False})
ASKS = "<think>I look.</think><search> sun </search>"


class Servers(BaseHTTPRequestHandler):
    """A retrieval server and a code judge, which answer as RLinf's do."""

    asked = ()
    broken = 0  # answers with 503 that are still to come

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body))
        if type(self).broken:
            type(self).broken -= 1
            self.send_error(503)
            return
        if self.path == "/retrieve":
            found = [{"contents": f"{body['queries'][0]} {n}", "url": f"u{n}"} for n in range(3)]
            answer = {"result": [found if body["queries"] != ["nothing"] else []]}
        else:
            code = body["submissions"][0]["solution"]
            is_right = "boom" not in code
            answer = {"results": [{"success": is_right, "run_success": is_right, "reason": "exit 1", "stdout": code}]}
        sent = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Servers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def fresh():
    Servers.asked, Servers.broken = [], 0


def search(url, **keys):
    return {"search": {"_target_": f"{TOOLS}.Search", "url": url, "topk": 2, "wait_s": 0.01, **keys}}


def python(**keys):
    return {"python": {"_target_": f"{TOOLS}.Python", **keys}}


def call(name="python", **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def run_episode(*says, tools, task=CHAT, max_turns=5, limit=None, **agent):
    """The score, the text of the only sequence, the text that is learnt from, and the options_seen of turns."""
    left, options_seen = list(says), []

    async def sample(token_ids, turn, max_tokens, options=None):
        options_seen.append((max_tokens, options))
        text = left.pop(0)
        stops = options.stop if options else ()
        ends = any(text.endswith(stop) for stop in stops)
        return completion((*ids(text), *(() if ends else (QWEN_TOKENIZER.eos_token_id,))))

    async def playing():
        environment = {"_target_": f"{TOOLS}.ToolEnvironments", "tools": tools}
        scenario = AgentScenario(
            QWEN_TOKENIZER,
            {"_target_": "tests.rollout.agents.world.Tasks", "count": 1},
            {"_target_": AGENT, **agent},
            environment,
            max_turns,
            max_response_length=limit,
        )
        transcript = Transcript(sample)
        try:
            return await scenario.run_episode(task, transcript), transcript
        finally:
            await scenario.close()

    score, transcript = ran(playing())
    (tokens,) = transcript.sequences()
    learnt = QWEN_TOKENIZER.decode(tokens.token_ids[tokens.turns != NOT_GENERATED])
    return score, QWEN_TOKENIZER.decode(tokens.token_ids), learnt, options_seen


def test_a_search_continues_the_text_with_what_was_found(address):
    answer = "It is it.<answer>sun</answer>"
    score, text, learnt, options_seen = run_episode(
        ASKS, answer, tools=search(address), task=TEXT, parser="search", stop=["</answer>"]
    )
    found = "\n\n<information>\n[Doc 1](u0):\nsun 0\n\n[Doc 2](u1):\nsun 1\n</information>\n<think>\n"
    assert text == f"Who? {ASKS}{found}{answer}"
    assert learnt == ASKS + answer, "what the server says is not learnt from"
    assert score.answer == ASKS + answer, "rewards see the policy's turns, without the server's words"
    assert score.parts == {"tool_calls": 1.0, "failed_tool_calls": 0.0}
    assert options_seen[0][1].stop == ("</answer>", "</search>")
    assert Servers.asked == [("/retrieve", {"queries": ["sun"], "topk": 2, "return_scores": False})]


def test_a_prompt_that_is_text_is_cut_at_its_end(address):
    _, text, _, _ = run_episode(ASKS, "ok", tools=search(None), task=TEXT, parser="search", max_prompt_tokens=3)
    assert text.startswith(f"Who{ASKS}\n\n<information>")


@pytest.mark.parametrize(("max_turns", "asked"), [(1, 0), (2, 1)])
def test_the_last_turn_calls_nothing(address, max_turns, asked):
    score, _, _, _ = run_episode(ASKS, ASKS, tools=search(address), task=TEXT, parser="search", max_turns=max_turns)
    assert len(Servers.asked) == score.parts["tool_calls"] == asked


def test_nothing_found_is_said(address):
    reported = "<search>nothing</search>"
    _, text, _, _ = run_episode(reported, "ok", tools=search(address), task=TEXT, parser="search")
    assert "<information>\nNo search results are found.\n</information>" in text
    _, text, _, _ = run_episode(ASKS, "ok", tools=search(None), task=TEXT, parser="search")
    assert "<information>\nNo search results are found.\n</information>" in text


def test_a_busy_server_is_asked_again(address):
    Servers.broken = 2
    score, text, _, _ = run_episode(ASKS, "ok", tools=search(address), task=TEXT, parser="search")
    assert "sun 0" in text
    assert score.parts["failed_tool_calls"] == 0


@pytest.mark.parametrize("continues", [True, False])
def test_a_server_that_does_not_answer_is_an_error_that_the_policy_sees_or_the_end(address, continues):
    Servers.broken = 9
    score, text, learnt, _ = run_episode(
        ASKS, "ok", tools=search(address, tries=2), task=TEXT, parser="search", continues_at_failure=continues
    )
    assert score.parts == {"tool_calls": 1.0, "failed_tool_calls": 1.0}
    assert ("/retrieve: 503" in text) is continues
    assert (learnt == ASKS) is not continues


def test_a_search_whose_result_does_not_fit_ends_the_episode(address):
    room = len(ids(ASKS)) + 10
    score, text, _, options_seen = run_episode(ASKS, tools=search(address), task=TEXT, parser="search", limit=room)
    assert text == f"Who? {ASKS}"
    assert options_seen[0][0] == room, "a turn gets what the response has left"
    assert score.answer == ASKS


def test_calls_in_a_conversation_run_in_a_sandbox():
    first = call(code="x = int(input())\nx * 7", input="6")
    score, text, learnt, _ = run_episode(first, "It is 42.", tools=python())
    assert '"name": "python"' in text.split("<|im_start|>")[1], "the template shows the tools"
    assert "<tool_response>\nTool call success\nstdout: 42\n\n execution time: " in text
    assert learnt == f"{first}<|im_end|>It is 42.<|im_end|>"
    assert score.answer == f"{first}It is 42."


def test_code_that_fails_is_told():
    _, text, _, _ = run_episode(call(code="1 / 0", input=""), "ok", tools=python())
    assert "Tool call failure\nreason: raised\n" in text
    assert "ZeroDivisionError" in text


def test_a_code_judge_runs_code(address):
    score, text, _, _ = run_episode(
        call(code="print(1)\n2", input="x"), call(code="boom()", input=""), "ok", tools=python(url=address)
    )
    solution = "print(1)\n_ = (2)\nif _ is not None: print(repr(_))"
    assert Servers.asked[0] == (
        "/run/long-batch",
        {"type": "batch", "submissions": [{"type": "python", "solution": solution, "input": "x"}]},
    )
    assert "Tool call success\nstdout: print(1)" in text
    assert "Tool call failure\nreason: exit 1\n" in text
    assert score.parts == {"tool_calls": 2.0, "failed_tool_calls": 1.0}


def test_calls_that_cannot_be_made_are_answered():
    wrong = ["<tool_call>{</tool_call>", call("rm"), call(code=1)]
    _, text, _, _ = run_episode(*wrong, "ok", tools=python())
    assert "Failed to decode tool call: Expecting property name" in text
    assert "error: tool rm not exist" in text
    assert "'code' should be a string\nparameters format error, 'input' is missing" in text


def test_only_so_many_calls_of_a_turn_are_made_and_shown_at_this_length(address):
    both = call("search", query="sun") + call("search", query="moon")
    _, text, _, _ = run_episode(
        both, "ok", tools=search(address), max_parallel_calls=1, max_answer_characters=5, kept="start"
    )
    assert [body["queries"] for _, body in Servers.asked] == [["sun"]]
    assert "<tool_response>\n[Doc ...(truncated)\n</tool_response>" in text


def test_data_of_tasks_are_opened_before_a_run(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a question that is too long"}) + "\n")
    tasks = PromptScenario(QWEN_TOKENIZER, path=str(file), max_prompt_tokens=3)
    findings = Findings()
    environment = {"_target_": f"{TOOLS}.ToolEnvironments", "tools": search(None)}
    AgentScenario(QWEN_TOKENIZER, tasks, {"_target_": AGENT}, environment).open_data(Where(), findings)
    assert [found.what for found in findings.errors] == ["no row is left to train on"]


@pytest.mark.parametrize(
    ("tools", "code"), [({}, "RST-A029"), (search("http://h", top=1), "RST-A006"), ({"it": {}}, "RST-A005")]
)
def test_tools_are_checked_before_a_run(tools, code):
    findings = Findings()
    config = {"_target_": f"{TOOLS}.ToolEnvironments", "tools": tools}
    check_target(config, Where(path=("environment",)), ENVIRONMENT, findings)
    assert [found.code for found in findings.errors] == [code]
