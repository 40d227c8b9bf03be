import pytest

from roost.trainer.targets import class_name_of, load_tokenizer

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
