"""instructor: values of a type, by a tool and by a JSON schema."""

from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from tests.e2e.clients.target import BASE_URL, MODEL


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Ann", "Bob"]
    age: Literal[6, 7, 8]


def main() -> None:
    """Run all."""
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key="unused"), mode=mode)
        person = client.chat.completions.create(
            model=MODEL,
            response_model=Person,
            messages=[{"role": "user", "content": "Ann is 7 years old."}],
            max_tokens=64,
            temperature=0,
            max_retries=0,
        )
        assert isinstance(person, Person), mode


main()
