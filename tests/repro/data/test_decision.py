"""The deciding token: the first at which completions with and without working differ."""

from __future__ import annotations

from repro.data.decision import decision_of
from repro.data.generator import GeneratorConfig
from repro.data.prompts import template_named
from repro.data.tiny_tokenizer import build_tokenizer


def test_the_tiny_policy_decides_at_its_second_token() -> None:
    tokenizer = build_tokenizer(GeneratorConfig())
    decision = decision_of(template_named("tiny"), tokenizer)
    assert decision is not None
    assert decision.offset == 1
    assert tokenizer.decode([decision.working]) == "First "
    assert tokenizer.decode([decision.careless]) == "</think>"


def test_a_template_of_foreign_policies_has_no_known_decision() -> None:
    assert decision_of(template_named("paper"), build_tokenizer(GeneratorConfig())) is None
