"""Rewards as users write them; configs in the tests name them."""


class Length:
    def __init__(self, most=100, *, least=0):
        self.most, self.least = most, least

    async def score(self, answer):
        return float(self.least <= len(answer.text) <= self.most)

    async def close(self):
        pass


class Anything(Length):
    def __init__(self, **keys):
        super().__init__()
        self.keys = keys


class Refuses(Length):
    def __init__(self, most=1):
        raise OSError(f"no file {most}")


class NotAsync:
    def score(self, answer):
        return 0.0

    async def close(self):
        pass


class NeverCloses:
    async def score(self, answer):
        return 0.0


def short(text, most=10):
    return len(text) <= most


async def short_async(text):
    return len(text) <= 10


def needs_more(text, rubric):
    return len(rubric)


NOTHING = 7
