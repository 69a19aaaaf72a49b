"""The fields of requests that are about tools: the functions that a model may call, and which of them it must."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from medha_router.request_model import RequestModel

MOST_TOOLS = 512
FunctionName = Annotated[str, Field(pattern="^[A-Za-z0-9_.:/-]{1,128}$")]


class FunctionFields(RequestModel):
    """A function that a model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_template(self, description: str | None = None) -> dict[str, Any]:
        """Return the function as chat templates expect it, always with the same order of fields.

        `description` stands in for the one that the function lacks.
        """
        function: dict[str, Any] = {"name": self.name}
        if (text := description if self.description is None else self.description) is not None:
            function["description"] = text
        return {"type": "function", "function": {**function, "parameters": self.schema_of_parameters}}

    @property
    def schema_of_parameters(self) -> dict[str, Any]:
        """The schema of the arguments; a function without parameters takes an empty object."""
        return self.parameters if self.parameters is not None else {"type": "object", "properties": {}}


class ChatTool(RequestModel):
    """OpenAI's form in chats."""

    type: Literal["function"]
    function: FunctionFields


class ResponseTool(FunctionFields):
    """OpenAI's form in the Responses API."""

    type: Literal["function"]


class NamedFunction(RequestModel):
    name: FunctionName


class NamedTool(RequestModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS)]


class ChatToolChoice(RequestModel):
    """A choice of a single function, or of those that are allowed."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class ResponseNamedTool(RequestModel):
    type: Literal["function"]
    name: FunctionName


class ResponseToolChoice(RequestModel):
    """The same choice in the form of the Responses API."""

    type: Literal["function", "allowed_tools"]
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ResponseNamedTool], Field(min_length=1, max_length=MOST_TOOLS)] | None = None


WordChoice = Literal["none", "auto", "required"]
ChatTools = Annotated[list[ChatTool], Field(max_length=MOST_TOOLS)]
ResponseTools = Annotated[list[ResponseTool], Field(max_length=MOST_TOOLS)]
