"""schemathesis: whatever the OpenAPI document allows or forbids, no answer is a 500 or of another form."""

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from helpers_server import MODEL, Live, live_server
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from minivllm.server.app import create_api
from minivllm.server.service import Service
from minivllm.server.settings import ServerSettings

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server() as live:
        yield live
        live.wait_until_idle()


schema = schemathesis.openapi.from_dict(create_api(Service(ServerSettings(model_name=MODEL))).openapi())


@schema.parametrize()
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
def test_answers_are_as_documented(case: Any, live: Live) -> None:
    case.call_and_validate(base_url=live.url, checks=CHECKS)
