"""The form that an answer must have: from OpenAI's and vLLM's fields to StructuredOutputsParams."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minivllm.errors import RequestError
from minivllm.server.errors import bad_request
from minivllm.server.protocol import GenerationRequest
from minivllm.structured_outputs import StructuredOutputsParams

_FIELDS = (
    "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
)  # fmt: skip


def structured_outputs(body: GenerationRequest) -> StructuredOutputsParams | None:
    """The form that a request asks for; None: any will do.

    Raises:
        ApiError: it asks for several, or for one that is malformed.
    """
    asked = {name: form for name in _FIELDS if (form := _form(body, name)) is not None}
    if not asked:
        return None
    if len(asked) > 1:
        raise bad_request(f"{' and '.join(asked)} are given; an answer can have one form", list(asked)[1])
    ((name, form),) = asked.items()
    with about_field(name):
        return StructuredOutputsParams(**form)


@contextmanager
def about_field(name: str) -> Iterator[None]:
    """Let refusals of structured outputs name the field by which they were asked for."""
    try:
        yield
    except RequestError as error:
        if error.param != "structured_outputs":
            raise
        raise bad_request(str(error), name) from None


def form_field(body: GenerationRequest) -> str:
    """The field by which a request asks for a form, if it does."""
    return next((name for name in _FIELDS if _form(body, name) is not None), "tools")


def _form(body: GenerationRequest, name: str) -> dict[str, Any] | None:
    """What a field asks for, by the names of StructuredOutputsParams; None: nothing."""
    if name == "response_format":
        wanted = body.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            return {"json_object": True}
        return {"json": wanted.json_schema.schema_}
    value = getattr(body, name)
    if value is None:
        return None
    if name == "structured_outputs":
        return dict(value.model_dump(by_alias=True, exclude_none=True))
    return {name.removeprefix("guided_"): value}
