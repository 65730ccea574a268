"""Classes of tokens: the one that decides, digits, all others; each token has one."""

from __future__ import annotations

import torch

from repro.data.generator import GeneratorConfig
from repro.data.tiny_tokenizer import build_tokenizer
from repro.evidence.receipts.schedule import CLASSES
from repro.rl.lessons import Lesson, rows_of
from repro.rl.token_classes import TokenClasses, token_classes
from tests.repro.rl.uneven_rows import uneven_rows

TEXTS = ("<think>First 1 + 2 = 3</think>", "<think></think>", "12</think>", "<think>")


def test_each_token_has_the_class_that_its_place_and_text_say() -> None:
    tokenizer = build_tokenizer(GeneratorConfig())
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    rows = rows_of([Lesson(prompt=(1,), completion=tuple(own)) for own in ids])
    masks = token_classes(tokenizer, "tiny").masks(rows)
    by_class = {
        name: [
            tokenizer.decode(rows.token_ids[row][mask[row]].tolist()) for row in range(len(TEXTS))
        ]
        for name, mask in masks.items()
    }
    # The second token decides, be it a digit; a completion of one token decides nothing.
    assert by_class["decision"] == ["First ", "</think>", "2", ""]
    assert by_class["digits"] == ["123", "", "1", ""]
    assert by_class["template"] == ["<think> +  = </think>", "<think>", "</think>", "<think>"]


def test_the_first_token_decides_where_habits_are_not_known() -> None:
    assert token_classes(build_tokenizer(GeneratorConfig()), "paper").decision == 0


def test_classes_are_disjoint_and_together_all_tokens() -> None:
    rows = uneven_rows()
    masks = TokenClasses(decision=4, digits=frozenset(range(5, 20))).masks(rows)
    assert tuple(masks) == CLASSES
    assert torch.equal(sum(mask.int() for mask in masks.values()), rows.mask.int())
    # Completions of 1 and 3 tokens end before it.
    assert masks["decision"].sum(1).tolist() == [1, 0, 1, 0, 1, 1]
