"""What OpenAI's routes have in common: their fields, and whole or streamed replies."""

from __future__ import annotations

from starlette.responses import Response

from roost.engines.generation import Sampling
from roost.net.errors import Refused
from roost.torch_engine.in_flight import Asked
from roost.torch_engine.replies import Form, StreamReply, WholeReply
from roost.torch_engine.request_fields import RequestId, SamplingFields, StreamOptions, room_for_completion
from roost.torch_engine.served import Served


class OpenAIFields(SamplingFields):
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    request_id: RequestId | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def sampling_for(self, prompt: tuple[int, ...], max_tokens: int | None, max_context: int) -> Sampling:
        """How a prompt is completed; as with OpenAI, more than the context holds is refused rather than cut."""
        room = room_for_completion(len(prompt), max_context)
        if max_tokens is not None and max_tokens > room:
            raise Refused(
                f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, together more than the context "
                f"of {max_context}; write at most {room}",
                field="max_tokens",
            )
        return self.sampling(room if max_tokens is None else max_tokens)


def reply(served: Served, body: OpenAIFields, asked: Asked, form: Form) -> Response:
    if not body.stream:
        if body.stream_options is not None:
            raise Refused("stream_options are for streams; write stream: true", field="stream_options")
        return WholeReply(served.in_flight, asked, form)
    if asked.wants_prompt_logprobs:
        raise Refused("prompt_logprobs do not come in a stream; write stream: false", field="prompt_logprobs")
    return StreamReply(served.in_flight, asked, form, bool(body.stream_options and body.stream_options.include_usage))
