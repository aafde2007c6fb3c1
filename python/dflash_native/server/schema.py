"""What requests may hold. Anything else that has a value is refused by name.

Fields without an effect here are accepted where their documented meaning has none either: `user`,
`safety_identifier`, `metadata`, `prompt_cache_key` and `prompt_cache_retention` label a request for
the operator of a hosted service; `store=false` and `service_tier` "auto" or "default" are what
happens anyway.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

REFUSED = {
    "audio": "this server gives text only",
    "best_of": "only n is supported",
    "echo": "the prompt is not given back",
    "function_call": "it is deprecated; use tool_choice",
    "functions": "it is deprecated; use tools",
    "images": "this server reads text only",
    "logit_processor": "no code is taken from requests",
    "prediction": "the server's own drafter predicts",
    "suffix": "no model here fills a gap; put the model's own marks into the prompt",
    "web_search_options": "this server has no access to the web",
}
"""Why a known parameter that is not here is refused; the others are not supported, and no more."""


class Fields(BaseModel):
    """An object whose unknown fields are refused; null is the same as a field left out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        unknown = [name for name in given if name not in cls.model_fields]
        for name in unknown[1:]:  # the first one is refused
            del given[name]
        return given


Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is read up to its first fault: pydantic would write a report on each of a million."""


def _one_fault(bias: Any) -> Any:
    """The same of `logit_bias`: its first fault alone, if it has any."""
    for token, value in bias.items() if isinstance(bias, dict) else ():
        if type(value) not in (int, float) or not -100 <= value <= 100:
            return {token: value}
    return bias


class TextPart(Fields):
    type: Literal["text"]
    text: str


Content = str | Items[TextPart]


class FunctionCall(Fields):
    name: str
    arguments: str = "{}"


class ToolCall(Fields):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int = 0
    """Clients that put a stream together send it back."""


class AskingMessage(Fields):
    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class AssistantMessage(Fields):
    role: Literal["assistant"]
    content: Content = ""
    name: str | None = None
    tool_calls: Items[ToolCall] = []
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same by its other name."""


class ToolMessage(Fields):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[AskingMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Fields):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] = False
    """True would promise arguments that fit the schema."""


class Tool(Fields):
    type: Literal["function"]
    function: Function


class ResponseFormat(Fields):
    type: Literal["text"]


class StreamOptions(Fields):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    include_speculation: bool = False
    """This server's own: each chunk says what was drafted and which tokens drafts have brought."""


class GenerationRequest(Fields):
    """What both endpoints take."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] = 1
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[Items[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
    ) = []
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    repetition_context_size: Annotated[int, Field(ge=1, lt=2**31)] = 20
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_one_fault)
    ] = {}
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Items[Tool] = []
    tool_choice: Literal["none", "auto"] = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    modalities: Items[Literal["text"]] = ["text"]
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the model's chat template, such as enable_thinking."""
    reasoning_effort: str | None = None
    """Where the model's chat template reads it."""


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
