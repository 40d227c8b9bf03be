"""Images of data sets: columns, places in prompts, tokens, and what is refused."""

import json
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from roost.config.data import read_data
from roost.config.findings import Findings, Where
from roost.engines.protocol import Completion, Finish, VersionSpan
from roost.engines.weights.probe import AFTER_IMAGE, probe_image, probe_tokens, probe_with_image
from roost.rollout.agents.chat import ChatPolicy
from roost.rollout.agents.chat_format import ChatFormat
from roost.rollout.colours import QUESTION, VOCABULARY, square, write_colour_data
from roost.rollout.data.scenario import PromptScenario
from roost.rollout.data.tables import DataError
from roost.rollout.episode import Split, Transcript
from roost.rollout.gateway import _encode_options
from roost.trainer.batch import _sample
from roost.vision.image import Image, ImageError, decode_rgb, files_of, fill_images, from_cell, png, size, thumbnail
from roost.vision.processor import FAMILIES, Processor
from tests.rollout.script import ran
from tests.vision.shown import PAD, sample

RED, BLUE = square("red", 1), square("blue", 2)
BIG = square("blue", 2, edge=24)


def scenario(folders, path, **keys):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders["qwen2_5_vl"])
    return PromptScenario(tokenizer, **{"path": str(path), "chat_template": True, **keys})


def written(tmp_path, *rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


TEXT = {"type": "text", "text": "what ?"}
ROWS = [
    pytest.param({"prompt": "<image>what ?", "images": [{"bytes": RED, "path": None}]}, {}, [RED], id="verl's"),
    pytest.param({"prompt": "what ?", "photo": {"bytes": RED}}, {"images": "photo"}, [RED], id="a named column"),
    pytest.param({"prompt": "what ?", "a": RED, "b": BLUE}, {"images": ["a", "b"]}, [RED, BLUE], id="two columns"),
    pytest.param({"prompt": "<image>what ?", "image": "red.png"}, {}, [RED], id="a path beside the file"),
    pytest.param({"prompt": "<image> is <image> ?", "images": [RED, BIG]}, {}, [RED, BIG], id="two places"),
    pytest.param(
        {"prompt": [{"role": "user", "content": [{"type": "image", "text": None}, TEXT]}], "image": RED},
        {},
        [RED],
        id="parts of messages",
    ),
    pytest.param({"prompt": "<image>what ?", "answer": "1"}, {}, [], id="a marker without a column is text"),
]


@pytest.mark.parametrize(("row", "keys", "files"), ROWS)
def test_images_of_rows(folders, tmp_path, row, keys, files):
    (tmp_path / "red.png").write_bytes(RED)
    made = scenario(folders, written(tmp_path, row), **keys)
    task = made.task(Split.TRAIN, 0)
    assert files_of(task.data["messages"]) == files
    asked = []

    async def answer(token_ids, turn, max_tokens, options=None):
        asked.append((list(token_ids), options.images if options else ()))
        return Completion((16, 1), (-1.0, -1.0), Finish.STOP, (VersionSpan(0, 0, 2),))

    transcript = Transcript(answer)
    ran(made.run_episode(task, transcript))
    [(ids, images)] = asked
    counts = [4 if data is not BIG else 9 for data in files]
    assert ids.count(PAD) == sum(counts)
    assert [image.data for image in images] == files
    for image, count in zip(images, counts, strict=True):
        assert ids[image.start : image.start + count] == [PAD] * count
    [tokens] = transcript.sequences()
    assert _sample(tokens, None).images == images
    assert _sample(tokens, 5).images == tuple(image for image in images if image.start < 5)


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        pytest.param({"prompt": "<image> <image>", "images": [RED]}, {}, "2 image placeholders but 1 ", id="few"),
        pytest.param({"prompt": "<image>", "images": [RED, BLUE]}, {}, "1 image placeholder but 2 ", id="many"),
        pytest.param({"prompt": "<image>", "image": "none.png"}, {}, "there is no image", id="no such file"),
        pytest.param({"prompt": "what ?"}, {"images": "photo"}, "no column photo", id="no such column"),
        pytest.param({"prompt": "<image>", "image": RED}, {"chat_template": None}, "chat template", id="plain text"),
    ],
)
def test_what_does_not_fit_is_named(folders, tmp_path, row, keys, message):
    path = written(tmp_path, row)
    with pytest.raises(DataError, match=message):
        scenario(folders, path, **keys).task(Split.TRAIN, 0)
    findings = Findings()
    PromptScenario.check_config({"path": str(path), "chat_template": True, **keys}, Where(), findings)
    assert findings.num_errors == 1


def test_image_tokens_count_for_the_length_of_prompts(folders, tmp_path):
    rows = [{"prompt": f"<image>{QUESTION}", "image": data} for data in (RED, BIG)]
    whole = scenario(folders, written(tmp_path, *rows))
    short, long = (len(whole.prompt_ids(whole.task(Split.TRAIN, index))) for index in (0, 1))
    assert long - short == 5
    kept = scenario(folders, tmp_path / "rows.parquet", max_prompt_tokens=short)
    assert kept.size(Split.TRAIN) == 1
    cut = scenario(folders, tmp_path / "rows.parquet", max_prompt_tokens=5, overlong="truncate")
    assert PAD not in cut.prompt_ids(cut.task(Split.TRAIN, 1)), "no image is cut"


def test_data_of_the_example(folders, tmp_path):
    made = scenario(folders, write_colour_data(tmp_path / "rows.jsonl", 8), images="image")
    task = made.task(Split.TRAIN, 1)
    assert (task.name, task.data["answer"]) == (f"[image]{QUESTION}", "green")
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])["answer"] == "red"


def test_agents_show_images_in_any_turn(folders):
    """A conversation goes on with an image, its branch keeps the earlier ones, and another image is another message."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders["qwen2_5_vl"])
    asked = []

    async def answer(token_ids, turn, max_tokens, options=None):
        asked.append((list(token_ids), options.images if options else ()))
        return Completion((16, VOCABULARY["<|im_end|>"]), (-1.0, -1.0), Finish.STOP, (VersionSpan(0, 0, 2),))

    transcript = Transcript(answer)
    policy = ChatPolicy(transcript, ChatFormat(tokenizer))

    def user(data):
        part = {"type": "image_url", "image_url": {"url": Image(data).data_url}}
        return {"role": "user", "content": [part, {"type": "text", "text": "what"}]}

    async def talk():
        first = await policy.chat([user(RED)])
        said = {"role": "assistant", "content": first.text}
        for data in (BIG, BLUE):
            await policy.chat([user(RED), said, user(data)])

    ran(talk())
    processor = Processor.of_model(str(folders["qwen2_5_vl"]))
    assert [[image.data for image in images] for _, images in asked] == [[RED], [RED, BIG], [RED, BLUE]]
    for ids, images in asked:
        processor.layout(ids, images)
    assert asked[1][0][: len(asked[0][0])] == asked[0][0], "the sequence goes on"
    assert len(transcript.sequences()) == 2
    shown = transcript.sequences()[0].parts[0].messages
    assert shown == (("user", "[image]what"),)


def test_requests_of_workers_carry_images():
    from roost.rollout.episode import TurnOptions
    from roost.vision.image import from_data_url

    options = TurnOptions(images=(Image(RED, 3),))
    [[url, start]] = json.loads(json.dumps(_encode_options(options)))["images"]
    assert (from_data_url(url), start) == (RED, 3)


def test_files_and_thumbnails():
    from PIL import Image as Pillow

    wide = Pillow.new("RGB", (400, 100), (1, 2, 3))
    assert from_cell(wide, None) == png(wide)
    assert size(from_cell({"image": png(wide)}, None)) == (100, 400)
    assert size(from_data(thumbnail(png(wide)))) == (24, 96)
    assert thumbnail(b"abc") == ""
    with pytest.raises(ImageError, match="not an image"):
        size(b"abc")


def from_data(url):
    from roost.vision.image import from_data_url

    return from_data_url(url)


def test_places_and_markers():
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what ?"}]
    assert fill_images(messages, [RED])[1]["content"][0] == {"type": "image", "image": RED}
    with pytest.raises(ImageError, match="no user message"):
        fill_images(messages[:1], [RED])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param({"type": "url", "url": "https://a/b.png"}, "an image is 'https://a/b.png'; send it as", id="url"),
        pytest.param({"type": "base64", "data": "a"}, "an image is not base64", id="no base64"),
    ],
)
def test_sources_of_anthropic_that_cannot_be_read(source, message):
    with pytest.raises(ImageError, match=message):
        fill_images([{"role": "user", "content": [{"type": "image", "source": source}]}], [])


def test_a_sample_is_made_of_pieces(folders):
    one = sample(Processor.of_model(str(folders["qwen2_5_vl"])), [[0, 2, PAD, 3], [16]], [RED])
    assert one.token_ids.tolist() == [0, 2, PAD, PAD, PAD, PAD, 3, 16]


def test_samples_have_thumbnails(folders, tmp_path):
    from roost.rollout.episode import Episode, EpisodeReward, Group, token_numbers
    from roost.trainer.records.samples import samples_of

    async def answer(token_ids, turn, max_tokens, options=None):
        return Completion((16, 1), (-1.0, -1.0), Finish.STOP, (VersionSpan(0, 0, 2),))

    made = scenario(folders, written(tmp_path, {"prompt": "<image> or <image>", "images": [RED, BIG]}))
    task, transcript = made.task(Split.TRAIN, 0), Transcript(answer)
    score = ran(made.run_episode(task, transcript))
    group = Group(0, task, 0, (Episode(transcript.sequences(), EpisodeReward(1.0, score.shown), 0.1),))
    [record] = json.loads(json.dumps(samples_of([group], "train", 1, 0, token_numbers)))
    assert [size(from_data(url)) for url in record["images"]] == [(16, 16), (24, 24)]
    assert record["messages"][0]["content"] == "[image] or [image]"


def test_choices_follow_the_question(folders, tmp_path):
    row = {"question": "open ?", "choices": "['Yes', 'No']", "correct_answer": 1, "image": {"bytes": RED}}
    keys = {"prompt": "question", "choices": "choices", "answer": "correct_answer", "images": "image"}
    task = scenario(folders, written(tmp_path, row), **keys).task(Split.TRAIN, 0)
    [message] = task.data["messages"]
    assert message["content"][1]["text"] == "open ?\nChoices:\nA. Yes\nB. No\n"
    assert task.data["answer"] == {"choices": "['Yes', 'No']", "correct_answer": 1}


def test_images_are_upright(folders):
    """By their EXIF orientation, as vLLM shows them; the number of tokens is that of the file as it lies."""
    from PIL import Image as Pillow

    lying, written = Pillow.new("RGB", (32, 16), "blue"), BytesIO()
    lying.paste("red", (0, 0, 16, 16))
    exif = lying.getexif()
    exif[0x0112] = 6  # to be turned clockwise
    lying.save(written, "PNG", exif=exif)
    upright = decode_rgb(written.getvalue())
    assert upright.size == (16, 32)
    assert [upright.getpixel(place) for place in ((8, 2), (8, 30))] == [(255, 0, 0), (0, 0, 255)]
    processor = Processor.of_model(str(folders["qwen2_5_vl"]))
    image = Image(written.getvalue())
    assert processor.patches(image).grid == (1, 8, 4)
    assert len(processor.span(image)) == processor.count(image.data)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_images_are_on_white(mode):
    from PIL import Image as Pillow

    clear, written = Pillow.new("RGBA", (4, 4), (0, 0, 0, 0)), BytesIO()
    clear.paste((0, 0, 0, 255), (0, 0, 2, 4))
    clear.convert(mode).save(written, "PNG")
    shown = decode_rgb(written.getvalue())
    assert (shown.mode, shown.getpixel((0, 0)), shown.getpixel((3, 3))) == ("RGB", (0, 0, 0), (255, 255, 255))


def test_images_that_cannot_be_read_are_named(folders, tmp_path):
    from transformers import AutoTokenizer

    from roost.engines.tiny_model import write_tiny_model

    broken = scenario(folders, written(tmp_path, {"prompt": "<image>", "image": b"abc"}), max_prompt_tokens=32)
    with pytest.raises(DataError, match="3 bytes are not an image"):
        broken.size(Split.TRAIN)
    path = written(tmp_path, {"prompt": "<image>", "image": RED})
    text = AutoTokenizer.from_pretrained(write_tiny_model(tmp_path / "text"))
    with pytest.raises(DataError, match="reads text alone"):
        PromptScenario(text, path=str(path), chat_template="chatml", max_prompt_tokens=32).size(Split.TRAIN)


def test_images_of_a_shape_that_the_model_does_not_take_are_named(folders, tmp_path):
    from PIL import Image as Pillow

    line = png(Pillow.new("RGB", (300, 1)))
    rows = written(tmp_path, {"prompt": "<image>", "image": line})
    with pytest.raises(DataError, match="an image of 300 x 1 pixels does not suit the model"):
        scenario(folders, rows, max_prompt_tokens=32).size(Split.TRAIN)
    with pytest.raises(ImageError, match="an image of 300 x 1 pixels does not suit the model"):
        Processor.of_model(str(folders["qwen2_vl"])).span(Image(line))


@pytest.mark.parametrize(
    ("data", "key_path"),
    [
        pytest.param({"path": "a.jsonl", "images": 3, "eval": {"aime": "b.jsonl"}}, "data.images", id="of all sources"),
        pytest.param({"path": [{"path": "a.jsonl", "images": 3}]}, "data.path.images", id="of one source"),
    ],
)
def test_wrong_columns_are_reported_where_they_stand(data, key_path):
    findings = Findings()
    assert read_data(data, Where(path=("data",)), findings) is None
    assert [found.where.key_path for found in findings.found] == [key_path]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_probe_with_an_image_fits_into_the_context_of_the_example(folders, family):
    example = yaml.safe_load((Path(__file__).parents[2] / "examples/vision/rlinf.yaml").read_text())
    processor = Processor.of_model(str(folders[family]))
    tokens, (image,) = probe_with_image(probe_tokens(100), processor)
    assert len(tokens) < example["train"]["engine_options"]["max_context"], "and an engine generates a token more"
    assert sum(token != processor.token_id for token in tokens) == 1 + AFTER_IMAGE
    assert (image.data, image.start) == (probe_image(), 1)
