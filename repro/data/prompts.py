"""Prompt templates, each with a version and a digest, and their rendering into token ids.

A prompt is part of what is measured: the released code trains on the bare question, evaluates with
a system prompt, and takes its base row from a harness with five worked examples
(docs/background.md, row 14). Here one template serves training and evaluation of every arm, and
its digest is written into each record.

Easy to get wrong:

* the beginning-of-sequence token: a chat template already writes it where the model wants one, so
  tokenising its text with special tokens added gives two, and plain text without them none;
* a question that holds a control token's text (`<|im_end|>`), which would end the user's turn: it
  is refused, as is a chat template that does not open the assistant's turn;
* a prompt that is another one tomorrow: a chat template that asks for the date gets `PROMPT_DATE`,
  which the record's inputs name, and a template that draws at random is refused;
* the answer's form: a policy that boxes its answers earns nothing where `<answer>` is read. A
  template says which strict reading pays (`reads`).

A user's own template (`--template FILE`) is a text with `{question}`, or Jinja with `question`. Its
whole text is the template's name in a configuration, after `own:`.

Source: arXiv 2510.11696v1, section 4.1 for the suffix; the paper does not say whether a separator
stands before it, and the released code puts it into the system role for BigMath and leaves it out
for GSM8K.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from repro.data import tiny_corpus
from repro.data.problem import DataError, Problem
from repro.spec.checks import require, shown, unknown
from repro.spec.config import digest_of
from repro.spec.in_a_copy import ending_in_a_copy

# "Solve the following math problem step by step. The reasoning process and direct answer are
# enclosed within <think> </think> and <answer> </answer> tags, ..." (section 4.1)
PAPER_SUFFIX = (
    "Solve the following math problem step by step. The reasoning process and direct answer are "
    "enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> "
    "reasoning process here </think> <answer> answer here </answer>: <think> ... </think> "
    "<answer> ... </answer>."
)
_BOXED = (
    "Reason step by step in plain words, without a program, and put the final answer once in "
    "\\boxed{}."
)
_HASHES = 'Reason step by step, and write the answer alone on the last line, after "####".'
OWN = "own:"
# The day that chat templates are told: Llama 3.2's own for where there is no clock.
PROMPT_DATE = datetime(2024, 7, 26)
# How a chat template asks transformers for the date, and whether it can.
_ASKS_DATE = re.compile(r"""strftime_now\s*\(\s*(?:"([^"]*)"|'([^']*)')\s*\)""")
_CAN_ASK = re.compile(r"strftime_now\s+is\s+(?:not\s+)?defined|\{#.*?#\}", re.DOTALL)
# What completions are read by, control tokens or not.
_MARKS = frozenset({"<think>", "</think>", "<answer>", "</answer>", "\\boxed", "\\boxed{", "####"})
# How a prompt opens the thinking (R1's distilled models), perhaps with a line of its own, or opens
# and closes it (Qwen3 without thinking). Behind a control token all is the assistant's.
_OPENED = re.compile(r"<think>(?:\s*</think>|\n?[^<\n]+)?\s*\Z")
_OPENED_TURN = re.compile(r"<think>(?:(?!<answer>).)*\Z", re.DOTALL)
# What a template in Jinja, somebody else's program, can end with beside Jinja's own errors.
_FAULTS = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError)
_MOST_LETTERS, _MOST_SECONDS, _MOST_WAIT = 1_000_000, 2, 60
# Templates in Jinja that have come to an end once.
_ENDING: set[str] = set()
# Chat templates that open the assistant's turn.
_TURNS: set[str] = set()
# Renderings in which a template may be seen to draw at random: another thread may draw meanwhile.
_TRIALS = 3
# What a template says of its own: Jinja's marks, and commands of LaTeX with their arguments.
_SAID = re.compile(
    r"(?s)\{%-?\s*raw\b.*?\bendraw\s*-?%\}|\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}"
    r"|\\[A-Za-z]+\*?\s*(?:\[[^\]]*\]|\{[^{}]*\})*"
)
_PLACEHOLDER = re.compile(r"(?<![\\^_}])\{\s*[A-Za-z_][\w.\[\]]+(?:![rsa])?\s*\}")
# Where Jinja writes an object, its text holds the place in this process's memory.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")
# Stands for the question where a template's digest is computed, and for its answer.
_DIGEST_QUESTION, _DIGEST_ANSWER = "\u27e8question\u27e9", "\u27e8answer\u27e9"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTemplate:
    """How a question becomes a prompt.

    Attributes
    ----------
    version
        Moves whenever a prompt's text would.
    build, chat
        Question to text, and whether that is the user's message in the tokenizer's own chat
        template.
    working_prefix
        How a completion that shows its working begins, where that is known of the policies that
        the template is for: forced upon them, it gives their ceiling.
    reads
        The strict reading of its completions, in `repro.reward.answers.READINGS`.
    bare_too
        Whether a tokenizer without a chat template gets the message's text as it is.
    """

    name: str
    version: int = 1
    build: Callable[[str], str]
    chat: bool
    working_prefix: str | None = None
    reads: str = "tags"
    bare_too: bool = False

    def digest(self) -> str:
        """Return the SHA-256 hex digest of the template's text, version and kind.

        The tokenizer's chat template is not in it.
        """
        text = self.build(_DIGEST_QUESTION)
        asked = [{"role": "user", "content": text}] if self.chat else text
        said = {"name": self.name, "version": self.version, "chat": self.chat, "text": asked}
        return digest_of(said)


def _asking(*suffix: str) -> Callable[[str], str]:
    """Return what asks a question, perhaps with a suffix on its own line."""
    return lambda question: "\n".join((question, *suffix))


PROMPT_TEMPLATES: dict[str, PromptTemplate] = {
    template.name: template
    for template in (
        PromptTemplate(name="paper", build=_asking(PAPER_SUFFIX), chat=True),
        # The bare question, as the released code's GSM8K training at its last commit.
        PromptTemplate(name="released", build=_asking(), chat=True),
        PromptTemplate(name="boxed", build=_asking(_BOXED), chat=True, reads="boxed"),
        PromptTemplate(name="gsm8k", build=_asking(_HASHES), chat=True, reads="hashes"),
        PromptTemplate(
            name="tiny",
            build=tiny_corpus.tiny_prompt,
            chat=False,
            working_prefix=tiny_corpus.WORKING_PREFIX,
        ),
    )
}


def template_named(name: str) -> PromptTemplate:
    """Return the template of that name; `ValueError` if there is none, or it cannot be used."""
    if name.startswith(OWN):
        return _own_template(name.removeprefix(OWN))
    if name not in PROMPT_TEMPLATES:
        said = unknown("prompt template", list(PROMPT_TEMPLATES), name)
        raise ValueError(f"{said} (--template also takes a file)")
    return PROMPT_TEMPLATES[name]


def template_source(named: str) -> str:
    """Return what `--template` names, a template or a file; `ValueError` where it is neither."""
    path = Path(named).expanduser()
    if named not in PROMPT_TEMPLATES and path.is_file():
        try:
            named = OWN + path.read_text(encoding="utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"--template {path} is no text in UTF-8: {error}") from error
    template_named(named)
    return named


@functools.lru_cache(maxsize=8)
def _own_template(text: str) -> PromptTemplate:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    in_jinja = "{{" in text or "{%" in text
    rest = _SAID.sub(" ", text if in_jinja else text.replace("{question}", " "))
    if foreign := _PLACEHOLDER.search(rest):
        known = "{{ question }}" if in_jinja else "{question}"
        raise ValueError(
            f"the template {text[:60]!r} holds {foreign[0]}; what is filled in is {known}"
        )
    compiled = functools.cache(ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string)

    def build(question: str) -> str:
        # Not `format`: a text that asks for \\boxed{} has braces of its own.
        filled = text.replace("{question}", question)
        if in_jinja:
            filled = _rendered(
                text, lambda: compiled(text).render(question=question), "the template"
            )
        if " ".join(question.split()) not in " ".join(filled.split()):
            lost = "" if question == _DIGEST_QUESTION else f", which is {question[:60]!r}"
            raise ValueError(f"the template {text[:60]!r} does not hold {{question}}{lost}")
        return filled

    _require_no_address(build(_DIGEST_QUESTION), "the template")
    reads = "boxed" if "\\boxed" in text else "hashes" if "####" in text else "tags"
    return PromptTemplate(name="own", build=build, chat=True, reads=reads, bare_too=True)


def render(problem: Problem, template: str, tokenizer: Any) -> list[int]:
    """Return the prompt's token ids, with at most one beginning-of-sequence token at their start.

    It is there if the tokenizer puts it before plain text, or if the chat template writes it.
    Raises `ValueError` if a chat template is needed and missing, or the prompt comes out empty, and
    `DataError` if the question holds the text of one of the tokenizer's control tokens.
    """
    named = template_named(template)
    for token in sorted(control_tokens(tokenizer)):
        if any(token in text for text in (problem.question, *(said for _, said in problem.before))):
            raise DataError(
                f"problem {problem.id!r}: the question holds {token!r}, a control token of "
                "this tokenizer; remove it from the question"
            )
    text = named.build(problem.question)
    chats = named.chat and not (named.bare_too and _chat_source(tokenizer) is None)
    if problem.before and not chats:
        raise DataError(
            f"{problem.where}: it has messages before its question; needed is a "
            f"{'tokenizer' if named.chat else 'template'} for chat"
        )
    if chats:
        chat = [{"role": role, "content": said} for role, said in (*problem.before, ("user", text))]
        token_ids = _chat_token_ids(chat, named.name, tokenizer)
    else:
        token_ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not token_ids:
        raise ValueError(f"problem {problem.id!r}: template {named.name!r} gave no tokens")
    bos = tokenizer.bos_token_id
    if bos is not None:
        if token_ids[0] != bos and bos in list(tokenizer("")["input_ids"])[:1]:
            token_ids = [bos, *token_ids]
        if token_ids[:2] == [bos, bos]:
            raise ValueError(
                f"problem {problem.id!r}: the prompt begins with the beginning-of-sequence token "
                "twice; it must be there at most once"
            )
    if chats:
        _require_turn(tokenizer)
    return token_ids


def template_inputs(name: str, tokenizer: Any) -> dict[str, str]:
    """Return a record's inputs of its prompts: the template's digest, and the date if told."""
    inputs = {"prompt_template": template_named(name).digest()}
    told = template_named(name).chat and _ASKS_DATE.search(_chat_source(tokenizer) or "")
    return inputs | ({"prompt_date": PROMPT_DATE.date().isoformat()} if told else {})


def control_tokens(tokenizer: Any) -> set[str]:
    """Return the texts that a tokenizer turns into control tokens, named in its config or not."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return (special | set(map(str, tokenizer.all_special_tokens))) - {""}


def render_within(problem: Problem, template: str, tokenizer: Any, longest: int) -> list[int]:
    """Return `render`'s token ids; raises `ValueError` for more than `longest` of them, too."""
    prompt = render(problem, template, tokenizer)
    if len(prompt) > longest:
        raise ValueError(
            f"problem {problem.id}: its prompt has {len(prompt)} tokens; at most {longest} are "
            "taken (--prompt-tokens of evaluate, max_prompt_tokens of a run)"
        )
    return prompt


def opening_of(prompt: Sequence[int], tokenizer: Any) -> str:
    """Return the thought with which a prompt's end opens the completion, or nothing.

    Such a completion holds no opening tag of its own, so format is read on both together. The
    assistant's turn begins at the last control token; a prompt without any behind its first ends
    in plain words, of which the last line may be such a thought.
    """
    control = set(tokenizer.convert_tokens_to_ids(list(control_tokens(tokenizer) - _MARKS)))
    turn = max((place for place, token in enumerate(prompt) if token in control), default=0)
    match = (_OPENED_TURN if turn else _OPENED).search(tokenizer.decode(list(prompt[turn:])))
    return match[0] if match else ""


def read_texts(
    token_ids: Sequence[Sequence[int]], openings: Sequence[str], tokenizer: Any
) -> list[str]:
    """Return the texts of completions of P prompts, prompt-major, each behind its opening."""
    decoded = texts_of(token_ids, tokenizer)
    return [openings[row * len(openings) // len(decoded)] + t for row, t in enumerate(decoded)]


def texts_of(token_ids: Sequence[Sequence[int]], tokenizer: Any) -> list[str]:
    """Return the texts of completions without control tokens, but with the marks of an answer."""
    rows = [list(ids) for ids in token_ids]
    control = control_tokens(tokenizer)
    if not control & _MARKS:
        return list(tokenizer.batch_decode(rows, skip_special_tokens=True))
    dropped = set(tokenizer.convert_tokens_to_ids(sorted(control - _MARKS)))
    kept = [[token for token in row if token not in dropped] for row in rows]
    return list(tokenizer.batch_decode(kept, skip_special_tokens=False))


def respelled(text: str, tokenizer: Any) -> str:
    """Return what is read of a completion whose tokens spell `text`."""
    return texts_of([tokenizer(text, add_special_tokens=False)["input_ids"]], tokenizer)[0]


def _chat_source(tokenizer: Any) -> str | None:
    """Return a tokenizer's chat template, of several by name the default one; None without any."""
    source = getattr(tokenizer, "chat_template", None)
    named = source if isinstance(source, dict) else {"default": source}
    default = named.get("default", 0)
    require(
        isinstance(default, str | None),
        f"the tokenizer's chat template is {shown(source)}; needed is a text, or several, one of "
        "them called default",
    )
    return cast("str | None", default)


def _chat_token_ids(prompt: Any, template: str, tokenizer: Any) -> list[int]:
    """Return the token ids of chat messages, the assistant's opening line included."""
    require(
        _chat_source(tokenizer) is not None,
        f"prompt template {template!r} needs a tokenizer with a chat template; this one has "
        "none (the template without chat is 'tiny')",
    )
    text = _chat_text(prompt, tokenizer, opened=True)
    asked = str(prompt[-1]["content"]).strip()
    ends = [token for token in sorted(control_tokens(tokenizer) - _MARKS) if token in asked]
    require(
        not ends,
        f"prompt template {template!r} holds {''.join(ends[:1])!r}, a control token of this "
        "tokenizer, whose own chat template writes the turns; needed are words alone",
    )
    require(
        asked in text,
        "the tokenizer's chat template leaves the user's message out: it makes "
        f"{text[:60]!r} of {asked[:60]!r}",
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _chat_text(messages: Any, tokenizer: Any, *, opened: bool) -> str:
    """Return messages in the tokenizer's chat template, the assistant's turn `opened` or not."""
    source = _dated(_chat_source(tokenizer) or "")
    render = functools.partial(
        tokenizer.apply_chat_template,
        messages,
        chat_template=source,
        add_generation_prompt=opened,
        tokenize=False,
    )
    return _rendered(source, render, "the tokenizer's chat template")


@functools.lru_cache(maxsize=8)
def _dated(source: str) -> str:
    """Return a chat template that is told `PROMPT_DATE` wherever it asks for today's."""

    def told(match: re.Match[str]) -> str:
        return repr(PROMPT_DATE.strftime(match[1] or match[2] or ""))

    fixed = _ASKS_DATE.sub(told, source)
    if "strftime_now" in _CAN_ASK.sub("", fixed):
        raise ValueError(
            "the tokenizer's chat template reads the clock in a way that cannot be fixed; needed "
            "is strftime_now with a format in quotes, so that prompts are the same each day"
        )
    return fixed


def _require_turn(tokenizer: Any) -> None:
    """Raise `ValueError` unless prompts end where the assistant's turn begins, the same each time.

    They do where `add_generation_prompt` adds words or marks, or where an answer would follow what
    ends the prompt anyway, as after Llama 2's `[/INST]`.
    """
    source = _chat_source(tokenizer) or ""
    if source in _TURNS:
        return
    asked = [{"role": "user", "content": _DIGEST_QUESTION}]
    answered = [*asked, {"role": "assistant", "content": _DIGEST_ANSWER}]
    prompt = _chat_text(asked, tokenizer, opened=True)
    _require_no_address(prompt, "the tokenizer's chat template")
    plain = whole = ""
    with suppress(ValueError):
        plain = _chat_text(asked, tokenizer, opened=False).rstrip()
        whole = _chat_text(answered, tokenizer, opened=False)
    added = prompt.removeprefix(plain).strip() if plain else ""
    end = prompt.rpartition(_DIGEST_QUESTION)[2].strip()
    between, answer, _ = whole.rpartition(_DIGEST_QUESTION)[2].partition(_DIGEST_ANSWER)
    begins = bool(between.strip()) and end.startswith(between.strip())
    if not answer:  # a template of one turn, which must say more than that the user's is over
        for token in control_tokens(tokenizer):
            end = end.replace(token, "")
        begins = bool(end.strip())
    if not begins and (not added or not prompt.startswith(plain)):
        raise ValueError(
            "the tokenizer's chat template does not open the assistant's turn: with "
            f"add_generation_prompt a prompt still ends in {prompt[-40:]!r}; add what the turn "
            "begins with, or take the chat template away and give plain text (--template FILE)"
        )
    _TURNS.add(source)


def _require_no_address(text: str, what: str) -> None:
    """Raise `ValueError` for a text that holds a place in memory, which no second process has."""
    if _ADDRESS.search(text):
        raise ValueError(
            f"{what} writes a place in memory, another in each process: {text[:200]!r}"
        )


def _rendered(source: str, render: Callable[[], str], what: str) -> str:
    """Return what a template in Jinja makes of a question; `ValueError` where it fails.

    Jinja's sandbox keeps it from files and attributes, not from loops within loops, nor from a
    power of a power, in which no signal reaches the interpreter. So it is first tried in a process
    of its own, which the signal's default action ends.
    """
    from jinja2 import TemplateError

    if source not in _ENDING:
        if ending_in_a_copy(render, _MOST_WAIT, _MOST_SECONDS):
            raise ValueError(f"{what} has come to no end after {_MOST_SECONDS} seconds")
        _ENDING.add(source)
    same = False
    try:
        for _ in range(_TRIALS):
            state = random.getstate()
            text = render()
            if same := random.getstate() == state:
                break
    except (TemplateError, ValueError, *_FAULTS) as error:
        raise ValueError(f"{what} fails with {shown(error, 300)}") from error
    if not same:
        raise ValueError(f"{what} draws at random, so that a prompt is another one each time")
    if len(text) > _MOST_LETTERS:
        raise ValueError(
            f"{what} makes {len(text)} letters of a question; a prompt has {_MOST_LETTERS} at most"
        )
    return text
