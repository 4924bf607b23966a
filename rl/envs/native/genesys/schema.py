"""The rows of GENESYS, the data format of SYNTHETIC-1 and SYNTHETIC-2: tasks and responses.

Fields that a JSON column holds as a text, as on the Hugging Face hub, are parsed.
"""

import json
from collections.abc import Mapping
from typing import Any

import pydantic


class Task(pydantic.BaseModel):
    """A problem with the data that verifies a response to it."""

    problem_id: str
    source: str = ""
    task_type: str
    in_source_id: str | None = None
    prompt: str
    gold_standard_solution: str | None = None
    verification_info: dict[str, Any] = pydantic.Field(default_factory=dict)
    metadata: dict[str, Any] = pydantic.Field(default_factory=dict)

    @pydantic.field_validator("verification_info", "metadata", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        if value is None or value == "":
            return {}
        return json.loads(value) if isinstance(value, str) else value


class Response(Task):
    """A task with one answer of a model."""

    llm_response: str
    response_id: str
    model_name: str
    generation_config: dict[str, Any] = pydantic.Field(default_factory=dict)
    machine_info: dict[str, Any] | None = None


def task_of(row: Mapping[str, Any]) -> Task:
    """Returns the task in a row; other fields are left out. Raises ValueError with the field that is wrong."""
    try:
        return Task(**{name: row[name] for name in Task.model_fields if name in row})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"field {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ValueError as error:  # of JSON in a text
        raise ValueError(f"verification_info or metadata is not JSON ({error})") from None
