"""The part of JSON Schema that results.schema.json uses, checked by hand: no library is needed for it."""

import functools
import json
from importlib.resources import files
from typing import Any

FORMAT = 5
"""Version of results.json. 4: tau counts what reached the answers (tau_raw: what 3 called tau); intervals draw prompts."""
NOT_DESCRIBED = "is not described; add it to eval/results.schema.json"
KNOWN = {
    *("$schema", "$defs", "$ref", "title", "description", "type", "properties", "required", "additionalProperties"),
    *("items", "anyOf", "enum", "const"),
}
TYPES: dict[str, Any] = {
    **{"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)},
    **{"number": (int, float), "integer": int},
}


@functools.cache
def results_schema() -> dict[str, Any]:
    """The shipped schema of results.json."""
    schema: dict[str, Any] = json.loads((files("eagle") / "eval" / "results.schema.json").read_text(encoding="utf-8"))
    return schema


def problems(value: Any, schema: Any, root: dict[str, Any], where: str = "results") -> list[str]:
    """Every place at which `value` is not what the schema says."""
    if schema is True:
        return []
    if schema is False:
        return [f"{where} {NOT_DESCRIBED}"]
    assert schema.keys() <= KNOWN, f"this validator does not know {schema.keys() - KNOWN}"
    if "$ref" in schema:
        return problems(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, where)
    if "anyOf" in schema:
        tried = [problems(value, option, root, where) for option in schema["anyOf"]]
        return [] if [] in tried else min(tried, key=len)
    if "const" in schema and value != schema["const"]:
        return [f"{where} is {value!r}, expected {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where} is {value!r}, expected one of {schema['enum']}"]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        return [f"{where} is {type(value).__name__}, expected {' or '.join(kinds)}"]
    found = []
    if isinstance(value, dict):
        found += [f"{where}.{key} is missing" for key in schema.get("required", []) if key not in value]
        described = schema.get("properties", {})
        for key, item in value.items():
            found += problems(
                item, described.get(key, schema.get("additionalProperties", True)), root, f"{where}.{key}"
            )
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            found += problems(item, schema["items"], root, f"{where}[{i}]")
    return found


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES[kind])
