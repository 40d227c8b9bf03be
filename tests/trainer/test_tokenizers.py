import pytest

from roost.config.findings import ConfigError
from roost.rollout.arithmetic import write_arithmetic_model
from roost.trainer.targets import check_vocabularies, class_name_of, load_tokenizer
from tests.trainer.live.jobs import config, job_of

BACKEND = "transformers.PreTrainedTokenizerFast"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="<end>").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "class_name",
    [
        pytest.param("", id="not known"),
        pytest.param(BACKEND, id="known"),
        pytest.param("transformers.tokenization_of_tomorrow.NewBackend", id="of another release"),
        pytest.param("transformers_modules.theirs.Theirs", id="comes with the model"),
    ],
)
def test_the_tokenizer_is_the_same_whatever_is_known_of_its_class(class_name, folder):
    loaded = load_tokenizer(folder, class_name)
    plain = load_tokenizer(folder)
    assert class_name_of(loaded) == class_name_of(plain)
    assert (loaded("a").input_ids, loaded.eos_token_id) == ([0], 2)


def test_a_teacher_must_have_the_tokens_of_the_policy(folder, tmp_path):
    model = write_arithmetic_model(tmp_path / "model", num_hidden_layers=1)

    def check(teacher):
        job = job_of(config(model, {"actor": "0", "rollout": "1", "teacher": "2"}, teacher={"model": str(teacher)}))
        check_vocabularies(job.training, job, load_tokenizer(str(model)))

    check(model)
    with pytest.raises(ConfigError, match="16 of 16 tokens of the policy are not the teacher's") as raised:
        check(folder)
    assert "train.teacher" in str(raised.value)
    (tmp_path / "bare").mkdir()
    with pytest.raises(ConfigError, match="has no tokenizer that can be loaded"):
        check(tmp_path / "bare")
