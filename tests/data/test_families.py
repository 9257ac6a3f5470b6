"""Every model family's chat template: what is exact, to the token, and what is refused and why.

Most templates are the real ones, read as files of the trl package. Those marked "published" were
written here from what the families' papers and model cards say. The oracle renders by transformers
and encodes whole texts, as a server does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tiny_targets import Style, shipped, write_target

from dflashdist.data import template, turns
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import Conversation, RowError

SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches a text.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string", "description": "What to search."}},
                "required": ["text"],
            },
        },
    }
]
RESULT = {"role": "tool", "content": "[1]", "name": "search", "tool_call_id": "callcall1"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(**more: Any) -> dict[str, Any]:
    function = {"name": "search", "arguments": {"text": 'a "tree"', "limit": 2}}
    calls = [{"type": "function", "id": "callcall1", "function": function}]
    return answer("", tool_calls=calls, **more)


TALKS: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "one": ([user("What does walk do?"), answer("It walks.")], None),
    "two": ([user("What?"), answer("It walks."), user("And?"), answer("No more.")], None),
    "system": ([SYSTEM, user("What?"), answer("It walks.")], None),
    "odd": (
        [
            user("  What? 🙂\n"),
            answer("  x = 1\n\n\t# é 👩‍👩‍👧 naïve"),
            user("/"),
            answer("/ \n's 42"),
        ],
        None,
    ),
    "thought": ([user("What?"), answer("It walks.", reasoning="A walk,\n\nthen.")], None),
    "thoughts": (
        [user("a?"), answer("b.", reasoning="Hm."), user("c?"), answer("d.", reasoning="Oh.")],
        None,
    ),
    "calls": ([user("What?"), call(), RESULT, answer("It is 1.")], TOOLS),
    "thought calls": (
        [user("What?"), call(reasoning="Look."), RESULT, answer("It is 1.", reasoning="So.")],
        TOOLS,
    ),
}
CHAT = ("one", "two", "system", "odd", "thought", "thoughts", "calls", "thought calls")

# Published: the one that Llama 2 and the first Mistral share, a blank on either side of an answer.
LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content"
    " + ' [/INST]' }}{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}"
    "{% endif %}{% endfor %}"
)
# Published: Mistral's third tokenizer, tools before the last question.
MISTRAL_3 = (
    "{{ bos_token }}{% set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}{{ ']' + eos_token }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + ({'content': m.content, 'call_id': "
    "m.tool_call_id} | tojson) + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
# Published: Phi-4 separates a role from its text by a token.
PHI_4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
# Published: DeepSeek-V3 as it first came, without thinking.
DEEPSEEK_V3 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}"  # noqa: RUF001
    "{{ '<｜Assistant｜>' + m.content + eos_token }}{% endif %}{% endfor %}"  # noqa: RUF001
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"  # noqa: RUF001
)

CHATML = Style(
    "llama3",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>"),
    ("<|im_end|>", "<|endoftext|>"),
)
LLAMA = Style(
    "llama3",
    ("<|pad|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
     "<|end_of_text|>", "<|eom_id|>"),
    ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "<|begin_of_text|>",
)  # fmt: skip
GEMMA = Style(
    "gemma",
    ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    ("<eos>", "<end_of_turn>"),
    "<bos>",
)
GEMMA_4 = Style(
    "gemma",
    ("<pad>", "<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>",
     "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|tool>", "<tool|>", '<|"|>'),
    ("<eos>", "<turn|>", "<|tool_response>"),
    "<bos>",
)  # fmt: skip
DEEPSEEK = Style(
    "llama3",
    ("<pad>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),  # noqa: RUF001
    ("<｜end▁of▁sentence｜>",),  # noqa: RUF001
    "<｜begin▁of▁sentence｜>",  # noqa: RUF001
)
HARMONY = Style(
    "o200k",
    ("<|endoftext|>", "<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>",
     "<|call|>"),
    ("<|return|>", "<|endoftext|>", "<|call|>"),
)  # fmt: skip
PHI_3_TOKENS = ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>")
PHI_3 = Style("llama2", PHI_3_TOKENS, ("<|endoftext|>", "<|end|>"), rstrip=PHI_3_TOKENS[1:])
GLM = Style(
    "llama3",
    ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
     "<|observation|>", "<think>", "</think>"),
    ("<|endoftext|>", "<|user|>", "<|observation|>"),
)  # fmt: skip
COHERE = Style(
    "gpt2",
    ("<PAD>", "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
     "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|END_OF_TURN_TOKEN|>",),
    "<BOS_TOKEN>",
)  # fmt: skip
MISTRAL = Style(
    "first",
    ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
     "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ("</s>",),
    "<s>",
)  # fmt: skip
MISTRAL_1 = Style("llama2", ("<unk>", "<s>", "</s>"), ("</s>",), "<s>")
LLAMA_2_FIRST = Style("first", ("<unk>", "<s>", "</s>"), ("</s>",), "<s>")
TEKKEN_4 = Style(
    "o200k", ("<|dummy|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"), ("<|im_end|>",)
)


@dataclass(frozen=True)
class Family:
    """A template, its tokenizer, and what comes of each of TALKS: rows, or the reason."""

    style: Style
    outcomes: tuple[int | str, ...]
    source: str | None = None  # None: trl's of the family's name
    settings: dict[str, Any] = field(default_factory=dict)


REFUSES, CHANGES = template.TEMPLATE_REFUSES, turns.CHANGES_ANSWER
DROPPED, LOST = turns.REASONING_DROPPED, turns.REASONING_LOST
DIFFERS, HISTORY = turns.PROMPT_DIFFERS, turns.HISTORY_DIFFERS
NO_THINKING = {"enable_thinking": False}
FAMILIES = {
    #                          one, two, system, odd, thought, thoughts, calls, thought calls
    "qwen2_5": Family(CHATML, (1, 1, 1, 1, 1, 1, 1, 1)),
    # Earlier answers lose their think blocks, so the next answer begins another row.
    "qwen3": Family(CHATML, (1, 2, 1, 2, 1, 2, 2, 1)),
    # The generation prompt closes the think block, and history has none.
    "qwen3 no thinking": Family(
        CHATML, (1, 2, 1, 2, DIFFERS, DIFFERS, 2, DIFFERS), shipped("qwen3"), NO_THINKING
    ),
    "qwen3_instruct_2507": Family(CHATML, (1, 1, 1, 1, 1, 1, 1, 1)),
    # The generation prompt opens the think block, which an answer without a thought closes.
    "qwen3_5_think": Family(CHATML, (1, 2, 1, 2, 1, 2, 2, 1)),
    "qwen3_5_nothink": Family(CHATML, (1, 2, 1, 2, DIFFERS, DIFFERS, 1, DIFFERS)),
    "qwen3_5 no thinking": Family(
        CHATML, (1, 2, 1, 2, DIFFERS, DIFFERS, 1, DIFFERS), shipped("qwen3_5_think"), NO_THINKING
    ),
    "llama3": Family(LLAMA, (1, 1, 1, 1, 1, 1, CHANGES, CHANGES)),
    # A thought is put inline, and the content beside a call left out.
    "llama3_1": Family(LLAMA, (1, 1, 1, 1, 1, 1, 1, LOST)),
    "llama3_2": Family(LLAMA, (1, 1, 1, 1, 1, 1, 1, LOST)),
    "gemma": Family(GEMMA, (1, 1, REFUSES, 1, 1, 1, REFUSES, REFUSES)),
    "gemma3": Family(GEMMA, (1, 1, 1, 1, 1, 1, REFUSES, REFUSES)),
    # The earlier revisions write a thought only beside a call.
    "gemma4": Family(GEMMA_4, (1, 1, 1, 1, LOST, LOST, 1, LOST)),
    "gemma4_v5": Family(GEMMA_4, (1, 1, 1, 1, 1, 2, 1, 1)),
    "deepseek v3": Family(DEEPSEEK, (1, 1, 1, 1, 1, 1, CHANGES, CHANGES), DEEPSEEK_V3),
    # R1: the generation prompt opens a thought, and no template text ever holds one. Arguments
    # reach a template as objects, where this one joins them as text.
    "deepseekv3": Family(DEEPSEEK, (*(DROPPED,) * 6, REFUSES, REFUSES)),
    "deepseek_r1_distill": Family(DEEPSEEK, (DROPPED,) * 8),
    "deepseek_r1_distill_training": Family(DEEPSEEK, (*(DROPPED,) * 4, 1, 1, DROPPED, CHANGES)),
    # <|return|> becomes <|end|> once the conversation goes on; the thought beside a call goes when
    # an answer follows, so that the answer's own prompt is gone.
    "gptoss": Family(HARMONY, (1, 2, 1, 2, 1, 2, 1, HISTORY)),
    # EOS follows <|end|> at the very end, and tokens take the blanks after them.
    "phi3": Family(PHI_3, (1, 1, 1, 1, 1, 1, CHANGES, CHANGES)),
    "phi3_5": Family(PHI_3, (1, 1, 1, 1, 1, 1, CHANGES, CHANGES)),
    "phi 4": Family(TEKKEN_4, (1, 1, 1, 1, 1, 1, CHANGES, CHANGES), PHI_4),
    # The next turn's own token ends an answer.
    "glm4moe": Family(GLM, (1, 1, 1, 1, 1, 2, 1, 1)),
    "glm4moe no thinking": Family(
        GLM, (1, 1, 1, 1, DIFFERS, DIFFERS, 1, DIFFERS), shipped("glm4moe"), NO_THINKING
    ),
    "cohere": Family(COHERE, (1, 1, 1, 1, 1, 1, REFUSES, REFUSES)),
    "cohere2": Family(COHERE, (1, 1, 1, 1, 1, 1, REFUSES, REFUSES)),
    "lfm2_2_5_v2": Family(CHATML, (1, 1, 1, 1, 1, 2, 1, 1)),
    "nemotron_3_nano": Family(CHATML, (*(DROPPED,) * 4, 1, 2, DROPPED, 1)),
    "llama 2": Family(LLAMA_2_FIRST, (1, 1, REFUSES, 1, 1, 1, REFUSES, REFUSES), LLAMA_2),
    "mistral 1": Family(MISTRAL_1, (1, 1, REFUSES, 1, 1, 1, REFUSES, REFUSES), LLAMA_2),
    "mistral 3": Family(MISTRAL, (1, 1, REFUSES, 1, 1, 1, 1, LOST), MISTRAL_3),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(family, its chat format, the source of its template)."""
    entry = FAMILIES[request.param]
    source = entry.source or shipped(request.param)
    folder = write_target(tmp_path_factory.mktemp("family"), entry.style, source)
    return entry, ChatTokenizer.load(folder, settings=entry.settings), source


def by_transformers(family: Any, messages: Sequence[Any], tools: Any, prompt: bool) -> str:
    """The text that a server would render."""
    from transformers.utils.chat_template_utils import render_jinja_template

    entry, chat, source = family
    inline = chat._template._variant(tools).inline_reasoning
    given = []
    for message in messages:
        message = dict(message)
        if inline and "reasoning" in message:
            thought = message.pop("reasoning")
            message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
        elif "reasoning" in message:
            message["thinking"] = message["reasoning_content"] = message["reasoning"]
        given.append(message)
    rendered, _ = render_jinja_template(
        [given], tools=tools, chat_template=source, add_generation_prompt=prompt,
        **chat._target.specials, **entry.settings,
    )  # fmt: skip
    return rendered[0]


def literal_rows(family: Any, messages: Sequence[Any], tools: Any) -> list[tuple[list, list]]:
    """The definition, in whole texts: (ids, mask) of every row."""
    entry, chat, _ = family
    tokenizer = chat.tokenizer

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    rows: list[tuple[list[int], list[int]]] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = by_transformers(family, messages[:i], tools, True)
        rest = by_transformers(family, messages[: i + 1], tools, False).removeprefix(prompt)
        stops = [rest.find(end) + len(end) for end in entry.style.ends if end in rest]
        if not stops and entry.style is GLM:
            rest += "<|observation|>" if "tool_calls" in message else "<|user|>"
        written = rest[: min(stops)] if stops else rest
        before, both = encode(prompt), encode(prompt + written)
        joined = both[: len(before)] == before
        if not joined:
            assert entry.style.kind not in ("llama2", "first", "gemma")
        ids = both[len(before) :] if joined else encode(written)
        if rows and before[: len(rows[-1][0])] == rows[-1][0]:
            row = rows[-1]
            row[1].extend([0] * (len(before) - len(row[0])))
            row[0].extend(before[len(row[0]) :])
        else:
            row = (before, [0] * len(before))
            rows.append(row)
        row[0].extend(ids)
        row[1].extend([1] * len(ids))
    return rows


@pytest.mark.parametrize("talk", TALKS)
def test_exact_or_refused(family, talk):
    messages, tools = TALKS[talk]
    expected = family[0].outcomes[CHAT.index(talk)]
    chat = family[1]
    if isinstance(expected, str):
        with pytest.raises(RowError) as caught:
            chat.training_rows(Conversation("here", messages, tools))
        assert str(caught.value) == expected
        return
    made = chat.training_rows(Conversation("here", messages, tools))
    rows = [(row.ids.tolist(), row.loss_mask.tolist()) for row in made.rows]
    assert rows == literal_rows(family, messages, tools)
    assert len(rows) == expected
    for row in made.rows:
        chat.check(row, Conversation(talk, messages, tools))
        bos = family[0].style.bos
        assert bos is None or row.ids.tolist().count(chat.tokenizer.token_to_id(bos)) == 1


@pytest.mark.parametrize("talk", TALKS)
def test_text_is_that_of_transformers(family, talk):
    messages, tools = TALKS[talk]
    for stop in range(1, len(messages) + 1):
        for prompt in (False, True):
            try:
                text = family[1].render(messages[:stop], tools, prompt)
            except RowError:
                with pytest.raises(template.FAILURES):
                    by_transformers(family, messages[:stop], tools, prompt)
            else:
                assert text == by_transformers(family, messages[:stop], tools, prompt)


TAGGED = {
    "qwen2_5": CHATML, "qwen3": CHATML, "qwen3_5_think": CHATML, "qwen3_instruct_2507": CHATML,
    "llama3": LLAMA, "gemma": GEMMA, "gemma3": GEMMA, "gptoss": HARMONY, "glm4moe": GLM,
    "cohere": COHERE, "cohere2": COHERE, "phi3": PHI_3, "phi3_5": PHI_3,
}  # fmt: skip


@pytest.mark.parametrize("name", TAGGED)
def test_tags_that_others_wrote_agree(name, tmp_path):
    """trl's variants with `{% generation %}` tags supervise the same tokens, where they render
    alike, and the spans that transformers finds in them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    style, source = TAGGED[name], shipped(f"{name}_training")
    plain = ChatTokenizer.load(write_target(tmp_path, style, shipped(name)))
    (tmp_path / "tagged.jinja").write_text(source)
    tagged = ChatTokenizer.load(tmp_path, template=str(tmp_path / "tagged.jinja"))
    alike = 0
    for talk, (messages, tools) in TALKS.items():
        try:
            made = tagged.training_rows(Conversation(talk, messages, tools))
        except RowError as error:
            with pytest.raises(RowError, match=str(error)):
                plain.training_rows(Conversation(talk, messages, tools))
            continue
        inputs = tagged._template.inputs(messages, tools)
        options: dict[str, Any] = {"tools": tools, "return_assistant_tokens_mask": True}
        options |= tagged._target.specials
        rendered: Any = render_jinja_template([inputs], chat_template=source, **options)
        texts, spans = rendered
        bodies = [texts[0][start:stop] for start, stop in spans[0]]
        last = made.rows[-1].answers[-1]
        assert any(body.rstrip().endswith(last) or last.endswith(body.rstrip()) for body in bodies)
        at = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        turns_alike = all(
            plain.render(messages[:i], tools, True) == tagged.render(messages[:i], tools, True)
            and plain.render(messages[: i + 1], tools) == tagged.render(messages[: i + 1], tools)
            for i in at
        )
        if turns_alike:
            alike += 1
            others = plain.training_rows(Conversation(talk, messages, tools))
            for row, other in zip(made.rows, others.rows, strict=True):
                assert row.ids.tolist() == other.ids.tolist()
                assert row.loss_mask.tolist() == other.loss_mask.tolist()
    assert alike >= 2 or name == "glm4moe"  # whose variant always writes the token that ends a turn
