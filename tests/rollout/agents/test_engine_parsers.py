"""Parsers of engines: stand-ins with the signatures of vLLM's and SGLang's, which are not installed with the tests."""

import sys
import types
from dataclasses import dataclass

import pytest

from roost.rollout.agents import engine_parsers
from roost.rollout.agents.chat_format import ParsedReply, ToolCall, parse_reply
from roost.rollout.agents.engine_parsers import parser_of

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
FOUND = ParsedReply("Look.", (ToolCall("find", '{"word": "sun"}'),), "Hm.")
TEXT = '[[Hm.]]Look. CALL find {"word":"sun"}'


def split(text):
    thought, rest = text.removeprefix("[[").split("]]")
    return thought, rest


def calls(text):
    content, _, call = text.partition("CALL ")
    return content, call.split(" ", 1)


@dataclass
class Request:
    model: str
    messages: list
    tools: list | None


class ToolParser:
    def __init__(self, tokenizer, tools=None):
        self._tools = tools

    def extract_tool_calls(self, model_output, request):
        assert request.tools == self._tools == TOOLS
        content, (name, arguments) = calls(model_output)
        function = types.SimpleNamespace(name=name, arguments=arguments)
        return types.SimpleNamespace(content=content, tool_calls=[types.SimpleNamespace(function=function)])


class Reasoning:
    def __init__(self, *given):
        assert given

    def extract_reasoning(self, model_output, request):
        return split(model_output)

    def parse_non_stream(self, text):
        return split(text)


class FunctionCallParser:
    def __init__(self, tools, tool_call_parser):
        if tool_call_parser != "mine":
            raise ValueError(f"Unsupported tool_call_parser: {tool_call_parser}")

    def parse_non_stream(self, text):
        content, (name, arguments) = calls(text)
        return content, [types.SimpleNamespace(name=name, parameters=arguments)]


MODULES = {
    "vllm": {
        "vllm.tool_parsers": {
            "ToolParserManager": types.SimpleNamespace(get_tool_parser={"mine": ToolParser}.__getitem__)
        },
        "vllm.reasoning": {
            "ReasoningParserManager": types.SimpleNamespace(get_reasoning_parser={"mine": Reasoning}.__getitem__)
        },
        "vllm.entrypoints.openai.chat_completion.protocol": {"ChatCompletionRequest": Request},
    },
    "sglang": {
        "sglang.srt.function_call.function_call_parser": {"FunctionCallParser": FunctionCallParser},
        "sglang.srt.parser.reasoning_parser": {"ReasoningParser": Reasoning},
        "sglang.srt.entrypoints.openai.protocol": {"Tool": types.SimpleNamespace},
    },
}


@pytest.fixture(params=["vllm", "sglang"])
def installed(request, monkeypatch):
    monkeypatch.setattr(engine_parsers.importlib.util, "find_spec", lambda name: name == request.param or None)
    for name, holds in MODULES[request.param].items():
        module = types.ModuleType(name)
        vars(module).update(holds)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("installed")
def test_an_engine_s_parsers_split_a_turn():
    parser = parser_of("tokenizer", "mine", "mine")
    assert parser(TEXT, TOOLS) == FOUND
    assert parser("[[Hm.]]Yes.") == ParsedReply("Yes.", (), "Hm.")
    with pytest.raises((KeyError, ValueError)):
        parser_of("tokenizer", "other")


@pytest.mark.usefixtures("installed")
def test_one_without_the_other_and_a_parser_that_raises():
    hermes = '[[Hm.]]Look.<tool_call>{"name": "find", "arguments": {"word": "sun"}}</tool_call>'
    assert parser_of("tokenizer", None, "mine")(hermes, TOOLS) == FOUND
    assert parser_of("tokenizer", None, "mine")("no brackets") == ParsedReply("no brackets")


def test_without_names_and_without_engines(monkeypatch):
    monkeypatch.setattr(engine_parsers.importlib.util, "find_spec", lambda name: None)
    assert parser_of("tokenizer") is parse_reply
    with pytest.raises(ValueError, match="neither is installed here"):
        parser_of("tokenizer", "kimi_k2")
