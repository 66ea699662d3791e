"""A tokenizer for the tiny models: one character is one token.

A server that speaks text needs one. The models know 512 tokens, so these are 512 printable characters: English text
is written in them, whatever the model generates is valid text without a control character, and text that was
generated becomes the same tokens again. The last point is what a byte-level vocabulary of this size cannot give, and
a conversation needs it: its next prompt contains the answers before.
"""

from __future__ import annotations

import json
from pathlib import Path

from lmcache_mp_safe.testing.models import MAX_LENGTH, VOCABULARY

# Each message is a line with its role in front, and the assistant's line is left open.
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def alphabet() -> str:
    """The characters in the order of their token ids: what a US keyboard has, Latin letters, Greek, Cyrillic."""
    ascii_part = ["\n", *map(chr, range(0x20, 0x7F))]
    letters = [chr(code) for code in (*range(0xC0, 0x250), *range(0x391, 0x3CA), *range(0x400, 0x460))]
    return "".join([*ascii_part, *(letter for letter in letters if letter.isalpha())][:VOCABULARY])


def write_tokenizer(path: Path | str) -> Path:
    """Write tokenizer and chat template beside the model in the directory `path`, and return it.

    A character that is not in the alphabet becomes "?".
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    ids = {character: number for number, character in enumerate(alphabet())}
    tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    path = Path(path)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return path
