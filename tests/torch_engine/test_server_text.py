"""Text from tokens that come one by one: whole characters, stop strings, and nothing lost."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from roost.engines.protocol import Finish, Sampling, VersionSpan
from roost.engines.tiny_model import write_byte_tokenizer
from roost.torch_engine.scheduler import Progress
from roost.torch_engine.text import Sample, StopScanner, TextCodec, TextStream, TextWanted

TEXTS = ["plain", "né à l'été", "日本語", "😀😀 👩‍👩‍👧", "mixed 日 and é", " two  spaces ", "a\nb\t"]


@pytest.fixture(scope="module")
def byte_codec(tmp_path_factory):
    """Every byte is a token: most characters outside ASCII take several."""
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return TextCodec(PreTrainedTokenizerFast.from_pretrained(folder))


@pytest.fixture(scope="module")
def piece_codec():
    """Words carry their space before them, the first loses it, and bytes stand in for unknown characters."""
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁the", "▁cat", "s", "▁", "▁naïve"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def streamed(codec, ids, prompt=()):
    stream = TextStream(codec, prompt, skip_special_tokens=True)
    return [stream.add((token_id,)) for token_id in ids] + [stream.rest()]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back_in_whole_characters(byte_codec, text):
    pieces = streamed(byte_codec, byte_codec.encode(text * 8))
    assert "".join(pieces) == text * 8
    assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(30))
def test_any_bytes_give_the_text_they_give_at_once(byte_codec, seed):
    draw = random.Random(seed)
    ids = []
    for _ in range(draw.randrange(1, 60)):
        ids += byte_codec.encode(draw.choice(TEXTS)) if draw.random() < 0.5 else (draw.randrange(260),)
    assert "".join(streamed(byte_codec, ids)) == byte_codec.decode(ids)


@pytest.mark.parametrize("seed", range(10))
def test_words_and_characters_in_bytes_give_the_text_they_give_at_once(piece_codec, seed):
    draw = random.Random(seed)
    ids = []
    for _ in range(40):
        ids += draw.choice(TEXTS).encode() if draw.random() < 0.5 else (draw.randrange(256, 261),)
    pieces = streamed(piece_codec, ids)
    assert "".join(pieces) == piece_codec.decode(ids)
    assert not any("�" in piece for piece in pieces)


CONTINUED = {
    "a word after a word has its space": ([256], [257], " cat"),
    "nothing before it, no space": ([], [257], "cat"),
    "the rest of a word": ([257], [258], "s"),
    "a character begun in the prompt": ([257, 0xC3], [0xA9, 257], "� cat"),
}


@pytest.mark.parametrize(("prompt", "ids", "text"), CONTINUED.values(), ids=CONTINUED.keys())
def test_the_prompt_decides_how_a_completion_begins(piece_codec, prompt, ids, text):
    assert "".join(streamed(piece_codec, ids, prompt)) == text


STOPS = {
    "in one piece": (("END",), ["one END two"], "one ", "END"),
    "over three pieces": (("END",), ["one E", "N", "D two"], "one ", "END"),
    "a beginning that leads nowhere": (("END",), ["E", "N", "E", "x"], "ENEx", None),
    "a beginning at the very end": (("END",), ["one EN"], "one EN", None),
    "a beginning inside a beginning": (("aab",), ["a", "a", "a", "b"], "a", "aab"),
    "the first of two": (("two", "one"), ["one two"], "", "one"),
    "written first, where both begin together": (("ab", "a"), ["xab"], "x", "ab"),
    "several characters of one": (("日本",), ["x日", "本y"], "x", "日本"),
}


@pytest.mark.parametrize(("stops", "pieces", "text", "stop"), STOPS.values(), ids=STOPS.keys())
def test_stop_strings(stops, pieces, text, stop):
    scanner, shown, found = StopScanner(stops), "", None
    for piece in pieces:
        scanned = scanner.add(piece)
        shown, found = shown + scanned.text, found or scanned.stop
        if found:
            break
    assert (shown + ("" if found else scanner.rest()), found) == (text, stop)


def test_a_stop_string_that_is_kept():
    assert StopScanner(("END",), keeps_stop=True).add("one END two").text == "one END"


def sample_of(
    codec,
    text,
    stops=(),
    keeps_stop=False,
    stop_token_ids=(),
    version_changes_at=None,
    finish=Finish.LENGTH,
    min_tokens=0,
):
    """A completion whose tokens came one by one."""
    ids = codec.encode(text)
    sampling = Sampling(stop_token_ids=stop_token_ids, min_tokens=min_tokens)
    sample = Sample(0, (1,), sampling, TextWanted(codec, stops, keeps_stop))
    for place, token_id in enumerate(ids):
        if sample.finish is None:
            version = 2 if version_changes_at is not None and place >= version_changes_at else 1
            is_last = place == len(ids) - 1
            sample.take(Progress((token_id,), (-0.5,), version, finish if is_last else None))
    return sample


@pytest.mark.parametrize(("min_tokens", "text"), [(4, "one "), (7, "one END two "), (99, "one END two END")])
def test_a_stop_string_ends_nothing_before_the_minimum(byte_codec, min_tokens, text):
    sample = sample_of(byte_codec, "one END two END", stops=("END",), min_tokens=min_tokens)
    assert sample.text == text


def test_a_stop_string_cuts_tokens_logprobs_and_versions(byte_codec):
    sample = sample_of(byte_codec, "one END two", stops=("END",), version_changes_at=5)
    assert (sample.text, sample.finish, sample.stop_reason) == ("one ", Finish.STOP, "END")
    assert byte_codec.decode(sample.token_ids) == "one END"
    assert len(sample.logprobs) == len(sample.token_ids) == 7
    assert sample.versions == (VersionSpan(1, 0, 5), VersionSpan(2, 5, 7))


ENDS = {
    "the model's own end is not written": ({"finish": Finish.STOP}, "cat", None),
    "an end that is kept": ({"finish": Finish.STOP, "keeps_stop": True}, "cats", None),
    "out of tokens": ({}, "cats", None),
    "a stop token that was asked for": ({"finish": Finish.STOP, "stop_token_ids": (82,)}, "cat", 82),
    "a stop string in the last characters": ({"stops": ("ts",)}, "ca", "ts"),
    "half a stop string at the end": ({"stops": ("sx",)}, "cats", None),
}


@pytest.mark.parametrize(("given", "text", "reason"), ENDS.values(), ids=ENDS.keys())
def test_how_a_completion_ends(byte_codec, given, text, reason):
    sample = sample_of(byte_codec, "cats", **given)
    assert (sample.text, sample.stop_reason) == (text, reason)


def test_an_aborted_completion_keeps_what_it_has(byte_codec):
    sample = Sample(0, (1,), Sampling(), TextWanted(byte_codec, stops=("abc",)))
    sample.take(Progress(byte_codec.encode("xab"), (-1.0, -2.0, -3.0), 4))
    sample.take(Progress((), (), 4, Finish.ABORT))
    assert (sample.text, sample.finish, sample.stop_reason) == ("xab", Finish.ABORT, None)
    assert sample.versions == (VersionSpan(4, 0, 3),)
