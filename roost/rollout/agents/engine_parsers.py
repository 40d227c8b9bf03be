"""Tool and reasoning parsers of vLLM and SGLang, by the names that their servers take."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from typing import Any

from roost.rollout.agents.chat_format import ParsedReply, Parser, Tools, parse_reply, split_reasoning, tool_call

logger = logging.getLogger(__name__)

PACKAGES = ("vllm", "sglang")


def parser_of(tokenizer: Any, tool_parser: str | None = None, reasoning_parser: str | None = None) -> Parser:
    """Return the parser of turns; it reads Hermes and Qwen style if no name is given."""
    if tool_parser is None and reasoning_parser is None:
        return parse_reply
    package = next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), None)
    if package is None:
        raise ValueError(
            f"{tool_parser or reasoning_parser} is a parser of vLLM or SGLang, and neither is installed here; install "
            "one where agents run, or leave out tool_parser and reasoning_parser to parse Hermes and Qwen style"
        )
    parser = VllmParser if package == "vllm" else SglangParser
    return parser(tokenizer, tool_parser, reasoning_parser)


class EngineParser:
    """Splits turns with an engine's parsers; without a name, or if a parser raises, in Hermes and Qwen style."""

    def __init__(self, tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None) -> None:
        self._tokenizer, self._tool_parser_name, self._reasoning_parser_name = tokenizer, tool_parser, reasoning_parser
        self._prepare()

    def __call__(self, text: str, tools: Tools = None) -> ParsedReply:
        try:
            reasoning, rest = split_reasoning(text) if self._reasoning_parser_name is None else self._split(text)
            if self._tool_parser_name is None:
                spoken = parse_reply(rest)
                return ParsedReply(spoken.text, spoken.calls, reasoning.strip())
            content, calls = self._extract(rest, tools) if tools else (rest, [])
        except Exception as error:  # a parser must not fail a turn that was generated
            logger.warning("a turn could not be parsed: %s: %s", type(error).__name__, error)
            return parse_reply(text)
        return ParsedReply(content.strip(), tuple(tool_call(*call) for call in calls), reasoning.strip())

    def _prepare(self) -> None:
        """Find the parsers; raise for an unknown name."""
        raise NotImplementedError

    def _split(self, text: str) -> tuple[str, str]:
        """Return the reasoning of a turn, and the rest."""
        raise NotImplementedError

    def _extract(self, text: str, tools: Tools) -> tuple[str, list[tuple[str, str]]]:
        """Return the text outside of tool calls, and the calls as (name, arguments)."""
        raise NotImplementedError


class VllmParser(EngineParser):
    """Parsers of vLLM (`--tool-call-parser`, `--reasoning-parser`)."""

    def _prepare(self) -> None:
        if self._tool_parser_name is not None:
            manager = importlib.import_module("vllm.tool_parsers").ToolParserManager
            self._tool_parser_class = manager.get_tool_parser(self._tool_parser_name)
            self._tool_parser_for(self._request(None))  # raises if the tokenizer lacks a token of the parser
        if self._reasoning_parser_name is not None:
            manager = importlib.import_module("vllm.reasoning").ReasoningParserManager
            self._reasoning_parser = manager.get_reasoning_parser(self._reasoning_parser_name)(self._tokenizer)

    def _split(self, text: str) -> tuple[str, str]:
        reasoning, content = self._reasoning_parser.extract_reasoning(text, self._request(None))
        return reasoning or "", content or ""

    def _extract(self, text: str, tools: Tools) -> tuple[str, list[tuple[str, str]]]:
        request = self._request(tools)
        found = self._tool_parser_for(request).extract_tool_calls(text, request)
        return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]

    def _tool_parser_for(self, request: Any) -> Any:
        takes_tools = "tools" in inspect.signature(self._tool_parser_class).parameters  # newer releases
        return self._tool_parser_class(self._tokenizer, *([request.tools] if takes_tools else []))

    def _request(self, tools: Tools) -> Any:
        protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
        messages = [{"role": "user", "content": ""}]
        return protocol.ChatCompletionRequest(model="policy", messages=messages, tools=list(tools or ()) or None)


class SglangParser(EngineParser):
    """Parsers of SGLang (`--tool-call-parser`, `--reasoning-parser`)."""

    def _prepare(self) -> None:
        if self._tool_parser_name is not None:
            module = importlib.import_module("sglang.srt.function_call.function_call_parser")
            self._tool_parser_class = module.FunctionCallParser
            self._tool_parser_class([], self._tool_parser_name)  # raises for an unknown name
        if self._reasoning_parser_name is not None:
            self._reasoning_parser_class = importlib.import_module("sglang.srt.parser.reasoning_parser").ReasoningParser
            self._reasoning_parser_class(self._reasoning_parser_name)

    def _split(self, text: str) -> tuple[str, str]:
        reasoning, content = self._reasoning_parser_class(self._reasoning_parser_name).parse_non_stream(text)
        return reasoning or "", content or ""

    def _extract(self, text: str, tools: Tools) -> tuple[str, list[tuple[str, str]]]:
        tool = importlib.import_module("sglang.srt.entrypoints.openai.protocol").Tool
        offered = [tool(**each) for each in tools or ()]
        content, calls = self._tool_parser_class(offered, self._tool_parser_name).parse_non_stream(text)
        return content or "", [(call.name, call.parameters) for call in calls]
