import pytest

pytest.importorskip("torch")

import json

import numpy as np
from transformers import AutoTokenizer

from roost.config.compose import load
from roost.config.data import Distillation
from roost.config.findings import Findings
from roost.config.notations.notation import read_job
from roost.config.train import ImportanceSamplingLevel, LossAggregation, Objective
from roost.config.train_choices import Divergence
from roost.learner.sample import NOT_GENERATED
from roost.placement.planner import try_plan
from roost.rollout.arithmetic import Arithmetic, write_arithmetic_model
from roost.rollout.data.scenario import PromptScenario
from roost.rollout.episode import Split, Task
from roost.trainer.sft import Conversations

ROLES = {"user": "+", "assistant": "-"}
# `+question=` and `-answer<end> `; the space after the end belongs to the template.
CHAT = (
    "{% for message in messages %}{{ '+' if message['role'] == 'user' else '-' }}{{ message['content'] }}"
    "{{ '=' if message['role'] == 'user' else '<end> ' }}{% endfor %}{% if add_generation_prompt %}-{% endif %}"
)
# The same, but answers before the last are left empty, as some templates drop the reasoning of earlier turns.
FORGETFUL = CHAT.replace(
    "{{ message['content'] }}", "{{ message['content'] if message['role'] == 'user' or loop.last }}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(write_arithmetic_model(tmp_path_factory.mktemp("model"), hidden_size=16))


def shown(tokenizer, sample):
    """The whole text, and the text that is learnt."""
    learnt = sample.token_ids[sample.turns != NOT_GENERATED]
    return tokenizer.decode(sample.token_ids), tokenizer.decode(learnt)


CONVERSATION = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
]


def test_loss_is_on_the_turns_of_the_assistant_and_their_ends(tokenizer):
    tokenizer.chat_template = CHAT
    (sample,) = Conversations(None, tokenizer).samples_of(Task("sums", {"messages": CONVERSATION}))
    assert shown(tokenizer, sample) == ("+1+1=-2<end> +2+2=-4<end> ", "2<end>4<end>")
    assert len(set(sample.turns[sample.turns != NOT_GENERATED])) == 2, "each answer is a turn"
    assert np.all(sample.advantages == 1)


def test_a_turn_that_the_template_renders_differently_later_is_learnt_in_a_sequence_of_its_own(tokenizer):
    tokenizer.chat_template = FORGETFUL
    samples = Conversations(None, tokenizer).samples_of(Task("sums", {"messages": CONVERSATION}))
    found = [shown(tokenizer, sample) for sample in samples]
    assert found == [("+1+1=-2<end> ", "2<end>"), ("+1+1=-<end> +2+2=-4<end> ", "4<end>")]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({"messages": CONVERSATION[:1], "reply": "2"}, id="messages"),
        pytest.param({"messages": CONVERSATION[:2], "reply": "2"}, id="a column instead of the assistant's messages"),
    ],
)
def test_a_completion_in_a_column_follows_the_messages(tokenizer, data):
    tokenizer.chat_template = CHAT
    if len(data["messages"]) == 2:
        data = {**data, "messages": [*data["messages"], CONVERSATION[2]], "reply": "4"}
    (sample,) = Conversations(None, tokenizer, "reply").samples_of(Task("sums", data))
    text, learnt = shown(tokenizer, sample)
    assert text.endswith(f"-{data['reply']}<end> ") and learnt.endswith(f"{data['reply']}<end>")


def test_plain_prompts_and_completions_get_an_end(tokenizer):
    samples, left_out = Conversations(Arithmetic(tokenizer, 2), tokenizer).samples(Split.TRAIN, [4, 8])
    assert [shown(tokenizer, sample) for sample in samples] == [("1+1=2<end>", "2<end>"), ("2+2=4<end>", "4<end>")]
    assert left_out == 0


def test_long_conversations_are_left_out_and_counted(tokenizer):
    data = Conversations(Arithmetic(tokenizer, 9), tokenizer, most_tokens=6)
    samples, left_out = data.samples(Split.TRAIN, [0, 99])  # 9+9=18 has 7 tokens
    assert (len(samples), left_out) == (1, 1)


def test_prompts_are_learnt_if_wanted(tokenizer):
    data = Conversations(Arithmetic(tokenizer, 2), tokenizer, learns_prompts=True)
    (sample,) = data.samples(Split.TRAIN, [4])[0]
    assert shown(tokenizer, sample) == ("1+1=2<end>", "1+1=2<end>")


def test_rows_with_another_value_in_a_column_are_left_out(tokenizer, tmp_path):
    rows = [{"prompt": str(n), "answer": "2", "split": "test" if n % 3 else "train"} for n in range(9)]
    path = data_file(tmp_path / "rows.jsonl", [*rows, {"prompt": "9", "answer": "2"}])
    scenario = PromptScenario(tokenizer, path=path, only={"split": "train"}, eval=path, shuffle=False)
    texts = [scenario.task(Split.TRAIN, index).data["prompt_text"] for index in range(scenario.size(Split.TRAIN))]
    assert texts == ["0", "3", "6", "9"] and scenario.size(Split.EVALUATION) == 10
    assert scenario.data_summary().endswith("6 rows dropped: split is not train")


def test_a_row_without_a_completion_names_its_columns(tokenizer):
    with pytest.raises(ValueError, match=r"no column reply; columns: prompt_text, text\. Write train\.completion"):
        Conversations(None, tokenizer, "reply").samples_of(Task("1", {"prompt_text": "1", "text": "2"}))


def test_a_row_that_cannot_be_read_is_named(tokenizer, tmp_path):
    path = data_file(
        tmp_path / "rows.jsonl", [{"prompt": "1", "answer": "2"}] * 1100 + [{"prompt": None, "answer": "2"}]
    )
    data = Conversations(PromptScenario(tokenizer, path=path, shuffle=False), tokenizer)
    with pytest.raises(ValueError, match=r"row 1100 of .* holds no prompt"):
        data.samples(Split.TRAIN, [1100])


def data_file(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ASKED = [CONVERSATION[0]]


@pytest.mark.parametrize(
    ("row", "keys", "text", "learnt"),
    [
        ({"prompt": "1+1=", "answer": "2"}, {"answer": "answer"}, "1+1=2<end>", "2<end>"),
        ({"prompt": ASKED, "answer": "2"}, {"answer": "answer"}, "+1+1=-2<end> ", "2<end>"),
        ({"prompt": "1+1", "answer": "2"}, {"answer": "answer", "chat_template": True}, "+1+1=-2<end> ", "2<end>"),
        ({"messages": CONVERSATION}, {}, "+1+1=-2<end> +2+2=-4<end> ", "2<end>4<end>"),
        ({"messages": CONVERSATION[:2]}, {"chat_template": CHAT.replace("'='", "'*'")}, "+1+1*-2<end> ", "2<end>"),
        ({"messages": CONVERSATION[:2]}, {"template_arguments": {"mark": "0"}}, "0+1+1=-2<end> ", "2<end>"),
        ({"prompt": ASKED, "answer": "2"}, {"answer": "answer", "prompt_suffix": "0"}, "+1+1=-02<end>", "2<end>"),
        (
            {"messages": ASKED, "answer": "2"},
            {"tag": "t", "tag_templates": {"t": "-" + CHAT}},
            "-+1+1=-2<end> ",
            "2<end>",
        ),
    ],
)
def test_rows_of_data_files_are_rendered_as_their_settings_say(row, keys, text, learnt, tokenizer, tmp_path):
    tokenizer.chat_template = "{{ mark }}" + CHAT
    scenario = PromptScenario(tokenizer, path=data_file(tmp_path / "rows.jsonl", [row]), **keys)
    (sample,) = Conversations(scenario, tokenizer).samples(Split.TRAIN, [0])[0]
    assert shown(tokenizer, sample) == (text, learnt)


def test_turns_of_the_assistant_cannot_follow_finished_prompts(tokenizer, tmp_path):
    tokenizer.chat_template = CHAT
    path = data_file(tmp_path / "rows.jsonl", [{"messages": CONVERSATION}])
    data = Conversations(PromptScenario(tokenizer, path=path, prompt_suffix="0"), tokenizer)
    with pytest.raises(ValueError, match="Remove prompt_suffix"):
        data.samples(Split.TRAIN, [0])


def test_rows_come_in_the_order_of_the_data_and_in_named_sets(tokenizer, tmp_path):
    one = data_file(tmp_path / "one.jsonl", [{"prompt": f"{n}=", "answer": str(n)} for n in range(6)])
    two = data_file(tmp_path / "two.jsonl", [{"prompt": f"-{n}=", "answer": str(n)} for n in range(40)])
    keys = {"answer": "answer", "batch_size": 4, "eval": {"one": one, "two": {"path": two, "limit": 3}}}
    paths = [{"path": one, "weight": 1}, {"path": two, "weight": 3}]
    data = Conversations(PromptScenario(tokenizer, path=paths, **keys), tokenizer)
    order = data.order(seed=3)
    asked = [shown(tokenizer, data.samples(Split.TRAIN, [order.index(n)])[0][0])[0] for n in range(40)]
    assert [sum(not text.startswith("-") for text in asked[n : n + 4]) for n in range(0, 40, 4)] == [1] * 10
    again = Conversations(PromptScenario(tokenizer, path=paths, **keys), tokenizer).order(seed=3)
    assert [again.index(n) for n in range(13, 40)] == [order.index(n) for n in range(13, 40)], "resumed in an epoch"
    assert data.eval_sets(0, seed=3) == {"one": list(range(6)), "two": [6, 7, 8]}
    assert sum(map(len, data.eval_sets(4, seed=3).values())) == 4
    assert Conversations(Arithmetic(tokenizer, 1), tokenizer).eval_sets(0, seed=3) == {"": [0, 1, 2, 3]}


def read(values, **train):
    findings = Findings()
    task = {"_target_": "roost.rollout.arithmetic.Arithmetic"}
    own = {} if "data" in train else {"task": task}
    source = load({**values, "train": {"objective": "sft", "model": "m", **own, **train}}, (), findings)
    return read_job(source, findings).training, findings


PLACED = {"cluster": {"num_nodes": 1, "num_gpus_per_node": 1, "component_placement": {"actor": 0}}}


def test_supervised_settings_are_a_plain_likelihood_whatever_the_other_keys_say():
    algorithm = {"adv_type": "gae", "kl_beta": 0.1, "sampling_params": {"temperature": 0.5}}
    settings, findings = read({**PLACED, "algorithm": algorithm, "actor": {"global_batch_size": 24}})
    assert settings.learner.loss.importance_sampling_level is ImportanceSamplingLevel.NONE
    assert settings.learner.loss.loss_aggregation is LossAggregation.TOKEN_MEAN
    assert (settings.learner.loss.kl_coef, settings.learner.temperature) == (0.0, 1.0)
    assert (settings.rollout.prompts_per_step, settings.samples_per_step, settings.minibatches) == (24, 24, 1)
    described = [finding.what for finding in findings.found if finding.code == "RST-T043"]
    assert len(described) == 1 and "algorithm.kl_beta" in described[0]
    assert not findings.has_errors


def test_data_files_need_no_reward():
    actor = {"actor": {"global_batch_size": 24}}
    settings, findings = read({**PLACED, **actor}, data={"path": "rows.jsonl", "mix": {"a": 1}})
    assert not findings.has_errors, findings.found
    assert settings.task["_target_"].endswith("PromptScenario")
    assert settings.task["batch_size"] == 24, "rows of a step are mixed"


def test_the_loss_aggregation_of_supervised_training_can_be_chosen():
    settings, _ = read(PLACED, loss_aggregation="seq-mean-token-mean")
    assert settings.learner.loss.loss_aggregation is LossAggregation.SEQ_MEAN


def test_rlinf_says_by_its_task_type_that_it_trains_on_completions():
    task = {"_target_": "roost.rollout.arithmetic.Arithmetic"}
    findings = Findings()
    runner = {"task_type": "sft", "max_steps": -1}
    values = {**PLACED, "runner": runner, "actor": {"global_batch_size": 8}, "train": {"model": "m", "task": task}}
    settings = read_job(load(values, (), findings), findings).training
    assert (settings.objective, settings.max_epochs, settings.max_steps) == (Objective.SFT, 1, None)
    assert settings.rollout.prompts_per_step == 8 and not findings.has_errors


def test_rolls_role_for_supervised_training_is_followed():
    role = {
        "device_mapping": [0, 1],
        "strategy_args": {"strategy_name": "fsdp2_train"},
        "model_args": {"dtype": "bf16"},
        "training_args": {
            "num_train_epochs": 2,
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 4,
            "learning_rate": 5e-6,
        },
    }
    values = {
        "num_gpus_per_node": 2,
        "pretrain": "some/model",
        "sequence_length": 512,
        "response_key": "reply",
        "prompt_key": "task",
        "query_key": "input",
        "system_key": "rules",
        "validation": {"data_args": {"file_name": "held.json"}},
        "sft_train": role | {"data_args": {"file_name": "rows.json", "template": "qwen2_5"}},
        "train": {},
    }
    findings = Findings()
    settings = read_job(load(values, (), findings), findings).training
    assert not findings.has_errors, findings.found
    assert (settings.objective, settings.max_epochs, settings.max_steps) == (Objective.SFT, 2, None)
    assert (settings.completion, settings.max_sequence_tokens) == ("reply", 512)
    assert settings.rollout.prompts_per_step == 3 * 4 * 2, "rows of each device, accumulated, on two devices"
    assert settings.learner.optimizer.learning_rate == 5e-6 and settings.learner.model == "some/model"
    assert settings.learner.compute_dtype == "bfloat16"
    assert dict(settings.data) == {
        "path": "rows.json",
        "prompt": "task",
        "query": "input",
        "system_column": "rules",
        "chat_template": True,
        "shuffle": False,
        "drop_last": True,
        "eval": "held.json",
    }
    described = [finding.what for finding in findings.found if finding.code == "RST-T014"]
    assert not described, "every key is followed"


STUDENT = {
    "device_mapping": [0, 1],
    "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 2}},
    "training_args": {"num_train_epochs": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "data_args": {"file_name": ["rows.json"], "template": "qwen2_5"},
}
DISTILLING = {
    "num_nodes": 1,
    "num_gpus_per_node": 2,
    "student_pretrain": "some/small",
    "teacher_pretrain": "some/large",
    "question_key": "question_zh",
    "answer_key": "answer_zh",
    "sequence_length": 512,
    "student": STUDENT,
    "teacher": {"device_mapping": [0, 1], "strategy_args": {"strategy_name": "megatron_infer"}},
}
WRITTEN = {
    "distill_loss_weight": 0.85,
    "kd_objective": "skewed_reverse_kl",
    "kd_temperature": 2,
    "teacher_temperature": 0.5,
    "logits_topk": 0,
    "adaptive_kl_alpha": 0.3,
    "skew_lambda": 0.2,
    "distill_on_prompt": True,
}


def distilling(values):
    findings = Findings()
    job = read_job(load(values, (), findings), findings, trains=True)
    return job, findings


def test_rolls_distillation_on_given_answers_is_followed():
    job, findings = distilling(DISTILLING | WRITTEN)
    assert not findings.has_errors, findings.found
    settings = job.training
    assert (settings.objective, settings.max_epochs, settings.max_steps) == (Objective.SFT, 3, None)
    assert (settings.learner.model, settings.completion, settings.max_sequence_tokens) == (
        "some/small",
        "answer_zh",
        512,
    )
    assert settings.rollout.prompts_per_step == 2 * 4, "two devices hold one copy of the model"
    assert dict(settings.data) == {
        "path": ["rows.json"],
        "prompt": "question_zh",
        "only": {"split": "train"},
        "chat_template": True,
        "drop_last": True,
    }
    assert settings.learner.loss.distillation == Distillation(
        0.85, Divergence.SKEWED_REVERSE_KL, 0, 2.0, 0.5, 0.3, 0.2, True
    )
    plan = try_plan(job, findings)
    assert plan["teacher"].model.path == "some/large"
    assert not [finding for finding in findings.found if finding.code == "RST-T014"], "every key is followed"


def test_rolls_defaults_of_distillation():
    job, _ = distilling(DISTILLING)
    assert job.training.learner.loss.distillation == Distillation()
    assert job.training.learner.optimizer.max_grad_norm == 0, "ROLL does not clip unless told to"


def test_single_keys_of_the_teacher_are_changed_in_train():
    job, findings = distilling(DISTILLING | {"train": {"teacher": {"top_k": 8}}} | WRITTEN)
    found = job.training.learner.loss.distillation
    assert (found.top_k, found.weight) == (8, 0.85) and not findings.has_errors


def test_prompts_with_images_are_a_finding():
    role = STUDENT | {"data_args": {"file_name": "rows/", "template": "qwen2-vl"}}
    _, findings = distilling(DISTILLING | {"student": role})
    (found,) = [finding for finding in findings.found if finding.code == "RST-T082"]
    assert found.what == "'qwen2-vl' is for prompts with images" and findings.has_errors


BESIDE = {"cluster": {"num_nodes": 1, "num_gpus_per_node": 2, "component_placement": {"actor": 0, "teacher": 1}}}


def test_a_teacher_distills_in_supervised_training():
    settings, findings = read(BESIDE, teacher={"model": "large", "weight": 1, "coef": 0.5})
    assert settings.learner.loss.distillation == Distillation(weight=1)
    (found,) = findings.found
    assert (found.code, found.what) == ("RST-T081", "coef is not used")
    assert read(PLACED)[0].learner.loss.distillation is None
    train = {"objective": "sft", "model": "m", "teacher": {"model": "large"}, "data": {"path": "rows.jsonl"}}
    findings = Findings()
    try_plan(read_job(load({**PLACED, "train": train}, (), findings), findings), findings)
    assert "RST-T072" in {finding.code for finding in findings.found}, "it is not placed"


@pytest.mark.parametrize(
    ("teacher", "what"),
    [
        ({"divergence": "forward"}, "is 'forward'"),
        ({"weight": 2}, "is 2; it must be at most 1"),
        ({"temperature": 0}, "is 0; it must be above 0"),
        ({"top_k": "all"}, "is 'all'; it must be a whole number"),
        ({"math": {"model": "a"}, "code": {"model": "b"}}, "has 2 teachers: math, code"),
    ],
)
def test_wrong_keys_of_distillation_are_findings(teacher, what):
    _, findings = read(BESIDE, teacher=teacher)
    assert [finding.what for finding in findings.found if finding.code == "RST-T076"] == [what]
