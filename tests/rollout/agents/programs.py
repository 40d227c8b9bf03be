"""Programs as people write them for OpenAI's client, and agents that a config may name."""

import asyncio

import openai


def run_episode(base_url, api_key, model, task, environment, prefix=""):
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        messages, seen = [], environment.first
        while not seen.is_over:
            messages.append({"role": "user", "content": prefix + seen.content})
            reported = client.chat.completions.create(model=model, messages=messages).choices[0].message.content
            messages.append({"role": "assistant", "content": reported})
            seen = environment.step(reported)


async def play_async(base_url, api_key, model, task, environment):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages, seen = [{"role": "system", "content": task.name}], environment.first
        while not seen.is_over:
            messages.append({"role": "user", "content": seen.content})
            answer = await client.chat.completions.create(model=model, messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            seen = await environment.step(answer.choices[0].message.content)


def answer_alone(base_url, api_key, model, task, environment):
    """A program of its own: it knows nothing of environments."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        client.chat.completions.create(model=model, messages=task.data["messages"])


def fail(base_url, api_key, model, task, environment):
    raise LookupError("mine")


def wrapped(**keys):
    return play_async(**keys)


def needy(base_url, api_key, model, task, environment, prefix):
    pass


def worldless(base_url, api_key, model, task):
    pass


class Guesser:
    """An agent of Roost's own protocol; each turn of it is a step."""

    def __init__(self, task, hint, tries=2):
        self._hint, self._tries = hint, tries

    async def run_episode(self, policy, environment, first, max_turns):
        seen = first
        for _ in range(max_turns):
            if seen.is_over:
                return
            reply = await policy.chat([{"role": "user", "content": f"{self._hint} {seen.content}"}])
            for _ in range(self._tries):
                seen = await environment.step(reply.text)


class Silent:
    def __init__(self, task):
        pass

    async def run_episode(self, policy, environment, first, max_turns):
        pass


class Blocking:
    def __init__(self, task):
        pass

    def run_episode(self, policy, environment, first, max_turns):
        pass


class Stuck:
    def __init__(self, task):
        pass

    async def run_episode(self, policy, environment, first, max_turns):
        await asyncio.Event().wait()


class Coder:
    """An agent of the AppWorld contract that does not derive from its class."""

    def __init__(self, *, task, llm, style):
        self._llm, self._messages = llm, []

    def next_code_block(self, output, world):
        from roost.rollout.agents.appworld_agent import UserMessage

        self._messages.append(UserMessage(output or "begin"))
        self._messages.append(self._llm.generate(self._messages))
        return self._messages[-1].content

    def history_as_messages(self, last_execution_output):
        return self._messages


class Anything:
    def __init__(self, task, **keys):
        pass

    async def run_episode(self, policy, environment, first, max_turns):
        pass


class NoTask:
    async def run_episode(self, policy, environment, first, max_turns):
        pass


class NoAgent:
    pass
