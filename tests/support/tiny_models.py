"""Tiny random encoders with real tokenizers, saved as folders that `AutoModel` can load.

The weights are noise, but everything around them is what the architecture really uses: its special
tokens, its pairs, its padding id, its position offsets. So a test on one of these meets the same
surprises as a run on the real thing, in milliseconds.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from dpfp_ray.models.pretrained import load_tokenizer

TEXTS = (
    "a warm and funny film that stays with you",
    "the plot is dull and the jokes fall flat",
    "one of the best movies of the year",
    "a tedious mess from beginning to end",
    "the acting is superb and the story moves fast",
    "i wanted to leave after ten minutes",
    "beautiful pictures, clever dialogue and a great cast",
    "it never finds its tone and wastes its actors",
    "an honest, touching portrait of a family",
    "the worst sequel i have ever seen",
    "delightful, charming and often very smart",
    "a lifeless script with nothing new to say",
    "the director knows how to hold our attention",
    "boring, predictable and far too long",
    "a small gem that deserves a large audience",
    "loud, empty and painfully unfunny",
    "who wrote this film? nobody knows, and nobody cares",
    "is this what we paid for? yes, and it was worth it",
    "the second half does not live up to the first",
    "she gives the performance of her life",
)
VOCABULARY = 400  # upper bound of the learnt part
UNUSED = [f"[unused{number}]" for number in range(100)]

# special tokens by role, and the roles in the order of their ids
_BERT = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "unk": "[UNK]", "mask": "[MASK]"}
_BERT_ORDER = ("pad", "unk", "cls", "sep", "mask")
_ROBERTA = {"cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
_ROBERTA_ORDER = ("cls", "pad", "sep", "unk", "mask")  # pad must be 1: positions start after it

_WORDPIECE = {"bert", "distilbert", "electra", "mpnet"}
_ROBERTA_STYLE = {"roberta", "mpnet", "xlm-roberta"}
_TOKEN_TYPES = {"bert", "electra", "albert", "deberta-v2"}
ENCODERS = (
    "bert",
    "roberta",
    "mpnet",
    "distilbert",
    "electra",
    "albert",
    "deberta-v2",
    "xlm-roberta",
    "modernbert",
)
NO_POOLER = ("distilbert", "electra", "deberta-v2", "modernbert")


def build_tiny(
    folder: Path,
    architecture: str = "bert",
    *,
    hidden: int = 32,
    layers: int = 2,
    texts: Sequence[str] | None = None,
) -> str:
    """Save a seeded random `architecture` and its tokenizer in `folder`; gives the folder's name.

    `architecture` is transformers' model type: one of `ENCODERS`, or gpt2, t5, bart.
    The vocabulary is learnt from `texts`; bert has `[unused0]` to `[unused99]` besides.
    """
    tokenizer = tokenizer_of(architecture, list(texts or TEXTS))
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(
        architecture, **_settings(architecture, hidden, layers, tokenizer)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        AutoModel.from_config(config).save_pretrained(folder)
    return str(folder)


def tokenizer_of(architecture: str, texts: list[str]) -> PreTrainedTokenizerFast:
    if architecture == "gpt2":
        tokenizer = _train_bpe(texts, ["<|endoftext|>"])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<|endoftext|>",
            eos_token="<|endoftext|>",
            model_max_length=64,
            model_input_names=["input_ids", "attention_mask"],
        )
    roberta = architecture in _ROBERTA_STYLE
    roles, order = (_ROBERTA, _ROBERTA_ORDER) if roberta else (_BERT, _BERT_ORDER)
    special = [roles[role] for role in order]
    if architecture in _WORDPIECE:
        unused = UNUSED if architecture == "bert" else []
        tokenizer = _wordpiece(texts, special, roles["unk"], unused)
    else:
        tokenizer = _train_bpe(texts, special)
    start, end = roles["cls"], roles["sep"]
    middle = f"{end} {end}" if roberta else end
    second = "0" if roberta else "1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {middle} $B:{second} {end}:{second}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (start, end)],
    )
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        model_input_names=[*names, "token_type_ids"] if architecture in _TOKEN_TYPES else names,
        **{f"{role}_token": token for role, token in roles.items()},
    )


def _wordpiece(texts: list[str], special: list[str], unknown: str, unused: list[str]) -> Tokenizer:
    """Frequent words whole, the rest letter by letter; printable ASCII has no unknowns.

    Not trained by the library: its WordPiece trainer breaks ties differently in every process, and
    a test on a vocabulary that changes cannot pin a number.
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.BertPreTokenizer()
    counts = Counter(
        word
        for text in texts
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))
    )
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1) if not chr(code).isupper()]
    pieces = [*letters, *(f"##{letter}" for letter in letters if letter.isalnum())]
    frequent = sorted(counts.keys() - set(pieces), key=lambda word: (-counts[word], word))
    # As in the real BERT, an unused entry has an id but no text ever becomes it.
    entries = [*special, *unused, *pieces, *frequent[: VOCABULARY - len(pieces)]]
    vocabulary = {token: number for number, token in enumerate(entries)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token=unknown))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _train_bpe(texts: list[str], special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        # all 256 bytes: any text has tokens, none is unknown
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _settings(
    architecture: str, hidden: int, layers: int, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    """The config's values, under the names that the architecture gives them."""
    pad = tokenizer.pad_token_id
    common: dict[str, Any] = {"vocab_size": len(tokenizer)}
    if architecture == "gpt2":
        end = tokenizer.eos_token_id
        common |= {"bos_token_id": end, "eos_token_id": end}
        return common | {"n_embd": hidden, "n_layer": layers, "n_head": 2, "n_positions": 64}
    common |= {"pad_token_id": pad}
    if architecture == "distilbert":
        common |= {"dim": hidden, "hidden_dim": 2 * hidden, "n_layers": layers, "n_heads": 2}
        return common | {"max_position_embeddings": 64}
    if architecture == "t5":
        return common | {"d_model": hidden, "d_ff": 64, "d_kv": 16, "num_layers": 1, "num_heads": 2}
    if architecture == "bart":
        sizes = {"d_model": hidden, "encoder_layers": 1, "decoder_layers": 1}
        return common | sizes | {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    common |= {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 2 * hidden,
        # the offset of 2 leaves the same 64 positions as elsewhere
        "max_position_embeddings": 66 if architecture in _ROBERTA_STYLE else 64,
    }
    if architecture in ("electra", "albert"):
        # Both factor the embedding; half the width keeps that projection in the test.
        common |= {"embedding_size": hidden // 2}
    if architecture in ("roberta", "xlm-roberta"):
        ids = {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
        common |= {"type_vocab_size": 1, **ids}
    if architecture == "modernbert":
        # one layer that sees all tokens, one that sees its neighbours; LayerNorms without a bias
        common |= {"global_attn_every_n_layers": 2, "local_attention": 8}
        ends = ("bos", "eos", "cls", "sep")
        starts = (tokenizer.cls_token_id, tokenizer.sep_token_id) * 2
        common |= {f"{name}_token_id": number for name, number in zip(ends, starts, strict=True)}
    if architecture == "deberta-v2":
        # as in the released v3 checkpoints: relative positions only, no token types
        common |= {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
        common |= {"position_biased_input": False, "type_vocab_size": 0}
        common |= {"position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True}
    return common


def encode(
    folder: Path | str, texts: list[str], pairs: list[str] | None = None
) -> dict[str, Tensor]:
    return dict(load_tokenizer(str(folder))(texts, pairs, padding=True, return_tensors="pt"))
