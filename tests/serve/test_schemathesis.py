"""Requests made of the OpenAPI page, well-formed or not: none is a fault of the server's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

N_EXAMPLES = 5  # of each kind, for each path
# Fields of which a JSON schema cannot say what is taken; well-formed requests are sent without.
UNSAID = {"grammar", "regex", "json_schema", "method", "method_options", "budget", "samplers"}
UNSAID |= {"logit_bias", "response_format", "best_of", "sparsekv_rows", "return_progress"}


def said(case: Any) -> Any:
    """The request without the fields of UNSAID."""
    if isinstance(case.body, dict):  # and no document's bytes
        case.body = {key: value for key, value in case.body.items() if key not in UNSAID}
    return case


@pytest.mark.slow
def test_no_request_is_a_fault(serve: Callable[..., Any]) -> None:
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import status_code_conformance

    page = schemathesis.openapi.from_url(f"{serve(tokens=2).url}/openapi.json")
    statuses: dict[str, set[int]] = {}
    few = settings(
        max_examples=N_EXAMPLES, derandomize=True, deadline=None, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    for found in page.get_all_operations():
        operation = found.ok()
        kinds = list(schemathesis.GenerationMode) if operation.method == "post" else [None]
        for kind in kinds:
            strategy = operation.as_strategy(**({"generation_mode": kind} if kind else {}))
            if kind == schemathesis.GenerationMode.POSITIVE:
                strategy = strategy.map(said)

            @few
            @given(case=strategy)
            def ask(case: Any) -> None:
                checks = [not_a_server_error, status_code_conformance]
                answer = case.call_and_validate(checks=checks, timeout=30)
                statuses.setdefault(case.operation.path, set()).add(answer.status_code)

            ask()
    assert statuses.pop("/v1/responses/{id}") <= {404, 405}  # none is kept under such an id
    assert all(200 in codes or 400 in codes for codes in statuses.values()) and len(statuses) == 14
    assert statuses["/v1/completions"] >= {200, 400}
