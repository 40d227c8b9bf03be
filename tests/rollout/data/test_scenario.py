import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roost.config.findings import Findings, Where
from roost.rollout.data import tables
from roost.rollout.data.scenario import PromptScenario
from roost.rollout.data.tables import DataError
from roost.rollout.episode import Split

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ enable_thinking if enable_thinking is defined else '' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each character, and a chat template."""
    from tokenizers import Regex

    vocabulary = {chr(code): code - 31 for code in range(32, 127)} | {"<end>": 0, "é": 96}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    words.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    made.chat_template = TEMPLATE
    return made


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(count, tag="math", start=0):
    return [{"prompt": f"{tag} {n}?", "answer": n, "tag": tag, "level": n % 3} for n in range(start, start + count)]


def drawn(scenario, count, start=0, seed=5):
    order = scenario.order(Split.TRAIN, seed)
    return [scenario.task(Split.TRAIN, order.index(number)).name for number in range(start, start + count)]


def test_a_task_carries_the_row(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", rows_of(3))
    scenario = PromptScenario(tokenizer, path=path, answer="answer", tag_column="tag")
    task = scenario.task(Split.TRAIN, 1)
    assert (task.name, task.tag) == ("math 1?", "math")
    assert task.data["answer"] == 1 and task.data["level"] == 1 and task.data["prompt_text"] == "math 1?"
    assert task.data["messages"] == [{"role": "user", "content": "math 1?"}]


def test_a_column_of_answers_takes_the_place_of_rolls(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "result": 1}, {"prompt": "b", "result": 2, "ground_truth": 3}])
    for answer, found in ((None, [(None, None), (3, 3)]), ("result", [(1, 1), (2, 2)])):
        keys = {} if answer is None else {"answer": answer}
        scenario = PromptScenario(tokenizer, path=path, optional_answer="ground_truth", shuffle=False, **keys)
        tasks = [scenario.task(Split.TRAIN, number).data for number in range(2)]
        assert [(task.get("answer"), task.get("ground_truth")) for task in tasks] == found


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({}, "hi"),
        ({"chat_template": True}, "<user>hi<assistant>"),
        ({"chat_template": True, "system_prompt": "be brief"}, "<system>be brief<user>hi<assistant>"),
        ({"chat_template": True, "template_arguments": {"enable_thinking": False}}, "<user>hi<assistant>False"),
        ({"chat_template": "chatml"}, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        ({"chat_template": True, "prompt_suffix": "<think>\n"}, "<user>hi<assistant><think>\n"),
        ({"tag_column": "tag", "tag_templates": {"x": True}}, "<user>hi<assistant>"),
        (
            {
                "tag_column": "tag",
                "prompt_suffix": "not of x",
                "tag_templates": {"x": {"chat_template": True, "template_arguments": {"enable_thinking": True}}},
            },
            "<user>hi<assistant>True",
        ),
    ],
)
def test_text_prompts(keys, text, tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "hi", "tag": "x"}])
    assert PromptScenario(tokenizer, path=path, **keys).task(Split.TRAIN, 0).data["prompt_text"] == text


def test_columns_add_a_query_and_a_system_prompt_to_rows_that_have_them(tokenizer, tmp_path):
    rows = [{"prompt": "sum", "more": "1 2", "system": "be brief"}, {"prompt": "hi", "more": "", "system": None}]
    path = write(tmp_path / "a.jsonl", rows)
    keys = {"path": path, "query": "more", "system_column": "system", "system_prompt": "be kind", "shuffle": False}
    scenario = PromptScenario(tokenizer, chat_template=True, **keys)
    texts = [scenario.task(Split.TRAIN, index).data["prompt_text"] for index in range(2)]
    assert texts == ["<system>be brief<user>sum\n1 2<assistant>", "<system>be kind<user>hi<assistant>"]
    with pytest.raises(DataError, match="a system prompt needs a chat template"):
        PromptScenario(tokenizer, **keys).task(Split.TRAIN, 0)
    with pytest.raises(DataError, match="there is no column missing"):
        PromptScenario(tokenizer, path=path, query="missing").task(Split.TRAIN, 0)


@pytest.mark.parametrize("written", [list, json.dumps])
def test_messages_and_their_json_text_get_the_template(written, tokenizer, tmp_path):
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    path = write(tmp_path / "a.jsonl", [{"messages": written(messages)}])
    task = PromptScenario(tokenizer, path=path, system_prompt="unused").task(Split.TRAIN, 0)
    assert task.data["prompt_text"] == "<system>be kind<user>hi<assistant>" and task.data["messages"] == messages
    empty = PromptScenario(tokenizer, path=path, chat_template="empty").task(Split.TRAIN, 0)
    assert empty.data["prompt_text"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_long_prompts_are_dropped_refused_or_cut(tokenizer, tmp_path):
    path = write(
        tmp_path / "a.jsonl", [{"prompt": "abc"}, {"prompt": "abcdefgh"}, {"prompt": "é" * 5}, {"prompt": "é" * 6}]
    )
    bound = {"path": path, "max_prompt_tokens": 5}
    scenario = PromptScenario(tokenizer, **bound)
    assert [scenario.task(Split.TRAIN, n).name for n in range(scenario.size(Split.TRAIN))] == ["abc", "ééééé"]
    assert scenario.data_metrics == {"data/rows": 2.0, "data/dropped_rows": 2.0}
    assert scenario.data_summary() == "data: 2 rows; 2 rows dropped: prompts longer than 5 tokens"
    with pytest.raises(DataError, match=r"row 1 of .* has 8 tokens; max_prompt_tokens is 5"):
        PromptScenario(tokenizer, **bound, overlong="error").size(Split.TRAIN)
    cut = PromptScenario(tokenizer, **bound, overlong="truncate")
    assert cut.size(Split.TRAIN) == 4
    assert tokenizer.decode(list(cut._format.ids("abcdefgh", False)[0])) == "abcde"
    with pytest.raises(DataError, match="no row is left"):
        PromptScenario(tokenizer, path=path, max_prompt_tokens=2).size(Split.TRAIN)
    short = PromptScenario(tokenizer, path=path, min_prompt_tokens=6)
    assert [short.task(Split.TRAIN, n).name for n in range(short.size(Split.TRAIN))] == ["abcdefgh", "éééééé"]


def test_rows_are_selected_by_a_column_that_some_row_has(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "a"}] * 200 + [{"prompt": "b", "level": 2}, {"prompt": "c"}])
    assert PromptScenario(tokenizer, path=path, only={"level": 1}).size(Split.TRAIN) == 201
    assert PromptScenario(tokenizer, path=path, only={"split": "train"}).size(Split.TRAIN) == 202, "as ROLL selects"
    with pytest.raises(DataError, match="only selects rows by levels, a column that no row has; the columns are"):
        PromptScenario(tokenizer, path=path, only={"levels": 1}).size(Split.TRAIN)
    path = write(tmp_path / "b.jsonl", [{"prompt": "b", "level": 2}])
    with pytest.raises(DataError, match=r"no row is left to train on; 1 row dropped of 1: level is not 1.*change only"):
        PromptScenario(tokenizer, path=path, only={"level": 1}).size(Split.TRAIN)


def test_order(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", rows_of(10))
    in_order = PromptScenario(tokenizer, path=path, shuffle=False)
    assert drawn(in_order, 12) == [f"math {n % 10}?" for n in range(12)]
    shuffled = drawn(PromptScenario(tokenizer, path=path), 20)
    assert sorted(shuffled[:10]) == sorted(shuffled[10:]) and shuffled[:10] != shuffled[10:]
    seeded = PromptScenario(tokenizer, path=path, seed=3)
    assert drawn(seeded, 10, seed=1) == drawn(seeded, 10, seed=2) != shuffled[:10]
    dropping = PromptScenario(tokenizer, path=path, shuffle=False, drop_last=True, batch_size=4)
    assert drawn(dropping, 10) == [f"math {n % 8}?" for n in range(10)]


def test_a_run_resumed_in_an_epoch_has_the_same_batches(tokenizer, tmp_path):
    """Several sources, shares by tag, dropped and held-out rows: a new process continues at the number it is told."""
    files = [
        write(tmp_path / "math.jsonl", rows_of(37)),
        write(tmp_path / "code.jsonl", rows_of(11, "code")),
        write(tmp_path / "both.jsonl", [*rows_of(5, "code", 900), *rows_of(5, "math", 10_000)]),
    ]
    keys = {
        "path": files,
        "tag_column": "tag",
        "max_prompt_tokens": 9,
        "held_out": 4,
        "mix": {"math": 0.75, "code": 0.25},
        "batch_size": 8,
    }
    whole = drawn(PromptScenario(tokenizer, **keys), 160)
    assert drawn(PromptScenario(tokenizer, **keys), 160 - 52, start=52) == whole[52:]
    for start in range(0, 160, 8):
        assert sum(name.startswith("math") for name in whole[start : start + 8]) == 6
    assert not any("10000" in name for name in whole)  # too long
    tried = PromptScenario(tokenizer, **keys)
    held = {tried.task(Split.EVALUATION, n).name for n in range(tried.size(Split.EVALUATION))}
    assert len(held) == 4 and not held & set(whole)


def test_sources_are_mixed_by_weight(tokenizer, tmp_path):
    paths = [
        {"path": write(tmp_path / "a.jsonl", rows_of(4, "a")), "weight": 3},
        {"path": write(tmp_path / "b.jsonl", rows_of(40, "b")), "weight": 1, "limit": 2},
    ]
    names = drawn(PromptScenario(tokenizer, path=paths, batch_size=8), 64)
    assert [sum(name.startswith("a") for name in names[n : n + 8]) for n in range(0, 64, 8)] == [6] * 8
    assert {name for name in names if name.startswith("b")} == {"b 0?", "b 1?"}


def test_domains_come_from_tags_as_in_roll(tokenizer, tmp_path):
    rows = [*rows_of(3, "aime"), *rows_of(3, "KodCode"), *rows_of(3, "other")]
    rows += [row | {"domain": "code"} for row in rows_of(2, "swe")]
    scenario = PromptScenario(
        tokenizer,
        path=write(tmp_path / "a.jsonl", rows),
        tag_column="tag",
        domain_column="domain",
        domains={"math_rule": ["aime"], "code": ["KodCode"]},
        default_domain="math_rule",
        mix={"math_rule": 0.5, "code": 0.5},
        batch_size=2,
    )
    tags = [scenario.task(Split.TRAIN, n).tag for n in range(scenario.size(Split.TRAIN))]
    assert tags == ["aime"] * 3 + ["KodCode"] * 3 + ["math_rule"] * 3 + ["code"] * 2


def test_evaluation_sets_have_names(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", rows_of(4))
    sets = {"aime": write(tmp_path / "b.jsonl", rows_of(3, "aime")), "gpqa": {"path": path, "limit": 2}}
    scenario = PromptScenario(tokenizer, path=path, eval=sets)
    assert scenario.eval_sets == {"aime": range(3), "gpqa": range(3, 5)}
    assert [scenario.task(Split.EVALUATION, n).name for n in (0, 3)] == ["aime 0?", "math 0?"]
    assert PromptScenario(tokenizer, path=path).size(Split.EVALUATION) == 0


def test_limits_and_epochs(tokenizer, tmp_path):
    path = [write(tmp_path / "a.jsonl", rows_of(4)), write(tmp_path / "b.jsonl", rows_of(4, "b"))]
    assert PromptScenario(tokenizer, path=path, limit=6).size(Split.TRAIN) == 6
    assert PromptScenario(tokenizer, path=path, rows_per_epoch=100).size(Split.TRAIN) == 100
    assert PromptScenario(tokenizer, path=path, held_out=0.25).size(Split.EVALUATION) == 2


def found(scenario=None, config=None):
    findings = Findings()
    where = Where(path=("train", "data"))
    if config is not None:
        PromptScenario.check_config(config, where, findings)
    else:
        scenario.open_data(where, findings)
    return [(each.code, f"{each.what}; {each.why}; {each.fix}") for each in findings.found]


def test_findings_of_the_config(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows_of(2)), path)
    assert found(config={"path": str(path)}) == []
    ((code, text),) = found(config={"path": str(path), "prompt": "promt"})
    assert code == "RST-T064" and "the columns are prompt, answer, tag, level; did you mean prompt?" in text
    assert found(config={"path": str(tmp_path / "b.jsonl")})[0][0] == "RST-T063"
    assert found(config={"path": str(path), "promt": "x"})[0][0] == "RST-C023"
    assert found(config={"path": str(path), "shuffle": "yes", "overlong": "cut"})[0][0] == "RST-T060"
    assert found(config={})[0][0] == "RST-T060"


def test_findings_of_the_first_rows_without_a_tokenizer(tmp_path):
    path = write(tmp_path / "a.jsonl", rows_of(2))
    assert found(config={"path": path, "chat_template": True, "max_prompt_tokens": 9}) == []
    assert found(config={"path": path, "answer": "solution"})[0][0] == "RST-T064"
    ((code, text),) = found(config={"path": write(tmp_path / "b.jsonl", [*rows_of(2), {"prompt": 5}])})
    assert code == "RST-T065" and "b.jsonl: column prompt holds no prompt; it is 5" in text and "row 2 of" in text


def test_an_empty_file_is_told(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [])
    for described in (found(config={"path": path}), found(PromptScenario(tokenizer, path=path))):
        assert described == [("RST-T066", f"{path} has no rows; there is nothing to train on; name a file with rows")]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (("train", "data"), ("train", "data", "answer")),
        (("data", "train_data_paths"), ("data", "answer_key")),
        (("actor_train", "data_args", "file_name"), ("actor_train", "data_args", "answer")),
    ],
)
def test_a_finding_is_at_the_key_that_names_the_column(section, key, tmp_path):
    path, findings = write(tmp_path / "a.jsonl", rows_of(1)), Findings()
    where = Where("job.yaml", 3, 3, section, {key: ("command line", None, None)})
    PromptScenario.check_config({"path": path, "answer": "solution"}, where, findings)
    assert str(findings.found[0].where) == f"command line {'.'.join(key)}"


@pytest.mark.parametrize(
    ("row", "keys", "code", "text"),
    [
        ({"prompt": 5}, {}, "RST-T065", "row 2 of"),
        ({"prompt": None}, {}, "RST-T065", "it is null"),
        ({"prompt": [{"role": "user", "content": "hi"}]}, {"chat_template": False}, "RST-T065", "row 2 of"),
        ({"prompt": "hi"}, {"answer": "solution"}, "RST-T064", "prompt, answer, tag, level"),
        ({"prompt": "hi"}, {"mix": {"math": 1, "code": 1}, "tag_column": "tag"}, "RST-T070", "mix has code"),
        ({"prompt": "hi"}, {"chat_template": "chatlm"}, "RST-T060", "no such template"),
    ],
)
def test_findings_of_the_data(row, keys, code, text, tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [*rows_of(2), row])
    ((found_code, described),) = found(PromptScenario(tokenizer, path=path, **keys))
    assert found_code == code and text in described


def test_a_tokenizer_without_a_template_is_a_finding(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", rows_of(2))
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>")
    assert found(PromptScenario(bare, path=path, chat_template=True))[0][0] == "RST-T067"
    assert found(PromptScenario(bare, path=path, chat_template="chatml")) == []
