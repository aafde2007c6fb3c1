"""Requests to token ids: chat templates as transformers renders them, texts as they stand."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import meta
from pydantic_core import from_json
from transformers import PreTrainedTokenizerBase

from .errors import ApiError
from .schema import ChatRequest, Content, Message, ToolCall

_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


@dataclass(frozen=True)
class Prompt:
    """Token ids, and what the answer begins in."""

    tokens: list[int]
    boundaries: list[int]
    """Lengths at which a message ends."""
    in_reasoning: bool = False
    """Whether it ends in an opened mark of reasoning."""


class Prompts:
    """Turns requests into prompts with a tokenizer (mlx-lm's wrapper).

    A tokenizer without a chat template belongs to a model that continues text. Its prompt is the
    messages' contents with blank lines between them, but an assistant's text follows directly,
    since it went on from what stood before it. Tools are refused there. A text that no
    `max_context` tokens can hold is refused before it is cut into tokens, which takes seconds for
    megabytes.
    """

    def __init__(self, tokenizer: Any, max_context: int) -> None:
        self._tokenizer = tokenizer
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._most_characters = max_context * longest
        self._ends = frozenset(tokenizer.eos_token_ids)
        template = tokenizer.chat_template
        self._variables: frozenset[str] | None = None
        if isinstance(template, str):
            self._variables = _variables(template)

    def of_chat(self, request: ChatRequest) -> Prompt:
        """Raises ApiError (400) for what the model's template cannot show."""
        tokenizer = self._tokenizer
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        for tool in tools:
            del tool["function"]["strict"]
        if tools and not (tokenizer.has_chat_template and tokenizer.has_tool_calling):
            raise ApiError(
                400,
                "[tools] is not supported: the model's chat template knows no tools",
                param="tools",
                code="unsupported_parameter",
            )
        if request.tool_choice == "none":
            tools = []
        messages = [_template_message(message, i) for i, message in enumerate(request.messages)]
        variables = self._template_variables(request)
        if tokenizer.has_chat_template:
            try:
                text = tokenizer.apply_chat_template(
                    messages,
                    tools=tools or None,
                    add_generation_prompt=True,
                    tokenize=False,
                    **variables,
                )
            except Exception as error:  # a template is a program of the model's makers
                raise ApiError(
                    400,
                    f"the model's chat template refuses these messages: {error}",
                    param="messages",
                ) from None
            tokens = self._encode(text, "messages", special=False)
        else:
            text = _continued(messages)
            tokens = self._encode(text, "messages", special=True)
        inside = tokenizer.has_thinking and text.rstrip().endswith(tokenizer.think_start)
        return self._prompt(tokens, "messages", in_reasoning=inside)

    def of_text(self, prompt: str | list[int]) -> Prompt:
        """Raises ApiError (400) for ids outside the vocabulary and for an empty prompt."""
        if isinstance(prompt, str):
            bos = self._tokenizer.bos_token
            special = bos is None or not prompt.startswith(bos)
            tokens = self._encode(prompt, "prompt", special=special)
        else:
            tokens, size = prompt, len(self._tokenizer)
            outside = [token for token in tokens if not 0 <= token < size]
            if outside:
                raise ApiError(
                    400,
                    f"[prompt] expected token ids in 0 … {size - 1} but got {outside[0]}",
                    param="prompt",
                )
        return self._prompt(tokens, "prompt")

    def _encode(self, text: str, name: str, *, special: bool) -> list[int]:
        if len(text) > self._most_characters:
            raise ApiError(
                400,
                f"[{name}] expected at most {self._most_characters} characters, which the context "
                f"of this server can hold, but got {len(text)}",
                param=name,
                code="context_length_exceeded",
            )
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def _prompt(self, tokens: list[int], name: str, in_reasoning: bool = False) -> Prompt:
        if not tokens:
            raise ApiError(
                400, f"[{name}] expected at least one token but got an empty prompt", param=name
            )
        boundaries = [i + 1 for i, token in enumerate(tokens) if token in self._ends]
        return Prompt(tokens, boundaries, in_reasoning)

    def _template_variables(self, request: ChatRequest) -> dict[str, Any]:
        variables = dict(request.chat_template_kwargs)
        if request.reasoning_effort is not None:
            variables["reasoning_effort"] = request.reasoning_effort
        for name in variables:
            known = self._variables is None and self._tokenizer.has_chat_template
            known = known or name in (self._variables or ())
            if name in _RESERVED or not known:
                param = name if name == "reasoning_effort" else f"chat_template_kwargs.{name}"
                raise ApiError(
                    400,
                    f"[{param}] is not supported: the model's chat template does not read it",
                    param=param,
                    code="unsupported_parameter",
                )
        return variables


def _variables(template: str) -> frozenset[str] | None:
    """What a template reads; None where only transformers can tell."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)  # a tag of transformers
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(plain)))
    except jinja2.TemplateSyntaxError:
        return None


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _continued(messages: list[dict[str, Any]]) -> str:
    text = ""
    for message in messages:
        text += "\n\n" if text and message["role"] != "assistant" else ""
        text += message["content"]
    return text


def _template_message(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it: content a text, arguments of calls an object."""
    found = message.model_dump(exclude_none=True)
    found["content"] = _text(message.content)
    if message.role == "developer":
        found["role"] = "system"
    if message.role == "assistant":
        reasoning = found.pop("reasoning", None) or found.get("reasoning_content")
        if reasoning is not None:
            found["reasoning_content"] = reasoning
        del found["tool_calls"]
        if message.tool_calls:
            found["tool_calls"] = [
                _template_call(call, f"messages.{index}.tool_calls.{i}.function.arguments")
                for i, call in enumerate(message.tool_calls)
            ]
    return found


def _template_call(call: ToolCall, place: str) -> dict[str, Any]:
    try:
        arguments = from_json(call.function.arguments or "{}", allow_inf_nan=False)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        got = call.function.arguments[:60]
        raise ApiError(400, f"[{place}] expected a JSON object but got {got!r}", param=place)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
