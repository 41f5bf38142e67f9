"""Makes the tiny models and data sets that the training scripts in this folder read."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

_SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", "<cls>", "<sep>"]
"""Their order is that of their ids, and of the names in `_save`."""
_FIRST = ("ba", "ke", "li", "mo", "nu", "ra", "se", "ti", "vo", "zu")
_SECOND = ("da", "fin", "gor", "hal", "jum", "kep", "lis", "mar", "nox", "pel", "rit", "sun")
_WORDS = [first + second for first in _FIRST for second in _SECOND]
_LONGEST = 200
"""Words of the longest text; the models take 256 tokens."""
_TOKENS = 256
_PATCH = 4
"""Pixels of an image's patch, of which four make a token."""
_LARGEST = 8
"""Tokens of an image, in height and in width."""


def make_inputs(folder: Path) -> None:
    """Fill `folder`; the same files come out each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _make_models(folder)
        if find_spec("PIL"):
            _make_vision_model(folder / "vision")
    if find_spec("PIL"):
        _make_pictures(folder / "pictures", 200, seed=5)
    _write(folder / "text", ({"text": each} for each in _texts(400, seed=1)))
    _write(folder / "pairs", _pairs(200, seed=2))
    _write(folder / "labelled", _labelled(300, seed=3))
    _write(folder / "translation", _translations(200, seed=4))


def _make_models(folder: Path) -> None:
    size = len(_SPECIAL) + len(_WORDS)
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    layers = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": _TOKENS}
    decoder: dict[str, Any] = {"vocab_size": size, "num_key_value_heads": 2, **layers, **special}

    llama = LlamaConfig(intermediate_size=64, **decoder)
    _save(LlamaForCausalLM(llama), "<s> $A", folder / "model")

    experts = {"head_dim": 8, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    _save(Qwen3MoeForCausalLM(Qwen3MoeConfig(intermediate_size=64, **experts, **decoder)), "<s> $A", folder / "experts")

    bert = BertConfig(vocab_size=size, intermediate_size=64, pad_token_id=0, **layers)
    _save(BertForMaskedLM(bert), "<cls> $A <sep>", folder / "masked", pair="<cls> $A <sep> $B:1 <sep>:1")

    # Its positions begin after the padding's own.
    places = {"max_position_embeddings": _TOKENS + 1, "type_vocab_size": 1, **special}
    roberta = RobertaConfig(vocab_size=size, intermediate_size=64, **{**layers, **places})
    _save(RobertaForMaskedLM(roberta), "<s> $A </s>", folder / "roberta")

    widths = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    t5 = T5Config(vocab_size=size, pad_token_id=0, eos_token_id=3, decoder_start_token_id=0, **widths)
    _save(T5ForConditionalGeneration(t5), "$A </s>", folder / "seq2seq")


def _make_vision_model(folder: Path) -> None:
    """One whose processor puts the patches of all images of a batch into one tensor, as that of Qwen2-VL does.

    Those of Qwen also read videos, for which they need torchvision.
    """
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration, PaddleOCRVLProcessor
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

    size, names = len(_SPECIAL) + len(_WORDS), ("image_token", "video_token", "vision_start_token", "vision_end_token")
    shared = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    text = {"vocab_size": size + len(names), "num_key_value_heads": 2, "head_dim": 8, "rope_parameters": rope}
    config = PaddleOCRVLConfig(
        text_config={**shared, **special, **text, "max_position_embeddings": _TOKENS},
        vision_config={**shared, "patch_size": _PATCH, "image_size": 2 * _PATCH * _LARGEST},
        **{f"{name}_id": size + number for number, name in enumerate(names)},
    )
    known = {name: f"<{name}>" for name in names}
    tokenizer = _save(PaddleOCRVLForConditionalGeneration(config), "$A", folder, extra_special_tokens=known)
    pixels = (2 * _PATCH) ** 2
    images = PaddleOCRVLImageProcessorPil(
        patch_size=_PATCH, size={"shortest_edge": pixels, "longest_edge": pixels * _LARGEST**2}
    )
    image = "{vision_start_token} {image_token} {vision_end_token}".format(**known)
    template = (
        "{% for each in messages %}{% for part in each.content %}"
        f"{{{{ {image!r} if part.type == 'image' else part.text }}}} "
        "{% endfor %}</s> {% endfor %}"
    )
    PaddleOCRVLProcessor(images, tokenizer, chat_template=template).save_pretrained(folder)


def _make_pictures(folder: Path, number: int, seed: int) -> None:
    """Conversations about one or two images of many sizes."""
    from PIL import Image

    dice, rows = random.Random(seed), []
    texts = zip(_texts(number, seed), _texts(number, seed + 100), strict=True)
    (folder / "train").mkdir(parents=True, exist_ok=True)
    for place, (question, answer) in enumerate(texts):
        files = [f"{place}-{each}.png" for each in range(dice.choice((1, 1, 1, 2)))]
        for file in files:
            width, height = (2 * _PATCH * dice.randint(1, _LARGEST) for _ in range(2))
            image = Image.frombytes("RGB", (width, height), dice.randbytes(3 * width * height))
            image.save(folder / "train" / file)
        said = {"user": question, "assistant": answer}
        messages = [{"role": role, "content": " ".join(text.split()[:50])} for role, text in said.items()]
        rows.append({"images_file_names": files, "messages": messages})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train" / "metadata.jsonl").write_text(lines)


def _save(model: Any, template: str, folder: Path, pair: str | None = None, **more: Any) -> PreTrainedTokenizerFast:
    """The model and a tokenizer that puts special tokens around a text as `template` says."""
    ids = {word: number for number, word in enumerate(_SPECIAL + _WORDS)}
    words = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment, unused-ignore]
    around = [(word, ids[word]) for word in _SPECIAL]
    words.post_processor = TemplateProcessing(  # type: ignore[assignment, unused-ignore]
        single=template, pair=pair, special_tokens=around
    )
    names = ("pad_token", "unk_token", "bos_token", "eos_token", "mask_token", "cls_token", "sep_token")
    known = dict(zip(names, _SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=_TOKENS, **known, **more)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    described = folder / "tokenizer_config.json"
    # transformers 5 has a new name for its class, which older versions do not know; it reads the old one too.
    described.write_text(described.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    return tokenizer


def _texts(number: int, seed: int) -> Iterator[str]:
    """Many short texts and a few long ones, as real data has them."""
    dice = random.Random(seed)
    for _ in range(number):
        length = min(_LONGEST, max(3, round(dice.lognormvariate(3.0, 1.0))))
        yield " ".join(dice.choices(_WORDS, k=length))


def _pairs(number: int, seed: int) -> Iterator[dict[str, str]]:
    columns = zip(_texts(number, seed), _texts(number, seed + 100), _texts(number, seed + 200), strict=True)
    for prompt, chosen, rejected in columns:
        # An answer begins with a space, or its first word would become one with the prompt's last.
        yield {"prompt": _cut(prompt), "chosen": " " + _cut(chosen), "rejected": " " + _cut(rejected)}


def _labelled(number: int, seed: int) -> Iterator[dict[str, Any]]:
    for first, second in zip(_texts(number, seed), _texts(number, seed + 100), strict=True):
        yield {"sentence1": _cut(first), "sentence2": _cut(second), "label": int(len(first) > len(second))}


def _translations(number: int, seed: int) -> Iterator[dict[str, Any]]:
    for text in _texts(number, seed):
        yield {"translation": {"en": text, "de": " ".join(reversed(text.split()))}}


def _cut(text: str) -> str:
    """Short enough that two of them fit into a model."""
    return " ".join(text.split()[: _LONGEST // 2])


def _write(folder: Path, rows: Iterator[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    make_inputs(Path(sys.argv[1]))
